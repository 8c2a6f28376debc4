"""Reads the RDMA ports of a rank's host, with their counters, for link health reports.

Counters show a port that drops packets or was down for a moment earlier than wire times do. Values
that cannot be read are reported as "unavailable". A host without RDMA reports nothing.
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
"""Interval of reading: some counters come from the card's firmware, up to a millisecond each."""
REFRESH_SECONDS = 60.0
"""Interval in which all ports are reported again, since the ingest may have restarted."""


def read(
    stage: int,
    replica: int,
    sysfs: Path = rdma.SYSFS,
    used: Collection[str] | None = None,
) -> list[RailSample]:
    """One sample per port; empty if the kernel has no device. ``used``: the engine's rails, such as
    ``rxe0 port 1``; None without an engine."""
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
    """Reads the ports in a separate thread, since the executor must not wait for firmware.

    The thread ends with this object. It is only started if there is a device.
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
        """Number of ports; None before the first reading."""
        with self._lock:
            return None if self._newest is None else len(self._newest)

    def take(self) -> list[RailSample]:
        """The ports that have changed since the last call; once a minute, all ports. Never
        waits."""
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
