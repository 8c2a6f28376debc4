"""Op times and memory of the stages: recent measurements, or else the values of the spec."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

from pipemorph.api.spec import JobSpec, StageTime
from pipemorph.control.memory_limits import Room, room
from pipemorph.planning.problem import StageTimes
from pipemorph.wire import StageProfile

WINDOWS = 9
"""Profiles in a median: a few iterations, so that one pause has no effect. A profile has the mean
of each op in an iteration, since an iteration takes their sum."""

INFLATED = 1.3
"""Ops that take so many times their shortest time of late are inflated."""
FUSING_PAYS = 0.02
"""Least saving of a fused backward, as a fraction of its parts, for the planner to use it. Less is
within the error of measured op times."""


def expected_times(spec: JobSpec) -> tuple[StageTimes, ...] | None:
    """Op times of the spec in seconds; None if it has none.

    ``schedule.stageTimes``, else those of the emulation, which are exact.
    """
    times = _stated(spec)
    if times is None:
        return None
    return tuple(
        StageTimes(
            forward=t.forward / 1e3,
            backward_input=t.backward_input / 1e3,
            backward_weight=t.backward_weight / 1e3,
            fused_backward=None if t.fused_backward is None else t.fused_backward / 1e3,
            in_flight_limit=limit,
        )
        for t, limit in zip(times, in_flight_limits(spec), strict=True)
    )


def _stated(spec: JobSpec) -> list[StageTime] | None:
    times = spec.schedule.stage_times
    if times is None and spec.emulation is not None:
        times = spec.emulation.stage_times
    if times is None:
        return None
    return times * spec.parallelism.stages if len(times) == 1 else times


def in_flight_limits(spec: JobSpec) -> tuple[int | None, ...]:
    """``K_i`` per stage from the spec alone; None for no cap. Nothing is offloaded before there is
    a measurement, and only emulated stages have a known activation size."""
    emulated = spec.emulation
    size = emulated.activation_bytes if emulated is not None else None
    return tuple(room(spec, stage, size, None).device for stage in range(spec.parallelism.stages))


class _Windows:
    """Newest profiles of one stage of one replica. Only op times, since a host has many jobs.

    ``fused``: times of fused backwards, which are as noisy as their parts.
    """

    __slots__ = ("crowding", "fused", "ops", "peak_memory")

    def __init__(self) -> None:
        self.ops: deque[tuple[float, float, float]] = deque(maxlen=WINDOWS)
        self.fused: deque[float] = deque(maxlen=WINDOWS)
        self.peak_memory = 0
        self.crowding = 0.0

    def add(self, profile: StageProfile, expected: StageTimes | None) -> None:
        """Add a profile. If its backwards were fused, the last times of B and W are kept."""
        backward, weight = profile.backward_input, profile.backward_weight
        if profile.fused_backward is not None:
            self.fused.append(profile.fused_backward)
        if profile.split != "fused" and not weight:
            if profile.fused_backward is None:
                self.fused.append(backward)
            if self.ops:
                _, backward, weight = self.ops[-1]
            elif expected is not None:
                backward, weight = expected.backward_input, expected.backward_weight
        self.ops.append((profile.forward, backward, weight))
        self.peak_memory = profile.peak_memory
        self.crowding = profile.crowding or 0.0

    @property
    def inflated(self) -> bool:
        """Whether the newest ops took longer than they can: something else used the processor."""
        times = [sum(ops) for ops in self.ops]
        return times[-1] > INFLATED * min(times)


class Footprint:
    """Activation and input bytes of one microbatch of a stage, and seconds to copy the activations.
    The bytes are the maximum measured on any replica, so limits based on them only get tighter; the
    time is the newest."""

    __slots__ = ("activation_bytes", "input_bytes", "offload_copy")

    def __init__(self) -> None:
        self.activation_bytes: int | None = None
        self.offload_copy: float | None = None
        self.input_bytes: int | None = None

    def saved(self) -> tuple[int | None, float | None, int | None]:
        """For a snapshot."""
        return self.activation_bytes, self.offload_copy, self.input_bytes

    def add(self, profile: StageProfile) -> bool:
        """Process a measurement; return whether it changed anything."""
        changed = False
        if profile.activation_bytes and profile.activation_bytes > (self.activation_bytes or 0):
            self.activation_bytes, changed = profile.activation_bytes, True
        if profile.input_bytes is not None and profile.input_bytes > (self.input_bytes or -1):
            self.input_bytes, changed = profile.input_bytes, True
        if profile.offload_copy is not None:
            changed |= self.offload_copy is None
            self.offload_copy = profile.offload_copy
        return changed


class _Memory(NamedTuple):
    """The memory fields of a stage's times: limits, and the values they follow from."""

    in_flight_limit: int | None
    device_limit: int | None
    activation_bytes: int | None
    offload_copy: float | None
    recompute_limit: int | None


class StageBook:
    """Medians of measured op times per stage, of the slowest replica, since all wait for it.

    ``footprints``: from an earlier attempt; they remain valid.
    """

    def __init__(self, spec: JobSpec, footprints: Sequence[Footprint] = ()) -> None:
        self._spec = spec
        self._expected = expected_times(spec)
        self._stages: list[dict[int, _Windows]] = [{} for _ in range(spec.parallelism.stages)]
        self._times: tuple[StageTimes, ...] | None = None
        self._reductions: dict[int, float] = {}
        self.footprints = list(footprints) or [Footprint() for _ in self._stages]
        if spec.emulation is not None:
            for mine, stated in zip(self.footprints, _stated(spec) or (), strict=True):
                mine.activation_bytes = spec.emulation.activation_bytes
                mine.input_bytes = spec.emulation.input_bytes
                mine.offload_copy = stated.offload_copy / 1e3
        self._rooms = self._measure_rooms()

    def observe(self, profile: StageProfile) -> None:
        replicas = self._stages[profile.stage]
        windows = replicas.get(profile.replica)
        if windows is None:
            windows = replicas[profile.replica] = _Windows()
        windows.add(profile, self._expected[profile.stage] if self._expected else None)
        self._times = None
        if self.footprints[profile.stage].add(profile):
            self._rooms = self._measure_rooms()

    def reduce(self, exposed: Mapping[int, float]) -> None:
        """Note what follows the last op of each stage, seconds."""
        self._reductions = dict(exposed)
        self._times = None

    def restore_footprints(
        self, saved: Sequence[tuple[int | None, float | None, int | None]]
    ) -> None:
        """Footprints known before a restart, so that limits in bytes hold from the first plan."""
        for known, each in zip(self.footprints, saved, strict=True):
            known.activation_bytes, known.offload_copy, known.input_bytes = each
        self._rooms, self._times = self._measure_rooms(), None

    def _measure_rooms(self) -> tuple[Room, ...]:
        return tuple(
            room(self._spec, stage, *known.saved()) for stage, known in enumerate(self.footprints)
        )

    @property
    def rooms(self) -> tuple[Room, ...]:
        """Memory limits of each stage, as far as known. A new object after each change."""
        return self._rooms

    @property
    def measured(self) -> bool:
        """Whether every stage has reported."""
        return all(self._stages)

    def times(self) -> tuple[StageTimes, ...] | None:
        """Seconds per op and stage, with the limits of :attr:`rooms`; None if neither measured nor
        in the spec."""
        if self._times is None:
            if self.measured:
                self._times = tuple(self._stage(stage) for stage in range(len(self._stages)))
            elif self._expected is not None:
                self._times = tuple(
                    stage.model_copy(update=self._memory(i)._asdict())
                    for i, stage in enumerate(self._expected)
                )
        return self._times

    def _stage(self, stage: int) -> StageTimes:
        windows = self._stages[stage].values()
        replicas = [list(zip(*w.ops, strict=True)) for w in windows]
        forward, backward_input, backward_weight = (
            max(median(ops[kind]) for ops in replicas) for kind in range(3)
        )
        fused = [median(w.fused) for w in windows if w.fused]
        whole = max(fused) if len(fused) == len(replicas) else None
        if whole is not None and whole > (1 - FUSING_PAYS) * (backward_input + backward_weight):
            whole = None
        known = self._memory(stage)
        # Without validation: profiles are validated, and this runs once per iteration and stage.
        return StageTimes.model_construct(
            forward=forward,
            backward_input=backward_input,
            backward_weight=backward_weight,
            fused_backward=whole,
            in_flight_limit=known.in_flight_limit,
            device_limit=known.device_limit,
            activation_bytes=known.activation_bytes,
            offload_copy=known.offload_copy,
            recompute_limit=known.recompute_limit,
            recompute=False,
            reduction=self._reductions.get(stage),
        )

    def _memory(self, stage: int) -> _Memory:
        space, known = self._rooms[stage], self.footprints[stage]
        in_flight, device = space.limits(self._spec.schedule.microbatches)
        return _Memory(
            in_flight, device, known.activation_bytes, known.offload_copy, space.recompute_limit
        )

    def inflated(self, stage: int, replica: int) -> bool:
        """Whether the newest ops of a rank show that something else used its processor."""
        windows = self._stages[stage].get(replica)
        return windows is not None and windows.inflated

    @property
    def crowding(self) -> float:
        """Ranks that compute on a host's processors over the number of those, of the worst host."""
        return max((w.crowding for each in self._stages for w in each.values()), default=0.0)

    def longest_op(self, stage: int) -> float:
        """Longest op of a stage, including a copy, in seconds; infinite if unknown."""
        copy = self.footprints[stage].offload_copy if self._rooms[stage].host else None
        replicas = self._stages[stage].values()
        if replicas:
            newest = (w.ops[-1] for w in replicas)
            longest = max(max(forward, b + w) for forward, b, w in newest)
            return longest + (copy or 0.0)
        if self._expected is not None:
            known = self._expected[stage]
            return max(known.forward, known.backward_input + known.backward_weight) + (copy or 0.0)
        return float("inf")

    def peak_memory(self) -> list[int | None]:
        """Newest peak memory per stage in bytes, of the highest replica; None if not reported."""
        return [
            max((w.peak_memory for w in replicas.values()), default=None)
            for replicas in self._stages
        ]
