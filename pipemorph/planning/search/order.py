"""Orders: schedules of split backwards as the search sees them.

Each kind runs in microbatch order, so the kinds of a stage's ops in run order are the whole
schedule of that stage.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipemorph.planning.ir import Op, OpKind, Schedule

FORWARD, BACKWARD, WEIGHT = 0, 1, 2
KINDS = (OpKind.F, OpKind.B, OpKind.W)

Order = list[bytearray]
"""Per stage, one of ``FORWARD``, ``BACKWARD`` and ``WEIGHT`` per op."""


def to_schedule(order: Sequence[bytes | bytearray], microbatches: int) -> Schedule:
    """The schedule, its ops shared between the stages."""
    ops = [[Op(kind, m) for m in range(microbatches)] for kind in KINDS]
    stages = []
    for kinds in order:
        turn = [iter(ops[FORWARD]), iter(ops[BACKWARD]), iter(ops[WEIGHT])]
        stages.append(tuple([next(turn[kind]) for kind in kinds]))
    return Schedule(microbatches, tuple(stages))


def from_schedule(schedule: Schedule) -> Order:
    """The order of a schedule without fused backwards (ValueError where there is one)."""
    return [bytearray(KINDS.index(op.kind) for op in ops) for ops in schedule.stages]


def in_flight_peaks(order: Order) -> tuple[int, ...]:
    """Most microbatches held, per stage."""
    peaks = []
    for kinds in order:
        now = peak = 0
        for kind in kinds:
            if kind == FORWARD:
                now += 1
                peak = max(peak, now)
            elif kind == WEIGHT:
                now -= 1
        peaks.append(peak)
    return tuple(peaks)
