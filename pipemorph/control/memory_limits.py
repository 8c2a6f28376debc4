"""Hard limits of the microbatches that a stage may hold: on its device, with their activations or
only with their inputs, and in host memory.

``schedule.inFlightLimit`` counts microbatches and is known from the start.
``schedule.activationMemory`` and ``adaptation.hostMemory`` are in bytes; they become counts once
the activation size of a microbatch is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from pipemorph.api.spec import JobSpec
from pipemorph.planning import Dispatch, Plan
from pipemorph.planning.ir import in_flight_peak
from pipemorph.planning.offload import host_limit, host_peak, recompute_room


class Room(NamedTuple):
    """Memory limits of a stage, in microbatches.

    ``device``: on the device, None for no limit; ``by_memory``: whether ``device`` follows from
    ``activationMemory``; ``host``: in host memory, 0 if the stage must not offload or the sizes are
    unknown; ``inputs``: on the device with their inputs, beside the activations of one, 0 if the
    stage must not recompute or the sizes are unknown.
    """

    device: int | None = None
    by_memory: bool = False
    host: int = 0
    inputs: int = 0

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
    """A stage of a plan can hold more microbatches than a field of the spec allows."""

    stage: int
    held: int
    room: int
    field: Literal["inFlightLimit", "activationMemory", "hostMemory"]


def stated_limits(spec: JobSpec) -> tuple[int | None, ...]:
    """``schedule.inFlightLimit`` per stage; None for no cap."""
    limit = spec.schedule.in_flight_limit
    if isinstance(limit, list):
        return tuple(limit)
    return (limit,) * spec.parallelism.stages


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
    # Memory is that of the rank, whose stages share it.
    several, by_memory = spec.parallelism.stages_per_rank, False
    memory = spec.schedule.activation_memory
    memory = memory // several if memory is not None else None
    if memory is not None and activation_bytes:
        fits = memory // activation_bytes
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
    return Room(device, by_memory, host, inputs)


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
    return None
