"""Op times and memory of the stages: recent measurements, or else the values of the spec."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeVar

from pipemorph.api.sections.schedule import StageTime
from pipemorph.api.spec import JobSpec
from pipemorph.control.memory_limits import Room, room
from pipemorph.planning.problem import StageTimes
from pipemorph.wire import StageState


def expected_times(spec: JobSpec) -> tuple[StageTimes, ...] | None:
    """Op times of the spec in seconds; None if it has none.

    ``schedule.stageTimes``, else those of the emulation, which are exact.
    """
    times = _stated(spec)
    if times is None:
        return None
    return tuple(
        _in_seconds(t.forward, t.backward_input, t.backward_weight, t.fused_backward, limit)
        for t, limit in zip(times, in_flight_limits(spec), strict=True)
    )


@lru_cache(4096)
def _in_seconds(
    forward: float,
    backward_input: float,
    backward_weight: float,
    fused_backward: float | None,
    limit: int | None,
) -> StageTimes:
    """Kept: most stages of a job are alike, and a host restores a thousand jobs at once."""
    return StageTimes(
        forward=forward / 1e3,
        backward_input=backward_input / 1e3,
        backward_weight=backward_weight / 1e3,
        fused_backward=None if fused_backward is None else fused_backward / 1e3,
        in_flight_limit=limit,
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

    def scale(self, factor: float) -> None:
        """The stage has so many times its activations. What is kept to compute them again is the
        input of the stage, and stays."""
        if self.activation_bytes is not None:
            self.activation_bytes = max(1, round(self.activation_bytes * factor))
        if self.offload_copy is not None:
            self.offload_copy *= factor

    def add(self, state: StageState) -> bool:
        """Process a measurement; return whether it changed anything."""
        changed = False
        if state.activation_bytes and state.activation_bytes > (self.activation_bytes or 0):
            self.activation_bytes, changed = state.activation_bytes, True
        if state.input_bytes is not None and state.input_bytes > (self.input_bytes or -1):
            self.input_bytes, changed = state.input_bytes, True
        if state.offload_copy is not None:
            changed |= self.offload_copy is None
            self.offload_copy = state.offload_copy
        return changed


class _Memory(NamedTuple):
    """The memory fields of a stage's times: limits, and the values they follow from."""

    in_flight_limit: int | None
    device_limit: int | None
    activation_bytes: int | None
    offload_copy: float | None
    recompute_limit: int | None


_Times = TypeVar("_Times", StageTimes, StageState)


def _scaled(times: _Times, factor: float) -> _Times:
    """With ops that take so many times as long."""
    ops = ("forward", "backward_input", "backward_weight", "fused_backward")
    found = {op: getattr(times, op) for op in ops}
    return times.model_copy(
        update={op: took * factor for op, took in found.items() if took is not None}
    )


class StageTable:
    """The stages of one attempt, as its agent last reported them.

    ``footprints``: from an earlier attempt; they remain valid.
    """

    def __init__(self, spec: JobSpec, footprints: Sequence[Footprint] = ()) -> None:
        self._spec = spec
        self._expected = expected_times(spec)
        self._states: list[StageState | None] = [None] * spec.parallelism.stages
        self._silent = len(self._states)
        """Stages that have not reported."""
        self._times: tuple[StageTimes, ...] | None = None
        self._reductions: dict[int, float] = {}
        self.footprints = list(footprints) or [Footprint() for _ in self._states]
        if spec.emulation is not None:
            for mine, stated in zip(self.footprints, _stated(spec) or (), strict=True):
                mine.activation_bytes = spec.emulation.activation_bytes
                mine.offload_copy = stated.offload_copy / 1e3
        self._rooms = self._measure_rooms()

    def take(self, state: StageState) -> None:
        """Process the state of a stage."""
        self._silent -= self._states[state.stage] is None
        self._states[state.stage] = state
        self._times = None
        if self.footprints[state.stage].add(state):
            self._rooms = self._measure_rooms()

    def scale(self, factors: Sequence[float]) -> None:
        """Each stage has so many times its work from now on, as far as is known before it is
        measured."""
        if self._expected is not None:
            pairs = zip(self._expected, factors, strict=True)
            self._expected = tuple(_scaled(stage, factor) for stage, factor in pairs)
        for stage, factor in enumerate(factors):
            self.footprints[stage].scale(factor)
            state = self._states[stage]
            if state is not None:
                self._states[stage] = _scaled(state, factor)
        self._rooms, self._times = self._measure_rooms(), None

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
        return not self._silent

    def times(self) -> tuple[StageTimes, ...] | None:
        """Seconds per op and stage, with the limits of :attr:`rooms`; None if neither measured nor
        in the spec."""
        if self._times is None:
            if self.measured:
                self._times = tuple(self._measured(s) for s in self._states if s is not None)
            elif self._expected is not None:
                self._times = tuple(
                    stage.model_copy(update=self._memory(i)._asdict())
                    for i, stage in enumerate(self._expected)
                )
        return self._times

    def _measured(self, state: StageState) -> StageTimes:
        known = self._memory(state.stage)
        # Without validation: states are validated, and this runs once per report and stage.
        return StageTimes.model_construct(
            forward=state.forward,
            backward_input=state.backward_input,
            backward_weight=state.backward_weight,
            fused_backward=state.fused_backward,
            in_flight_limit=known.in_flight_limit,
            device_limit=known.device_limit,
            activation_bytes=known.activation_bytes,
            offload_copy=known.offload_copy,
            recompute_limit=known.recompute_limit,
            recompute=False,
            reduction=self._reductions.get(state.stage),
        )

    def _memory(self, stage: int) -> _Memory:
        space, known = self._rooms[stage], self.footprints[stage]
        in_flight, device = space.limits(self._spec.schedule.microbatches)
        return _Memory(
            in_flight, device, known.activation_bytes, known.offload_copy, space.recompute_limit
        )

    @property
    def crowding(self) -> float:
        """Ranks that compute on a host's processors over the number of those, of the worst host."""
        return max((state.crowding for state in self._states if state is not None), default=0.0)

    def peak_memory(self) -> list[int | None]:
        """Newest peak memory per stage in bytes, of the highest column; None if not reported."""
        return [state.peak_memory if state is not None else None for state in self._states]
