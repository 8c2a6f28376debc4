"""Predicts the iteration time of the current plan and of its alternatives.

All are predicted with the *same* measured op times and delays, so that errors of the model mostly
cancel in the comparison.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from pipemorph.api.spec import JobSpec
from pipemorph.control.decide.varying import Varying
from pipemorph.control.memory_limits import Excess, Room, excess
from pipemorph.errors import InputError
from pipemorph.planning import (
    Dispatch,
    Plan,
    Policy,
    Problem,
    Route,
    StageTimes,
    plan,
    predict,
    predict_period,
    problem_for,
    simulate,
    validate,
    validate_online,
)
from pipemorph.planning.interleaved import plan_interleaved
from pipemorph.planning.search.variants import has_variants, variants
from pipemorph.planning.simulation.interleaved import (
    InterleavedSchedule,
    simulate_interleaved,
    validate_interleaved,
)

SAME = 0.01
"""Predictions within this fraction count as equal, since the model is not more exact."""
EFFORT, THOROUGH_CELLS = 10, 3072
"""Times the usual search effort, and the largest number of stages × microbatches for which a plan
takes at most about 0.1 s with it. Plan 0 takes the usual one, since all ranks compute it."""
STRAIN = 0.15
"""By how much more a delay may turn out to be than it was measured to be, as a fraction."""


@dataclass(frozen=True)
class Situation:
    """Measurements for a decision. Seconds; one entry per stage or link.

    ``wire_times``: current one-way times of a message; ``slow``: which of them are longer than
    normal; ``delays``: by how much; ``transfers``: which part of them a message occupies the link,
    alone. ``rooms``: memory limits of the stages, from which the limits
    in ``stages`` follow; empty if nothing is limited. ``barrier``: whether stages wait for each
    other between iterations, so that the makespan counts, and not the period.
    """

    stages: tuple[StageTimes, ...]
    wire_times: tuple[float, ...]
    delays: tuple[float, ...]
    slow: tuple[bool, ...]
    unknown: tuple[bool, ...]
    rooms: tuple[Room, ...] = ()
    transfers: tuple[float, ...] = ()
    """Empty if no link is narrow."""
    barrier: bool = True
    recent: tuple[tuple[float, ...], ...] = ()
    """Per link, the newest delays, of windows, oldest first, if they vary so much that their mean
    says little; else empty, as the whole is if none does."""

    def transfer(self, link: int) -> float:
        return self.transfers[link] if self.transfers else 0.0

    def varies(self, link: int) -> bool:
        return bool(self.recent and self.recent[link])

    def well(self) -> Situation:
        """The situation once all slow links have recovered."""
        links = range(len(self.slow))
        return replace(
            self,
            wire_times=tuple(
                max(0.0, self.wire_times[i] - self.delays[i] * self.slow[i]) for i in links
            ),
            delays=tuple(0.0 if self.slow[i] else self.delays[i] for i in links),
            slow=(False,) * len(self.slow),
            transfers=tuple(0.0 if self.slow[i] else self.transfer(i) for i in links),
            recent=(),
        )

    def strained(self) -> Situation:
        """The situation with all delays longer by :data:`STRAIN`."""
        return self.longer([STRAIN * delay for delay in self.delays])

    def longer(self, by: Iterable[float]) -> Situation:
        """The situation with longer delays."""
        wires = [wire + each for wire, each in zip(self.wire_times, by, strict=True)]
        return replace(self, wire_times=tuple(wires))


class Option(NamedTuple):
    """A plan, and its predicted iteration time in seconds."""

    plan: Plan
    seconds: float


class Forecast:
    """Predictions for one situation of one job."""

    def __init__(self, spec: JobSpec, situation: Situation) -> None:
        self._spec = spec
        self._situation = situation
        warmup = spec.schedule.warmup
        self._warmup = tuple(warmup) if warmup is not None else None
        self._varying = None
        if any(situation.recent) and spec.parallelism.stages_per_rank == 1:
            cells = spec.parallelism.stages * spec.schedule.microbatches
            self._varying = Varying.of(situation.recent, situation.delays, situation.stages, cells)

    def under(self, situation: Situation) -> Forecast:
        """Predictions for another situation of the same job."""
        return Forecast(self._spec, situation)

    def problem(self, routes: tuple[Route, ...]) -> Problem:
        """The planning problem with links on ``routes``."""
        situation = self._situation
        transfers = [situation.transfer(i) for i in range(len(routes))]
        problem = problem_for(
            self._spec.schedule.microbatches,
            situation.stages,
            [max(0.0, w - t) for w, t in zip(situation.wire_times, transfers, strict=True)],
            routes,
            transfers=transfers,
            queues=self._spec.transport.queues,
            half_duplex=self._spec.transport.direct_duplex == "half",
        )
        cut = self._spec.parallelism
        if cut.stages_per_rank > 1:
            # Planned for the makespan of the ops, with or without a barrier and a reduction.
            stages = [stage.model_copy(update={"reduction": None}) for stage in problem.stages]
            placed = {"ranks": cut.mesh.sizes["pp"], "placement": cut.stage_placement}
            return problem.model_copy(update=placed | {"stages": tuple(stages)})
        if not situation.barrier:
            problem = problem.model_copy(update={"objective": "period"})
        return problem if self._warmup is None else problem.with_warmup(self._warmup)

    def of(self, plan: Plan) -> Option:
        """Predicted time of a valid plan, under the plan's own limits."""
        problem = self.problem(plan.routes).under(plan)
        if plan.turns:
            schedule = InterleavedSchedule.of_plan(plan)
            return Option(plan, simulate_interleaved(schedule, problem).makespan)
        if self._varying is not None:
            return Option(plan, self._varying.seconds(plan, problem))
        if not self._situation.barrier:
            return Option(plan, predict_period(plan.schedule, problem, plan.dispatch))
        if plan.dispatch is Dispatch.STATIC:
            return Option(plan, predict(plan.schedule, problem))
        return Option(plan, simulate(plan.schedule, problem, plan.dispatch).makespan)

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

    def fresh(self, routes: tuple[Route, ...]) -> list[Option]:
        """New plans for this situation: a plain one, and shorter ones with fused backwards, offload
        or recomputation; and the same with online dispatch where the spec leaves it open. Raises
        :class:`InputError` if there is none."""
        made = self._planned(routes)
        if self._varying is not None:
            steady = replace(self._situation, recent=())
            for by in self._varying.longer():
                made += self.under(steady.longer(by))._planned(routes)
            made = [self.of(each) for each in dict.fromkeys(option.plan for option in made)]
        if not self._may_go_online(routes):
            return made
        online = [replace(option.plan, dispatch=Dispatch.ONLINE) for option in made]
        return [*made, *(self.of(plan) for plan in online if self.excess(plan) is None)]

    def _may_go_online(self, routes: tuple[Route, ...]) -> bool:
        """Only while links are slow and delegated. On a direct route a late send holds up whatever
        op comes next, and arrivals that say how slow the link is are seen later."""
        slow = [route for route, slow in zip(routes, self._situation.slow, strict=True) if slow]
        return (
            self._spec.schedule.dispatch == "auto"
            and self._spec.parallelism.mesh.lockstep == 1
            and self._spec.parallelism.stages_per_rank == 1
            and bool(slow)
            and all(route is Route.DELEGATED for route in slow)
        )

    def _planned(self, routes: tuple[Route, ...]) -> list[Option]:
        problem, dispatch = self.problem(routes), self._spec.schedule.dispatch_kind
        if problem.ranks is not None:
            return [self.of(plan_interleaved(problem, Policy.PIPEMORPH).to_plan(0, routes))]
        if not has_variants(problem):
            cells = problem.stage_count * problem.microbatches
            effort = EFFORT if cells <= THOROUGH_CELLS else 1
            made = plan(problem, Policy.PIPEMORPH, effort=effort)
            return [self.of(made.to_plan(0, routes, dispatch))]
        found = [(each.to_plan(0, routes, dispatch), each.makespan) for each in variants(problem)]
        if dispatch is Dispatch.STATIC and self._situation.barrier and self._varying is None:
            return [Option(*each) for each in found]
        return [self.of(each) for each, _ in found]

    def excess(self, plan: Plan) -> Excess | None:
        """The first stage on which the plan exceeds its limits; None if there is none."""
        rooms = self._situation.rooms
        return excess(plan, rooms) if rooms else None

    def route_choices(
        self, current: tuple[Route, ...], initial: tuple[Route, ...]
    ) -> list[tuple[Route, ...]]:
        """The distinct routes of all links that the spec allows.

        ``auto`` may delegate slow links only, since a healthy link is fastest direct. A link
        without recent samples keeps its route.
        """
        if self._spec.transport.route != "auto" or not self._spec.adaptation.allow_delegation:
            return [initial]
        situation = self._situation
        back = tuple(
            now if unknown else first
            for now, first, unknown in zip(current, initial, situation.unknown, strict=True)
        )
        moved = tuple(
            Route.DELEGATED if slow else route
            for route, slow in zip(back, situation.slow, strict=True)
        )
        return list(dict.fromkeys([current, back, moved]))


def runnable(plan: Plan) -> str | None:
    """None if ranks may run the plan, else the reason why not, in one line."""
    caps, device = plan.in_flight_limits, plan.device_limits
    try:
        if plan.turns:
            validate_interleaved(InterleavedSchedule.of_plan(plan), caps)
            return None
        validate(plan.schedule, caps, device)
        if plan.dispatch is Dispatch.ONLINE:
            validate_online(plan.warmup, caps, device_limits=device)
    except InputError as error:
        return str(error)
    return None
