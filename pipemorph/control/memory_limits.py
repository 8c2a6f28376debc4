"""How many microbatches a stage may hold, on its device and in host memory: hard limits.

``schedule.inFlightLimit`` counts microbatches and is known from the start;
``schedule.activationMemory`` and ``adaptation.hostMemory`` are bytes, which become counts once it
is known what one microbatch holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from pipemorph.api.spec import JobSpec
from pipemorph.planning import Dispatch, Plan
from pipemorph.planning.offload import host_limit, host_peak


class Room(NamedTuple):
    """What a stage has room for. ``device``: microbatches, None for any number; ``by_memory``:
    whether that is for ``activationMemory``; ``host``: microbatches in host memory, 0 where the
    stage must not offload, or it is not known what that takes."""

    device: int | None = None
    by_memory: bool = False
    host: int = 0

    def limits(self, microbatches: int) -> tuple[int | None, int | None]:
        """The most a plan may be given: ``(K, D)``, D None where offload is of no use."""
        if self.device is None or not self.host or self.device >= microbatches:
            return self.device, None
        return min(microbatches, self.device - 1 + self.host), self.device


class Excess(NamedTuple):
    """A plan can hold more on a stage than a field of the spec has room for, in microbatches."""

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


def room(spec: JobSpec, stage: int, activation_bytes: int | None, copy: float | None) -> Room:
    """Room of one stage, given what one microbatch holds and what a copy of it takes, if known.

    ``device`` is 0 where not even one microbatch fits into ``activationMemory``.
    """
    device = stated_limits(spec)[stage]
    memory, by_memory = spec.schedule.activation_memory, False
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
        host = adaptation.host_memory // activation_bytes
    return Room(device, by_memory, host)


def excess(plan: Plan, rooms: Sequence[Room]) -> Excess | None:
    """Where a plan can hold more than there is room for; None if nowhere."""
    schedule = plan.schedule
    n = schedule.microbatches
    peaks = schedule.in_flight_peak()
    for i, (space, ops, peak) in enumerate(zip(rooms, schedule.stages, peaks, strict=True)):
        cap, device = plan.in_flight_limits[i], plan.device_limits[i]
        if plan.dispatch is Dispatch.ONLINE:
            held, away = n if cap is None else min(cap, n), host_limit(cap, device, n)
        else:
            held, away = peak, host_peak(ops, device)
        held = held if device is None else min(held, device)
        if space.device is not None and held > space.device:
            return Excess(
                i, held, space.device, "activationMemory" if space.by_memory else "inFlightLimit"
            )
        if away > space.host:
            return Excess(i, away, space.host, "hostMemory")
    return None
