"""Makes a plan for a problem.

A rule-based policy makes one schedule from op times and caps. Policy pipemorph searches for an
order; if stages may offload, recompute or fuse backwards, it searches several variants of the
problem and takes the shortest; if microbatches differ in cost, it orders them, too. The schedule is
then validated and compared with a lower bound, and :meth:`PlanVariant.to_plan` turns the result
into the plan that ranks run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from time import perf_counter

from pipemorph.errors import InputError
from pipemorph.planning.ir import Dispatch, Policy, Route, Schedule
from pipemorph.planning.problem import Link, Problem, StageTimes, convert_to_grains
from pipemorph.planning.rule_based import (
    schedule_1f1b,
    schedule_1f1b_interleaved,
    schedule_gpipe,
    schedule_zero_bubble,
    schedule_zero_bubble_v,
)
from pipemorph.planning.search.plan_variants import PlanVariant, plan_in_order
from pipemorph.planning.search.reordering import find_best_reordered
from pipemorph.planning.simulation.execution import (
    RELATIVE_TOLERANCE,
    compute_lower_bound,
    compute_tight_lower_bound,
)
from pipemorph.planning.simulation.simulator import Simulation, predict, simulate
from pipemorph.planning.validator import check_rank_memory, validate

# Queues of a direct route, sends in flight at which it blocks compute; engine queues per link.
DIRECT_QUEUES, DIRECT_OUTSTANDING = 1, 2
DELEGATED_QUEUES = 8


@dataclass(frozen=True, kw_only=True)
class PlannedSchedule(PlanVariant):
    """Schedule with its problem and predicted time.

    ``problem``: the given problem, with the device limits and in-flight caps of the plan, and its
    microbatches in the plan's order. No schedule has a smaller ``objective`` than ``lower_bound``,
    in any order of the microbatches that it may choose. ``planning_seconds``: wall time
    without that of a tight bound; all other times are in the problem's unit.
    """

    lower_bound: float
    planning_seconds: float

    @cached_property
    def simulation(self) -> Simulation:
        """Simulation of the static order under the problem's times; computed on first use."""
        return simulate(self.schedule, self.problem)

    @property
    def gap(self) -> float:
        """Excess over ``lower_bound`` as a fraction of it; 0: proven shortest."""
        return self.objective / self.lower_bound - 1 if self.lower_bound > 0 else 0.0

    @cached_property
    def objective(self) -> float:
        """Makespan or period, by the problem's ``objective``."""
        if self.problem.objective == "makespan":
            return self.makespan
        return self.simulation.period


def plan(
    problem: Problem,
    policy: Policy | None = None,
    *,
    effort: int = 1,
    near: float = 0.0,
    tight_bound: bool = False,
) -> PlannedSchedule:
    """Plan with ``policy``, or with the problem's own.

    A problem gives the same schedule on every machine, since no result depends on planning time.

    Policy pipemorph chooses where to offload within the device limits, and which stages fuse their
    backwards if ``fused_backward`` is shorter than both parts; other policies leave the device
    limits unchanged. ``effort``: multiple of the usual number of orders tried, for problems with
    one stage per rank and without variants of offload and fused backwards. ``near``: gap to the
    lower bound, as a fraction, at which the search stops. ``tight_bound``: search for a larger
    ``lower_bound`` if the plan is not proven shortest and its microbatches may not be reordered;
    this does not change the plan and may take longer than planning. Raises :class:`InputError` if
    the policy cannot plan the problem.
    """
    began, given = perf_counter(), problem
    policy = problem.policy if policy is None else policy
    if problem.dispatch is Dispatch.GUIDED or not problem.multi_stage:
        problem = (
            problem.with_divided_memory()
        )  # Out of turn, all stages may reach their peaks at once.
    if policy is Policy.PIPEMORPH:
        plan_problem = find_best_reordered if problem.reorders else plan_in_order
        best, bound = plan_problem(problem, effort=effort, near=near)
    else:
        schedule = _schedule_by_rule(convert_to_grains(problem)[0], policy)
        bound = compute_lower_bound(problem, schedule.placement)
        problem = problem.with_microbatch_order(())
        best = PlanVariant(problem, schedule, predict(schedule, problem), policy)
    problem, schedule = best.problem, best.schedule
    validate(schedule, problem.list_in_flight_limits(), problem.list_device_limits())
    check_rank_memory(schedule, problem.microbatch_sizes, problem.rank_memory)
    planned = PlannedSchedule(
        policy=policy,
        problem=problem,
        schedule=schedule,
        makespan=best.makespan,
        microbatch_order=best.microbatch_order,
        lower_bound=bound,
        planning_seconds=perf_counter() - began,
    )
    unproven = planned.objective > bound * (1 + RELATIVE_TOLERANCE)
    tightens = not problem.multi_stage and not given.reorders
    if tight_bound and policy is Policy.PIPEMORPH and unproven and tightens:
        bound = max(bound, compute_tight_lower_bound(given, planned.objective))
        planned = replace(planned, lower_bound=bound)
    # Both are sums of the same times in different order: ignore rounding errors.
    near = planned.objective <= bound * (1 + RELATIVE_TOLERANCE)
    return replace(planned, lower_bound=planned.objective) if near else planned


def _schedule_by_rule(problem: Problem, policy: Policy) -> Schedule:
    if policy.interleaved and problem.warmup is not None:
        raise InputError(f"warmup is {list(problem.warmup)}; policy {policy.value} sets its own")
    if problem.multi_stage and not policy.interleaved:
        raise InputError(
            f"ranks is {problem.ranks}; policy {policy.value} has one stage per rank, and stages"
            f" has {problem.stage_count} entries: use pipemorph, 1f1b-interleaved or zero-bubble-v"
        )
    match policy:
        case Policy.GPIPE:
            return schedule_gpipe(problem)
        case Policy.ONE_F_ONE_B:
            return schedule_1f1b(problem)
        case Policy.ZERO_BUBBLE:
            return schedule_zero_bubble(problem)
        case Policy.ONE_F_ONE_B_INTERLEAVED:
            return schedule_1f1b_interleaved(problem)
        case Policy.ZERO_BUBBLE_V:
            return schedule_zero_bubble_v(problem)
        case _:
            raise AssertionError(f"policy {policy.value} has no rule")


def build_problem(
    microbatches: int,
    stages: Sequence[StageTimes],
    delays: Sequence[float],
    routes: Sequence[Route] | None = None,
    *,
    transfers: Sequence[float] | None = None,
    queues: int = DELEGATED_QUEUES,
    half_duplex: bool = False,
    several: bool = False,
) -> Problem:
    """Problem for measured op times and link delays; used by the adaptation controller.

    ``stages`` and ``delays`` share one unit (seconds in the controller). ``routes[i]``: route of
    link *i*, see :func:`build_link`; None plans for pure latency. ``transfers[i]``: time for which
    a message occupies link *i* before it travels for ``delays[i]``. ``several``: see
    :func:`build_link`."""
    if routes is None:
        links = [Link(delay=delay) for delay in delays]
    else:
        links = [
            build_link(route, delay, queues=queues, half_duplex=half_duplex, several=several)
            for route, delay in zip(routes, delays, strict=True)
        ]
    if transfers is not None and any(transfers):
        links = [
            link.model_copy(update={"transfer": transfer})
            for link, transfer in zip(links, transfers, strict=True)
        ]
    return Problem(microbatches=microbatches, stages=tuple(stages), links=tuple(links))


@lru_cache(maxsize=4096)  # A decision makes the same links for each problem that it plans.
def build_link(
    route: Route,
    delay: float,
    *,
    queues: int = DELEGATED_QUEUES,
    half_duplex: bool = False,
    several: bool = False,
) -> Link:
    """Link model of a route with ``delay``.

    Direct: one queue per direction (``half_duplex``: one for both), and the third send in flight
    blocks compute until the first has arrived, like a framework's in-order send queue. If ranks
    have ``several`` stages, no send blocks: a bound on the sends of one could block another.
    Delegated: ``queues`` queues, round robin; sends never block compute.
    """
    if route is Route.DIRECT:
        return Link(
            delay=delay,
            queues=DIRECT_QUEUES,
            outstanding=None if several else DIRECT_OUTSTANDING,
            half_duplex=half_duplex,
        )
    return Link(delay=delay, queues=queues)
