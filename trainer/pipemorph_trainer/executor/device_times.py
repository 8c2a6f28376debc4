"""When ops ran on a device. The host only launches them, and is done long before the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import time
from typing import NamedTuple

import torch
from torch import Tensor

from pipemorph_trainer.executor.timed import TimedCopy, TimedOp
from pipemorph_trainer.topology.accelerator import Accelerator, Event

LAUNCHED_AHEAD = 1
"""Ops that may wait on the device behind the one that runs, where the next is chosen by what is
ready: enough that the device never waits for the host, and few enough that it is chosen late."""


class _Mark(NamedTuple):
    start: Event
    end: Event


class DeviceTimes:
    """Marks ops on the compute stream and tells their times afterwards. Main thread only."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._marks: list[_Mark] = []
        self._copies: list[_Mark] = []
        self._start: Event | None = None

    def start(self) -> None:
        """An op is launched from here on."""
        self._start = self._now()

    def end(self) -> None:
        """It is launched."""
        assert self._start is not None
        self._marks.append(_Mark(self._start, self._now()))

    @contextmanager
    def copy(self) -> Iterator[None]:
        """Around what an op launches of a copy on its own stream."""
        start = self._now()
        yield
        self._copies.append(_Mark(start, self._now()))

    def resolve_copies(self, copies: Sequence[TimedCopy]) -> list[TimedCopy]:
        """The same copies with the times they took of the compute stream; forgets their marks.
        A way out over a side stream takes none. Waits as :meth:`resolve` does, so call it after."""
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
        """Drop the marks of an iteration that was refused."""
        self._marks, self._copies = [], []

    def pace(self) -> None:
        """Wait until the device is at most :data:`LAUNCHED_AHEAD` ops behind."""
        if len(self._marks) > LAUNCHED_AHEAD:
            self._marks[-1 - LAUNCHED_AHEAD].end.synchronize()

    def resolve(self, ops: Sequence[TimedOp]) -> list[TimedOp]:
        """The same ops, one per mark, with the wall-clock times of the device; forgets the marks.

        Waits for the last op to end: the one time per iteration that the host does so.
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
    """Losses on their way to the host, behind the ops that make them. ``losses``: scalars."""

    def __init__(self, accelerator: Accelerator, losses: Sequence[Tensor]) -> None:
        stream = accelerator.compute_stream()
        found = torch.stack([loss.detach().reshape(()).double() for loss in losses])
        self._values = accelerator.pinned_empty((len(losses),), torch.float64)
        accelerator.copy(stream, self._values, found)
        accelerator.keep(found, stream)
        self._event = accelerator.record(stream)

    def done(self) -> bool:
        """Whether :meth:`take` returns at once."""
        return self._event.query()

    def take(self) -> list[float]:
        """The losses, exactly; waits for them."""
        self._event.synchronize()
        values: list[float] = self._values.tolist()
        return values
