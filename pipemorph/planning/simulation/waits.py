"""Where a plan has its stages wait on purpose, for guided dispatch."""

from __future__ import annotations

from pipemorph.planning.ir import Schedule
from pipemorph.planning.problem import Problem
from pipemorph.planning.simulation import core
from pipemorph.planning.simulation.costs import INF, Costs
from pipemorph.planning.simulation.guided import Guide
from pipemorph.planning.simulation.reference import BW, B, F, W

Waits = tuple[tuple[int, ...], ...]
"""Per stage, positions of ops before which nothing runs in their turn."""


def guide_of(schedule: Schedule, problem: Problem, waits: Waits | None = None) -> Guide:
    """What guided dispatch of ``schedule`` follows. ``waits``: empty for none, None for those that
    the schedule has under ``problem``."""
    if waits is None:
        waits = planned_waits(schedule, problem)
    n, slots = schedule.microbatches, [link.slots for link in problem.links]
    limited = any(held is not None for held in slots)
    return Guide(
        codes=tuple(core.encode(ops) for ops in schedule.stages),
        waits=waits or ((),) * schedule.stage_count,
        caps=schedule.in_flight_peak(),
        slots=tuple(n if held is None else held for held in slots) if limited else None,
    )


def planned_waits(schedule: Schedule, problem: Problem) -> Waits:
    """Where stages wait for an op though another could run, or for a link to take a message, if
    messages take as long as under ``problem``."""
    costs, peaks = Costs.of(problem), schedule.in_flight_peak()
    ran = core.in_order(costs, [core.encode(ops) for ops in schedule.stages])
    return tuple(_waits(costs, ran, stage, peak) for stage, peak in enumerate(peaks))


def _waits(costs: Costs, ran: core.Ran, stage: int, peak: int) -> tuple[int, ...]:
    n, kinds = costs.microbatches, ran.codes[stage]
    above, below, free = ran.above[stage], ran.below[stage], ran.free[stage]
    backwards = [kind for kind in kinds if kind in (B, BW)]
    sends = costs.outstanding[stage] if stage < costs.stage_count - 1 else 0
    f = b = w = 0
    idle_since, found = 0.0, []
    for position, (kind, start) in enumerate(zip(kinds, ran.start[stage], strict=True)):
        taken = ran.above[stage + 1][f - sends] if kind == F and sends and f >= sends else 0.0
        if start > idle_since or taken > start:
            other = INF
            if kind != F and f < n and f - w < peak:
                other = above[f]
            if kind in (F, W) and b < f and (backwards[b] == B or w == b):
                other = min(other, below[b])
            if kind != W and w < b:
                other = idle_since
            if max(other, idle_since) < start or taken > start:
                found.append(position)
        idle_since = free[position]
        f += kind == F
        b += kind in (B, BW)
        w += kind in (W, BW)
    return tuple(found)
