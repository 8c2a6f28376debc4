"""Reads the RDMA ports of a rank's host, with their counters, for link health reports.

Counters reveal a port that drops packets or was briefly down earlier than wire times do. Values
that cannot be read are reported as "unavailable". A host without RDMA reports nothing.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

from pipemorph.doctor import rdma
from pipemorph.protocol import RailSample

INTERVAL_SECONDS = 5.0
"""Interval of reading: some counters come from the card's firmware and take up to 1 ms each."""
REFRESH_SECONDS = 60.0
"""Interval in which all ports are reported again, since the ingest may have restarted."""


def read_rails(
    stage: int,
    replica: int,
    sysfs: Path = rdma.SYSFS,
    used: Collection[str] | None = None,
) -> list[RailSample]:
    """Read a sample per port; empty if the kernel has no device. ``used``: the engine's rails, such
    as ``rxe0 port 1``; None without an engine."""
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
        for port in rdma.list_ports(rdma.read_devices(sysfs))
    ]


class RailSampler:
    """Reads the ports in a separate thread, since the executor must not wait for firmware. The
    thread is started only if there is a device, and ends with this object.
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
        self._reported: list[RailSample] = []
        self._refreshed_at = clock()
        self._stop = threading.Event()
        weakref.finalize(self, self._stop.set)
        if not rdma.read_devices(sysfs):
            self._newest = []
        else:
            threading.Thread(
                target=_sample_periodically,
                args=(
                    weakref.ref(self),
                    self._stop,
                    partial(read_rails, stage, replica, sysfs, used),
                    interval,
                ),
                name="pm-rails",
                daemon=True,
            ).start()

    def store_samples(self, samples: list[RailSample]) -> None:
        with self._lock:
            self._newest = samples

    @property
    def port_count(self) -> int | None:
        """Number of ports; None before the first reading."""
        with self._lock:
            return None if self._newest is None else len(self._newest)

    def take_changed(self) -> list[RailSample]:
        """Return the ports that have changed since the last call; once a minute, all ports. Never
        waits."""
        with self._lock:
            newest = self._newest or []
        now = self._clock()
        if now - self._refreshed_at >= REFRESH_SECONDS:
            self._refreshed_at = now
            self._reported = []
        changed = [sample for sample in newest if sample not in self._reported]
        self._reported = newest
        return changed


def _sample_periodically(
    watch: weakref.ref[RailSampler],
    stop: threading.Event,
    read_ports: Callable[[], list[RailSample]],
    interval: float,
) -> None:
    """Read the ports every ``interval`` seconds until ``stop``, or ``watch`` is freed."""
    while True:
        samples = read_ports()
        owner = watch()
        if owner is None:
            return
        owner.store_samples(samples)
        del owner
        if stop.wait(interval):
            return
