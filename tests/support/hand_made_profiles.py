"""Traces as ``torch.profiler`` writes them, made by hand with known times.

A pipeline of one stage per rank runs all forwards, then all backwards. A forward takes
:data:`FORWARD` and a backward :data:`BACKWARD` milliseconds; a message takes :data:`TRANSFER`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

FORWARD, BACKWARD, TRANSFER = 10.0, 20.0, 2.0
SEND = 1.0
"""Milliseconds for which a rank issues a send."""
PYTHON = 0.5
"""Milliseconds of an op before its first operator, on the processor."""
BASE = 1_790_000_000_000_000_000
"""Nanoseconds of the wall clock at which traces begin."""
Labels = Literal["", "stages", "numbers"]


@dataclass
class HandMadeTrace:
    """Trace of a rank. Times in milliseconds. ``skew``: those by which its clock is ahead."""

    rank: int
    world_size: int
    groups: Sequence[tuple[str, Sequence[int]]] = ()
    skew: float = 0.0
    events: list[dict[str, Any]] = field(default_factory=list)
    sequence: int = 100
    correlation: int = 0

    def add(
        self, name: str, begin: float, milliseconds: float, category: str = "cpu_op", /, **args: Any
    ) -> None:
        self.events.append(
            {
                "ph": "X", "cat": category, "name": name, "pid": 1, "tid": args.pop("tid", 1),
                "ts": 1e3 * begin, "dur": 1e3 * milliseconds, "args": args,
            }
        )  # fmt: skip

    def annotate(self, name: str, begin: float, end: float) -> None:
        self.add(name, begin, end - begin, "user_annotation")

    def launch(self, name: str, at: float, begin: float, end: float, stream: int) -> None:
        """A kernel, and its launch by the processor."""
        self.correlation += 1
        correlation = self.correlation
        self.add("cudaLaunchKernel", at, 0.001, "cuda_runtime", correlation=correlation)
        self.add(name, begin, end - begin, "kernel", correlation=correlation, stream=stream)

    def write(self, folder: Path, name: str | None = None) -> Path:
        path = folder / (name or f"rank{self.rank}.json")
        groups = [("default_pg", range(self.world_size)), *self.groups]
        content = {
            "schemaVersion": 1,
            "distributedInfo": {
                "backend": "gloo", "rank": self.rank, "world_size": self.world_size,
                "pg_config": [{"pg_desc": kind, "ranks": list(ranks)} for kind, ranks in groups],
            },
            "traceEvents": self.events,
            "baseTimeNanoseconds": BASE + round(1e6 * self.skew),
        }  # fmt: skip
        path.write_text(json.dumps(content))
        return path


class _Op(NamedTuple):
    stage: int
    microbatch: int
    backward: bool


@dataclass
class HandMadePipeline:
    """A pipeline over global ``ranks``. ``labels``: as interleaved schedules have them, as GPipe,
    or none. ``gpu``: whether ops are kernels that the processor launches within 0.2 ms."""

    ranks: Sequence[int]
    world_size: int
    microbatches: int = 3
    steps: int = 2
    labels: Labels = ""
    gpu: bool = False
    slow: dict[int, float] = field(default_factory=dict)
    """Factors of the times of stages."""
    groups: Sequence[tuple[str, Sequence[int]]] = ()
    sequence: int = 100
    """Number of the node of the autograd graph before the first."""

    def make_traces(self) -> list[HandMadeTrace]:
        """Traces of its ranks, by stage."""
        traces = [
            HandMadeTrace(rank, self.world_size, self.groups, sequence=self.sequence)
            for rank in self.ranks
        ]
        free = [1.0] * len(traces)
        made: dict[tuple[int, int], int] = {}
        for step in range(self.steps):
            begins = list(free)
            for backward in (False, True):
                arrived: dict[tuple[int, int], float] = {}
                stages = range(len(traces))
                for microbatch in range(self.microbatches):
                    for stage in reversed(stages) if backward else stages:
                        other = stage + 1 if backward else stage - 1
                        arrival = arrived.get((other, microbatch))
                        op = _Op(stage, microbatch, backward)
                        end = self._add_op(traces[stage], op, free[stage], arrival, made)
                        arrived[stage, microbatch] = end + TRANSFER
                        free[stage] = end + SEND + 0.05
            for stage, trace in enumerate(traces):
                trace.annotate("Optimizer.step#AdamW.step", free[stage] + 1, free[stage] + 3)
                free[stage] += 4
                trace.annotate(f"ProfilerStep#{step}", begins[stage] - 0.5, free[stage])
                free[stage] += 1
            free = [max(free)] * len(free)
        return traces

    def _add_op(
        self,
        trace: HandMadeTrace,
        op: _Op,
        free: float,
        arrival: float | None,
        made: dict[tuple[int, int], int],
    ) -> float:
        """Add an op with its messages to a rank that is free since then; return when it ends."""
        stage, microbatch, backward = op
        begin = free
        where = 1 if backward else -1
        if arrival is not None:
            begin = max(free + 0.05, arrival)
            peer = {"Concrete Inputs": ["", "", str(stage + where), "0"]}
            trace.add("c10d::recv_", free, 0.02, **peer)
            if self.gpu:
                trace.annotate(f"nccl:recv {stage}<-{stage + where}", free, free + 0.02)
                trace.launch(
                    "ncclDevKernel_SendRecv()", free + 0.01, arrival - TRANSFER, arrival, 9
                )
            else:
                trace.annotate("gloo:recv", free + 0.01, begin)
        lasts = (BACKWARD if backward else FORWARD) * self.slow.get(stage, 1.0)
        end = begin + lasts
        issued, issues = (free + 0.03, 0.2) if self.gpu else (begin + PYTHON, lasts - PYTHON)
        key = stage, microbatch
        if backward:
            thread = 2 if self.gpu else 1
            trace.add(
                "autograd::engine::evaluate_function: AddBackward0", issued, issues, tid=thread,
                **{"Sequence number": made[key], "Fwd thread id": 1},
            )  # fmt: skip
        else:
            trace.sequence += 1
            made[key] = trace.sequence
            trace.add("aten::add", issued, issues, **{"Sequence number": trace.sequence})
            # Makes no node, so it shows the number of the next one.
            trace.add(
                "aten::detach", issued + issues, 0.001, **{"Sequence number": trace.sequence + 1}
            )
        if self.gpu:
            trace.launch("add_kernel", issued + 0.1, begin, end, 7)
        sent = (issued + issues if self.gpu else end) + 0.002
        target = stage - where
        if 0 <= target < len(self.ranks):
            trace.add("c10d::send", sent, SEND, **{"Concrete Inputs": ["", "", str(target), "0"]})
            if self.gpu:
                trace.annotate(f"nccl:send {stage}->{target}", sent, sent + SEND)
                trace.launch("ncclDevKernel_SendRecv()", sent + 0.05, end, end + TRANSFER, 9)
            else:
                trace.annotate("gloo:send", sent + 0.05, sent + 3 * TRANSFER)
        done = sent + (SEND if 0 <= target < len(self.ranks) else 0.0)
        if self.labels == "numbers":
            name = "Backward" if backward else "Forward"
            trace.annotate(f"{name} {microbatch}", free - 0.01, done + 0.01)
        elif self.labels == "stages":
            kind = "B" if backward else "F"
            if arrival is not None:
                trace.annotate(f"PP:{stage}RECV_{kind}{microbatch}", free - 0.002, free + 0.025)
            ends = sent - 0.001 if self.gpu else end
            begins = free - 0.001 if arrival is None else free + 0.026
            trace.annotate(f"PP:{stage}{kind}{microbatch}", begins, ends)
            trace.annotate(f"PP:{stage}SEND_{kind}{microbatch}", sent - 0.0005, done)
        return end
