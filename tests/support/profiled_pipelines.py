"""Profiles torch's own pipeline schedules, with a recorder of every op in the same process.

Stages take fixed times: the ops sleep, so that several ranks fit on few processors. ``torch`` is
imported by each rank alone.
"""

from __future__ import annotations

import gzip
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, schedules
from torch.profiler import ProfilerActivity, profile, schedule

from pipemorph.diagnose.formats.torch_profiler.reader import TorchProfilerReader
from pipemorph.diagnose.operation import BACKWARD, COMPUTE, FORWARD, WEIGHT, Operation
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
    """Steps to time with and without the profiler, in turn; with ``observed`` the observation."""
    observed: bool = False
    """Whether the run is observed as well, into the folder ``ops``."""


class RecordedOp(NamedTuple):
    """An op as the hooks saw it. ``start``, ``end``: seconds of the wall clock."""

    kind: str
    stage: int
    microbatch: int
    start: float
    end: float


class Sleep(torch.autograd.Function):
    """Identity whose forward and backward take times of their own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.backward_seconds = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_seconds)
        return grads[0].clone(), None, None


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


class HookRecorder:
    """Hooks on torch's stages and schedules that note every op's time."""

    def __init__(self) -> None:
        self.ops: list[RecordedOp] = []
        self._clock = time.time() - time.perf_counter()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Replace the methods of the classes meanwhile."""
        base: Any = torch.distributed.pipelining.stage._PipelineStageBase
        scheduled: Any = schedules._PipelineSchedule
        hooks: list[tuple[Any, str, Callable[..., str]]] = [
            (base, "forward_one_chunk", lambda **_: "F"),
            (base, "backward_one_chunk", lambda full_backward=True, **_: "IB"[full_backward]),
            (base, "backward_weight_one_chunk", lambda **_: "W"),
        ]
        before = [(owner, name, getattr(owner, name)) for owner, name, _ in hooks]
        loss = scheduled._maybe_compute_loss

        for (owner, name, kind), (_, _, original) in zip(hooks, before, strict=True):
            setattr(owner, name, self._timed(original, kind))

        def timed_loss(schedule: Any, stage: Any, output: Any, target: Any, *rest: Any) -> Any:
            start = time.perf_counter()
            try:
                return loss(schedule, stage, output, target, *rest)
            finally:
                if stage.is_last:
                    self._add("L", stage.stage_index, rest[0], start)

        scheduled._maybe_compute_loss = timed_loss
        try:
            yield
        finally:
            scheduled._maybe_compute_loss = loss
            for owner, name, original in before:
                setattr(owner, name, original)

    def _timed(self, original: Callable[..., Any], kind: Callable[..., str]) -> Any:
        def timed(stage: Any, microbatch: int, *args: Any, **named: Any) -> Any:
            start = time.perf_counter()
            try:
                return original(stage, microbatch, *args, **named)
            finally:
                self._add(kind(**named), stage.stage_index, microbatch, start)

        return timed

    def _add(self, kind: str, stage: int, microbatch: int, start: float) -> None:
        end = time.perf_counter()
        self.ops.append(RecordedOp(kind, stage, microbatch, start + self._clock, end + self._clock))


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
    """Result of a rank. ``ops``: those of the profiled steps, step by step. ``with_profiler``,
    ``without``: mean seconds of an op in the steps that were timed in turn; with ``observed`` those
    of the step."""

    ops: list[list[RecordedOp]]
    with_profiler: list[float]
    without: list[float]


def profile_pipeline(context: TrainerContext, run: PipelineRun, folder: str) -> ProfiledRank:
    """Train on this rank, and write ``rankN.json.gz`` in ``folder``."""
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
    recorder = HookRecorder()
    steps: list[list[RecordedOp]] = []

    def pass_batch(step: Callable[..., Any]) -> None:
        args = (x,) if 0 in mine else ()
        step(*args, **({"target": x, "losses": []} if stages - 1 in mine else {}))

    def train() -> None:
        if run.evaluate:
            pass_batch(pipeline.eval)
        recorder.ops.clear()
        for _ in range(run.accumulate):
            pass_batch(pipeline.step)
        steps.append(list(recorder.ops))
        if run.replicas > 1:
            for parameter in parameters:
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad, group=mesh.get_group("dp_shard"))
        optimizer.step()
        optimizer.zero_grad()

    observation = observe(f"{folder}/ops") if run.observed else None
    skipped = 0 if run.whole else 2
    timed: dict[bool, list[float]] = {True: [], False: []}
    with recorder.installed():
        with profile(
            activities=[ProfilerActivity.CPU],
            record_shapes=run.record_shapes,
            schedule=None if run.whole else schedule(wait=1, warmup=1, active=run.steps, repeat=1),
        ) as profiler:
            for _ in range(run.steps + skipped):
                train()
                if not run.whole:
                    profiler.step()
        profiler.export_chrome_trace(f"{folder}/rank{context.rank}.json.gz")
        profiled = steps[skipped : run.steps + skipped]
        for turn in range(2 * run.rounds):
            dist.barrier()
            if observation is not None:
                # Its hooks stay where they are, and do nothing.
                observation.active = bool(turn % 2)
                began = time.perf_counter()
                train()
                timed[bool(turn % 2)].append(time.perf_counter() - began)
                continue
            if turn % 2:
                with profile(activities=[ProfilerActivity.CPU], record_shapes=run.record_shapes):
                    train()
            else:
                train()
            lasted = [op.end - op.start for op in steps[-1] if op.kind != "L"]
            timed[bool(turn % 2)].append(statistics.fmean(lasted))
    if observation is not None:
        observation.active = True
        observation.stop()
    dist.barrier()
    dist.destroy_process_group()
    return ProfiledRank(profiled, timed[True], timed[False])


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
    """Ops of a trace against those of the recorder. ``found``, ``recorded``: numbers of ops; the
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


def compare_operations(
    operations: Iterable[Operation], ranks: Sequence[ProfiledRank], run: PipelineRun
) -> Comparison:
    """Compare what was read with what the hooks recorded."""
    read: dict[tuple[int, int], dict[OpKey, Operation]] = {}
    for op in operations:
        if op.optype in COMPUTE:
            key = op.optype, op.global_chunk, op.microbatch
            read.setdefault((op.rank, op.step), {})[key] = op
    steps = sorted({step for _, step in read})
    compared = Comparison(0, 0, {}, [], [])
    found = recorded = 0
    for number, rank in enumerate(ranks):
        hooks = [_key_ops(step, run.microbatches) for step in rank.ops[-len(steps) :]]
        pairs = [
            (read[number, step][key], op)
            for step, ops in zip(steps, hooks, strict=True)
            for key, op in ops.items()
            if key in read[number, step]
        ]
        shift = statistics.median(op.start - hook.start for op, hook in pairs)
        compared.clocks.append(shift)
        recorded += sum(map(len, hooks))
        for op, hook in pairs:
            lasted = hook.end - hook.start
            compared.errors.setdefault(op.optype, []).append((op.duration - lasted, lasted))
            common = min(op.end - shift, hook.end) - max(op.start - shift, hook.start)
            found += common > lasted / 2
        for step, ops in zip(steps, hooks, strict=True):
            shares = [
                _share_without_ops([(op.start, op.end) for op in each])
                for each in (read[number, step].values(), ops.values())
            ]
            compared.bubbles.append(shares[0] - shares[1])
    clocks = [shift - compared.clocks[0] for shift in compared.clocks[1:]]
    return compared._replace(found=found, recorded=recorded, clocks=clocks)


OpKey = tuple[str, int, int]
"""Op type, stage and microbatch of an op."""


def _key_ops(step: Iterable[RecordedOp], microbatches: int) -> dict[OpKey, RecordedOp]:
    """Ops of a step. A forward includes its loss; stage 0's I has no work, and its W is the whole
    backward. Microbatches of several calls of the schedule are counted on."""
    found: dict[OpKey, RecordedOp] = {}
    calls: Counter[RecordedOp] = Counter()
    for op in step:
        same = op._replace(start=0.0, end=0.0)
        number = op.microbatch + microbatches * calls[same]
        calls[same] += 1
        if op.kind == "L":
            forward = FORWARD, op.stage, number
            found[forward] = found[forward]._replace(end=op.end)
        elif op.kind != "I" or op.stage:
            optype = WEIGHT if op.kind == "W" and op.stage else BACKWARD
            found[FORWARD if op.kind == "F" else optype, op.stage, number] = op
    return found


def _share_without_ops(spans: Sequence[tuple[float, float]]) -> float:
    whole = max(end for _, end in spans) - min(begin for begin, _ in spans)
    return 1 - sum(end - begin for begin, end in spans) / whole


def read_profiles(folder: Path, notes: list[str] | None = None) -> list[Operation]:
    """Operations of the traces in a folder."""
    files = [TraceFile.open_file(path) for path in sorted(folder.glob("*.json.gz"))]
    return list(TorchProfilerReader().read_operations(files, [] if notes is None else notes))
