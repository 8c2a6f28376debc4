"""Ranks of an observed job, simulated: the reports of their steps to ``pipemorph serve``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from pipemorph.planning.ir import OpKind
from pipemorph.planning.simulation.simulator import TimedOp
from pipemorph.protocol import OpsTrace
from pipemorph.protocol.observed_steps import (
    MessageKind,
    ObservedPlace,
    ObservedStage,
    ObservedStep,
    ReceivedMessage,
    SentMessage,
    StepsReport,
)
from pipemorph.protocol.op_traces import RankTimes

FORWARD, BACKWARD = 0.010, 0.020
USUAL = 0.001
"""Seconds of an op, and of a message on a healthy link."""
Order = Sequence[Sequence[tuple[OpKind, int]]]


def order_1f1b(stages: int, microbatches: int) -> Order:
    """Ops of each stage by torch's 1F1B."""
    ranks = []
    for stage in range(stages):
        warmup = min(microbatches, stages - stage)
        ops = [(OpKind.F, m) for m in range(warmup)]
        for m in range(microbatches):
            ops.append((OpKind.BW, m))
            if warmup + m < microbatches:
                ops.append((OpKind.F, warmup + m))
        ranks.append(ops)
    return ranks


def run_step(
    step: int, began: float, order: Order, wires: Mapping[int, float], *, noise: float = 0.0
) -> list[ObservedStep]:
    """Run a step on all ranks, by one clock. ``wires``: seconds of a message by link."""
    done: dict[tuple[OpKind, int, int], float] = {}
    ran: list[list[TimedOp]] = [[] for _ in order]
    receives: dict[int, list[tuple[MessageKind, int, float, float]]] = defaultdict(list)
    positions, free = [0] * len(order), [began] * len(order)
    while any(at < len(ops) for at, ops in zip(positions, order, strict=True)):
        for stage, ops in enumerate(order):
            while positions[stage] < len(ops):
                kind, m = ops[positions[stage]]
                source = stage - 1 if kind is OpKind.F else stage + 1
                start = free[stage]
                if 0 <= source < len(order):
                    if (kind, source, m) not in done:
                        break
                    wire = wires.get(min(stage, source), USUAL) + noise * ((7 * m + step) % 3)
                    start = max(start, done[kind, source, m] + wire)
                    letter: MessageKind = "F" if kind is OpKind.F else "B"
                    receives[stage].append((letter, m, free[stage], start))
                free[stage] = start + (FORWARD if kind is OpKind.F else BACKWARD)
                done[kind, stage, m] = free[stage]
                ran[stage].append(TimedOp(kind, m, start, free[stage]))
                positions[stage] += 1
    ended = max(free)
    return [
        _make_step(step, stage, ops, receives[stage], (began, ended, len(order)))
        for stage, ops in enumerate(ran)
    ]


def _make_step(
    step: int,
    stage: int,
    ops: Sequence[TimedOp],
    received: Sequence[tuple[MessageKind, int, float, float]],
    span: tuple[float, float, int],
) -> ObservedStep:
    began, ended, stages = span

    def to_microseconds(at: float) -> int:
        return round(1e6 * (at - began))

    sends: list[SentMessage] = [
        ("F" if op.kind is OpKind.F else "B", op.microbatch, to_microseconds(op.end))
        for op in ops
        if (stage < stages - 1 if op.kind is OpKind.F else stage > 0)
    ]
    receives: list[ReceivedMessage] = [
        (kind, m, to_microseconds(posted), to_microseconds(posted), to_microseconds(end))
        for kind, m, posted, end in received
    ]
    trace = OpsTrace.from_ops(
        (stage, stage, 0), step, 0, began, [op[:4] for op in ops],
        waits=[
            (OpKind.F if kind == "F" else OpKind.BW, m, posted, end)
            for kind, m, posted, end in received
        ],
        rank_times=RankTimes(window=ended - began),
    )  # fmt: skip
    assert trace is not None
    return ObservedStep(
        step=step, microbatches=len({op.microbatch for op in ops}), ended_at=ended,
        seconds=ended - began, stages=[ObservedStage(ops=trace, sends=sends, receives=receives)],
    )  # fmt: skip


def shift_clock(step: ObservedStep, seconds: float) -> ObservedStep:
    """Step by a clock that is ahead."""
    stages = [
        each.model_copy(
            update={"ops": each.ops.model_copy(update={"origin": each.ops.origin + seconds})}
        )
        for each in step.stages
    ]
    return step.model_copy(update={"ended_at": step.ended_at + seconds, "stages": stages})


def make_report(
    stage: int,
    stages: int,
    steps: Sequence[ObservedStep] = (),
    *,
    session: str = "a",
    ahead: float = 0.0,
    crowding: float | None = None,
    **fields: object,
) -> bytes:
    """Report of a rank. ``ahead``: seconds by which its clock is ahead of the host's."""
    place = ObservedPlace(
        rank=stage,
        stages=stages,
        chunks=(stage,),
        host=f"host{stage}",
        framework="torch Schedule1F1B",
        crowding=crowding,
    )
    report = StepsReport(
        protocol=1, session=f"{session}{stage}", place=place, clock=-ahead, round_trip=0.001,
        steps=[shift_clock(step, ahead) for step in steps],
    )  # fmt: skip
    return report.model_copy(update=fields).model_dump_json().encode()
