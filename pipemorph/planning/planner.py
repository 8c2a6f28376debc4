"""Makes a plan for a problem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from time import perf_counter

from pipemorph.errors import InputError
from pipemorph.planning.ir import Dispatch, Policy, Route, Schedule
from pipemorph.planning.problem import Link, Problem, StageTimes, in_grains
from pipemorph.planning.rule_based import (
    gpipe,
    one_f_one_b,
    one_f_one_b_interleaved,
    zero_bubble,
    zero_bubble_v,
)
from pipemorph.planning.search.search import search
from pipemorph.planning.search.variants import Variant, best_variant, has_variants
from pipemorph.planning.simulation.core import SAME, lower_bound, tight_lower_bound
from pipemorph.planning.simulation.simulator import Simulation, predict, simulate
from pipemorph.planning.validator import check_memory, validate

# Sends in flight at which a direct route blocks compute, and engine queues per link.
DIRECT_QUEUES, DIRECT_OUTSTANDING = 1, 2
DELEGATED_QUEUES = 8


@dataclass(frozen=True, kw_only=True)
class PlannedSchedule(Variant):
    """A schedule with its problem and predicted time.

    ``problem``: the given one, with the device limits and in-flight caps that the plan uses.
    No schedule has a smaller ``objective`` than ``lower_bound``. ``planning_seconds``: wall time
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
        """Makespan or period, as the problem asks for."""
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

    The same problem gives the same schedule on every machine, since no result depends on planning
    time.

    Policy pipemorph chooses where to offload within the device limits, and which stages fuse their
    backwards if ``fused_backward`` is shorter than both parts; other policies keep the device
    limits unchanged. ``effort``: times the usual number of orders that it tries, where it tries no
    variants of offload and fused backwards, with one stage per rank; it stops at a plan that is
    longer than the lower bound by ``near`` at most, as a fraction. ``tight_bound``: where its plan
    is not proven shortest, look for a larger ``lower_bound``, which does not change the plan and
    may take longer than it.
    Raises :class:`InputError` if the policy cannot plan the problem.
    """
    began, asked = perf_counter(), problem
    policy = problem.policy if policy is None else policy
    if problem.dispatch is Dispatch.GUIDED or not problem.several:
        problem = problem.shared_out()  # Out of turn, stages may hold their most all at once.
    if policy is Policy.PIPEMORPH and has_variants(problem):
        bound = lower_bound(problem)
        best = best_variant(problem)
        problem, schedule, makespan = best.problem, best.schedule, best.makespan
    elif policy is Policy.PIPEMORPH:
        found = search(problem, effort=effort, near=near)
        schedule, bound = found.schedule, found.bound
        is_makespan = problem.objective == "makespan"
        makespan = found.objective if is_makespan else predict(schedule, problem)
    else:
        schedule = _made_by_rule(in_grains(problem)[0], policy)
        bound = lower_bound(problem, schedule.placement)
        makespan = predict(schedule, problem)
    validate(schedule, problem.in_flight_limits(), problem.device_limits())
    check_memory(schedule, problem.sizes, problem.rank_memory)
    planned = PlannedSchedule(
        policy=policy,
        problem=problem,
        schedule=schedule,
        makespan=makespan,
        lower_bound=bound,
        planning_seconds=perf_counter() - began,
    )
    unproven = planned.objective > bound * (1 + SAME)
    if tight_bound and policy is Policy.PIPEMORPH and unproven and not problem.several:
        bound = max(bound, tight_lower_bound(asked, planned.objective))
        planned = replace(planned, lower_bound=bound)
    # Both are sums of the same times in different order: ignore rounding errors.
    near = planned.objective <= bound * (1 + SAME)
    return replace(planned, lower_bound=planned.objective) if near else planned


def _made_by_rule(problem: Problem, policy: Policy) -> Schedule:
    if policy.interleaved and problem.warmup is not None:
        raise InputError(f"warmup is {list(problem.warmup)}; policy {policy.value} sets its own")
    if problem.several and not policy.interleaved:
        raise InputError(
            f"ranks is {problem.ranks}; policy {policy.value} has one stage per rank, and stages"
            f" has {problem.stage_count} entries: use pipemorph, 1f1b-interleaved or zero-bubble-v"
        )
    match policy:
        case Policy.GPIPE:
            return gpipe(problem)
        case Policy.ONE_F_ONE_B:
            return one_f_one_b(problem)
        case Policy.ZERO_BUBBLE:
            return zero_bubble(problem)
        case Policy.ONE_F_ONE_B_INTERLEAVED:
            return one_f_one_b_interleaved(problem)
        case Policy.ZERO_BUBBLE_V:
            return zero_bubble_v(problem)
        case _:
            raise AssertionError(f"policy {policy.value} has no rule")


def problem_for(
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
    """The problem for measured op times and link delays; used by the adaptation controller.

    ``stages`` and ``delays`` share one unit (seconds in the controller). ``routes[i]``: route of
    link *i*, see :func:`link_on`; None plans for pure latency. ``transfers[i]``: how long a message
    occupies link *i* before it travels for ``delays[i]``. ``several``: see :func:`link_on`."""
    if routes is None:
        links = [Link(delay=delay) for delay in delays]
    else:
        links = [
            link_on(route, delay, queues=queues, half_duplex=half_duplex, several=several)
            for route, delay in zip(routes, delays, strict=True)
        ]
    if transfers is not None and any(transfers):
        links = [
            link.model_copy(update={"transfer": transfer})
            for link, transfer in zip(links, transfers, strict=True)
        ]
    return Problem(microbatches=microbatches, stages=tuple(stages), links=tuple(links))


@lru_cache(maxsize=4096)  # A decision makes the same ones for each problem that it looks at.
def link_on(
    route: Route,
    delay: float,
    *,
    queues: int = DELEGATED_QUEUES,
    half_duplex: bool = False,
    several: bool = False,
) -> Link:
    """The link model of a route with ``delay``.

    Direct: one queue per direction (``half_duplex``: one for both), and the third send in flight
    blocks compute until the first has arrived, like a framework's in-order send queue. Not if
    ranks have ``several`` stages, which take turns: a bound on the sends of one could block
    another. Delegated: ``queues`` queues, round robin; sends never block compute.
    """
    if route is Route.DIRECT:
        return Link(
            delay=delay,
            queues=DIRECT_QUEUES,
            outstanding=None if several else DIRECT_OUTSTANDING,
            half_duplex=half_duplex,
        )
    return Link(delay=delay, queues=queues)
