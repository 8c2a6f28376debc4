"""Predicts the iteration time of the current plan and of its alternatives.

All are predicted with the *same* measured op times and delays, so that errors of the model mostly
cancel in the comparison.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace
from math import inf
from operator import or_
from typing import NamedTuple

from pipemorph.api.spec import JobSpec
from pipemorph.control.decide.situation import Situation
from pipemorph.control.decide.varying import Varying
from pipemorph.control.observed.stages import Excess, excess
from pipemorph.errors import InputError
from pipemorph.planning import (
    Dispatch,
    Plan,
    Policy,
    Problem,
    Route,
    lower_bound,
    plan,
    predict,
    predict_period,
    problem_for,
    simulate,
    validate,
    validate_waits,
)
from pipemorph.planning.search.variants import has_variants, variants
from pipemorph.planning.simulation.core import as_fast_guided, planned_waits, tight_lower_bound
from pipemorph.planning.simulation.simulator import TimedOp

SAME = 0.01
"""Predictions within this fraction count as equal, since the model is not more exact."""
EFFORT, MOST_EFFORT, THOROUGH_CELLS = 5, 10, 3072
"""Times the usual search effort for small and for larger problems, of which the usual one tries
fewer orders; and the largest number of stages × microbatches for which a plan takes at most about
0.2 s with it. Plan 0 takes the usual one, since all ranks compute it."""
NEAR = 0.005
"""More effort ends where a plan is so near to the lower bound, as a fraction."""
PROOF_EFFORT = 400_000
"""Of the lower bound that is looked for before that, about 4 ms."""


class Option(NamedTuple):
    """A plan, and its predicted iteration time in seconds."""

    plan: Plan
    seconds: float


@dataclass(frozen=True)
class Outlook:
    """A job as it is now, to predict its plans: that of the start, and the one in effect.
    ``outside``: seconds that an iteration takes outside of its ops, as measured."""

    rules: JobSpec
    situation: Situation
    start: Plan
    running: Plan
    outside: float = 0.0

    @property
    def seconds(self) -> float:
        """Predicted time of an iteration under the plan in effect, with what it takes beside its
        ops. Raises
        :class:`~pipemorph.errors.InputError` if it cannot be simulated."""
        return Forecast(self.rules, self.situation).of(self.running).seconds + self.outside


@dataclass(frozen=True)
class _Known:
    """What has been found out about one situation. A decision asks for the same again and again,
    each time by a walk over all ops: problems, and their lower bounds, by the routes in force;
    seconds by what ranks run."""

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
        beside: Forecast | None = None,
    ) -> None:
        """``dispatch``: of new plans, as far as the spec leaves it open; None: static. ``beside``:
        predictions for another situation of the same job, to know what is known there."""
        self._spec = spec
        self._situation = situation
        self._all_known: dict[Situation, _Known] = {} if beside is None else beside._all_known
        self._known = self._all_known.setdefault(situation, _Known())
        self._dispatch = spec.schedule.dispatch_kind
        if spec.schedule.dispatch == "auto" and dispatch is Dispatch.GUIDED:
            self._dispatch = dispatch
        warmup = spec.schedule.warmup
        self._warmup = tuple(warmup) if warmup is not None else None
        self._varying = None
        if any(situation.recent):
            cells = spec.parallelism.stages * spec.schedule.microbatches
            self._varying = Varying.of(situation.recent, situation.delays, situation.stages, cells)

    def under(self, situation: Situation) -> Forecast:
        """Predictions for another situation of the same job."""
        if situation is self._situation:
            return self
        return Forecast(self._spec, situation, self._dispatch, beside=self)

    def problem(self, routes: tuple[Route, ...]) -> Problem:
        """The planning problem with links on ``routes``."""
        routes = self._situation.carried(routes)
        known = self._known.problems
        if routes not in known:
            known[routes] = self._problem(routes)
        return known[routes]

    def _problem(self, routes: tuple[Route, ...]) -> Problem:
        situation, cut = self._situation, self._spec.parallelism
        transfers = [situation.transfer(i) for i in range(len(routes))]
        problem = problem_for(
            self._spec.schedule.microbatches,
            situation.route_cost.on(situation.stages, routes),
            [max(0.0, w - t) for w, t in zip(situation.wire_times, transfers, strict=True)],
            routes,
            transfers=transfers,
            several=cut.stages_per_rank > 1,
        )
        if not situation.barrier:
            problem = problem.model_copy(update={"objective": "period"})
        if cut.stages_per_rank > 1:
            memory = situation.rooms[0].memory if situation.rooms else None
            ranks, placement = cut.mesh.sizes["pp"], cut.stage_placement
            placed = {"ranks": ranks, "placement": placement, "rank_memory": memory}
            problem = problem.model_copy(update=placed)
        return problem if self._warmup is None else problem.with_warmup(self._warmup)

    def of(self, plan: Plan) -> Option:
        """Predicted time of a valid plan, under the plan's own limits."""
        # All that the prediction depends on: each kind of op runs in microbatch order.
        runs = (
            plan.schedule.codes, plan.dispatch, plan.waits, plan.routes,
            plan.in_flight_limits, plan.device_limits, plan.recompute,
        )  # fmt: skip
        known = self._known.seconds
        if runs not in known:
            known[runs] = self._predicted(plan)
        return Option(plan, known[runs])

    def simulated(self, plan: Plan) -> list[list[tuple[int, TimedOp]]]:
        """The ops of one iteration by rank, each with its stage; seconds. For a valid plan.
        Delays that vary are their mean."""
        ran = simulate(plan.schedule, self._within(plan), plan.dispatch, waits=plan.waits)
        stages_of = plan.schedule.stages_of
        return [
            [(mine[op.chunk], op) for op in ops]
            for mine, ops in zip(stages_of, ran.ranks, strict=True)
        ]

    def _predicted(self, plan: Plan) -> float:
        problem = self._within(plan)
        if self._varying is not None:
            return self._varying.seconds(plan, problem)
        if not self._situation.barrier:
            return predict_period(plan.schedule, problem, plan.dispatch, plan.waits)
        return predict(plan.schedule, problem, plan.dispatch, plan.waits)

    def best(self, options: Iterable[Option]) -> Option:
        """The fastest option. Among equals, one that stays fast if delays are somewhat longer than
        measured, then the one with the fewest delegated links, the fewest stages whose activations
        leave the device, the first."""
        ranked = list(options)
        quickest = min(option.seconds for option in ranked)
        equal = [option for option in ranked if option.seconds <= quickest * (1 + SAME)]
        if len(equal) > 1 and any(self._situation.slow):
            strained = self.under(self._situation.strained())
            times = [strained.of(option.plan).seconds for option in equal]
            least = min(times) * (1 + SAME)
            equal = [each for each, time in zip(equal, times, strict=True) if time <= least]
        return min(
            equal,
            key=lambda each: (
                len(each.plan.delegated),
                len(each.plan.offloading) + len(each.plan.recomputing),
            ),
        )

    def stays_as_fast(self, option: Option, other: Option) -> bool:
        """Whether ``option`` is no slower than ``other``, also with somewhat longer delays."""
        strained = self.under(self._situation.strained())
        limit = strained.of(other.plan).seconds * (1 + SAME)
        return option.seconds <= other.seconds and strained.of(option.plan).seconds <= limit

    def fresh(
        self, routes: tuple[Route, ...], within: float = inf, effort: int = 1
    ) -> list[Option]:
        """New plans for this situation: a plain one, and shorter ones with fused backwards, offload
        or recomputation; and the same with other dispatch where the spec leaves it open. None if
        all are known to take longer than ``within`` seconds. ``effort``: of the search. Raises
        :class:`InputError` if there is no plan."""
        if self._is_simple and self._bound(routes) > within:
            return []
        made = self._planned(routes, effort)
        if self._varying is not None:
            steady = replace(self._situation, recent=())
            for by in self._varying.longer():
                made += self.under(steady.longer(by))._planned(routes, effort)
            made = [self.of(each) for each in dict.fromkeys(option.plan for option in made)]
        # Only here does a prediction show what it costs not to wait for what is nearly there.
        if self._varying is None or not self._may_go_guided(routes):
            return made
        plans = [option.plan for option in made]
        others = [_guided(each, self._within(each)) for each in plans if not _is_guided(each)]
        return [*made, *(self.of(plan) for plan in others if self.excess(plan) is None)]

    def _within(self, plan: Plan) -> Problem:
        """The planning problem of a plan, on its routes and under its own limits."""
        return self.problem(plan.routes).under(plan)

    def _as_open(self, plan: Plan) -> Plan:
        """A new plan, in the plan's own order where in-flight limits leave guided dispatch too
        little room, and the spec leaves it open."""
        n = plan.schedule.microbatches
        limited = any(limit is not None and limit < n for limit in plan.in_flight_limits)
        if self._spec.schedule.dispatch != "auto" or not _is_guided(plan) or not limited:
            return plan
        if as_fast_guided(plan.schedule, self._within(plan), plan.waits):
            return plan
        return replace(plan, dispatch=Dispatch.STATIC, waits=())

    def longer_searched(self, best: Option) -> list[Option]:
        """Plans on the routes of the best one so far that are searched for with more effort, if
        they are shorter; none where that cannot pay, or takes too long."""
        routes = best.plan.routes
        problem = self.problem(routes)
        cells = problem.stage_count * problem.microbatches
        if problem.ranks is not None or has_variants(problem) or cells > THOROUGH_CELLS:
            return []
        if self._is_simple:
            if best.seconds <= self._bound(routes) * (1 + NEAR):
                return []
            # A proof takes a fraction of the search, and is found for every second plan.
            bound = tight_lower_bound(problem, best.seconds, PROOF_EFFORT)
            if best.seconds <= bound * (1 + NEAR):
                return []
        made = self.fresh(routes, effort=min(MOST_EFFORT, max(EFFORT, cells // 64)))
        return [option for option in made if option.seconds < best.seconds]

    def _bound(self, routes: tuple[Route, ...]) -> float:
        """A lower bound of all plans with links on ``routes``."""
        routes, known = self._situation.carried(routes), self._known.bounds
        if routes not in known:
            known[routes] = lower_bound(self.problem(routes))
        return known[routes]

    @property
    def _is_simple(self) -> bool:
        """Whether an iteration is one of the problem: no delay varies."""
        return self._varying is None and self._spec.parallelism.stages_per_rank == 1

    def _may_go_guided(self, routes: tuple[Route, ...]) -> bool:
        """Only while links are slow and delegated. On a direct route a late send holds up whatever
        op comes next, and arrivals that say how slow the link is are seen later."""
        carried = self._situation.carried(routes)
        slow = [route for route, slow in zip(carried, self._situation.slow, strict=True) if slow]
        return (
            self._spec.schedule.dispatch == "auto"
            and self._spec.parallelism.mesh.lockstep == 1
            and bool(slow)
            and all(route is Route.DELEGATED for route in slow)
        )

    def _planned(self, routes: tuple[Route, ...], effort: int) -> list[Option]:
        problem, dispatches = self.problem(routes), [self._dispatch]
        if problem.rank_memory is not None and self._spec.schedule.dispatch == "auto":
            # In the plan's order stages share memory by the moment; out of turn they must not.
            dispatches = list(dict.fromkeys([Dispatch.STATIC, self._dispatch]))
        return [
            option
            for dispatch in dispatches
            for option in self._planned_for(dispatch, problem, routes, effort)
        ]

    def _planned_for(
        self, dispatch: Dispatch, problem: Problem, routes: tuple[Route, ...], effort: int
    ) -> list[Option]:
        if dispatch is Dispatch.GUIDED:
            problem = problem.shared_out()
        if not has_variants(problem):
            near = NEAR if effort > 1 else 0.0
            made = plan(problem, Policy.PIPEMORPH, effort=effort, near=near)
            only = self._as_open(made.to_plan(0, routes, dispatch))
            return [Option(only, made.makespan) if self._as_planned(only) else self.of(only)]
        found = [
            (self._as_open(each.to_plan(0, routes, dispatch)), each.makespan)
            for each in variants(problem)
        ]
        return [
            Option(each, seconds) if self._as_planned(each) else self.of(each)
            for each, seconds in found
        ]

    def _as_planned(self, plan: Plan) -> bool:
        """Whether a new plan for this situation takes as long as the planner says: guided dispatch
        keeps to its order, too, while messages come as planned."""
        return self._varying is None and self._situation.barrier

    def excess(self, plan: Plan) -> Excess | None:
        """The first stage on which the plan exceeds its limits; None if there is none."""
        rooms = self._situation.rooms
        return excess(plan, rooms) if rooms else None

    def route_choices(
        self, current: tuple[Route, ...], initial: tuple[Route, ...]
    ) -> list[tuple[Route, ...]]:
        """The distinct routes of all links that the spec allows.

        ``auto`` may delegate links that are slow, or on which messages take so long that the two
        of a direct route may not be enough. A link without recent samples keeps its route, and one
        whose direct route broke has no other.
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
        return list(dict.fromkeys(map(situation.carried, choices)))


def _is_guided(plan: Plan) -> bool:
    return plan.dispatch is Dispatch.GUIDED


def _guided(plan: Plan, problem: Problem) -> Plan:
    """A static plan for a problem, with guided dispatch."""
    waits = planned_waits(plan.schedule, problem)
    return replace(plan, dispatch=Dispatch.GUIDED, waits=waits)


def runnable(plan: Plan) -> str | None:
    """None if ranks may run the plan, else the reason why not, in one line."""
    try:
        validate(plan.schedule, plan.in_flight_limits, plan.device_limits)
        validate_waits(plan.schedule, plan.waits)
    except InputError as error:
        return str(error)
    return None
