"""Ops and copies with their times. On a device they are found afterwards by events: the host only
launches ops, and is done long before the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import time
from typing import NamedTuple

import torch
from torch import Tensor

from pipemorph.planning.ir import OpKind
from pipemorph_trainer.topology.accelerator import Accelerator, DeviceEvent

MAX_QUEUED_OPS = 1
"""Ops that may be queued on the device behind the running one, under guided dispatch: enough that
the device never waits for the host, and few enough that the next op is chosen late."""


class MeasuredOp(NamedTuple):
    """Op that ran. Wall-clock seconds."""

    kind: OpKind
    microbatch: int
    start: float
    end: float


class MeasuredCopy(NamedTuple):
    """Copy of activations to host memory (part of an F) or back (part of a B or BW), or with
    ``recomputed`` a forward that ran again instead of the copy back. Wall-clock seconds; on CUDA
    the time on the compute stream, so 0 for a copy on a side stream."""

    kind: OpKind
    microbatch: int
    start: float
    end: float
    nbytes: int
    recomputed: bool = False

    @property
    def to_host(self) -> bool:
        """True if the copy goes to host memory."""
        return self.kind is OpKind.F


class _EventPair(NamedTuple):
    start: DeviceEvent
    end: DeviceEvent


class DeviceTimes:
    """Marks ops on the compute stream, and computes their times afterwards. Main thread only."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._marks: list[_EventPair] = []
        self._copies: list[_EventPair] = []
        self._start: DeviceEvent | None = None

    def mark_op_start(self) -> None:
        """Mark the start of an op."""
        self._start = self._record_event()

    def mark_op_end(self) -> None:
        """Mark the end of the op: all its work was launched."""
        assert self._start is not None
        self._marks.append(_EventPair(self._start, self._record_event()))

    @contextmanager
    def mark_copy(self) -> Iterator[None]:
        """Context for the part of an op that launches a copy on the compute stream."""
        start = self._record_event()
        yield
        self._copies.append(_EventPair(start, self._record_event()))

    def resolve_copies(self, copies: Sequence[MeasuredCopy]) -> list[MeasuredCopy]:
        """Return the copies with their times on the compute stream, and drop their marks. A copy to
        the host over a side stream takes 0 s. Waits like :meth:`resolve_ops`; call it later."""
        marks, self._copies = self._copies, []
        times = self._read_times(marks)
        return [c._replace(start=at, end=end) for c, (at, end) in zip(copies, times, strict=True)]

    def drop_marks(self) -> None:
        """Drop the marks of a refused iteration."""
        self._marks, self._copies = [], []

    def wait_for_device(self) -> None:
        """Wait until the device is at most :data:`MAX_QUEUED_OPS` ops behind."""
        if len(self._marks) > MAX_QUEUED_OPS:
            self._marks[-1 - MAX_QUEUED_OPS].end.synchronize()

    def resolve_ops(self, ops: Sequence[MeasuredOp]) -> list[MeasuredOp]:
        """Return the ops, one per mark, with their wall-clock times on the device; drop the marks.

        Waits for the end of the last op. The host does this once per iteration.
        """
        marks, self._marks = self._marks, []
        times = self._read_times(marks)
        return [op._replace(start=at, end=end) for op, (at, end) in zip(ops, times, strict=True)]

    def _read_times(self, marks: Sequence[_EventPair]) -> list[tuple[float, float]]:
        """Wall-clock start and end of each pair of events. Waits for the device."""
        now = self._record_event()
        now.synchronize()
        here = time()
        seconds = self._accelerator.elapsed_seconds
        return [(here - seconds(mark.start, now), here - seconds(mark.end, now)) for mark in marks]

    def _record_event(self) -> DeviceEvent:
        return self._accelerator.record_event(self._accelerator.compute_stream(), timed=True)


class LossCopy:
    """Copies losses to the host, after the ops that compute them. ``losses``: scalars."""

    def __init__(self, accelerator: Accelerator, losses: Sequence[Tensor]) -> None:
        stream = accelerator.compute_stream()
        # Held until the copy is done.
        self._source = torch.stack([loss.detach().reshape(()).double() for loss in losses])
        self._values = accelerator.allocate_pinned((len(losses),), torch.float64)
        accelerator.copy_tensor(stream, self._values, self._source)
        self._event = accelerator.record_event(stream)

    def is_complete(self) -> bool:
        """True if :meth:`wait_for_losses` would return at once."""
        return self._event.query()

    def wait_for_losses(self) -> list[float]:
        """Wait for the losses and return them, without rounding."""
        self._event.synchronize()
        values: list[float] = self._values.tolist()
        return values
