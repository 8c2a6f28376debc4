"""Activations in host memory: which microbatches of a stage go there, and which come back when.

A stage with a *device limit* D keeps the activations of at most D microbatches on its device;
its in-flight cap may be higher. One rule says what happens, from nothing but the ops the stage
has run, so that it is the same for a fixed order and for online dispatch, and for the
validator, the simulator and the executor:

- A microbatch is *resident* from the start of its F until its activations have gone to host
  memory, and again from the start of its B (or BW) until the end of its W (or BW).
- When the F of ``m`` ends and D or more microbatches are resident, ``m`` among them, ``m`` goes
  to host memory: the newest, since backwards run in microbatch order and it is needed last.
- The B of a microbatch in host memory brings it back first.

So every F leaves room for one more, and whenever D forbids an op there is a W to run: D or more
resident microbatches include one whose B has run. D alone therefore never deadlocks.

Each copy, out or back, takes ``StageTimes.offload_copy`` and is part of its op: the F ends, and
sends, after the copy out; the B begins with the copy back. A device that copies beside its
compute is quicker than that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pipemorph.planning.ir import Op, OpKind, Schedule


class Residency:
    """Where the activations of one stage's microbatches are, op by op.

    ``limit`` is D, at least 1; None: everything stays on the device. Ops must be given in the
    order the stage runs them, each once, as a valid schedule has them.
    """

    __slots__ = ("_limit", "_on_host", "resident")

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._on_host: set[int] = set()
        self.resident = 0
        """Microbatches on the device between two ops."""

    @property
    def on_host(self) -> int:
        """Microbatches in host memory."""
        return len(self._on_host)

    def fits(self, kind: OpKind, microbatch: int) -> bool:
        """Whether the op can run now without making more than D microbatches resident."""
        if self._limit is None or self.resident < self._limit:
            return True
        return kind is not OpKind.F and microbatch not in self._on_host

    def run(self, kind: OpKind, microbatch: int) -> bool:
        """Take the op as run; whether it copies: out after an F, back before a B or BW.

        What it returns is known when the op starts: a stage runs one op at a time.
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
        # What goes after its F is on the device during it, and so is what came back for its B.
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
    """Most microbatches that can be in host memory at a time, whatever order a stage runs.

    Each goes there while D - 1 others are resident, so K in flight leave K - (D - 1).
    """
    if device_limit is None:
        return 0
    most = microbatches if in_flight_limit is None else min(in_flight_limit, microbatches)
    return max(0, most - device_limit + 1) if most >= device_limit else 0
