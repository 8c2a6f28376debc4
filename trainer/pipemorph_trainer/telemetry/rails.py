"""The RDMA ports that a rank's host shows, and their counters, for link health reports.

Beside what the engine measures in band: a port that drops packets or was down for a moment says
so in its counters before a window of wire times does. Only what is readable is reported as a
number; the rest is "unavailable", and a host without RDMA reports nothing.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

from pipemorph.discovery import rdma
from pipemorph.wire import RailSample

INTERVAL_SECONDS = 5.0
"""Drivers ask the card's firmware for some counters, which takes up to a millisecond each."""
REFRESH_SECONDS = 60.0
"""All ports are told again so often: whoever listens may have started over."""


def read(
    stage: int,
    replica: int,
    sysfs: Path = rdma.SYSFS,
    used: Collection[str] | None = None,
) -> list[RailSample]:
    """One sample per port. Empty where the kernel shows no device. ``used``: the engine's rails,
    as in ``rxe0 port 1``; None without an engine."""
    return [
        RailSample(
            stage=stage,
            replica=replica,
            device=port.device,
            port=port.number,
            state=port.state or "unavailable",
            counters={name: "unavailable" if n is None else n for name, n in port.counters.items()},
            used=None if used is None else f"{port.device} port {port.number}" in used,
        )
        for port in rdma.ports(rdma.devices(sysfs))
    ]


class RailWatch:
    """Reads the ports on a thread of its own, since the executor must not wait for firmware.

    The thread ends with this object. There is none where there is no device at the start.
    """

    def __init__(
        self,
        stage: int,
        replica: int,
        *,
        sysfs: Path = rdma.SYSFS,
        interval: float = INTERVAL_SECONDS,
        used: Collection[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lock = threading.Lock()
        self._clock = clock
        self._newest: list[RailSample] | None = None
        self._taken: list[RailSample] = []
        self._told_at = clock()
        self._stop = threading.Event()
        weakref.finalize(self, self._stop.set)
        if not rdma.devices(sysfs):
            self._newest = []
        else:
            threading.Thread(
                target=_watch,
                args=(
                    weakref.ref(self),
                    self._stop,
                    partial(read, stage, replica, sysfs, used),
                    interval,
                ),
                name="pm-rails",
                daemon=True,
            ).start()

    def put(self, samples: list[RailSample]) -> None:
        with self._lock:
            self._newest = samples

    @property
    def ports(self) -> int | None:
        """How many there are; None before the first look."""
        with self._lock:
            return None if self._newest is None else len(self._newest)

    def take(self) -> list[RailSample]:
        """The ports that are not as they were when they were taken last, all of them once a
        minute. Never waits."""
        with self._lock:
            newest = self._newest or []
        now = self._clock()
        if now - self._told_at >= REFRESH_SECONDS:
            self._told_at = now
            self._taken = []
        changed = [sample for sample in newest if sample not in self._taken]
        self._taken = newest
        return changed


def _watch(
    watch: weakref.ref[RailWatch],
    stop: threading.Event,
    look: Callable[[], list[RailSample]],
    interval: float,
) -> None:
    while True:
        samples = look()
        owner = watch()
        if owner is None:
            return
        owner.put(samples)
        del owner
        if stop.wait(interval):
            return
