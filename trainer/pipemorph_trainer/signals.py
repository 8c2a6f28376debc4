"""On SIGTERM, lets the rank save before it ends; at once it ends with what it was waiting for.

SIGTERM asks from outside: Kubernetes, Slurm, torchrun or a user stops the job. If the ranks can
save, :attr:`LastWord.asked` tells the pipeline, which ends when all ranks have saved. The process
ends by itself at the end of the grace. The end comes at once if there is nothing to save, and on
:data:`~pipemorph.exits.END_NOW`, which hosts send when another rank has failed.

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
from time import monotonic
from types import FrameType

from pipemorph.exits import END_NOW, EXIT_SAVED, EXIT_SIGTERM

_SIGNALS = (signal.SIGTERM, END_NOW)
_CALLED = 128
"""Added to a signal's number in the byte that the handler writes: no signal has this number."""


class LastWord:
    """The handler of both signals. Installed only from the main thread, and for each signal only
    if there is none yet.

    ``describe``: what the rank is waiting for. ``last``: called before the process ends. ``grace``:
    seconds that the rank has for saving after a SIGTERM; 0: it ends at once.
    """

    def __init__(
        self, describe: Callable[[], str], last: Callable[[], None], grace: float = 0.0
    ) -> None:
        self._describe, self._last, self._grace = describe, last, grace
        self._installed = False
        self._handled: list[signal.Signals] = []
        self.saved = False
        """Whether the rank has saved, so that all that may be left is to end."""
        self.asked = False
        """Whether a SIGTERM came, so that the rank is to save and to end."""

    def install(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        free = [each for each in _SIGNALS if signal.getsignal(each) is signal.SIG_DFL]
        if not free:
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
        for each in free:
            signal.signal(each, self._handler)
        self._handled = free
        self._installed = True
        _forks().word = self
        threading.Thread(target=self._listen, name="pipemorph-last-word", daemon=True).start()

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        """The handler. A script's handler may call it as the previous handler."""
        with contextlib.suppress(BlockingIOError):  # Full: the thread is awake already.
            self._writer.send(bytes([_CALLED + number]))

    def _listen(self) -> None:
        end: float | None = None
        while True:
            self._reader.settimeout(None if end is None else max(0.001, end - monotonic()))
            try:
                data = self._reader.recv(64)
            except TimeoutError:
                self._end("" if self.saved else f"not saved within {self._grace:g} s; ")
                return
            if not data:
                return
            if self._came(END_NOW, data) or (self._came(signal.SIGTERM, data) and not self._grace):
                self._end()
                return
            if end is None and self._came(signal.SIGTERM, data):
                end = monotonic() + self._grace
                self.asked = True
                _say(f"SIGTERM: to save within {self._grace:g} s, then to end")

    def _came(self, number: signal.Signals, data: bytes) -> bool:
        """Whether the handler was called, or will be as soon as the main thread runs Python."""
        ours = signal.getsignal(number) is self._handler
        return _CALLED + number in data or (ours and number in data)

    def _end(self, why: str = "") -> None:
        _say(f"terminated: {why}{self._describe()}")
        try:
            self._last()
        except OSError as error:  # Such as a full disk: the process must end anyway.
            _say(f"terminated: {error}")
        finally:
            os._exit(EXIT_SAVED if self.saved else EXIT_SIGTERM)

    def remove(self) -> None:
        """Uninstall the handlers, unless the script has replaced them. Idempotent."""
        if not self._installed:
            return
        self._installed = False
        _forks().word = None
        wakes = signal.set_wakeup_fd(-1)
        if wakes != self._writer.fileno():
            signal.set_wakeup_fd(wakes)
        for each in self._handled:
            if signal.getsignal(each) is self._handler:
                signal.signal(each, signal.SIG_DFL)
        self._writer.close()


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


class _Forks:
    """Removes the handlers in forked children: they inherit them with their socket, so that SIGTERM
    to the child would end the parent.

    Both signals are blocked in the forking thread until the child has removed the handlers.
    """

    def __init__(self) -> None:
        self.word: LastWord | None = None
        self._thread = threading.local()
        os.register_at_fork(
            before=self._before, after_in_parent=self._unblock, after_in_child=self._in_child
        )

    def _before(self) -> None:
        self._thread.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)

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
