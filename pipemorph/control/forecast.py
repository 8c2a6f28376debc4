"""What could be run, and how long an iteration would take: the planner asked twice.

Both the present plan and every alternative are predicted on the *same* measured op times,
delays and paths, so that what the model leaves out falls out of the comparison.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pipemorph.errors import InputError
from pipemorph.planning import (
    Dispatch,
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
from pipemorph.spec import JobSpec

SAME = 0.01
"""Predictions closer than this are taken for equal: the model is no better than that."""


@dataclass(frozen=True)
class Situation:
    """What a decision rests on. Seconds; one entry per stage or link.

    ``wire_times`` are one-way times of a message as it is now; ``slow`` says which of them
    are longer than normal, ``delays`` by how much.
    """

    stages: tuple[StageTimes, ...]
    wire_times: tuple[float, ...]
    delays: tuple[float, ...]
    slow: tuple[bool, ...]
    unknown: tuple[bool, ...]


@dataclass(frozen=True)
class Option:
    """A schedule over paths, and its predicted iteration time in seconds."""

    schedule: Schedule
    paths: tuple[Path, ...]
    seconds: float

    @property
    def delegated(self) -> int:
        return sum(path is Path.DELEGATED for path in self.paths)


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

    def of(self, schedule: Schedule, paths: tuple[Path, ...]) -> Option:
        """Predicted time of a (valid) schedule."""
        problem = self.problem(paths)
        if self._dispatch is Dispatch.STATIC:
            seconds = predict(schedule, problem)
        else:
            seconds = simulate(schedule, problem, self._dispatch).makespan
        return Option(schedule, paths, seconds)

    def fresh(self, paths: tuple[Path, ...]) -> Option:
        """A schedule made for this situation. Raises :class:`InputError` if there is none."""
        return self.of(plan(self.problem(paths), Policy.PIPEMORPH).schedule, paths)

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


def runnable(schedule: Schedule, limits: Iterable[int | None], dispatch: Dispatch) -> str | None:
    """None if ranks may run the schedule, else the one-line reason they must not."""
    caps = tuple(limits)
    try:
        validate(schedule, caps)
        if dispatch is Dispatch.ONLINE:
            validate_online(schedule.warmup(), caps)
    except InputError as error:
        return str(error)
    return None


def best(options: Iterable[Option]) -> Option:
    """The quickest; among equals the one with the fewest delegated links, then the first."""
    ranked = list(options)
    quickest = min(option.seconds for option in ranked)
    equal = [option for option in ranked if option.seconds <= quickest * (1 + SAME)]
    return min(equal, key=lambda option: option.delegated)


def without_caps(stages: Iterable[StageTimes]) -> Iterator[tuple[float, float, float]]:
    """Forward, backward-input and backward-weight times alone, to compare."""
    for stage in stages:
        yield stage.forward, stage.backward_input, stage.backward_weight
