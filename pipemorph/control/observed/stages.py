"""Op times and memory of the stages: recent measurements, or else the values of the spec.

Limits of the microbatches that a stage may hold are hard: on its device, with their activations or
only with their inputs, and in host memory. ``schedule.inFlightLimit`` counts microbatches and is
known from the start. ``schedule.activationMemory`` and ``adaptation.hostMemory`` are in bytes; they
become counts once the activation size of a microbatch is known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple, TypeVar

from pipemorph.api.sections.schedule import StageTime
from pipemorph.api.spec import JobSpec
from pipemorph.planning import Dispatch, Plan
from pipemorph.planning.ir import in_flight_peak, stages_of
from pipemorph.planning.offload import host_limit, host_peak, rank_peaks, recompute_room
from pipemorph.planning.problem import StageTimes
from pipemorph.wire import StageState

MOST = 2**31 - 1
"""Microbatches that a limit in bytes comes to at most: more than any plan has."""


class Room(NamedTuple):
    """Memory limits of a stage, in microbatches.

    ``device``: on the device, None for no limit; ``by_memory``: whether ``device`` follows from
    ``activationMemory``; ``host``: in host memory, 0 if the stage must not offload or the sizes are
    unknown; ``inputs``: on the device with their inputs, beside the activations of one, 0 if the
    stage must not recompute or the sizes are unknown. ``memory``: bytes that the stages of its rank
    share by the moment, ``size`` of them for a microbatch of this stage; None: ``device`` is its
    own share.
    """

    device: int | None = None
    by_memory: bool = False
    host: int = 0
    inputs: int = 0
    memory: int | None = None
    size: int = 0

    @property
    def recompute_limit(self) -> int | None:
        """Most microbatches in flight if all are recomputed; None if that is of no use."""
        return self.inputs if self.device and self.inputs > self.device else None

    def limits(self, microbatches: int) -> tuple[int | None, int | None]:
        """The largest limits for a plan: ``(K, D)``; D is None if offload has no use."""
        if self.device is None or not self.host or self.device >= microbatches:
            return self.device, None
        return min(microbatches, self.device - 1 + self.host), self.device


class Excess(NamedTuple):
    """A stage of a plan can hold more microbatches than a field of the spec allows; or a rank more
    bytes, if ``field`` is ``rank``: that of the stage."""

    stage: int
    held: int
    room: int
    field: Literal["inFlightLimit", "activationMemory", "hostMemory", "rank"]


def stated_limits(spec: JobSpec) -> tuple[int | None, ...]:
    """``schedule.inFlightLimit`` per stage; None for no cap."""
    limit = spec.schedule.in_flight_limit
    if isinstance(limit, list):
        return tuple(min(each, MOST) for each in limit)
    return (None if limit is None else min(limit, MOST),) * spec.parallelism.stages


def room(
    spec: JobSpec,
    stage: int,
    activation_bytes: int | None,
    copy: float | None,
    input_bytes: int | None = None,
) -> Room:
    """Limits of one stage. ``activation_bytes``: of one microbatch, ``copy``: seconds to copy them,
    ``input_bytes``: what has to be kept to compute them again; None if unknown.

    ``device`` is 0 if not even one microbatch fits into ``activationMemory``.
    """
    device = stated_limits(spec)[stage]
    # Memory is that of the rank, whose stages share it: evenly, if activations may leave.
    several, by_memory = spec.parallelism.stages_per_rank, False
    memory, moves = spec.schedule.activation_memory, leave_the_device(spec)
    if memory is not None and moves:
        memory //= several
    if memory is not None and activation_bytes:
        fits = min(memory // activation_bytes, MOST)
        if device is None or fits < device:
            device, by_memory = fits, True
    host = 0
    adaptation = spec.adaptation
    if (
        adaptation.allow_offload
        and adaptation.host_memory
        and activation_bytes
        and copy is not None
    ):
        host = adaptation.host_memory // several // activation_bytes
    inputs = 0
    if (
        spec.schedule.recompute == "auto"
        and device
        and activation_bytes
        and input_bytes is not None
    ):
        held = memory if by_memory and memory is not None else device * activation_bytes
        inputs = (held - activation_bytes) // max(1, input_bytes)
    if several == 1 or moves:
        return Room(device, by_memory, host, inputs)
    return Room(device, by_memory, memory=memory, size=activation_bytes or 0)


def leave_the_device(spec: JobSpec) -> bool:
    """Whether plans may move activations off the device or compute them again."""
    return spec.adaptation.allow_offload or spec.schedule.recompute == "auto"


def excess(plan: Plan, rooms: Sequence[Room]) -> Excess | None:
    """The first stage on which a plan can exceed its limits; None if there is none."""
    n = plan.schedule.microbatches
    for i, (space, ops) in enumerate(zip(rooms, plan.schedule.stages, strict=True)):
        device = plan.device_limits[i]
        if space.device is None and device is None:
            continue  # Nothing is limited, and nothing leaves the device.
        held, away = in_flight_peak(ops), host_peak(ops, device)
        if plan.dispatch is Dispatch.GUIDED:
            away = host_limit(held, device, n)
        fits = space.device
        if away and fits is not None and plan.recompute[i]:
            most = space.recompute_limit
            fits = recompute_room(held, fits, most) if most is not None else 0
        held = held if device is None else min(held, device)
        if fits is not None and held > fits:
            field: Literal["inFlightLimit", "activationMemory"]
            field = "activationMemory" if space.by_memory else "inFlightLimit"
            return Excess(i, held, max(0, fits), field)
        if away > space.host and not plan.recompute[i]:
            return Excess(i, away, space.host, "hostMemory")
    memory, sizes = rooms[0].memory, [space.size for space in rooms]
    for rank, mine in enumerate(plan.schedule.stages_of if memory is not None else ()):
        held = int(rank_peaks(plan.schedule, rank, plan.device_limits, sizes)[0])
        if plan.dispatch is Dispatch.GUIDED:
            held = sum(plan.schedule.in_flight_peak()[i] * sizes[i] for i in mine)
        if memory is not None and held > memory:
            return Excess(mine[0], held, memory, "rank")
    return None


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
    """``K_i`` per stage from the spec alone; None for no cap."""
    return tuple(space.device for space in stated_rooms(spec))


def stated_rooms(spec: JobSpec) -> tuple[Room, ...]:
    """The room of each stage from the spec alone. Nothing is offloaded before there is
    a measurement, and only emulated stages have a known activation size."""
    emulated = spec.emulation
    size = emulated.activation_bytes if emulated is not None else None
    return tuple(room(spec, stage, size, None) for stage in range(spec.parallelism.stages))


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
        rooms = [
            room(self._spec, stage, *known.saved()) for stage, known in enumerate(self.footprints)
        ]
        memory = rooms[0].memory
        if memory is None:
            return tuple(rooms)
        for mine in stages_of(self._spec.parallelism.mesh.placed):
            if sum(rooms[stage].size for stage in mine) > memory:
                rooms[mine[0]] = rooms[mine[0]]._replace(device=0)
        return tuple(rooms)

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
