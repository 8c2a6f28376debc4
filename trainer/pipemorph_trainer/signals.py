"""On SIGTERM, prints what this rank was waiting for.

The main thread may be in a C++ wait, where no Python handler runs. So the signal wakes a thread
over a socket (``signal.set_wakeup_fd``), which prints the message and ends the process.

This applies to this process only, and only while our handler is installed: a script may set its
own, which then runs as in any other script, and a forked child starts with the default.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

EXIT_TERMINATED = 128 + signal.SIGTERM
_CALLED = b"\0"
"""The byte that the handler writes; no signal has this number."""


class LastWord:
    """The handler of SIGTERM. Installed only from the main thread, and only if there is none
    yet."""

    def __init__(self, describe: Callable[[], str], last: Callable[[], None]) -> None:
        self._describe, self._last = describe, last
        self._installed = False

    def install(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        previous = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        if previous != -1:
            signal.set_wakeup_fd(previous, warn_on_full_buffer=False)
            self._reader.close()
            self._writer.close()
            return
        self._handler = self._terminate
        signal.signal(signal.SIGTERM, self._handler)
        self._installed = True
        _forks().word = self
        threading.Thread(target=self._listen, name="pipemorph-last-word", daemon=True).start()

    def _terminate(self, *_: Any) -> None:
        """The handler of SIGTERM. A script's handler may call it as the previous handler."""
        with contextlib.suppress(BlockingIOError):  # Full: the thread is awake already.
            self._writer.send(_CALLED)

    def _listen(self) -> None:
        while data := self._reader.recv(64):
            ours = signal.getsignal(signal.SIGTERM) is self._handler
            if _CALLED[0] in data or (ours and signal.SIGTERM in data):
                self._end()

    def _end(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            print(f"terminated: {self._describe()}", file=sys.stderr, flush=True)
        try:
            self._last()
        except OSError as error:  # Such as a full disk: the process must end anyway.
            with contextlib.suppress(OSError, ValueError):
                print(f"terminated: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(EXIT_TERMINATED)

    def remove(self) -> None:
        """Uninstall the handler, unless the script has replaced it. Idempotent."""
        if not self._installed:
            return
        self._installed = False
        _forks().word = None
        wakes = signal.set_wakeup_fd(-1)
        if wakes != self._writer.fileno():
            signal.set_wakeup_fd(wakes)
        if signal.getsignal(signal.SIGTERM) is self._handler:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._writer.close()


class _Forks:
    """Removes the handler in forked children: they inherit it with its socket, so that SIGTERM to
    the child would end the parent.

    SIGTERM is blocked in the forking thread until the child has removed both.
    """

    def __init__(self) -> None:
        self.word: LastWord | None = None
        self._thread = threading.local()
        os.register_at_fork(
            before=self._before, after_in_parent=self._unblock, after_in_child=self._in_child
        )

    def _before(self) -> None:
        self._thread.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def _unblock(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._thread.mask)

    def _in_child(self) -> None:
        if self.word is not None:
            self.word.remove()
        self._unblock()


@cache
def _forks() -> _Forks:
    """The one instance, since a registration for forks is permanent."""
    return _Forks()
