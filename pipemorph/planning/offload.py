"""Activations away from the device: rules by which microbatches of a stage leave and return.

A stage with a *device limit* D holds the activations of at most D microbatches on its device; its
in-flight cap may be higher. The stage either *offloads*: the activations move to host memory and
back; or it *recomputes*: it drops them, retains the inputs, and runs the forward again. The ops
that a stage has run determine which microbatches leave. The same rules thus hold for a fixed order
and for guided dispatch, in the validator, simulator and executor:

- A microbatch is *resident* on the device from the start of its F until its activations leave it,
  and again from the start of its B (or BW) until the end of its W (or BW).
- If D or more microbatches, including ``m``, are resident when the F of ``m`` ends, ``m`` leaves:
  it is the newest and needed last, since backwards run in microbatch order.
- The B of a microbatch that is away first copies it back, or runs its forward again.

After every F there is thus room for one more microbatch, and whenever D forbids an op a W can run:
of D or more resident microbatches at least one has run its B. D alone never causes a deadlock.

Each copy takes ``StageTimes.offload_copy`` and is part of its op: the F ends, and sends, after the
copy to the host; the B begins with the copy back. A device that copies while it computes is faster
than this model. Dropping activations takes no time; the B begins with another forward.

The inputs of dropped activations take device memory. A stage states it by two limits: the device
has room for L microbatches with their activations, or for one with its activations and R with their
inputs (:func:`compute_device_room`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pipemorph.planning.ir import Op, OpKind, Schedule


class DeviceResidency:
    """Set of microbatches whose activations are on a stage's device, op by op.

    ``limit``: D, at least 1; None: none leave. Ops must be recorded in the order in which the stage
    runs them, each once, as in a valid schedule.
    """

    __slots__ = ("_away", "_limit", "resident_count")

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._away: set[int] = set()
        self.resident_count = 0
        """Number of microbatches on the device between two ops."""

    @property
    def away_count(self) -> int:
        """Number of microbatches whose activations are away from the device."""
        return len(self._away)

    def can_run(self, kind: OpKind, microbatch: int) -> bool:
        """True if the op can run now without making more than D microbatches resident."""
        if self._limit is None or self.resident_count < self._limit:
            return True
        return kind is not OpKind.F and microbatch not in self._away

    def record_op(self, kind: OpKind, microbatch: int) -> bool:
        """Record an op. True if its activations leave after an F, or return before a B or BW.

        The result is known at the start of the op, since a stage runs one op at a time.
        """
        if kind is OpKind.F:
            self.resident_count += 1
            if self._limit is None or self.resident_count < self._limit:
                return False
            self.resident_count -= 1
            self._away.add(microbatch)
            return True
        back = kind is not OpKind.W and microbatch in self._away
        if back:
            self._away.remove(microbatch)
            self.resident_count += 1
        if kind is not OpKind.B:
            self.resident_count -= 1
        return back


def find_copying_ops(ops: Iterable[Op], limit: int | None) -> list[bool]:
    """Flags of a stage's ops, by position: True if activations leave or return in the op."""
    held = DeviceResidency(limit)
    return [held.record_op(op.kind, op.microbatch) for op in ops]


class AwayMicrobatches(NamedTuple):
    """Microbatches per iteration and stage whose activations leave the device."""

    offloaded: list[int]
    recomputed: list[int]


def count_away_microbatches(
    schedule: Schedule, limits: Sequence[int | None], recompute: Sequence[bool]
) -> AwayMicrobatches:
    """Count these microbatches. ``limits[i]``: device limit of stage *i*; ``recompute[i]``: True if
    the stage recomputes."""
    found = [
        sum(find_copying_ops(ops, limit)) // 2 if limit is not None else 0
        for ops, limit in zip(schedule.stages, limits, strict=True)
    ]
    again = list(recompute)
    return AwayMicrobatches(
        [0 if drops else n for n, drops in zip(found, again, strict=True)],
        [n if drops else 0 for n, drops in zip(found, again, strict=True)],
    )


def count_device_peak(ops: Iterable[Op], limit: int | None) -> int:
    """Most microbatches resident at any moment while a stage runs ``ops``."""
    held = DeviceResidency(limit)
    peak = 0
    for kind, microbatch, _ in ops:
        before = held.resident_count
        copies = held.record_op(kind, microbatch)
        # During an F or B its own microbatch is on the device, even if copied before or after.
        arrives = kind is OpKind.F or copies
        peak = max(peak, before + arrives)
    return peak


def count_host_peak(ops: Iterable[Op], limit: int | None) -> int:
    """Most microbatches whose activations are away at any moment while a stage runs ``ops``."""
    held = DeviceResidency(limit)
    peak = 0
    for op in ops:
        held.record_op(op.kind, op.microbatch)
        peak = max(peak, held.away_count)
    return peak


def measure_rank_peaks(
    schedule: Schedule, rank: int, limits: Sequence[int | None], units: Sequence[float]
) -> tuple[float, float]:
    """Peak activation memory while a rank runs its ops: on the device, and away from it. Stages of
    the rank count together at each moment.

    ``limits[s]``: device limit of stage *s*; ``units[s]``: memory of a microbatch on it, any unit.
    """
    mine = schedule.stages_by_rank[rank]
    held = [DeviceResidency(limits[stage]) for stage in mine]
    device = away = 0.0
    for kind, microbatch, chunk in schedule.ranks[rank]:
        before = sum(each.resident_count * units[s] for s, each in zip(mine, held, strict=True))
        copies = held[chunk].record_op(kind, microbatch)
        # As in device_peak().
        arrives = units[mine[chunk]] if kind is OpKind.F or copies else 0.0
        device = max(device, before + arrives)
        away = max(
            away, sum(each.away_count * units[s] for s, each in zip(mine, held, strict=True))
        )
    return device, away


def compute_host_limit(
    in_flight_limit: int | None, device_limit: int | None, microbatches: int
) -> int:
    """Most microbatches that can be away at a time, in any order of ops.

    A microbatch leaves while D - 1 others are resident: at most K - (D - 1) of K in flight.
    """
    if device_limit is None:
        return 0
    most = microbatches if in_flight_limit is None else min(in_flight_limit, microbatches)
    return max(0, most - device_limit + 1) if most >= device_limit else 0


def compute_device_room(in_flight: int, limit: int, recompute_limit: int) -> int:
    """Device limit D of a stage that recomputes, with ``in_flight`` microbatches in flight; below 1
    if they do not fit.

    ``limit``: L, most microbatches that fit with their activations; ``recompute_limit``: R, most
    that fit with their inputs, in addition to one with activations. The inputs of a microbatch thus
    take s = (L - 1) / R of its activations. D - 1 are resident when another one leaves, and
    D + (in_flight - D + 1) s <= L.
    """
    free = limit * recompute_limit - (in_flight + 1) * (limit - 1)
    return free // (recompute_limit - limit + 1)


def compute_in_flight_reach(device_limit: int, limit: int, recompute_limit: int) -> int:
    """Most microbatches in flight for which :func:`compute_device_room` is ``device_limit``."""
    if limit == 1:
        return recompute_limit
    free = limit * recompute_limit - device_limit * (recompute_limit - limit + 1)
    return free // (limit - 1) - 1
