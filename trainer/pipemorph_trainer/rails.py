"""The RDMA ports that a rank's host shows, and their counters, for link health reports.

Beside what the engine measures in band: a port that drops packets or was down for a moment says
so in its counters before a window of wire times does. Only what is readable is reported as a
number; the rest is "unavailable", and a host without RDMA reports nothing.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path

from pipemorph.discovery import rdma
from pipemorph.wire import RailSample

INTERVAL_SECONDS = 5.0
"""Drivers ask the card's firmware for some counters, which takes up to a millisecond each."""


def read(stage: int, replica: int, sysfs: Path = rdma.SYSFS) -> list[RailSample]:
    """One sample per port. Empty where the kernel shows no device."""
    return [
        RailSample(
            stage=stage,
            replica=replica,
            device=port.device,
            port=port.number,
            state=port.state or "unavailable",
            counters={name: "unavailable" if n is None else n for name, n in port.counters.items()},
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
    ) -> None:
        self._lock = threading.Lock()
        self._newest: list[RailSample] = []
        self._taken: list[RailSample] = []
        self._stop = threading.Event()
        weakref.finalize(self, self._stop.set)
        if rdma.devices(sysfs):
            threading.Thread(
                target=_watch,
                args=(
                    weakref.ref(self),
                    self._stop,
                    partial(read, stage, replica, sysfs),
                    interval,
                ),
                name="pm-rails",
                daemon=True,
            ).start()

    def put(self, samples: list[RailSample]) -> None:
        with self._lock:
            self._newest = samples

    def take(self) -> list[RailSample]:
        """The ports that are not as they were when they were taken last. Never waits."""
        with self._lock:
            newest = self._newest
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
