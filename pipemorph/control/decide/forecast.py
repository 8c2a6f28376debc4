"""What could be run, and how long an iteration would take: the planner asked twice.

Both the present plan and every alternative are predicted on the *same* measured op times,
delays and routes, so that what the model leaves out falls out of the comparison.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from pipemorph.api.spec import JobSpec
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
    problem_for,
    simulate,
    validate,
    validate_online,
)
from pipemorph.planning.search.variants import has_variants, variants

SAME = 0.01
"""Predictions closer than this are taken for equal: the model is no better than that."""


@dataclass(frozen=True)
class Situation:
    """What a decision rests on. Seconds; one entry per stage or link.

    ``wire_times`` are one-way times of a message as it is now; ``slow`` says which of them
    are longer than normal, ``delays`` by how much. ``rooms`` is what the stages may hold, and the
    limits of ``stages`` are the most a plan may be given of it; empty where nothing is limited.
    """

    stages: tuple[StageTimes, ...]
    wire_times: tuple[float, ...]
    delays: tuple[float, ...]
    slow: tuple[bool, ...]
    unknown: tuple[bool, ...]
    rooms: tuple[Room, ...] = ()


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

    def problem(self, routes: tuple[Route, ...]) -> Problem:
        """The planning problem with bytes travelling over ``routes``."""
        problem = problem_for(
            self._spec.schedule.microbatches,
            self._situation.stages,
            self._situation.wire_times,
            routes,
            queues=self._spec.transport.queues,
            half_duplex=self._spec.transport.direct_duplex == "half",
        )
        return problem if self._warmup is None else problem.with_warmup(self._warmup)

    def of(self, plan: Plan) -> Option:
        """Predicted time of a (valid) plan under its own limits."""
        problem = self.problem(plan.routes).under(plan)
        if plan.dispatch is Dispatch.STATIC:
            return Option(plan, predict(plan.schedule, problem))
        return Option(plan, simulate(plan.schedule, problem, plan.dispatch).makespan)

    def fresh(self, routes: tuple[Route, ...]) -> list[Option]:
        """Plans made for this situation: split and on the device, and where they are shorter
        with fused backwards and with offload. Raises :class:`InputError` if there is none."""
        problem, dispatch = self.problem(routes), self._spec.schedule.dispatch_kind
        if not has_variants(problem):
            return [self.of(plan(problem, Policy.PIPEMORPH).to_plan(0, routes, dispatch))]
        made = [(found.to_plan(0, routes, dispatch), found.makespan) for found in variants(problem)]
        if dispatch is Dispatch.STATIC:
            return [Option(*each) for each in made]
        return [self.of(each) for each, _ in made]

    def excess(self, plan: Plan) -> Excess | None:
        """Where the plan holds more than there is room for; None if nowhere."""
        rooms = self._situation.rooms
        return excess(plan, rooms) if rooms else None

    def route_choices(
        self, current: tuple[Route, ...], initial: tuple[Route, ...]
    ) -> list[tuple[Route, ...]]:
        """Ways for the bytes to travel that the spec allows, each once.

        ``auto`` may move slow links, and only those: a healthy link is quickest direct. A
        link nobody has heard of lately stays where it is.
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
    """None if ranks may run the plan, else the one-line reason they must not."""
    caps, device = plan.in_flight_limits, plan.device_limits
    try:
        validate(plan.schedule, caps, device)
        if plan.dispatch is Dispatch.ONLINE:
            validate_online(plan.warmup, caps, device_limits=device)
    except InputError as error:
        return str(error)
    return None


def best(options: Iterable[Option]) -> Option:
    """The quickest; among equals the one with the fewest delegated links, then with the fewest
    stages that offload, then the first."""
    ranked = list(options)
    quickest = min(option.seconds for option in ranked)
    equal = [option for option in ranked if option.seconds <= quickest * (1 + SAME)]
    return min(equal, key=lambda option: (len(option.plan.delegated), len(option.plan.offloading)))
