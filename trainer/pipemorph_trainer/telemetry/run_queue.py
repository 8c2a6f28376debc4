"""Waits of this rank for a processor, which delay its clock readings.

If another process has the processor while a rank sends or receives a message, the link looks slow.
The kernel counts these waits for each thread.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

from pipemorph.doctor.cgroup import CGROUP, CGROUPS, count_processors

_NANO = 1e9


class RunQueue:
    """Waits for a processor of this process's Python threads, which send, receive and run ops.
    Reading them takes some microseconds per thread."""

    def __init__(self, tasks: Path = Path("/proc/self/task")) -> None:
        self._tasks = tasks
        self._known: dict[int, int] = {}
        self.take_waited_seconds()

    def take_waited_seconds(self) -> float | None:
        """Return the seconds that all threads together have waited since the last call; None if the
        kernel does not count them."""
        total, known = 0, {}
        for thread in threading.enumerate():
            if thread.native_id is None:
                continue
            try:
                # See Documentation/scheduler/sched-stats.rst: time on a processor, waits, slices.
                waits = int(_read_line(f"{self._tasks}/{thread.native_id}/schedstat").split()[1])
            except (OSError, IndexError, ValueError):
                continue  # The thread has ended, or the kernel does not count.
            known[thread.native_id] = waits
            total += waits - self._known.get(thread.native_id, waits)
        self._known = known
        return total / _NANO if known else None


def _read_line(path: str) -> bytes:
    """Read a kernel file with a single line. A :class:`~pathlib.Path` would take several times as
    long."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 256)
    finally:
        os.close(fd)


def compute_crowding(ranks: int, root: Path = CGROUPS, own: Path = CGROUP) -> float:
    """Divide ``ranks``, those that compute on this host or in this container, by the processors
    that they may use. A container is stopped when its threads have used up its CPU limit, however
    many processors its host has."""
    return ranks / count_processors(root, own)
