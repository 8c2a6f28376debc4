"""The cause of every idle time of an iteration, from nothing but its ops and their times.

:mod:`pipemorph.planning.analysis.bubbles` knows more of a simulation. Here a measured iteration and
a simulated one are to be compared, so both are judged by what both have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pipemorph.planning.analysis.bubbles import Cause
from pipemorph.planning.ir import OpKind
from pipemorph.planning.simulation.simulator import TimedOp

Ran = Sequence[Sequence[tuple[int, TimedOp]]]
"""Per rank, ``(stage, op)`` in run order."""
Idle = list[tuple[Cause, float, float]]


def bounds(ran: Ran) -> tuple[float, float]:
    """The start of the first op and the end of the last one."""
    begin = min((row[0][1].start for row in ran if row), default=0.0)
    return begin, max((row[-1][1].end for row in ran if row), default=0.0)


def idle_times(ran: Ran) -> list[Idle]:
    """Per rank, ``(cause, start, end)`` in order of time.

    Before the first op it is *fill*, after the last one *drain*. In between the rank waits for the
    input of its next op: *dependency* until that was computed, *link* from then on. *order* where
    the op needed nothing of another rank: then the host, or a send before it, took the time.
    """
    begin, end = bounds(ran)
    rank_of = {stage: rank for rank, row in enumerate(ran) for stage, _ in row}
    forward: dict[int, dict[int, float]] = {stage: {} for stage in rank_of}
    backward: dict[int, dict[int, float]] = {stage: {} for stage in rank_of}
    for row in ran:
        for stage, op in row:
            if op.kind is OpKind.F:
                forward[stage][op.microbatch] = op.end
            elif op.kind is not OpKind.W:
                backward[stage][op.microbatch] = op.end

    def computed(stage: int, op: TimedOp) -> float | None:
        """When another rank had computed the input of an op; None if it needed none."""
        first = op.kind is OpKind.F
        source = stage - 1 if first else stage + 1
        if op.kind is OpKind.W or rank_of.get(source, rank_of[stage]) == rank_of[stage]:
            return None
        return (forward if first else backward)[source].get(op.microbatch)

    return [_of(row, begin, end, computed) for row in ran]


def _of(
    row: Sequence[tuple[int, TimedOp]],
    begin: float,
    end: float,
    computed: Callable[[int, TimedOp], float | None],
) -> Idle:
    found: Idle = []

    def add(cause: Cause, start: float, stop: float) -> None:
        if stop > start:
            found.append((cause, start, stop))

    free = None
    for stage, op in row:
        if free is None:
            add(Cause.FILL, begin, op.start)
        elif op.start > free:
            ready = computed(stage, op)
            if ready is None:
                add(Cause.ORDER, free, op.start)
            else:
                ready = min(max(ready, free), op.start)
                add(Cause.DEPENDENCY, free, ready)
                add(Cause.LINK, ready, op.start)
        free = op.end
    add(Cause.DRAIN, begin if free is None else free, end)
    return found
