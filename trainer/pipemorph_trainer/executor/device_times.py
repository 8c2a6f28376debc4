"""Ops and copies with their times, and how those of a device are found: the host only launches ops,
and is done long before the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import time
from typing import NamedTuple

import torch
from torch import Tensor

from pipemorph.planning.ir import OpKind
from pipemorph_trainer.topology.accelerator import Accelerator, Event

LAUNCHED_AHEAD = 1
"""Ops that may be queued on the device behind the running one, under guided dispatch: enough that
the device never waits for the host, and few enough that the next op is chosen late."""


class TimedOp(NamedTuple):
    """One op that ran. Wall-clock seconds."""

    kind: OpKind
    microbatch: int
    start: float
    end: float


class TimedCopy(NamedTuple):
    """A copy of activations to host memory, as part of an F, or back, as part of a B or BW; or
    (``again``) a forward that ran again in place of the copy back. Wall-clock seconds. On CUDA the
    time on the compute stream: none for a copy on a side stream."""

    kind: OpKind
    microbatch: int
    start: float
    end: float
    nbytes: int
    again: bool = False

    @property
    def out(self) -> bool:
        return self.kind is OpKind.F


class _Mark(NamedTuple):
    start: Event
    end: Event


class DeviceTimes:
    """Marks ops on the compute stream, and finds their times afterwards. Main thread only."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._marks: list[_Mark] = []
        self._copies: list[_Mark] = []
        self._start: Event | None = None

    def start(self) -> None:
        """Mark the start of an op."""
        self._start = self._now()

    def end(self) -> None:
        """Mark the end of the op: all its work was launched."""
        assert self._start is not None
        self._marks.append(_Mark(self._start, self._now()))

    @contextmanager
    def copy(self) -> Iterator[None]:
        """Context for the part of an op that launches a copy on the compute stream."""
        start = self._now()
        yield
        self._copies.append(_Mark(start, self._now()))

    def resolve_copies(self, copies: Sequence[TimedCopy]) -> list[TimedCopy]:
        """The copies with their times on the compute stream; drops their marks. A copy to the host
        over a side stream takes none. Waits like :meth:`resolve`, so call it after that."""
        marks, self._copies = self._copies, []
        now = self._now()
        now.synchronize()
        here = time()
        seconds = self._accelerator.seconds
        return [
            copy._replace(start=here - seconds(mark.start, now), end=here - seconds(mark.end, now))
            for copy, mark in zip(copies, marks, strict=True)
        ]

    def forget(self) -> None:
        """Drop the marks of a refused iteration."""
        self._marks, self._copies = [], []

    def pace(self) -> None:
        """Wait until the device is at most :data:`LAUNCHED_AHEAD` ops behind."""
        if len(self._marks) > LAUNCHED_AHEAD:
            self._marks[-1 - LAUNCHED_AHEAD].end.synchronize()

    def resolve(self, ops: Sequence[TimedOp]) -> list[TimedOp]:
        """The ops, one per mark, with their wall-clock times on the device; drops the marks.

        Waits for the end of the last op. The host does this once per iteration.
        """
        marks, self._marks = self._marks, []
        now = self._now()
        now.synchronize()
        here = time()
        seconds = self._accelerator.seconds
        return [
            op._replace(start=here - seconds(mark.start, now), end=here - seconds(mark.end, now))
            for op, mark in zip(ops, marks, strict=True)
        ]

    def _now(self) -> Event:
        return self._accelerator.record(self._accelerator.compute_stream(), timed=True)


class LossCopy:
    """Copies losses to the host, behind the ops that compute them. ``losses``: scalars."""

    def __init__(self, accelerator: Accelerator, losses: Sequence[Tensor]) -> None:
        stream = accelerator.compute_stream()
        # Held until the copy is done.
        self._source = torch.stack([loss.detach().reshape(()).double() for loss in losses])
        self._values = accelerator.pinned_empty((len(losses),), torch.float64)
        accelerator.copy(stream, self._values, self._source)
        self._event = accelerator.record(stream)

    def done(self) -> bool:
        """Whether :meth:`take` would return at once."""
        return self._event.query()

    def take(self) -> list[float]:
        """Wait for the losses and return them, without rounding."""
        self._event.synchronize()
        values: list[float] = self._values.tolist()
        return values
