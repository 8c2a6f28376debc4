"""Waits for arrivals on either route, notes from neighbours, and points in time."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os

_POLLIN = 0x001
_libc = ctypes.CDLL(None, use_errno=True)


class _PollFd(ctypes.Structure):
    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))


class _TimeSpec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


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
        self._build()

    def watch_eventfd(self, fd: int) -> None:
        """Watch an eventfd. It is read, and so reset, whenever a wait returns."""
        self._eventfds.append(fd)
        self._build()

    def watch_socket(self, fd: int) -> None:
        """Watch a socket for input. Its owner reads it after a wait."""
        self._sockets.append(fd)
        self._build()

    def forget(self, fd: int) -> None:
        """Stop watching. Needed at the end of a socket, which stays readable."""
        for fds in (self._sockets, self._eventfds):
            if fd in fds:
                fds.remove(fd)
        self._build()

    def _build(self) -> None:
        fds = [*self._eventfds, *self._sockets]
        self._poll = (_PollFd * len(fds))(*[_PollFd(fd, _POLLIN, 0) for fd in fds])

    def wake(self) -> None:
        """Wake the waiting thread. Callable from any thread."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self._fd, 1)

    def wait(self, seconds: float) -> None:
        """Wait for an event, for ``seconds``, or for a signal."""
        seconds = max(0.0, seconds)
        whole = math.floor(seconds)
        timeout = _TimeSpec(whole, int((seconds - whole) * 1e9))
        _libc.ppoll(self._poll, len(self._poll), ctypes.byref(timeout), None)
        for index, fd in enumerate(self._eventfds):
            if self._poll[index].revents:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(fd)

    def close(self) -> None:
        self._eventfds.remove(self._fd)
        self._build()
        os.close(self._fd)
