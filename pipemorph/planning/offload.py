"""Activation offload: which microbatches of a stage move to host memory and back, and when.

A stage with a *device limit* D keeps the activations of at most D microbatches on its device; its
in-flight cap may be higher. The copies depend only on the ops that the stage has run. So the same
rules apply to a fixed order and to online dispatch, in the validator, simulator and executor:

- A microbatch is *resident* on the device from the start of its F until its activations are copied
  to host memory, and again from the start of its B (or BW) until the end of its W (or BW).
- If D or more microbatches, including ``m``, are resident when the F of ``m`` ends, ``m`` moves to
  host memory: it is the newest and needed last, since backwards run in microbatch order.
- The B of a microbatch in host memory first copies it back.

So after every F there is room for one more microbatch, and whenever D forbids an op a W can run: of
D or more resident microbatches at least one has run its B. So D alone never causes a deadlock.

Each copy takes ``StageTimes.offload_copy`` and is part of its op: the F ends, and sends, after the
copy to the host; the B begins with the copy back. A device that copies while it computes is faster
than this model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pipemorph.planning.ir import Op, OpKind, Schedule


class Residency:
    """Tracks which microbatches' activations are on a stage's device, op by op.

    ``limit``: D, at least 1; None: no offload. Ops must be given in the order in which the stage
    runs them, each once, as in a valid schedule.
    """

    __slots__ = ("_limit", "_on_host", "resident")

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._on_host: set[int] = set()
        self.resident = 0
        """Number of microbatches on the device between two ops."""

    @property
    def on_host(self) -> int:
        """Number of microbatches in host memory."""
        return len(self._on_host)

    def fits(self, kind: OpKind, microbatch: int) -> bool:
        """Whether the op can run now without making more than D microbatches resident."""
        if self._limit is None or self.resident < self._limit:
            return True
        return kind is not OpKind.F and microbatch not in self._on_host

    def run(self, kind: OpKind, microbatch: int) -> bool:
        """Record an op; returns whether it copies: to the host after an F, back before a B or BW.

        The result is known at the start of the op, since a stage runs one op at a time.
        """
        if kind is OpKind.F:
            self.resident += 1
            if self._limit is None or self.resident < self._limit:
                return False
            self.resident -= 1
            self._on_host.add(microbatch)
            return True
        back = kind is not OpKind.W and microbatch in self._on_host
        if back:
            self._on_host.remove(microbatch)
            self.resident += 1
        if kind is not OpKind.B:
            self.resident -= 1
        return back


def copying(ops: Iterable[Op], limit: int | None) -> list[bool]:
    """Which ops of a stage copy a microbatch's activations, by position."""
    held = Residency(limit)
    return [held.run(kind, microbatch) for kind, microbatch in ops]


def offloaded(schedule: Schedule, limits: Sequence[int | None]) -> list[int]:
    """Microbatches per iteration that go to host memory, per stage."""
    return [
        sum(copying(ops, limit)) // 2 if limit is not None else 0
        for ops, limit in zip(schedule.stages, limits, strict=True)
    ]


def device_peak(ops: Iterable[Op], limit: int | None) -> int:
    """Most microbatches resident at any moment while a stage runs ``ops``."""
    held = Residency(limit)
    peak = 0
    for kind, microbatch in ops:
        before = held.resident
        copies = held.run(kind, microbatch)
        # During an F or B its own microbatch is on the device, even if copied before or after.
        arrives = kind is OpKind.F or copies
        peak = max(peak, before + arrives)
    return peak


def host_peak(ops: Iterable[Op], limit: int | None) -> int:
    """Most microbatches in host memory at any moment while a stage runs ``ops``."""
    held = Residency(limit)
    peak = 0
    for kind, microbatch in ops:
        held.run(kind, microbatch)
        peak = max(peak, held.on_host)
    return peak


def host_limit(in_flight_limit: int | None, device_limit: int | None, microbatches: int) -> int:
    """Most microbatches that can be in host memory at a time, for any order of ops.

    Each moves there while D - 1 others are resident, so with K in flight at most K - (D - 1).
    """
    if device_limit is None:
        return 0
    most = microbatches if in_flight_limit is None else min(in_flight_limit, microbatches)
    return max(0, most - device_limit + 1) if most >= device_limit else 0
