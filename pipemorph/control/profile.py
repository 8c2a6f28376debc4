"""Op times of the stages: what was measured lately, else what the spec says."""

from __future__ import annotations

from collections import deque
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


class _Windows:
    """Newest profiles of one stage of one replica: op times only, as a host has many jobs."""

    __slots__ = ("ops", "peak_memory")

    def __init__(self) -> None:
        self.ops: deque[tuple[float, float, float]] = deque(maxlen=WINDOWS)
        self.peak_memory = 0


class StageBook:
    """Medians of measured op times, per stage: the slowest replica's, since all wait for it."""

    def __init__(self, spec: JobSpec) -> None:
        self._limits = in_flight_limits(spec)
        self._expected = expected_times(spec)
        self._stages: list[dict[int, _Windows]] = [{} for _ in self._limits]
        self._times: tuple[StageTimes, ...] | None = None

    def observe(self, profile: StageProfile) -> None:
        replicas = self._stages[profile.stage]
        windows = replicas.get(profile.replica)
        if windows is None:
            windows = replicas[profile.replica] = _Windows()
        windows.ops.append((profile.forward, profile.backward_input, profile.backward_weight))
        windows.peak_memory = profile.peak_memory
        self._times = None

    @property
    def measured(self) -> bool:
        """Whether every stage has reported."""
        return all(self._stages)

    def times(self) -> tuple[StageTimes, ...] | None:
        """Seconds per op and stage; None while neither measured nor stated."""
        if not self.measured:
            return self._expected
        if self._times is None:
            self._times = tuple(self._stage(stage) for stage in range(len(self._limits)))
        return self._times

    def _stage(self, stage: int) -> StageTimes:
        replicas = [list(zip(*w.ops, strict=True)) for w in self._stages[stage].values()]
        forward, backward_input, backward_weight = (
            max(median(ops[kind]) for ops in replicas) for kind in range(3)
        )
        # Not checked again: every profile was, and this is done once per iteration and stage.
        return StageTimes.model_construct(
            forward=forward,
            backward_input=backward_input,
            backward_weight=backward_weight,
            in_flight_limit=self._limits[stage],
        )

    def longest_op(self, stage: int) -> float:
        """Longest op of a stage, seconds; infinite while nothing is known."""
        replicas = self._stages[stage].values()
        if replicas:
            newest = (w.ops[-1] for w in replicas)
            return max(max(forward, b + w) for forward, b, w in newest)
        if self._expected is not None:
            known = self._expected[stage]
            return max(known.forward, known.backward_input + known.backward_weight)
        return float("inf")

    def peak_memory(self) -> list[int | None]:
        """Newest peak per stage, bytes, the highest replica's; None where not reported."""
        return [
            max((w.peak_memory for w in replicas.values()), default=None)
            for replicas in self._stages
        ]
