"""Waits for arrivals on either route, notes from neighbours, and points in time."""

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
"""Length of a ``struct pollfd``, of which the last short is what was found."""
_ppoll = ctypes.CDLL(None).ppoll
_ppoll.argtypes = (ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_void_p)


class _TimeSpec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


class _Watched(NamedTuple):
    """What one call of ``ppoll`` gets: an array of ``struct pollfd``, as shorts and by address."""

    shorts: memoryview
    address: int
    length: int

    @staticmethod
    def of(watched: list[tuple[int, int]]) -> _Watched:
        """``watched``: descriptors and events."""
        packed = b"".join(_POLLFD.pack(fd, events, 0) for fd, events in watched)
        memory = bytearray(packed or _POLLFD.size)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        return _Watched(memoryview(memory).cast("h"), address, len(watched))


class Poller:
    """Waits on several file descriptors at once, to the microsecond.

    Calls ``ppoll`` directly, because :func:`select.poll` and :class:`select.epoll` round to
    milliseconds, which is a tenth of an op, and :func:`select.select` accepts no descriptor above
    1023. Only the main thread waits; any thread may call :meth:`wake`.
    """

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._eventfds = [self._fd]
        self._sockets: list[int] = []
        self.awaited = True
        """Whether the arrival of a message has to wake the main thread. If it looks for messages
        before it waits, an arrival while it runs an op would only end its next wait early."""
        self._timeout = _TimeSpec()
        self._seconds = 0.0
        """What it is set to."""
        self._timeout_address = ctypes.addressof(self._timeout)
        self._build()

    def watch_eventfd(self, fd: int) -> None:
        """Watch an eventfd. It is read, and so reset, whenever a wait returns."""
        self._eventfds.append(fd)
        self._build()

    def watch_socket(self, fd: int) -> None:
        """Watch a socket. Its owner reads it after a wait."""
        self._sockets.append(fd)
        self._build()

    def forget(self, fd: int) -> None:
        """Stop watching. Needed at the end of a socket, which stays readable."""
        for fds in (self._sockets, self._eventfds):
            if fd in fds:
                fds.remove(fd)
        self._build()

    def _build(self) -> None:
        bells = [(fd, select.POLLIN) for fd in self._eventfds]
        self._quiet, self._hearing = (
            _Watched.of(bells + [(fd, events) for fd in self._sockets])
            for events in (select.POLLRDHUP, select.POLLIN)
        )

    def wake(self) -> None:
        """Wake the waiting thread, now or when it waits next. Callable from any thread."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self._fd, 1)

    def wait(self, seconds: float, *, hears: bool = True) -> bool:
        """Wait for an event, for ``seconds``, or for a signal. ``hears``: input of a socket is an
        event, and not only its end. Returns whether sockets are to be read: they may have input,
        or have ended. If the time is over without, they are to be read only if it ``hears``."""
        if seconds != self._seconds:
            self._seconds, until = seconds, self._timeout
            seconds = max(0.0, seconds)
            until.tv_sec = whole = math.floor(seconds)
            until.tv_nsec = int((seconds - whole) * 1e9)
        watched = self._hearing if hears else self._quiet
        left: int = _ppoll(watched.address, watched.length, self._timeout_address, None)
        if left <= 0:
            # Without input from sockets the time is over, or there was a signal.
            return hears
        found = _SHORTS - 1
        for fd in self._eventfds:
            if watched.shorts[found]:
                left -= 1
                try:  # noqa: SIM105  suppress() takes as long as the call
                    os.eventfd_read(fd)
                except BlockingIOError:
                    pass
            found += _SHORTS
        return left > 0

    def close(self) -> None:
        self._eventfds.remove(self._fd)
        self._build()
        os.close(self._fd)
