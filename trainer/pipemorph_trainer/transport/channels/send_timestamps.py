"""Timestamps at which messages of the direct route were complete on their device.

The host launches an op and the send of its result long before the device has run the op. So an
event is recorded on the compute stream before each send. A thread waits for these events, in the
order of the device, and reads their times. The executor's thread sends the times to the receivers
between two ops. No message waits for them.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from typing import NamedTuple

from pipemorph_trainer.errors import first_sentence
from pipemorph_trainer.topology.accelerator import Accelerator, DeviceEvent
from pipemorph_trainer.topology.device_event_clock import DeviceEventClock
from pipemorph_trainer.transport.message import Position, SendTimestamp

log = logging.getLogger("pipemorph.trainer")

JOIN_SECONDS = 5.0


class _MarkedMessage(NamedTuple):
    position: Position
    event: DeviceEvent
    found: deque[SendTimestamp]


class SendTimestamps:
    """Departures of a rank's messages, on all of its direct links. The executor's thread calls
    :meth:`mark_message` and :meth:`close`; the timing thread starts with the first message."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator, self._time = accelerator, DeviceEventClock(accelerator)
        self._marked: queue.SimpleQueue[_MarkedMessage | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ended = False

    def mark_message(self, position: Position, found: deque[SendTimestamp]) -> None:
        """Mark a message whose tensors are complete when the compute stream gets here. At that time
        the thread adds its departure to ``found``."""
        if self._ended:
            return
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._time_marked_messages, name="pipemorph-departures", daemon=True
            )
            self._thread.start()
        stream = self._accelerator.compute_stream()
        event = self._accelerator.record_event(stream, timed=True)
        self._marked.put(_MarkedMessage(position, event, found))

    def close(self) -> None:
        """End the thread, and wait for it: if it is inside torch when the interpreter ends, the
        process crashes. Unfinished departures are dropped. Idempotent."""
        self._ended = True
        self._marked.put(None)
        if self._thread is not None:
            self._thread.join(JOIN_SECONDS)

    def _time_marked_messages(self) -> None:
        try:
            self._accelerator.enter_thread()
            while (marked := self._marked.get()) is not None and not self._ended:
                marked.event.synchronize()
                marked.found.append(
                    SendTimestamp(marked.position, self._time.time_event(marked.event))
                )
                self._time.refresh_reference()
        except RuntimeError as error:
            # The executor reports the device's failure. Until then wire times are upper bounds.
            self._ended = True
            log.info("departures of messages are no longer timed: %s", first_sentence(error))
