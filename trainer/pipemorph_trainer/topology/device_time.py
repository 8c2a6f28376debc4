"""When a device reached points of its streams, by the host's clock.

Two timed events tell how long after one of them the device reached the other. So a *reference*, an
event of which the host knows when it was reached, gives the time of all others. It is recorded on a
stream of its own, behind nothing: the device reaches it after the host began to record it, and
before the host has seen that it did. Half of the time between is the error that is stated. It grows
until the reference is renewed, since the two clocks may drift apart.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from pipemorph_trainer.topology.accelerator import Accelerator, Event

RENEWED_AFTER, STALE_AFTER = 0.25, 2.0
"""Seconds after which :meth:`DeviceTime.keep_fresh` renews a reference, and after which it is
renewed before it is used."""
CLOSE, TRIES = 5e-5, 3
"""Error of a reference, seconds, with which no better one is sought; most that are recorded, of
which the closest counts: a thread that waits for the interpreter sees one late."""
DRIFT = 1e-4
"""Most that the clocks drift apart, seconds per second: clocks of hosts and devices are right to
some ten millionths, and a host's that is being corrected to some hundred."""


class Moment(NamedTuple):
    """A moment by this host's wall clock, to within so many seconds."""

    at: float
    within: float


class _Reference(NamedTuple):
    event: Event
    moment: Moment
    recorded: float
    """Monotonic, seconds."""


class DeviceTime:
    """The clock of one device, as one thread reads it. Any other thread may record the events."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._stream = accelerator.new_stream()
        self._reference: _Reference | None = None

    def of(self, event: Event) -> Moment:
        """When the device reached ``event``, which is timed and was reached. Waits for the device a
        moment if the reference is too old. Raises :class:`RuntimeError` if the device fails."""
        found = self._reference
        if found is None or self._older_than(STALE_AFTER):
            found = self._reference = self._renewed()
        after = self._accelerator.seconds(found.event, event)
        at, within = found.moment
        return Moment(at + after, within + DRIFT * abs(after))

    def keep_fresh(self) -> None:
        """Renew the reference if it is not new, while nobody waits for a time. Raises as
        :meth:`of`."""
        if self._older_than(RENEWED_AFTER):
            self._reference = self._renewed()

    def _older_than(self, seconds: float) -> bool:
        found = self._reference
        return found is not None and time.monotonic() - found.recorded > seconds

    def _renewed(self) -> _Reference:
        """The closest of a few references."""
        best = self._recorded()
        for _ in range(TRIES - 1):
            if best.moment.within <= CLOSE:
                break
            best = min(best, self._recorded(), key=lambda each: each.moment.within)
        return best

    def _recorded(self) -> _Reference:
        before = time.time()
        event = self._accelerator.record(self._stream, timed=True)
        event.synchronize()
        half = (time.time() - before) / 2
        return _Reference(event, Moment(before + half, abs(half)), time.monotonic())
