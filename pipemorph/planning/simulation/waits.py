"""Where a plan has its ranks wait on purpose, for guided dispatch."""

from __future__ import annotations

from collections.abc import Sequence

from pipemorph.planning import _planner
from pipemorph.planning.ir import Schedule
from pipemorph.planning.problem import Problem
from pipemorph.planning.simulation import core
from pipemorph.planning.simulation.costs import Costs
from pipemorph.planning.simulation.guided import Guide

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
    return tuple(map(tuple, _planner.waits(costs.packed(), codes, peaks, stages_of)))
