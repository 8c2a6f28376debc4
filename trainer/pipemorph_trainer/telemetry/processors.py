"""Whether this rank has to wait for a processor: if so, its clock readings are late.

A message that a rank sends or receives while another process has its processor looks as if the link
were slow. The kernel counts these waits for each thread.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

from pipemorph.discovery.cgroup import CGROUP, CGROUPS, processors

_NANO = 1e9


class RunQueue:
    """Waits of this process's Python threads for a processor: of those that send, receive and run
    ops. Reading it takes some microseconds per thread."""

    def __init__(self, tasks: Path = Path("/proc/self/task")) -> None:
        self._tasks = tasks
        self._known: dict[int, int] = {}
        self.waited()

    def waited(self) -> float | None:
        """Seconds that the threads have waited since the last call, added up. None if the kernel
        does not count it."""
        total, known = 0, {}
        for thread in threading.enumerate():
            if thread.native_id is None:
                continue
            try:
                # See Documentation/scheduler/sched-stats.rst: time on a processor, waits, slices.
                waits = int(_read(f"{self._tasks}/{thread.native_id}/schedstat").split()[1])
            except (OSError, IndexError, ValueError):
                continue  # It has ended, or the kernel does not count.
            known[thread.native_id] = waits
            total += waits - self._known.get(thread.native_id, waits)
        self._known = known
        return total / _NANO if known else None


def _read(path: str) -> bytes:
    """A file of the kernel with one line. As a :class:`~pathlib.Path` it would take several times
    as long."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 256)
    finally:
        os.close(fd)


def crowding(ranks: int, root: Path = CGROUPS, own: Path = CGROUP) -> float:
    """``ranks`` that compute on this host or in this container, over the processors that those may
    use: a container with a CPU limit is stopped as soon as its threads have used it up, however
    many processors its host has."""
    return ranks / processors(root, own)
