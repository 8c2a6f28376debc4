"""Predicts the iteration time of the current plan and of its alternatives.

All are predicted with the *same* measured op times and delays, so that errors of the model mostly
cancel in the comparison.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from operator import or_
from typing import NamedTuple

from pipemorph.control.decide.replica_shares import (
    Paces,
    divide_microbatches,
    merge_speeds,
    scale_problem,
)
from pipemorph.control.decide.situation import Situation
from pipemorph.control.decide.varying_delays import VaryingDelays
from pipemorph.control.job_state.stages import MemoryExcess, find_excess
from pipemorph.errors import InputError
from pipemorph.planning import (
    Dispatch,
    Plan,
    Policy,
    Problem,
    Route,
    build_problem,
    compute_lower_bound,
    plan,
    predict,
    predict_period,
    simulate,
    validate,
    validate_waits,
)
from pipemorph.planning import plan as plan_schedule
from pipemorph.planning.search.microbatch_order import predict_reordering_gain
from pipemorph.planning.search.plan_variants import generate_variants, has_variants
from pipemorph.planning.simulation.execution import (
    compute_tight_lower_bound,
    find_planned_waits,
    is_guided_as_fast,
)
from pipemorph.planning.simulation.simulator import TimedOp
from pipemorph.spec.job_spec import JobSpec

EQUAL_WITHIN = 0.01
"""Predictions within this fraction count as equal, since the model is not more exact."""
SEARCH_EFFORT, MOST_SEARCH_EFFORT, THOROUGH_CELLS = 5, 10, 3072
"""Factors on the usual search effort for small and for larger problems, of which the usual effort
tries fewer orders; and the most stages × microbatches for which a plan with it takes at most about
0.2 s. Plan 0 takes the usual effort, since all ranks compute it."""
NEAR_BOUND = 0.005
"""Distance to the lower bound, as a fraction, at which more effort ends."""
PROOF_EFFORT = 400_000
"""Effort of the lower bound that is searched before that: about 4 ms."""


class PlanOption(NamedTuple):
    """Plan and its predicted iteration time in seconds."""

    plan: Plan
    seconds: float


@dataclass(frozen=True)
class Outlook:
    """Present state of a job, to predict iterations under its initial plan (``initial_plan``) and
    the plan in effect. ``planning_spec``: fields of the spec that plans depend on;
    ``outside_seconds``: measured seconds of an iteration outside of its ops."""

    planning_spec: JobSpec
    situation: Situation
    initial_plan: Plan
    running_plan: Plan
    outside_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """Predicted seconds of an iteration under the plan in effect, with its time outside of ops.
        Raises :class:`~pipemorph.errors.InputError` if it cannot be simulated."""
        return (
            Forecast(self.planning_spec, self.situation).predict_option(self.running_plan).seconds
            + self.outside_seconds
        )

    def predict_reordering_gain(self, spread: float) -> float:
        """Predicted fraction of an iteration that ordering microbatches by their costs saves, see
        :func:`~pipemorph.planning.search.microbatch_order.predict_reordering_gain`."""
        problem = Forecast(self.planning_spec, self.situation).get_problem(self.running_plan.routes)
        return predict_reordering_gain(problem, self.running_plan, spread)


@dataclass(frozen=True)
class _ForecastCache:
    """Cache of one situation: problems and their lower bounds by the routes in force; predicted
    seconds by plan. A decision needs them often, and each costs a walk over all ops."""

    problems: dict[tuple[Route, ...], Problem] = field(default_factory=dict)
    bounds: dict[tuple[Route, ...], float] = field(default_factory=dict)
    seconds: dict[Hashable, float] = field(default_factory=dict)


class Forecast:
    """Predictions for one situation of one job."""

    def __init__(
        self,
        spec: JobSpec,
        situation: Situation,
        dispatch: Dispatch | None = None,
        *,
        other: Forecast | None = None,
    ) -> None:
        """``dispatch``: dispatch of new plans, unless the spec fixes it; None: static. ``other``:
        forecast for another situation of the same job, whose caches are shared."""
        self._spec = spec
        self._situation = situation
        self._cache_by_situation: dict[Situation, _ForecastCache] = (
            {} if other is None else other._cache_by_situation
        )
        self._cache = self._cache_by_situation.setdefault(situation, _ForecastCache())
        self._dispatch = spec.schedule.dispatch_kind
        if spec.schedule.dispatch == "auto" and dispatch is Dispatch.GUIDED:
            self._dispatch = dispatch
        warmup = spec.schedule.warmup
        self._warmup = tuple(warmup) if warmup is not None else None
        self._varying_delays = None
        if any(situation.recent):
            cells = spec.parallelism.stages * spec.schedule.microbatches
            self._varying_delays = VaryingDelays.from_recent(
                situation.recent, situation.delays, situation.stages, cells
            )

    def for_situation(self, situation: Situation) -> Forecast:
        """Predictions for another situation of the same job."""
        if situation is self._situation:
            return self
        return Forecast(self._spec, situation, self._dispatch, other=self)

    def get_problem(self, routes: tuple[Route, ...]) -> Problem:
        """Planning problem with links on ``routes``."""
        routes = self._situation.resolve_routes(routes)
        known = self._cache.problems
        if routes not in known:
            known[routes] = self._build_problem(routes)
        return known[routes]

    def _build_problem(self, routes: tuple[Route, ...]) -> Problem:
        situation, cut = self._situation, self._spec.parallelism
        transfers = [situation.get_transfer_time(i) for i in range(len(routes))]
        problem = build_problem(
            self._spec.schedule.microbatches,
            situation.route_cost.convert_op_times(situation.stages, routes),
            [max(0.0, w - t) for w, t in zip(situation.wire_times, transfers, strict=True)],
            routes,
            transfers=transfers,
            several=cut.stages_per_rank > 1,
        )
        if not situation.barrier:
            problem = problem.model_copy(update={"objective": "period"})
        if cut.stages_per_rank > 1:
            memory = situation.rooms[0].rank_memory if situation.rooms else None
            ranks, placement = cut.mesh.sizes["pp"], cut.stage_placement
            placed = {"ranks": ranks, "placement": placement, "rank_memory": memory}
            problem = problem.model_copy(update=placed)
        return problem if self._warmup is None else problem.with_warmup(self._warmup)

    def predict_option(self, plan: Plan) -> PlanOption:
        """Predicted time of a valid plan, under the plan's own limits."""
        # The prediction depends on nothing else: each kind of op runs in microbatch order.
        runs = (
            plan.schedule.op_codes, plan.dispatch, plan.waits, plan.routes,
            plan.in_flight_limits, plan.device_limits, plan.recompute, plan.shares, plan.resized,
        )  # fmt: skip
        known = self._cache.seconds
        if runs not in known:
            known[runs] = self._predict_seconds(plan)
        return PlanOption(plan, known[runs])

    def simulate_plan(self, plan: Plan) -> list[list[tuple[int, TimedOp]]]:
        """Simulate the ops of one iteration under a valid plan. Returns them by rank, each with its
        stage; times in seconds. Delays that vary are their mean."""
        ran = simulate(plan.schedule, self._get_plan_problem(plan), plan.dispatch, waits=plan.waits)
        stages_of = plan.schedule.stages_by_rank
        return [
            [(mine[op.chunk], op) for op in ops]
            for mine, ops in zip(stages_of, ran.ranks, strict=True)
        ]

    def _predict_seconds(self, plan: Plan) -> float:
        paces = self._situation.paces or ((),) * len(plan.shares)
        if not paces:
            return self._predict_replica(plan, self.get_problem(plan.routes))
        alike = {
            (row, plan.shares[replica] if plan.shares else 0): plan.for_replica(replica)
            for replica, row in enumerate(paces)
        }
        return max(
            self._predict_replica(mine, self._get_replica_problem(mine, row))
            for (row, _), mine in alike.items()
        )

    def _get_replica_problem(self, mine: Plan, row: Sequence[float]) -> Problem:
        return scale_problem(self.get_problem(mine.routes), row, mine.schedule.microbatches)

    def _predict_replica(self, plan: Plan, problem: Problem) -> float:
        problem = problem.with_plan_limits(plan)
        if self._varying_delays is not None:
            return self._varying_delays.predict_seconds(plan, problem)
        if not self._situation.barrier:
            return predict_period(plan.schedule, problem, plan.dispatch, plan.waits)
        return predict(plan.schedule, problem, plan.dispatch, plan.waits)

    def choose_best(self, options: Iterable[PlanOption]) -> PlanOption:
        """Choose the fastest option. Among equals, one that stays fast if delays are somewhat
        longer than measured; then the one with the fewest delegated links, the fewest stages whose
        activations leave the device; then the first."""
        ranked = list(options)
        quickest = min(option.seconds for option in ranked)
        equal = [option for option in ranked if option.seconds <= quickest * (1 + EQUAL_WITHIN)]
        if len(equal) > 1 and any(self._situation.slow):
            strained = self.for_situation(self._situation.with_margin())
            times = [strained.predict_option(option.plan).seconds for option in equal]
            least = min(times) * (1 + EQUAL_WITHIN)
            equal = [each for each, time in zip(equal, times, strict=True) if time <= least]
        return min(
            equal,
            key=lambda each: (
                len(each.plan.delegated_links),
                len(each.plan.offloading_stages) + len(each.plan.recomputing_stages),
            ),
        )

    def is_as_fast(self, option: PlanOption, other: PlanOption) -> bool:
        """True if ``option`` is no slower than ``other``, also with somewhat longer delays."""
        strained = self.for_situation(self._situation.with_margin())
        limit = strained.predict_option(other.plan).seconds * (1 + EQUAL_WITHIN)
        return (
            option.seconds <= other.seconds
            and strained.predict_option(option.plan).seconds <= limit
        )

    def make_options(
        self, routes: tuple[Route, ...], within: float = inf, effort: int = 1
    ) -> list[PlanOption]:
        """Make new plans for this situation: a plain one, and shorter ones with fused backwards,
        offload or recomputation; each also with another dispatch if the spec allows it. Empty if
        all take longer than ``within`` seconds. ``effort``: of the search. Raises
        :class:`InputError` if there is no plan."""
        if self._has_constant_delays and self._get_lower_bound(routes) > within:
            return []
        made = self._plan_routes(routes, effort)
        if self._varying_delays is not None:
            steady = replace(self._situation, recent=())
            for by in self._varying_delays.list_longer_delays():
                made += self.for_situation(steady.with_longer_delays(by))._plan_routes(
                    routes, effort
                )
            made = [
                self.predict_option(each) for each in dict.fromkeys(option.plan for option in made)
            ]
        # With varying delays, the prediction shows the cost of not waiting for late messages.
        if self._varying_delays is None or not self._may_dispatch_guided(routes):
            return made
        plans = [option.plan for option in made]
        others = [
            _with_guided_dispatch(each, self._get_plan_problem(each))
            for each in plans
            if not _is_guided(each)
        ]
        return [
            *made,
            *(self.predict_option(plan) for plan in others if self.find_excess(plan) is None),
        ]

    def make_unequal_shares(self, option: PlanOption) -> list[PlanOption]:
        """Make the plan of an option with unequal numbers of microbatches for replicas that compute
        at different speeds. Empty if none is slow, or if there is no such plan."""
        paces, plan = self._situation.paces, option.plan
        if not paces or self._warmup is not None or min(map(max, paces)) <= 0:
            return []
        paces = merge_speeds(paces)
        microbatches = plan.schedule.microbatches
        times = {row: self._estimate_replica_times(plan, row) for row in {*paces}}
        shares = divide_microbatches(
            microbatches * len(paces), *zip(*(times[row] for row in paces), strict=True)
        )
        if len({*shares}) == 1:
            return []
        try:
            found = self._plan_shares(plan, shares, paces)
        except InputError:
            return []
        return [] if self.find_excess(found) is not None else [self.predict_option(found)]

    def _estimate_replica_times(self, plan: Plan, row: Sequence[float]) -> tuple[float, float]:
        """Estimate the seconds of a replica with the paces ``row``: those that do not depend on its
        number of microbatches, and those of each."""
        plain = replace(plan, shares=(), resized=())
        seconds = self._predict_replica(plain, self._get_replica_problem(plain, row))
        busy = [0.0] * len(plan.schedule.stages_by_rank)
        for rank, stages in enumerate(plan.schedule.stages_by_rank):
            busy[rank] = sum(row[stage] for stage in stages)
        each = max(busy)
        return max(0.0, seconds - each * plan.schedule.microbatches), each

    def _plan_shares(self, plan: Plan, shares: Sequence[int], paces: Paces) -> Plan:
        """Plan the schedules of ``shares``. Raises :class:`InputError` if there is none."""
        resized = []
        for count in sorted({*shares} - {plan.schedule.microbatches}):
            rows = [row for row, share in zip(paces, shares, strict=True) if share == count]
            slowest = [max(each) for each in zip(*rows, strict=True)]
            problem = scale_problem(self.get_problem(plan.routes), slowest, count)
            made = plan_schedule(problem, Policy.PIPEMORPH)
            resized.append(made.to_plan(0, plan.routes, plan.dispatch))
        return replace(plan, shares=tuple(shares), resized=tuple(resized))

    def _get_plan_problem(self, plan: Plan) -> Problem:
        """Planning problem of a plan, on its routes and under its own limits."""
        return self.get_problem(plan.routes).with_plan_limits(plan)

    def _fall_back_to_static(self, plan: Plan) -> Plan:
        """Change a new plan to static dispatch, if the spec allows it, where in-flight limits are
        too tight for guided dispatch."""
        n = plan.schedule.microbatches
        limited = any(limit is not None and limit < n for limit in plan.in_flight_limits)
        if self._spec.schedule.dispatch != "auto" or not _is_guided(plan) or not limited:
            return plan
        if is_guided_as_fast(plan.schedule, self._get_plan_problem(plan), plan.waits):
            return plan
        return replace(plan, dispatch=Dispatch.STATIC, waits=())

    def search_longer(self, best: PlanOption) -> list[PlanOption]:
        """Search with more effort for plans on the routes of the best option so far. Returns those
        that are faster; empty if that cannot pay, or takes too long."""
        routes = best.plan.routes
        problem = self.get_problem(routes)
        cells = problem.stage_count * problem.microbatches
        if problem.ranks is not None or has_variants(problem) or cells > THOROUGH_CELLS:
            return []
        if self._has_constant_delays:
            if best.seconds <= self._get_lower_bound(routes) * (1 + NEAR_BOUND):
                return []
            # A proof costs a fraction of the search, and succeeds for every second plan.
            bound = compute_tight_lower_bound(problem, best.seconds, PROOF_EFFORT)
            if best.seconds <= bound * (1 + NEAR_BOUND):
                return []
        made = self.make_options(
            routes, effort=min(MOST_SEARCH_EFFORT, max(SEARCH_EFFORT, cells // 64))
        )
        return [option for option in made if option.seconds < best.seconds]

    def _get_lower_bound(self, routes: tuple[Route, ...]) -> float:
        """Lower bound of all plans with links on ``routes``, seconds."""
        routes, known = self._situation.resolve_routes(routes), self._cache.bounds
        if routes not in known:
            known[routes] = compute_lower_bound(self.get_problem(routes))
        return known[routes]

    @property
    def _has_constant_delays(self) -> bool:
        """True if no delay varies and each rank has one stage: lower bounds hold."""
        return self._varying_delays is None and self._spec.parallelism.stages_per_rank == 1

    def _may_dispatch_guided(self, routes: tuple[Route, ...]) -> bool:
        """True while links are slow and all slow ones are delegated. On a direct route a late send
        blocks the next op, and arrivals that show the delay are seen later."""
        carried = self._situation.resolve_routes(routes)
        slow = [route for route, slow in zip(carried, self._situation.slow, strict=True) if slow]
        return (
            self._spec.schedule.dispatch == "auto"
            and self._spec.parallelism.mesh.lockstep_size == 1
            and bool(slow)
            and all(route is Route.DELEGATED for route in slow)
        )

    def _plan_routes(self, routes: tuple[Route, ...], effort: int) -> list[PlanOption]:
        """Make new plans on ``routes``, with each dispatch that they may have."""
        problem, dispatches = self.get_problem(routes), [self._dispatch]
        if problem.rank_memory is not None and self._spec.schedule.dispatch == "auto":
            # In the plan's order stages share memory by the moment; in another order they must not.
            dispatches = list(dict.fromkeys([Dispatch.STATIC, self._dispatch]))
        return [
            option
            for dispatch in dispatches
            for option in self._plan_with_dispatch(dispatch, problem, routes, effort)
        ]

    def _plan_with_dispatch(
        self, dispatch: Dispatch, problem: Problem, routes: tuple[Route, ...], effort: int
    ) -> list[PlanOption]:
        """Make new plans with one dispatch: one by search, or each variant of the problem."""
        if dispatch is Dispatch.GUIDED:
            problem = problem.with_divided_memory()
        if not has_variants(problem):
            near = NEAR_BOUND if effort > 1 else 0.0
            made = plan(problem, Policy.PIPEMORPH, effort=effort, near=near)
            only = self._fall_back_to_static(made.to_plan(0, routes, dispatch))
            return [
                PlanOption(only, made.makespan)
                if self._takes_planned_time(only)
                else self.predict_option(only)
            ]
        found = [
            (self._fall_back_to_static(each.to_plan(0, routes, dispatch)), each.makespan)
            for each in generate_variants(problem)
        ]
        return [
            PlanOption(each, seconds)
            if self._takes_planned_time(each)
            else self.predict_option(each)
            for each, seconds in found
        ]

    def _takes_planned_time(self, plan: Plan) -> bool:
        """True if a new plan for this situation takes the planner's makespan. Guided dispatch
        follows its order, too, while messages arrive as planned."""
        situation = self._situation
        return self._varying_delays is None and situation.barrier and not situation.paces

    def find_excess(self, plan: Plan) -> MemoryExcess | None:
        """Find the first stage on which the plan exceeds its limits; None if there is none."""
        rooms = self._situation.rooms
        if not rooms:
            return None
        found = (find_excess(each, rooms) for each in (plan, *plan.resized))
        return next((each for each in found if each is not None), None)

    def list_route_choices(
        self, current: tuple[Route, ...], initial: tuple[Route, ...]
    ) -> list[tuple[Route, ...]]:
        """List the distinct choices of routes for all links that the spec allows.

        ``auto`` may delegate slow links, and links on which messages take so long that the two in
        flight on a direct route may not be enough. A link without recent samples stays on its
        route; one whose direct route broke has no other.
        """
        if self._spec.transport.route != "auto":
            return [initial]
        situation = self._situation
        back = tuple(
            now if unknown else first
            for now, first, unknown in zip(current, initial, situation.unknown, strict=True)
        )
        choices = [current, back]
        for away in (situation.slow, map(or_, situation.slow, situation.far)):
            rows = zip(back, away, situation.unknown, strict=True)
            choices.append(
                tuple(
                    now if unknown else Route.DELEGATED if leaves else Route.DIRECT
                    for now, leaves, unknown in rows
                )
            )
        return list(dict.fromkeys(map(situation.resolve_routes, choices)))


def _is_guided(plan: Plan) -> bool:
    return plan.dispatch is Dispatch.GUIDED


def _with_guided_dispatch(plan: Plan, problem: Problem) -> Plan:
    """Change a static plan for a problem to guided dispatch."""
    waits = find_planned_waits(plan.schedule, problem)
    return replace(plan, dispatch=Dispatch.GUIDED, waits=waits)


def find_plan_error(plan: Plan) -> str | None:
    """Find the reason, in one line, why ranks must not run the plan; None if they may."""
    try:
        for each in (plan, *plan.resized):
            validate(each.schedule, each.in_flight_limits, each.device_limits)
            validate_waits(each.schedule, each.waits)
        for replica in range(len(plan.shares)):
            plan.for_replica(replica)
        if plan.shares and sum(plan.shares) != plan.schedule.microbatches * len(plan.shares):
            return f"its shares are {list(plan.shares)}, whose sum is not that of equal ones"
    except InputError as error:
        return str(error)
    return None
