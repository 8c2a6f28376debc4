"""Poller of the executor: waits for arrivals on either route, notes, and points in time."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import select
import struct
from typing import NamedTuple

_POLLFD = struct.Struct("ihh")
_SHORTS = _POLLFD.size // 2
"""Length of a ``struct pollfd`` in shorts; the last one holds the returned events."""
_ppoll = ctypes.CDLL(None).ppoll
_ppoll.argtypes = (ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_void_p)


class _PollTimeout(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


class _PollSet(NamedTuple):
    """Argument of ``ppoll``: an array of ``struct pollfd``, as shorts and by address."""

    shorts: memoryview
    address: int
    length: int

    @staticmethod
    def from_descriptors(watched: list[tuple[int, int]]) -> _PollSet:
        """Pack pairs of a descriptor and its events."""
        packed = b"".join(_POLLFD.pack(fd, events, 0) for fd, events in watched)
        memory = bytearray(packed or _POLLFD.size)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        return _PollSet(memoryview(memory).cast("h"), address, len(watched))


class Poller:
    """Poller of several file descriptors at once, to the microsecond.

    It calls ``ppoll`` directly, because :func:`select.poll` and :class:`select.epoll` round to
    milliseconds, a tenth of an op, and :func:`select.select` accepts no descriptor above 1023. Only
    the main thread waits; any thread may call :meth:`wake`.
    """

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._eventfds = [self._fd]
        self._sockets: list[int] = []
        self.awaited = True
        """True if the arrival of a message must wake the main thread. If that thread checks for
        messages before it waits, an arrival during an op would only end its next wait early."""
        self._timeout = _PollTimeout()
        self._seconds = 0.0
        """Seconds in :attr:`_timeout`."""
        self._timeout_address = ctypes.addressof(self._timeout)
        self._build_poll_sets()

    def watch_eventfd(self, fd: int) -> None:
        """Watch an eventfd. Every wait that returns reads it, which resets it."""
        self._eventfds.append(fd)
        self._build_poll_sets()

    def watch_socket(self, fd: int) -> None:
        """Watch a socket. Its owner reads it after a wait."""
        self._sockets.append(fd)
        self._build_poll_sets()

    def stop_watching(self, fd: int) -> None:
        """Stop watching. Needed at the end of a socket, which stays readable."""
        for fds in (self._sockets, self._eventfds):
            if fd in fds:
                fds.remove(fd)
        self._build_poll_sets()

    def _build_poll_sets(self) -> None:
        eventfds = [(fd, select.POLLIN) for fd in self._eventfds]
        self._without_input, self._with_input = (
            _PollSet.from_descriptors(eventfds + [(fd, events) for fd in self._sockets])
            for events in (select.POLLRDHUP, select.POLLIN)
        )

    def wake(self) -> None:
        """Wake the waiting thread, now or when it waits next. Callable from any thread."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self._fd, 1)

    def wait(self, seconds: float, *, watch_input: bool = True) -> bool:
        """Wait for an event, for ``seconds``, or for a signal. ``watch_input``: input of a socket
        is an event, and not only its end. Returns true if sockets must be read: they may have
        input, or have ended. Without an event, that is the value of ``watch_input``."""
        if seconds != self._seconds:
            self._seconds, until = seconds, self._timeout
            seconds = max(0.0, seconds)
            until.tv_sec = whole = math.floor(seconds)
            until.tv_nsec = int((seconds - whole) * 1e9)
        watched = self._with_input if watch_input else self._without_input
        ready: int = _ppoll(watched.address, watched.length, self._timeout_address, None)
        if ready <= 0:
            # The time is over, or there was a signal.
            return watch_input
        found = _SHORTS - 1
        for fd in self._eventfds:
            if watched.shorts[found]:
                ready -= 1
                try:  # noqa: SIM105  suppress() takes as long as the call
                    os.eventfd_read(fd)
                except BlockingIOError:
                    pass
            found += _SHORTS
        return ready > 0

    def close(self) -> None:
        self._eventfds.remove(self._fd)
        self._build_poll_sets()
        os.close(self._fd)
