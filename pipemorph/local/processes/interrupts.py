"""Turns Ctrl-C, SIGTERM and SIGHUP into events of the run instead of exceptions.

A signal that was ignored at the start, as under ``nohup``, stays ignored.
"""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

from pipemorph.local.processes.supervise import Events, Signalled

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Context that puts a :class:`Signalled` into ``events`` for each signal. Main thread only."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._previous: dict[signal.Signals, Any] = {}
        self.received: signal.Signals | None = None

    def __enter__(self) -> Interrupts:
        # Where it is ignored, as a parent may pass on, the kernel forgets how ranks ended.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def output_closed(self) -> None:
        """Handle a closed standard output (as by ``| head``) like SIGPIPE."""
        self._handle(signal.SIGPIPE, None)

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or signal.Signals(number)
        self._events.put(Signalled(signal.Signals(number)))
