"""Waits for arrivals on either route, notes from neighbours, and points in time."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os

_POLLIN, _POLLRDHUP = 0x001, 0x2000
_ppoll = ctypes.CDLL(None, use_errno=True).ppoll


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
        self._quiet, self._hearing = (
            (_PollFd * (len(self._eventfds) + len(self._sockets)))(
                *[_PollFd(fd, _POLLIN, 0) for fd in self._eventfds],
                *[_PollFd(fd, events, 0) for fd in self._sockets],
            )
            for events in (_POLLRDHUP, _POLLIN)
        )

    def wake(self) -> None:
        """Wake the waiting thread. Callable from any thread."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self._fd, 1)

    def wait(self, seconds: float, *, hears: bool = True) -> bool:
        """Wait for an event, for ``seconds``, or for a signal. ``hears``: input of a socket is an
        event, and not only its end. Returns whether sockets are to be read: they may have input,
        or have ended."""
        seconds = max(0.0, seconds)
        whole = math.floor(seconds)
        timeout = _TimeSpec(whole, int((seconds - whole) * 1e9))
        polled = self._hearing if hears else self._quiet
        left: int = _ppoll(polled, len(polled), ctypes.byref(timeout), None)
        if left <= 0:
            return True
        for each, fd in zip(polled, self._eventfds, strict=False):
            if each.revents:
                left -= 1
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(fd)
        return left > 0

    def close(self) -> None:
        self._eventfds.remove(self._fd)
        self._build()
        os.close(self._fd)
