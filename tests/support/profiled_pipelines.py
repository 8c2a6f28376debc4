"""Profiles torch's own pipeline schedules, which are observed in the same processes.

Stages take fixed times: the ops sleep, so that several ranks fit on few processors. ``torch`` is
imported by each rank alone.
"""

from __future__ import annotations

import gzip
import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from sleeping_stages import Sleep
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, schedules
from torch.profiler import ProfilerActivity, profile, schedule

from pipemorph.diagnose.formats.op_table import JsonLinesReader
from pipemorph.diagnose.formats.torch_profiler.reader import TorchProfilerReader
from pipemorph.diagnose.operation import COMPUTE, FORWARD, LOSS, Operation
from pipemorph.diagnose.trace_file import TraceFile
from pipemorph_trainer.context import TrainerContext
from pipemorph_trainer.observe import observe

SCHEDULES = {
    "GPipe": (schedules.ScheduleGPipe, 1),
    "1F1B": (schedules.Schedule1F1B, 1),
    "Interleaved1F1B": (schedules.ScheduleInterleaved1F1B, 2),
    "InterleavedZeroBubble": (schedules.ScheduleInterleavedZeroBubble, 2),
    "ZBVZeroBubble": (schedules.ScheduleZBVZeroBubble, 2),
}
"""Class and stages per rank of each schedule."""
WIDTH = 16


class PipelineRun(NamedTuple):
    """Training to profile. ``forward``, ``backward``, ``weight``: seconds of an op; the backward
    of a schedule that does not split it takes the sum of the last two."""

    schedule: str = "1F1B"
    microbatches: int = 8
    steps: int = 3
    """Steps in the trace."""
    whole: bool = False
    """Whether the trace has the first step and no marks of steps; else two steps precede it."""
    forward: float = 0.020
    backward: float = 0.020
    weight: float = 0.020
    replicas: int = 1
    record_shapes: bool = True
    evaluate: bool = False
    """Whether an evaluation precedes each step's training."""
    accumulate: int = 1
    """Schedule steps for each step of the optimizer."""
    rounds: int = 0
    """Steps to time with and without the profiler, in turn."""
    times_observation: bool = False
    """Whether they are with and without the observation instead."""

    @property
    def first_profiled(self) -> int:
        """First step in the trace."""
        return 0 if self.whole else 2


class TimedStage(nn.Module):
    """A stage of a pipeline: a small layer, and sleeps for its three ops."""

    def __init__(self, run: PipelineRun) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        apply: Any = Sleep.apply
        weight = apply(self.layer.weight, 0.0, self.run.weight)
        x = torch.tanh(nn.functional.linear(x, weight, self.layer.bias))
        output: Tensor = apply(x, self.run.forward, self.run.backward)
        return output


def place_stages(name: str, rank: int, ranks: int) -> tuple[list[int], int]:
    """Stages of a rank, and the number of all stages."""
    chunks = SCHEDULES[name][1]
    if name == "ZBVZeroBubble":
        return [rank, 2 * ranks - 1 - rank], 2 * ranks
    return [rank + chunk * ranks for chunk in range(chunks)], chunks * ranks


def make_schedule(
    name: str, modules: Sequence[nn.Module], group: dist.ProcessGroup, microbatches: int
) -> Any:
    """Make torch's schedule of a rank. ``modules``: its stages."""
    mine, stages = place_stages(name, group.rank(), group.size())
    pieces = [
        PipelineStage(module, index, stages, torch.device("cpu"), group=group)
        for module, index in zip(modules, mine, strict=True)
    ]
    kind, chunks = SCHEDULES[name]
    # Stages' classes differ between schedules of one and of several stages per rank.
    make: Any = kind
    return make(pieces[0] if chunks == 1 else pieces, microbatches, loss_fn=nn.functional.mse_loss)


class ProfiledRank(NamedTuple):
    """Result of a rank: mean seconds of an op in the steps that were timed in turn; with
    ``times_observation`` those of the step."""

    with_profiler: list[float]
    without: list[float]


def profile_pipeline(context: TrainerContext, run: PipelineRun, folder: str) -> ProfiledRank:
    """Train on this rank, and write ``rankN.json.gz`` and ``ops/rankN.jsonl`` in ``folder``."""
    torch.manual_seed(context.rank)
    dist.init_process_group(
        "gloo", f"tcp://127.0.0.1:{context.master_port}", rank=context.rank,
        world_size=context.world_size,
    )  # fmt: skip
    ranks = context.world_size // run.replicas
    mesh = init_device_mesh("cpu", (ranks, run.replicas), mesh_dim_names=("pp", "dp_shard"))
    group = mesh.get_group("pp")
    mine, stages = place_stages(run.schedule, group.rank(), ranks)
    modules = [TimedStage(run) for _ in mine]
    pipeline = make_schedule(run.schedule, modules, group, run.microbatches)
    parameters = [p for module in modules for p in module.parameters()]
    optimizer = torch.optim.AdamW(parameters, 1e-3)
    x = torch.randn(4 * run.microbatches, WIDTH)

    def pass_batch(step: Callable[..., Any]) -> None:
        args = (x,) if 0 in mine else ()
        step(*args, **({"target": x, "losses": []} if stages - 1 in mine else {}))

    def train() -> None:
        if run.evaluate:
            pass_batch(pipeline.eval)
        for _ in range(run.accumulate):
            pass_batch(pipeline.step)
        if run.replicas > 1:
            for parameter in parameters:
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad, group=mesh.get_group("dp_shard"))
        optimizer.step()
        optimizer.zero_grad()

    observation = observe(f"{folder}/ops")
    timed: dict[bool, list[float]] = {True: [], False: []}
    with profile(
        activities=[ProfilerActivity.CPU],
        record_shapes=run.record_shapes,
        schedule=None if run.whole else schedule(wait=1, warmup=1, active=run.steps, repeat=1),
    ) as profiler:
        for _ in range(run.first_profiled + run.steps):
            train()
            if not run.whole:
                profiler.step()
    profiler.export_chrome_trace(f"{folder}/rank{context.rank}.json.gz")
    for turn in range(2 * run.rounds):
        dist.barrier()
        if run.times_observation:
            # Its hooks stay where they are, and do nothing.
            observation.active = bool(turn % 2)
            began = time.perf_counter()
            train()
            timed[bool(turn % 2)].append(time.perf_counter() - began)
        elif turn % 2:
            with profile(activities=[ProfilerActivity.CPU], record_shapes=run.record_shapes):
                train()
        else:
            train()
    observation.active = True
    observation.stop()
    if run.rounds and not run.times_observation:
        steps = sorted(read_observed(folder, context.rank).items())
        for turn, (_, ops) in enumerate(steps[-2 * run.rounds :]):
            timed[bool(turn % 2)].append(statistics.fmean(op.duration for op in ops.values()))
    dist.barrier()
    dist.destroy_process_group()
    return ProfiledRank(timed[True], timed[False])


def profile_into(
    folder: Path, run: PipelineRun, ranks: int, timeout: float = 100.0
) -> list[ProfiledRank]:
    """Run ``ranks`` ranks; their traces are in ``folder``."""
    from launch import run_ranks

    folder.mkdir(parents=True, exist_ok=True)
    return run_ranks(ranks, profile_pipeline, run, str(folder), timeout=timeout)


def change_trace(path: Path, *, seconds: float = 0.0, labels: bool = True) -> None:
    """Set the clock of a trace off by ``seconds``, and remove the schedule's labels on request."""
    with gzip.open(path, "rt") as file:
        trace = json.load(file)
    trace["baseTimeNanoseconds"] += round(1e9 * seconds)
    if not labels:
        trace["traceEvents"] = [
            event
            for event in trace["traceEvents"]
            if not event["name"].startswith(("PP:", "Forward ", "Backward "))
        ]
    with gzip.open(path, "wt") as file:
        json.dump(trace, file)


class Comparison(NamedTuple):
    """Ops of a trace against those of the observation. ``found``, ``recorded``: numbers of ops; the
    first counts ops of the right stage and microbatch that overlap the recorded one by half.
    ``errors``: by op type, of each op's duration, and the recorded duration, in seconds.
    ``bubbles``: by rank and step, errors of the share of its time without ops. ``clocks``: seconds
    by which the clock of each rank differs from that of the first after the alignment."""

    found: int
    recorded: int
    errors: dict[str, list[tuple[float, float]]]
    bubbles: list[float]
    clocks: list[float]

    def median_error(self, optype: str) -> float:
        """Median error of an op type's durations, in seconds."""
        return statistics.median(abs(error) for error, _ in self.errors[optype])

    def median_duration(self, optype: str) -> float:
        """Median of the recorded durations, in seconds."""
        return statistics.median(lasted for _, lasted in self.errors[optype])


OpKey = tuple[str, int, int]
"""Op type, stage and microbatch of an op."""


def compare_operations(
    operations: Iterable[Operation], folder: Path, run: PipelineRun
) -> Comparison:
    """Compare what was read with what was observed into ``folder``. Its first step has set-up, and
    is not observed."""
    read: dict[tuple[int, int], dict[OpKey, Operation]] = {}
    for op in operations:
        if op.optype in COMPUTE:
            key = op.optype, op.global_chunk, op.microbatch
            read.setdefault((op.rank, op.step), {})[key] = op
    steps = sorted({step for _, step in read})
    compared = Comparison(0, 0, {}, [], [])
    found = recorded = 0
    for rank in sorted({rank for rank, _ in read}):
        observed = read_observed(folder, rank)
        both = [
            (read[rank, step], observed[number])
            for number, step in enumerate(steps, run.first_profiled + run.steps - len(steps))
            if number in observed
        ]
        pairs = [(ops[key], op) for ops, hooks in both for key, op in hooks.items() if key in ops]
        shift = statistics.median(op.start - hook.start for op, hook in pairs)
        compared.clocks.append(shift)
        recorded += sum(len(hooks) for _, hooks in both)
        for op, hook in pairs:
            lasted = hook.duration
            compared.errors.setdefault(op.optype, []).append((op.duration - lasted, lasted))
            common = min(op.end - shift, hook.end) - max(op.start - shift, hook.start)
            found += common > lasted / 2
        for ops, hooks in both:
            shares = [_share_without_ops(list(each.values())) for each in (ops, hooks)]
            compared.bubbles.append(shares[0] - shares[1])
    clocks = [shift - compared.clocks[0] for shift in compared.clocks[1:]]
    return compared._replace(found=found, recorded=recorded, clocks=clocks)


def read_observed(folder: Path | str, rank: int) -> dict[int, dict[OpKey, Operation]]:
    """Compute ops that were observed on a rank, by step. A forward includes its loss."""
    table = TraceFile.open_file(Path(folder, "ops", f"rank{rank}.jsonl"))
    steps: dict[int, dict[OpKey, Operation]] = {}
    for op in JsonLinesReader().read_operations([table], []):
        ops = steps.setdefault(op.step, {})
        forward = FORWARD, op.global_chunk, op.microbatch
        if op.optype == LOSS:
            ops[forward] = ops[forward]._replace(duration=op.end - ops[forward].start)
        elif op.optype in COMPUTE:
            ops[op.optype, op.global_chunk, op.microbatch] = op
    return steps


def _share_without_ops(ops: Sequence[Operation]) -> float:
    whole = max(op.end for op in ops) - min(op.start for op in ops)
    return 1 - sum(op.duration for op in ops) / whole


def read_profiles(folder: Path, notes: list[str] | None = None) -> list[Operation]:
    """Operations of the traces in a folder."""
    files = [TraceFile.open_file(path) for path in sorted(folder.glob("*.json.gz"))]
    return list(TorchProfilerReader().read_operations(files, [] if notes is None else notes))
