"""Execution under delays that change while an iteration runs."""

from __future__ import annotations

from pipemorph.planning.costs import Costs
from pipemorph.planning.dispatch import Rules, dispatch
from pipemorph.planning.half_duplex import starts_in_time
from pipemorph.planning.ir import Dispatch, Schedule
from pipemorph.planning.links import DelayAt, Wires
from pipemorph.planning.problem import Problem
from pipemorph.planning.simulator import (
    Simulation,
    check_fits,
    from_runs,
    fused_stages,
    timed,
)
from pipemorph.planning.validator import validate


def simulate_changing(
    schedule: Schedule, problem: Problem, delay_at: DelayAt, mode: Dispatch = Dispatch.STATIC
) -> Simulation:
    """:func:`~pipemorph.planning.simulator.simulate`, with ``delay_at(link, sent)`` in place of
    the links' delays; queues and bounds are the problem's. ``sent`` counts from the begin of
    the iteration, in the problem's unit."""
    check_fits(schedule, problem)
    costs = Costs.of(problem)
    wires = Wires(costs, delay_at)
    if mode is Dispatch.STATIC:
        validate(schedule, problem.in_flight_limits(), problem.device_limits())
        return timed(schedule, starts_in_time(schedule, costs, wires), costs)
    validate(schedule)
    rules = Rules.of(
        problem,
        schedule.warmup(),
        fused=fused_stages(schedule),
        slots=[link.slots for link in problem.links],
    )
    return from_runs(dispatch(costs, rules, wires).runs, costs.microbatches)
