"""Op times and memory of the stages: recent measurements, or else the values of the spec.

The microbatches that a stage may hold have hard limits: on its device, with their activations or
only with their inputs, and in host memory. ``schedule.inFlightLimit`` counts microbatches and is
known from the start. ``schedule.activationMemory`` and ``adaptation.hostMemory`` are in bytes; they
become counts once the activation size of a microbatch is known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple, TypeVar

from pipemorph.planning import Dispatch, Plan
from pipemorph.planning.ir import count_in_flight_peak, group_stages_by_rank
from pipemorph.planning.offload import (
    compute_device_room,
    compute_host_limit,
    count_host_peak,
    measure_rank_peaks,
)
from pipemorph.planning.problem import StageTimes
from pipemorph.protocol import StageState
from pipemorph.spec.job_spec import JobSpec
from pipemorph.spec.sections.schedule import StageTime

MOST_MICROBATCHES = 2**31 - 1
"""Most microbatches that a limit in bytes is converted to: more than any plan has."""


class StageRoom(NamedTuple):
    """Memory limits of a stage, in microbatches.

    ``device_microbatches``: on the device, None for no limit; ``limited_by_memory``: True if
    ``device_microbatches`` follows from ``activationMemory``; ``host_microbatches``: in host
    memory, 0 if the stage must not offload or the sizes are unknown; ``recomputed_microbatches``:
    on the device with only their inputs, in addition to the activations of one microbatch, 0 if the
    stage must not recompute or the sizes are unknown. ``rank_memory``: bytes that the stages of its
    rank share by the moment, ``microbatch_bytes`` of them for a microbatch of this stage; None:
    ``device_microbatches`` is the stage's own share.
    """

    device_microbatches: int | None = None
    limited_by_memory: bool = False
    host_microbatches: int = 0
    recomputed_microbatches: int = 0
    rank_memory: int | None = None
    microbatch_bytes: int = 0

    @property
    def recompute_limit(self) -> int | None:
        """Most microbatches in flight if all are recomputed; None if recomputation is useless."""
        return (
            self.recomputed_microbatches
            if self.device_microbatches and self.recomputed_microbatches > self.device_microbatches
            else None
        )

    def get_plan_limits(self, microbatches: int) -> tuple[int | None, int | None]:
        """Largest limits for a plan: ``(K, D)``; D is None if offload is useless."""
        if (
            self.device_microbatches is None
            or not self.host_microbatches
            or self.device_microbatches >= microbatches
        ):
            return self.device_microbatches, None
        return min(
            microbatches, self.device_microbatches - 1 + self.host_microbatches
        ), self.device_microbatches


class MemoryExcess(NamedTuple):
    """Excess of a plan: a stage holds more microbatches than ``field`` of the spec allows, or, if
    ``field`` is ``rank``, the stage's rank holds more bytes."""

    stage: int
    held: int
    room: int
    field: Literal["inFlightLimit", "activationMemory", "hostMemory", "rank"]


def get_stated_limits(spec: JobSpec) -> tuple[int | None, ...]:
    """``schedule.inFlightLimit`` per stage; None for no cap."""
    limit = spec.schedule.in_flight_limit
    if isinstance(limit, list):
        return tuple(min(each, MOST_MICROBATCHES) for each in limit)
    return (None if limit is None else min(limit, MOST_MICROBATCHES),) * spec.parallelism.stages


def compute_room(
    spec: JobSpec,
    stage: int,
    activation_bytes: int | None,
    copy: float | None,
    input_bytes: int | None = None,
) -> StageRoom:
    """Compute the limits of one stage. ``activation_bytes``: of one microbatch; ``copy``: seconds
    to copy them; ``input_bytes``: bytes that are needed to compute them again; None if unknown.

    ``device`` is 0 if not even one microbatch fits into ``activationMemory``.
    """
    device = get_stated_limits(spec)[stage]
    # The stages of a rank share its memory: evenly, if activations may leave the device.
    several, by_memory = spec.parallelism.stages_per_rank, False
    memory, moves = spec.schedule.activation_memory, may_leave_device(spec)
    if memory is not None and moves:
        memory //= several
    if memory is not None and activation_bytes:
        fits = min(memory // activation_bytes, MOST_MICROBATCHES)
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
        return StageRoom(device, by_memory, host, inputs)
    return StageRoom(device, by_memory, rank_memory=memory, microbatch_bytes=activation_bytes or 0)


def may_leave_device(spec: JobSpec) -> bool:
    """True if plans may move activations off the device or compute them again."""
    return spec.adaptation.allow_offload or spec.schedule.recompute == "auto"


def find_excess(plan: Plan, rooms: Sequence[StageRoom]) -> MemoryExcess | None:
    """Find the first stage on which a plan can exceed its limits; None if there is none."""
    n = plan.schedule.microbatches
    for i, (space, ops) in enumerate(zip(rooms, plan.schedule.stages, strict=True)):
        device = plan.device_limits[i]
        if space.device_microbatches is None and device is None:
            continue  # Nothing is limited, and nothing leaves the device.
        held, away = count_in_flight_peak(ops), count_host_peak(ops, device)
        if plan.dispatch is Dispatch.GUIDED:
            away = compute_host_limit(held, device, n)
        fits = space.device_microbatches
        if away and fits is not None and plan.recompute[i]:
            most = space.recompute_limit
            fits = compute_device_room(held, fits, most) if most is not None else 0
        held = held if device is None else min(held, device)
        if fits is not None and held > fits:
            field: Literal["inFlightLimit", "activationMemory"]
            field = "activationMemory" if space.limited_by_memory else "inFlightLimit"
            return MemoryExcess(i, held, max(0, fits), field)
        if away > space.host_microbatches and not plan.recompute[i]:
            return MemoryExcess(i, away, space.host_microbatches, "hostMemory")
    memory, sizes = rooms[0].rank_memory, [space.microbatch_bytes for space in rooms]
    for rank, mine in enumerate(plan.schedule.stages_by_rank if memory is not None else ()):
        held = int(measure_rank_peaks(plan.schedule, rank, plan.device_limits, sizes)[0])
        if plan.dispatch is Dispatch.GUIDED:
            held = sum(plan.schedule.count_in_flight_peaks()[i] * sizes[i] for i in mine)
        if memory is not None and held > memory:
            return MemoryExcess(mine[0], held, memory, "rank")
    return None


def get_expected_times(spec: JobSpec) -> tuple[StageTimes, ...] | None:
    """Op times of the spec in seconds; None if it has none.

    ``schedule.stageTimes``, else those of the emulation, which are exact.
    """
    times = _get_stated_times(spec)
    if times is None:
        return None
    return tuple(
        _convert_to_seconds(t.forward, t.backward_input, t.backward_weight, t.fused_backward, limit)
        for t, limit in zip(times, get_in_flight_limits(spec), strict=True)
    )


@lru_cache(4096)
def _convert_to_seconds(
    forward: float,
    backward_input: float,
    backward_weight: float,
    fused_backward: float | None,
    limit: int | None,
) -> StageTimes:
    """Convert milliseconds. Cached: stages are alike, and a host restores a thousand jobs at
    once."""
    return StageTimes(
        forward=forward / 1e3,
        backward_input=backward_input / 1e3,
        backward_weight=backward_weight / 1e3,
        fused_backward=None if fused_backward is None else fused_backward / 1e3,
        in_flight_limit=limit,
    )


def _get_stated_times(spec: JobSpec) -> list[StageTime] | None:
    times = spec.schedule.stage_times
    if times is None and spec.emulation is not None:
        times = spec.emulation.stage_times
    if times is None:
        return None
    return times * spec.parallelism.stages if len(times) == 1 else times


def get_in_flight_limits(spec: JobSpec) -> tuple[int | None, ...]:
    """Limit ``K_i`` of microbatches in flight, by stage, from the spec alone; None for none."""
    return tuple(space.device_microbatches for space in compute_stated_rooms(spec))


def compute_stated_rooms(spec: JobSpec) -> tuple[StageRoom, ...]:
    """Compute the limits of each stage from the spec alone. Without a measurement nothing is
    offloaded, and only emulated stages have a known activation size."""
    emulated = spec.emulation
    size = emulated.activation_bytes if emulated is not None else None
    return tuple(compute_room(spec, stage, size, None) for stage in range(spec.parallelism.stages))


class MicrobatchFootprint:
    """Activation and input bytes of one microbatch of a stage, and seconds to copy the activations.
    Bytes are the maximum of all replicas, so limits only get tighter; the time is the newest."""

    __slots__ = ("activation_bytes", "input_bytes", "offload_copy")

    def __init__(self) -> None:
        self.activation_bytes: int | None = None
        self.offload_copy: float | None = None
        self.input_bytes: int | None = None

    def to_snapshot(self) -> tuple[int | None, float | None, int | None]:
        """Values for a snapshot."""
        return self.activation_bytes, self.offload_copy, self.input_bytes

    def scale_by(self, factor: float) -> None:
        """Multiply the activations by ``factor``. The input of the stage, which is needed to
        compute them again, stays."""
        if self.activation_bytes is not None:
            self.activation_bytes = max(1, round(self.activation_bytes * factor))
        if self.offload_copy is not None:
            self.offload_copy *= factor

    def add_measurement(self, state: StageState) -> bool:
        """Add a measurement. Returns True if it changed anything."""
        changed = False
        if state.activation_bytes and state.activation_bytes > (self.activation_bytes or 0):
            self.activation_bytes, changed = state.activation_bytes, True
        if state.input_bytes is not None and state.input_bytes > (self.input_bytes or -1):
            self.input_bytes, changed = state.input_bytes, True
        if state.offload_copy is not None:
            changed |= self.offload_copy is None
            self.offload_copy = state.offload_copy
        return changed


class _MemoryFields(NamedTuple):
    """Memory fields of a stage's times: limits, and the values that they follow from."""

    in_flight_limit: int | None
    device_limit: int | None
    activation_bytes: int | None
    offload_copy: float | None
    recompute_limit: int | None


_Times = TypeVar("_Times", StageTimes, StageState)


def _scale_ops(times: _Times, factor: float) -> _Times:
    """Multiply op times by ``factor``."""
    ops = ("forward", "backward_input", "backward_weight", "fused_backward")
    found = {op: getattr(times, op) for op in ops}
    return times.model_copy(
        update={op: took * factor for op, took in found.items() if took is not None}
    )


class StageTable:
    """Stages of one attempt, as its agent last reported them.

    ``footprints``: from an earlier attempt; they remain valid.
    """

    def __init__(self, spec: JobSpec, footprints: Sequence[MicrobatchFootprint] = ()) -> None:
        self._spec = spec
        self._expected = get_expected_times(spec)
        self._states: list[StageState | None] = [None] * spec.parallelism.stages
        self._unreported_stages = len(self._states)
        """Number of stages that have not reported."""
        self._times: tuple[StageTimes, ...] | None = None
        self._reductions: dict[int, float] = {}
        self.footprints = list(footprints) or [MicrobatchFootprint() for _ in self._states]
        if spec.emulation is not None:
            for mine, stated in zip(self.footprints, _get_stated_times(spec) or (), strict=True):
                mine.activation_bytes = spec.emulation.activation_bytes
                mine.offload_copy = stated.offload_copy / 1e3
        self._rooms = self._compute_rooms()

    def update_state(self, state: StageState) -> None:
        """Process the state of a stage."""
        self._unreported_stages -= self._states[state.stage] is None
        self._states[state.stage] = state
        self._times = None
        if self.footprints[state.stage].add_measurement(state):
            self._rooms = self._compute_rooms()

    def scale_work(self, factors: Sequence[float]) -> None:
        """Multiply the work of each stage, as an estimate until it is measured."""
        if self._expected is not None:
            pairs = zip(self._expected, factors, strict=True)
            self._expected = tuple(_scale_ops(stage, factor) for stage, factor in pairs)
        for stage, factor in enumerate(factors):
            self.footprints[stage].scale_by(factor)
            state = self._states[stage]
            if state is not None:
                self._states[stage] = _scale_ops(state, factor)
        self._rooms, self._times = self._compute_rooms(), None

    def set_reductions(self, exposed: Mapping[int, float]) -> None:
        """Set the seconds of reduction after the last op of each stage."""
        self._reductions = dict(exposed)
        self._times = None

    def restore_footprints(
        self, saved: Sequence[tuple[int | None, float | None, int | None]]
    ) -> None:
        """Restore footprints after a restart, so that limits in bytes hold from the first plan."""
        for known, each in zip(self.footprints, saved, strict=True):
            known.activation_bytes, known.offload_copy, known.input_bytes = each
        self._rooms, self._times = self._compute_rooms(), None

    def _compute_rooms(self) -> tuple[StageRoom, ...]:
        """Compute the limits of all stages; 0 where not even one microbatch of each fits."""
        rooms = [
            compute_room(self._spec, stage, *known.to_snapshot())
            for stage, known in enumerate(self.footprints)
        ]
        memory = rooms[0].rank_memory
        if memory is None:
            return tuple(rooms)
        for mine in group_stages_by_rank(self._spec.parallelism.mesh.pp_indices):
            if sum(rooms[stage].microbatch_bytes for stage in mine) > memory:
                rooms[mine[0]] = rooms[mine[0]]._replace(device_microbatches=0)
        return tuple(rooms)

    @property
    def rooms(self) -> tuple[StageRoom, ...]:
        """Memory limits of each stage, as far as known. A new object after each change."""
        return self._rooms

    @property
    def all_measured(self) -> bool:
        """True if every stage has reported."""
        return not self._unreported_stages

    def get_stage_times(self) -> tuple[StageTimes, ...] | None:
        """Seconds per op and stage, with the limits of :attr:`rooms`; None if neither measured nor
        in the spec."""
        if self._times is None:
            if self.all_measured:
                self._times = tuple(
                    self._build_measured_times(s) for s in self._states if s is not None
                )
            elif self._expected is not None:
                self._times = tuple(
                    stage.model_copy(update=self._get_memory_fields(i)._asdict())
                    for i, stage in enumerate(self._expected)
                )
        return self._times

    def _build_measured_times(self, state: StageState) -> StageTimes:
        """Make op times from a state, with the limits of its stage."""
        known = self._get_memory_fields(state.stage)
        # Skip validation: states are validated, and this runs once per report and stage.
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

    def _get_memory_fields(self, stage: int) -> _MemoryFields:
        space, known = self._rooms[stage], self.footprints[stage]
        in_flight, device = space.get_plan_limits(self._spec.schedule.microbatches)
        return _MemoryFields(
            in_flight, device, known.activation_bytes, known.offload_copy, space.recompute_limit
        )

    @property
    def crowding(self) -> float:
        """Ratio of ranks that compute on a host to its processors, of the worst host."""
        return max((state.crowding for state in self._states if state is not None), default=0.0)

    def list_peak_memory(self) -> list[int | None]:
        """Newest peak memory by stage in bytes, of the highest column; None if not reported."""
        return [state.peak_memory if state is not None else None for state in self._states]
