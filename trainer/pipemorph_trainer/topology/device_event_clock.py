"""Times at which a device reached events of its streams, by the host's clock.

Two timed events give the device time between them. So a *reference*, an event whose time the host
has measured, gives the times of all others. It is recorded on an idle stream of its own: the device
reaches it after the host began to record it, and before the host notices that. Half of the time in
between is the stated error. It grows until the reference is renewed, since the clocks drift apart.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from pipemorph_trainer.topology.accelerator import Accelerator, DeviceEvent

RENEWED_AFTER, STALE_AFTER = 0.25, 2.0
"""Seconds after which :meth:`DeviceEventClock.refresh_reference` renews a reference, and after
which a use does so."""
CLOSE_ENOUGH_SECONDS, MOST_TRIES = 5e-5, 3
"""Sufficient error of a reference, seconds; and number of references that are recorded to reach it,
of which the best is used: a thread that waits for the interpreter notices a reference late."""
MOST_DRIFT = 1e-4
"""Maximal drift between the clocks, seconds per second: clocks of hosts and devices are accurate to
tens of ppm, and a host's clock that is being corrected to hundreds."""


class DeviceMoment(NamedTuple):
    """Time ``at`` by this host's wall clock, and its error ``error_seconds``; seconds."""

    at: float
    error_seconds: float


class _Reference(NamedTuple):
    event: DeviceEvent
    moment: DeviceMoment
    recorded: float
    """Time of recording; monotonic, seconds."""


class DeviceEventClock:
    """Clock of a device, read by a single thread. Any thread may record the events."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._stream = accelerator.new_stream()
        self._reference: _Reference | None = None

    def time_event(self, event: DeviceEvent) -> DeviceMoment:
        """Return the time at which the device reached ``event``, which must be timed and reached.
        Waits briefly for the device if the reference is too old. Raises :class:`RuntimeError` if
        the device fails."""
        found = self._reference
        if found is None or self._is_older_than(STALE_AFTER):
            found = self._reference = self._renew_reference()
        after = self._accelerator.elapsed_seconds(found.event, event)
        at, within = found.moment
        return DeviceMoment(at + after, within + MOST_DRIFT * abs(after))

    def refresh_reference(self) -> None:
        """Renew an aging reference, while no caller waits for a time. Raises as
        :meth:`time_event`."""
        if self._is_older_than(RENEWED_AFTER):
            self._reference = self._renew_reference()

    def _is_older_than(self, seconds: float) -> bool:
        found = self._reference
        return found is not None and time.monotonic() - found.recorded > seconds

    def _renew_reference(self) -> _Reference:
        """Record a few references and return the most accurate."""
        best = self._record_reference()
        for _ in range(MOST_TRIES - 1):
            if best.moment.error_seconds <= CLOSE_ENOUGH_SECONDS:
                break
            best = min(best, self._record_reference(), key=lambda each: each.moment.error_seconds)
        return best

    def _record_reference(self) -> _Reference:
        before = time.time()
        event = self._accelerator.record_event(self._stream, timed=True)
        event.synchronize()
        half = (time.time() - before) / 2
        return _Reference(event, DeviceMoment(before + half, abs(half)), time.monotonic())
