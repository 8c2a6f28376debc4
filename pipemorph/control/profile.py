"""Op times of the stages: what was measured lately, else what the spec says."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

from pipemorph.planning.problem import StageTimes
from pipemorph.spec import JobSpec
from pipemorph.wire import StageProfile

WINDOWS = 9
"""Profiles a median is taken over: a few iterations, so that one pause does not show."""


def expected_times(spec: JobSpec) -> tuple[StageTimes, ...] | None:
    """Op times the spec states, seconds; None if it states none.

    ``schedule.stageTimes``, else those of the emulation, which are exact.
    """
    times = spec.schedule.stage_times
    if times is None and spec.emulation is not None:
        times = spec.emulation.stage_times
    if times is None:
        return None
    limits = in_flight_limits(spec)
    per_stage = times * len(limits) if len(times) == 1 else times
    return tuple(
        StageTimes(
            forward=t.forward / 1e3,
            backward_input=t.backward_input / 1e3,
            backward_weight=t.backward_weight / 1e3,
            in_flight_limit=limit,
        )
        for t, limit in zip(per_stage, limits, strict=True)
    )


def in_flight_limits(spec: JobSpec) -> tuple[int | None, ...]:
    """``K_i`` per stage; None for no cap."""
    limit = spec.schedule.in_flight_limit
    if isinstance(limit, list):
        return tuple(limit)
    return (limit,) * spec.parallelism.stages


class StageBook:
    """Medians of measured op times, per stage: the slowest replica's, since all wait for it."""

    def __init__(self, spec: JobSpec) -> None:
        self._limits = in_flight_limits(spec)
        self._expected = expected_times(spec)
        self._profiles: dict[tuple[int, int], deque[StageProfile]] = {}

    def observe(self, profile: StageProfile) -> None:
        key = (profile.stage, profile.replica)
        self._profiles.setdefault(key, deque(maxlen=WINDOWS)).append(profile)

    @property
    def measured(self) -> bool:
        """Whether every stage has reported."""
        return {stage for stage, _ in self._profiles} == set(range(len(self._limits)))

    def times(self) -> tuple[StageTimes, ...] | None:
        """Seconds per op and stage; None while neither measured nor stated."""
        if not self.measured:
            return self._expected
        return tuple(self._stage(stage) for stage in range(len(self._limits)))

    def _stage(self, stage: int) -> StageTimes:
        windows = [w for (s, _), w in self._profiles.items() if s == stage]
        return StageTimes(
            forward=_slowest([[p.forward for p in w] for w in windows]),
            backward_input=_slowest([[p.backward_input for p in w] for w in windows]),
            backward_weight=_slowest([[p.backward_weight for p in w] for w in windows]),
            in_flight_limit=self._limits[stage],
        )

    def longest_op(self, stage: int) -> float:
        """Longest op of a stage, seconds; infinite while nothing is known."""
        windows = [w[-1] for (s, _), w in self._profiles.items() if s == stage]
        if windows:
            return max(max(p.forward, p.backward_input + p.backward_weight) for p in windows)
        if self._expected is not None:
            known = self._expected[stage]
            return max(known.forward, known.backward_input + known.backward_weight)
        return float("inf")

    def peak_memory(self) -> list[int | None]:
        """Newest peak per stage, bytes, the highest replica's; None where not reported."""
        peaks: list[int | None] = [None] * len(self._limits)
        for (stage, _), windows in self._profiles.items():
            peaks[stage] = max(peaks[stage] or 0, windows[-1].peak_memory)
        return peaks


def _slowest(replicas: Sequence[Sequence[float]]) -> float:
    return max(median(values) for values in replicas)
