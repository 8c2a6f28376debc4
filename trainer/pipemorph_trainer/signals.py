"""A last word on SIGTERM: what this rank was waiting for.

The main thread may be deep in a C++ wait, where no Python handler runs. So the signal wakes
a small thread over a socket (``signal.set_wakeup_fd``), which says it and ends the process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable

EXIT_TERMINATED = 128 + signal.SIGTERM


class LastWord:
    """Installed from the main thread, and only where SIGTERM has no handler yet."""

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
        # A Python handler must exist for the wake-up to be written; the thread does the rest.
        signal.signal(signal.SIGTERM, lambda *_: None)
        self._installed = True
        threading.Thread(target=self._listen, name="pipemorph-last-word", daemon=True).start()

    def _listen(self) -> None:
        while data := self._reader.recv(64):
            if signal.SIGTERM in data:
                with contextlib.suppress(OSError, ValueError):
                    print(f"terminated: {self._describe()}", file=sys.stderr, flush=True)
                try:
                    self._last()
                except OSError as error:  # a full disk, say: the process has to end all the same
                    with contextlib.suppress(OSError, ValueError):
                        print(f"terminated: {error}", file=sys.stderr, flush=True)
                finally:
                    os._exit(EXIT_TERMINATED)

    def remove(self) -> None:
        """Give SIGTERM back. Idempotent."""
        if not self._installed:
            return
        self._installed = False
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._writer.close()
