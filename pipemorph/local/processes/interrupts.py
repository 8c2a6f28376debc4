"""Turns Ctrl-C, SIGTERM and SIGHUP into events of the run instead of exceptions.

A signal that was ignored at the start, as under ``nohup``, stays ignored.
"""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

from pipemorph.local.processes.supervision import Events, SignalReceived

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class InterruptHandler:
    """Context that puts a :class:`SignalReceived` into ``events`` by signal. Main thread only."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._previous: dict[signal.Signals, Any] = {}
        self.received: signal.Signals | None = None

    def __enter__(self) -> InterruptHandler:
        # If it is ignored, as a parent may pass on, the kernel drops exit statuses of ranks.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._handle_signal)
        return self

    def handle_closed_output(self) -> None:
        """Handle a closed standard output (as by ``| head``) like SIGPIPE."""
        self._handle_signal(signal.SIGPIPE, None)

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or signal.Signals(number)
        self._events.put(SignalReceived(signal.Signals(number)))
