"""One queue for both directions of a link, between two processes of one machine.

Only fault traces need it: where a direct route is half-duplex, a held message of one
direction holds up the other one's, so both senders must see when their queue is free.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager

from pipemorph_trainer.errors import PipelineError

_FREE_AT = struct.Struct("d")


class SharedQueue:
    """When a queue is free (wall clock, seconds), in anonymous memory two processes map.

    The lower stage makes it and tells the upper stage :attr:`name`. Nothing is left behind,
    however the processes end.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._memory = mmap.mmap(fd, mmap.PAGESIZE)

    @staticmethod
    def create() -> SharedQueue:
        fd = os.memfd_create("pipemorph-queue")
        os.ftruncate(fd, mmap.PAGESIZE)
        return SharedQueue(fd)

    @property
    def name(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    @staticmethod
    def open(name: str, link: int) -> SharedQueue:
        """Map the lower stage's queue. Raises :class:`PipelineError` where it is out of reach."""
        try:
            return SharedQueue(os.open(name, os.O_RDWR))
        except OSError as error:
            raise PipelineError(
                f"link {link}: a fault trace on a half-duplex direct route needs both ranks on "
                f"one machine; the neighbour's queue cannot be opened ({error.strerror})"
            ) from error

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the queue, so that reading and setting :attr:`free_at` is one step."""
        fcntl.lockf(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN)

    @property
    def free_at(self) -> float:
        return float(_FREE_AT.unpack_from(self._memory)[0])

    @free_at.setter
    def free_at(self, value: float) -> None:
        _FREE_AT.pack_into(self._memory, 0, value)

    def close(self) -> None:
        self._memory.close()
        os.close(self._fd)
