"""Op tables of jobs that are computed here, op by op, with any faults."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipemorph.diagnose.operation import Operation
from pipemorph.diagnose.operation_table import OperationTable
from pipemorph.planning.ir import OpKind, Policy, Schedule
from pipemorph.planning.planner import plan
from pipemorph.planning.problem import Link, Problem, StageTimes

FORWARD, BACKWARD, WEIGHT = 0.010, 0.020, 0.010
"""Seconds of an op without faults; a fused backward takes the sum of the latter two."""
NAMES = {
    OpKind.F: "forward-compute",
    OpKind.B: "backward-compute",
    OpKind.BW: "backward-compute",
    OpKind.W: "backward-weight",
}
SECONDS = {OpKind.F: FORWARD, OpKind.B: BACKWARD, OpKind.W: WEIGHT, OpKind.BW: BACKWARD + WEIGHT}


@dataclass
class PlayedJob:
    """A job of replicas that wait for each other at the end of each step.

    ``seconds(step, replica, stage, kind, microbatch, usual)``: time of an op; ``delay(step,
    replica, source, target)``: of a message between two workers; ``extra(step, replica, stage,
    position)``: type and time of an op before the worker's op of that position. ``tail``: types and
    seconds after the last op.
    """

    replicas: int = 1
    stages: int = 4
    microbatches: int = 8
    steps: int = 6
    policy: Policy = Policy.ONE_F_ONE_B
    ranks: int | None = None
    seconds: Callable[..., float] = lambda *_: _[-1]
    delay: Callable[..., float] = lambda *_: 0.0
    extra: Callable[..., tuple[str, float] | None] = lambda *_: None
    tail: tuple[tuple[str, float], ...] = (("grads-reduce-scatter", 0.005), ("optimizer", 0.003))
    order: Schedule | None = None
    """Schedule in place of the policy's."""
    counts: dict[int, int] = field(default_factory=dict)
    """Microbatches by replica, where they are others."""
    step_seconds: list[float] = field(default_factory=list)

    def plan_schedule(self, replica: int) -> Schedule:
        if self.order is not None:
            return self.order
        problem = Problem(
            microbatches=self.counts.get(replica, self.microbatches),
            stages=(StageTimes(forward=1, backward_input=2, backward_weight=1),) * self.stages,
            links=(Link(),) * (self.stages - 1),
            ranks=self.ranks,
            placement="v" if self.policy is Policy.ZERO_BUBBLE_V else "interleaved",
        )
        return plan(problem, self.policy).schedule

    def operations(self) -> Iterator[Operation]:
        """Ops of all steps; fills ``step_seconds``."""
        self.step_seconds = []
        for step in range(self.steps):
            ends: dict[tuple[int, int], float] = {}
            for replica in range(self.replicas):
                yield from self._play_replica(step, replica, ends)
            for name, seconds in self.tail:
                begins = dict(ends)
                for place in sorted(ends):
                    members = [
                        begin
                        for (replica, worker), begin in begins.items()
                        if name == "optimizer-clip-main-grad"
                        or (replica, worker) == place
                        or (name == "grads-reduce-scatter" and worker == place[1])
                    ]
                    ends[place] = max(members) + seconds
                    took = ends[place] - begins[place]
                    yield self._make(step, place, name, begins[place], took)
            self.step_seconds.append(max(ends.values()))

    def _make(
        self,
        step: int,
        place: tuple[int, int],
        name: str,
        start: float,
        seconds: float,
        **more: Any,
    ) -> Operation:
        replica, worker = place
        rank = worker * self.replicas + replica
        base = 1e5 * step
        times = {k: base + more.pop(k) for k in ("posted", "waited") if k in more}
        return Operation(
            step, replica, worker, rank, name, base + start, seconds, -1, **more, **times
        )

    def _play_replica(
        self, step: int, replica: int, ends: dict[tuple[int, int], float]
    ) -> Iterator[Operation]:
        schedule = self.plan_schedule(replica)
        arrived: dict[tuple[bool, int, int], float] = {}
        at = [0.0] * len(schedule.ranks)
        position = [0] * len(schedule.ranks)
        moved = True
        while moved:
            moved = False
            for worker, ops in enumerate(schedule.ranks):
                while position[worker] < len(ops):
                    op = ops[position[worker]]
                    stage = schedule.stages_by_rank[worker][op.chunk]
                    forward = op.kind is OpKind.F
                    source = stage - 1 if forward else stage + 1
                    receives = op.kind is not OpKind.W and 0 <= source < schedule.stage_count
                    key = (forward, stage, op.microbatch)
                    if receives and key not in arrived:
                        break
                    moved = True
                    chunk: dict[str, Any] = {
                        "model_chunk": op.chunk, "global_chunk": stage, "microbatch": op.microbatch,
                    }  # fmt: skip
                    more = self.extra(step, replica, worker, position[worker])
                    if more is not None:
                        yield self._make(step, (replica, worker), more[0], at[worker], more[1])
                        at[worker] += more[1]
                    if receives and schedule.placement[source] != worker:
                        wait = max(0.0, arrived[key] - at[worker])
                        yield self._make(
                            step, (replica, worker), "forward-recv" if forward else "backward-recv",
                            at[worker], wait, **chunk, posted=0.0, waited=at[worker],
                        )  # fmt: skip
                        at[worker] += wait
                    seconds = self.seconds(
                        step, replica, stage, op.kind, op.microbatch, SECONDS[op.kind]
                    )
                    yield self._make(
                        step, (replica, worker), NAMES[op.kind], at[worker], seconds, **chunk
                    )
                    at[worker] += seconds
                    target = stage + 1 if forward else stage - 1
                    if op.kind is not OpKind.W and 0 <= target < schedule.stage_count:
                        crosses = schedule.placement[target] != worker
                        to = schedule.placement[target]
                        late = self.delay(step, replica, worker, to) if crosses else 0.0
                        arrived[forward, target, op.microbatch] = at[worker] + late
                        if crosses:
                            name = "forward-send" if forward else "backward-send"
                            yield self._make(
                                step, (replica, worker), name, at[worker], 0.0, **chunk
                            )
                    position[worker] += 1
        for worker, end in enumerate(at):
            assert position[worker] == len(schedule.ranks[worker]), "the schedule deadlocks"
            ends[replica, worker] = end


def make_table(operations: Iterable[Operation]) -> OperationTable:
    table = OperationTable()
    for op in operations:
        table.append_operation(op)
    return table


COLUMNS = (
    "step", "dp_rank", "stage", "rank", "optype", "start_ts", "duration", "seq_id", "mc", "gmc",
    "mb_id", "posted", "waited", "completed", "schedule", "bytes",
)  # fmt: skip


def write_csv(path: Path, operations: Iterable[Operation]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows(operations)
    return path


def write_lines(path: Path, operations: Iterable[Operation]) -> Path:
    with path.open("w") as file:
        for op in operations:
            file.write(json.dumps(dict(zip(COLUMNS, op, strict=True))) + "\n")
    return path
