"""When messages of the direct route were complete on their device.

The host launches an op and the send of its result long before the device has run the op. So an
event is recorded on the compute stream before each send. A thread waits for these events, in the
order in which the device reaches them, and finds their times; the executor's thread tells them to
the receivers between two ops. No message waits for that.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from typing import NamedTuple

from pipemorph_trainer.errors import first_sentence
from pipemorph_trainer.links.message import Departure, Position
from pipemorph_trainer.topology.accelerator import Accelerator, Event
from pipemorph_trainer.topology.device_time import DeviceTime

log = logging.getLogger("pipemorph.trainer")

JOIN_SECONDS = 5.0


class _Marked(NamedTuple):
    position: Position
    event: Event
    found: deque[Departure]


class Departures:
    """The departures of one rank's messages, on all of its direct links. The executor's thread
    calls :meth:`mark` and :meth:`close`; the other thread starts with the first message."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator, self._time = accelerator, DeviceTime(accelerator)
        self._marked: queue.SimpleQueue[_Marked | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ended = False

    def mark(self, position: Position, found: deque[Departure]) -> None:
        """Mark a message whose tensors are complete when the compute stream gets here. Its
        departure is added to ``found``, in the thread, once that has happened."""
        if self._ended:
            return
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name="pipemorph-departures", daemon=True
            )
            self._thread.start()
        stream = self._accelerator.compute_stream()
        event = self._accelerator.record(stream, timed=True)
        self._marked.put(_Marked(position, event, found))

    def close(self) -> None:
        """End the thread, and wait for it: if it is inside torch when the interpreter ends, the
        process crashes. What it has not found yet is dropped. Idempotent."""
        self._ended = True
        self._marked.put(None)
        if self._thread is not None:
            self._thread.join(JOIN_SECONDS)

    def _run(self) -> None:
        try:
            self._accelerator.enter_thread()
            while (marked := self._marked.get()) is not None and not self._ended:
                marked.event.synchronize()
                marked.found.append(Departure(marked.position, self._time.of(marked.event)))
                self._time.keep_fresh()
        except RuntimeError as error:
            # The executor finds that its device has failed, and says so. Until then wire times are
            # upper bounds.
            self._ended = True
            log.info("departures of messages are not timed any more: %s", first_sentence(error))
