"""What could be run, and how long an iteration would take: the planner asked twice.

Both the present plan and every alternative are predicted on the *same* measured op times,
delays and paths, so that what the model leaves out falls out of the comparison.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pipemorph.api.spec import JobSpec
from pipemorph.control.memory_limits import Limits, Room, excess
from pipemorph.errors import InputError
from pipemorph.planning import (
    Dispatch,
    OpKind,
    Path,
    Policy,
    Problem,
    Schedule,
    StageTimes,
    plan,
    predict,
    problem_for,
    simulate,
    validate,
    validate_online,
)
from pipemorph.planning.offload import offloaded
from pipemorph.planning.search.variants import Variant, has_variants, variants

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


@dataclass(frozen=True)
class Option:
    """A schedule over paths, what it may hold, and its predicted iteration time in seconds."""

    schedule: Schedule
    paths: tuple[Path, ...]
    limits: Limits
    seconds: float

    @property
    def delegated(self) -> int:
        return sum(path is Path.DELEGATED for path in self.paths)

    @property
    def fused(self) -> tuple[int, ...]:
        """Stages with fused backwards."""
        return tuple(
            i
            for i, ops in enumerate(self.schedule.stages)
            if any(op.kind is OpKind.BW for op in ops)
        )

    def offloaded(self) -> list[int]:
        """Microbatches per iteration that go to host memory, per stage."""
        return offloaded(self.schedule, self.limits.device)


class Forecast:
    """Predictions for one situation of one job."""

    def __init__(self, spec: JobSpec, situation: Situation) -> None:
        self._spec = spec
        self._situation = situation
        self._dispatch = spec.schedule.dispatch_kind
        warmup = spec.schedule.warmup
        self._warmup = tuple(warmup) if warmup is not None else None

    def problem(self, paths: tuple[Path, ...]) -> Problem:
        """The planning problem with bytes travelling over ``paths``."""
        problem = problem_for(
            self._spec.schedule.microbatches,
            self._situation.stages,
            self._situation.wire_times,
            paths,
            queues=self._spec.transport.queues,
            half_duplex=self._spec.transport.direct_duplex == "half",
        )
        return problem if self._warmup is None else problem.with_warmup(self._warmup)

    def of(self, schedule: Schedule, paths: tuple[Path, ...], limits: Limits) -> Option:
        """Predicted time of a (valid) schedule under its own limits."""
        problem = self.problem(paths)
        problem = problem.model_copy(update={"stages": limits.on(problem.stages)})
        if self._dispatch is Dispatch.STATIC:
            seconds = predict(schedule, problem)
        else:
            seconds = simulate(schedule, problem, self._dispatch).makespan
        return Option(schedule, paths, limits, seconds)

    def fresh(self, paths: tuple[Path, ...]) -> list[Option]:
        """Schedules made for this situation: split and on the device, and where they are shorter
        with fused backwards and with offload. Raises :class:`InputError` if there is none."""
        problem = self.problem(paths)
        if has_variants(problem):
            return [self._of_variant(found, paths) for found in variants(problem)]
        found = plan(problem, Policy.PIPEMORPH)
        return [self.of(found.schedule, paths, Limits.of(found.problem))]

    def _of_variant(self, found: Variant, paths: tuple[Path, ...]) -> Option:
        limits = Limits.of(found.problem)
        if self._dispatch is Dispatch.STATIC:
            return Option(found.schedule, paths, limits, found.makespan)
        return self.of(found.schedule, paths, limits)

    def excess(self, schedule: Schedule, limits: Limits) -> str | None:
        """Where the schedule holds more than there is room for; None if nowhere."""
        if not self._situation.rooms:
            return None
        return excess(schedule, limits, self._situation.rooms, self._dispatch)

    def path_choices(
        self, present: tuple[Path, ...], initial: tuple[Path, ...]
    ) -> list[tuple[Path, ...]]:
        """Ways for the bytes to travel that the spec allows, each once.

        ``auto`` may move slow links, and only those: a healthy link is quickest direct. A
        link nobody has heard of lately stays where it is.
        """
        if self._spec.transport.path != "auto" or not self._spec.adaptation.allow_delegation:
            return [initial]
        situation = self._situation
        back = tuple(
            now if unknown else first
            for now, first, unknown in zip(present, initial, situation.unknown, strict=True)
        )
        moved = tuple(
            Path.DELEGATED if slow else path
            for path, slow in zip(back, situation.slow, strict=True)
        )
        return list(dict.fromkeys([present, back, moved]))


def runnable(schedule: Schedule, limits: Limits, dispatch: Dispatch) -> str | None:
    """None if ranks may run the schedule, else the one-line reason they must not."""
    try:
        validate(schedule, limits.in_flight, limits.device)
        if dispatch is Dispatch.ONLINE:
            validate_online(schedule.warmup(), limits.in_flight, device_limits=limits.device)
    except InputError as error:
        return str(error)
    return None


def best(options: Iterable[Option]) -> Option:
    """The quickest; among equals the one with the fewest delegated links, then with the fewest
    stages that offload, then the first."""
    ranked = list(options)
    quickest = min(option.seconds for option in ranked)
    equal = [option for option in ranked if option.seconds <= quickest * (1 + SAME)]
    return min(equal, key=lambda option: (option.delegated, len(option.limits.offloading)))
