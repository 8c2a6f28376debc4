"""Where a plan has its ranks wait on purpose, for guided dispatch."""

from __future__ import annotations

from collections.abc import Sequence

from pipemorph.planning.ir import Schedule
from pipemorph.planning.problem import Problem
from pipemorph.planning.simulation import core
from pipemorph.planning.simulation.costs import INF, Costs
from pipemorph.planning.simulation.guided import Guide
from pipemorph.planning.simulation.reference import BW, B, F, W

Waits = tuple[tuple[int, ...], ...]
"""Per stage, positions of its ops before which nothing runs in their turn."""


def guide_of(schedule: Schedule, problem: Problem, waits: Waits | None = None) -> Guide:
    """What guided dispatch of ``schedule`` follows. ``waits``: empty for none, None for those that
    the schedule has under ``problem``."""
    if waits is None:
        waits = planned_waits(schedule, problem)
    n, slots = schedule.microbatches, [link.slots for link in problem.links]
    limited = any(held is not None for held in slots)
    return Guide(
        codes=schedule.codes,
        waits=waits or ((),) * schedule.stage_count,
        caps=schedule.in_flight_peak(),
        slots=tuple(n if held is None else held for held in slots) if limited else None,
    )


def planned_waits(schedule: Schedule, problem: Problem) -> Waits:
    """Where stages wait for an op though another could run, or for a link to take a message, if
    messages take as long as under ``problem``."""
    codes = schedule.codes
    stages_of = core.one_stage_each(schedule.stage_count)
    return waits_of(Costs.of(problem), codes, stages_of, schedule.in_flight_peak())


def waits_of(
    costs: Costs,
    codes: Sequence[bytes],
    stages_of: Sequence[Sequence[int]],
    peaks: Sequence[int],
) -> Waits:
    """The same per rank, for orders as :func:`core.in_order` takes them: positions in the order of
    the rank. ``peaks``: most microbatches in flight by stage."""
    if core.compiled is not None:
        return tuple(map(tuple, core.compiled.waits(costs.packed(), codes, peaks, stages_of)))
    ran = core.in_order(costs, codes, stages_of)
    return tuple(_waits(costs, ran, rank, mine, peaks) for rank, mine in enumerate(stages_of))


def _waits(
    costs: Costs, ran: core.Ran, rank: int, mine: Sequence[int], peaks: Sequence[int]
) -> tuple[int, ...]:
    n, codes, free = costs.microbatches, ran.codes[rank], ran.free[rank]
    backwards = [
        [code % 4 for code in codes if code in (4 * place + B, 4 * place + BW)]
        for place in range(len(mine))
    ]
    done = [[0, 0, 0] for _ in mine]
    idle_since, found = 0.0, []
    for position, (code, start) in enumerate(zip(codes, ran.start[rank], strict=True)):
        its, kind = divmod(code, 4)
        stage, forwards = mine[its], done[its][F]
        sends = costs.outstanding[stage] if kind == F and stage < costs.stage_count - 1 else 0
        taken = ran.above[stage + 1][forwards - sends] if sends and forwards >= sends else 0.0
        if start > idle_since or taken > start:
            other = INF
            for place, each in enumerate(mine):
                f, b, w = done[place]
                here = kind if place == its else None
                if here != F and f < n and f - w < peaks[each]:
                    other = min(other, ran.above[each][f])
                splits = b < f and (backwards[place][b] == B or w == b)
                if here not in (B, BW) and splits:
                    other = min(other, ran.below[each][b])
                if here != W and w < b:
                    other = idle_since
            if max(other, idle_since) < start or taken > start:
                found.append(position)
        idle_since = free[position]
        done[its][F] += kind == F
        done[its][B] += kind in (B, BW)
        done[its][W] += kind in (W, BW)
    return tuple(found)
