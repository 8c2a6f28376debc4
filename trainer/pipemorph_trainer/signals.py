"""Handler of SIGTERM: lets the rank save before it ends, and prints the wait that it interrupts.

SIGTERM is a request from outside: Kubernetes, Slurm, torchrun or a user stops the job. If the ranks
can save, the handler sets :attr:`SigtermHandler.save_requested`, and the pipeline ends when all
have saved; the process ends anyway after the grace period. It ends at once if there is nothing to
save, and on :data:`~pipemorph.exits.ABORT_SIGNAL`, which hosts send when another rank has failed.

The main thread may wait in C++, where no Python handler runs. So the signal wakes a thread over a
socket (``signal.set_wakeup_fd``). That thread prints the message and ends the process.

This applies only to this process, and only while the handler is installed: a script may replace it
by its own, and a forked child starts with the default.
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

from pipemorph.exits import ABORT_SIGNAL, EXIT_SAVED, EXIT_SIGTERM

_SIGNALS = (signal.SIGTERM, ABORT_SIGNAL)
_HANDLER_CALLED = 128
"""Added to the signal number in the byte that the handler writes; no signal number is as large."""


class SigtermHandler:
    """Handler of both signals. It is installed only from the main thread, and only for signals
    without a handler.

    ``describe``: returns a text about the rank's current wait. ``before_end``: called before the
    process ends. ``grace``: seconds for saving after a SIGTERM; 0: the process ends at once.
    """

    def __init__(
        self, describe: Callable[[], str], before_end: Callable[[], None], grace: float = 0.0
    ) -> None:
        self._describe, self._before_end, self._grace = describe, before_end, grace
        self._installed = False
        self._handled: list[signal.Signals] = []
        self.saved = False
        """True if the rank has saved and only has to end."""
        self.save_requested = False
        """True if a SIGTERM was received: the rank must save and end."""

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
        self._handler = self._on_signal
        for each in free:
            signal.signal(each, self._handler)
        self._handled = free
        self._installed = True
        _get_fork_guard().handler = self
        threading.Thread(target=self._await_signals, name="pipemorph-sigterm", daemon=True).start()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal. A script's handler may call it as the previous handler."""
        with contextlib.suppress(BlockingIOError):  # Full: the thread is awake already.
            self._writer.send(bytes([_HANDLER_CALLED + number]))

    def _await_signals(self) -> None:
        """Wait in a thread for the signals and the end of the grace period."""
        end: float | None = None
        while True:
            self._reader.settimeout(None if end is None else max(0.001, end - monotonic()))
            try:
                data = self._reader.recv(64)
            except TimeoutError:
                self._end_process("" if self.saved else f"not saved within {self._grace:g} s; ")
                return
            if not data:
                return
            if self._was_received(ABORT_SIGNAL, data) or (
                self._was_received(signal.SIGTERM, data) and not self._grace
            ):
                self._end_process()
                return
            if end is None and self._was_received(signal.SIGTERM, data):
                end = monotonic() + self._grace
                self.save_requested = True
                _print_stderr(f"SIGTERM: saving within {self._grace:g} s, then ending")

    def _was_received(self, number: signal.Signals, data: bytes) -> bool:
        """True if the handler was called, or will be when the main thread runs Python again."""
        ours = signal.getsignal(number) is self._handler
        return _HANDLER_CALLED + number in data or (ours and number in data)

    def _end_process(self, why: str = "") -> None:
        _print_stderr(f"terminated: {why}{self._describe()}")
        try:
            self._before_end()
        except OSError as error:  # For example a full disk: the process must end anyway.
            _print_stderr(f"terminated: {error}")
        finally:
            os._exit(EXIT_SAVED if self.saved else EXIT_SIGTERM)

    def uninstall(self) -> None:
        """Uninstall the handlers, unless the script has replaced them. Idempotent."""
        if not self._installed:
            return
        self._installed = False
        _get_fork_guard().handler = None
        wakes = signal.set_wakeup_fd(-1)
        if wakes != self._writer.fileno():
            signal.set_wakeup_fd(wakes)
        for each in self._handled:
            if signal.getsignal(each) is self._handler:
                signal.signal(each, signal.SIG_DFL)
        self._writer.close()


def _print_stderr(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


class _ForkGuard:
    """Removes the handlers in forked children: with the inherited socket, a SIGTERM to the child
    would end the parent. The forking thread blocks both signals until the child has removed them.
    """

    def __init__(self) -> None:
        self.handler: SigtermHandler | None = None
        self._thread = threading.local()
        os.register_at_fork(
            before=self._before_fork,
            after_in_parent=self._unblock_signals,
            after_in_child=self._after_fork_in_child,
        )

    def _before_fork(self) -> None:
        self._thread.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)

    def _unblock_signals(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._thread.mask)

    def _after_fork_in_child(self) -> None:
        if self.handler is not None:
            self.handler.uninstall()
        self._unblock_signals()


@cache
def _get_fork_guard() -> _ForkGuard:
    """Return the only instance, since a registration for forks is permanent."""
    return _ForkGuard()
