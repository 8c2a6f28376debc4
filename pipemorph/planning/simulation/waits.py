"""Where a plan has its ranks wait on purpose, for guided dispatch."""

from __future__ import annotations

from pipemorph.planning import _planner
from pipemorph.planning.ir import Schedule
from pipemorph.planning.problem import Problem
from pipemorph.planning.simulation.costs import Costs
from pipemorph.planning.simulation.guided import Guide

Waits = tuple[tuple[int, ...], ...]
"""Per rank, positions of its ops before which nothing runs in their turn."""


def guide_of(schedule: Schedule, problem: Problem, waits: Waits | None = None) -> Guide:
    """What guided dispatch of ``schedule`` follows. ``waits``: empty for none, None for those that
    the schedule has under ``problem``."""
    if waits is None:
        waits = planned_waits(schedule, problem)
    return Guide(
        codes=schedule.codes,
        waits=waits or ((),) * len(schedule.ranks),
        caps=schedule.in_flight_peak(),
    )


def planned_waits(schedule: Schedule, problem: Problem) -> Waits:
    """Where ranks wait for an op though another could run, or for a link to take a message, if
    messages take as long as under ``problem``."""
    costs = Costs.of(problem, schedule.placement)
    found = _planner.waits(costs.packed(), schedule.codes, schedule.in_flight_peak())
    return tuple(map(tuple, found))
