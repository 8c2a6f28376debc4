"""Orders: the search's compact representation of schedules with split backwards.

Each kind runs in microbatch order, so the sequence of kinds defines the schedule of a stage.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipemorph.planning.ir import Op, OpKind, Schedule

FORWARD, BACKWARD, WEIGHT = 0, 1, 2
KINDS = (OpKind.F, OpKind.B, OpKind.W)

Order = list[bytearray]
"""Per stage, one of ``FORWARD``, ``BACKWARD`` and ``WEIGHT`` per op."""


def to_schedule(order: Sequence[bytes | bytearray], microbatches: int) -> Schedule:
    """The schedule of an order. Its stages share the op objects."""
    ops = [[Op(kind, m) for m in range(microbatches)] for kind in KINDS]
    stages = []
    for kinds in order:
        turn = [iter(ops[FORWARD]), iter(ops[BACKWARD]), iter(ops[WEIGHT])]
        stages.append(tuple([next(turn[kind]) for kind in kinds]))
    return Schedule(microbatches, tuple(stages))


def from_schedule(schedule: Schedule) -> Order:
    """The order of a schedule. Raises ValueError if it has fused backwards."""
    return [bytearray(KINDS.index(op.kind) for op in ops) for ops in schedule.stages]


def in_flight_peaks(order: Order) -> tuple[int, ...]:
    """Most microbatches in flight, per stage."""
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
