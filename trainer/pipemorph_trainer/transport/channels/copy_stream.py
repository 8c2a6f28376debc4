"""Side stream for copies, with a thread that runs an action after each copy.

The executor's thread launches copies on the stream and continues at once. The stream's thread waits
for an event behind the copy, without holding the interpreter, and then runs the action, such as
sending a message through the engine. A stream runs in order, so the thread waits only for the
oldest copy.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from pipemorph_trainer.errors import PipelineError, WaitTimeoutError, first_sentence
from pipemorph_trainer.topology.accelerator import Accelerator, DeviceEvent

RETRY_SECONDS = 0.0005
"""Pause before the retry of an action that was not possible."""
JOIN_SECONDS = 5.0

Act = Callable[[], bool]
"""Action after a copy. Returns False if it must be retried. Runs in the stream's thread."""


class _PendingAction(NamedTuple):
    event: DeviceEvent
    act: Act
    description: str


class CopyStream:
    """Side stream of a rank. The executor's thread calls :meth:`schedule_action`,
    :meth:`raise_error`, :meth:`drain` and :meth:`close`.

    ``on_error``: called in the stream's thread after a failure, to wake the executor, whose next
    :meth:`raise_error` raises. The thread starts with the first copy.
    """

    def __init__(self, name: str, accelerator: Accelerator, on_error: Callable[[], None]) -> None:
        self.stream = accelerator.new_stream()
        self._name, self._accelerator = name, accelerator
        self._on_error = on_error
        self._changed = threading.Condition()
        self._pending: deque[_PendingAction] = deque()
        self._unfinished = 0
        self._closing = self._abandoned = False
        self._error: str | None = None
        self._thread: threading.Thread | None = None

    def schedule_action(self, act: Act, what: str) -> DeviceEvent:
        """Run ``act`` when all work of the stream so far is done; return the event behind it.
        ``what`` names the action in errors: ``F of microbatch 3 of iteration 7 on link 1``."""
        event = self._accelerator.record_event(self.stream)
        with self._changed:
            self._pending.append(_PendingAction(event, act, what))
            self._unfinished += 1
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run_thread, name=self._name, daemon=True)
            self._thread.start()
        return event

    def raise_error(self) -> None:
        """Raise :class:`PipelineError`, with the name of the action, if one failed."""
        if self._error is not None:
            raise PipelineError(self._error)

    def drain(self, seconds: float) -> None:
        """Wait for all actions, at most ``seconds``. Raises :class:`WaitTimeoutError`, which names
        the oldest unfinished one, and :class:`PipelineError` if one failed."""
        with self._changed:
            done = self._changed.wait_for(lambda: not self._unfinished or self._error, seconds)
            open_count, oldest = (
                self._unfinished,
                self._pending[0].description if self._pending else "",
            )
        self.raise_error()
        if not done:
            raise WaitTimeoutError(
                f"{open_count} copies from or to the device are not done, the oldest: "
                f"{oldest or 'the one in progress'}; the deadline is {seconds:g} s"
            )

    def close(self, *, abandon: bool = False, seconds: float = JOIN_SECONDS) -> bool:
        """End the thread; return true if it has ended. ``abandon``: drop unfinished actions, except
        the one in progress. Idempotent."""
        with self._changed:
            self._closing = True
            self._abandoned |= abandon
            self._changed.notify_all()
        if self._thread is None:
            return True
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run_thread(self) -> None:
        try:
            self._accelerator.enter_thread()
            self._run_actions()
        except (RuntimeError, PipelineError) as error:
            self._record_failure(f"{self._now}: {first_sentence(error)}")
        except BaseException as error:
            self._record_failure(f"{self._now}: {error!r}")
            raise

    _now = "the start of the thread"

    def _run_actions(self) -> None:
        refused: list[_PendingAction] = []
        while True:
            with self._changed:
                while not (self._pending or refused or self._closing):
                    self._changed.wait()
                if self._abandoned or not (self._pending or refused):
                    return
                oldest = self._pending[0] if self._pending else None
            # While an action must be retried, the thread must not block on the device.
            if oldest is not None and (not refused or oldest.event.query()):
                self._now = oldest.description
                oldest.event.synchronize()
                with self._changed:
                    self._pending.popleft()
                refused.append(oldest)
            else:
                time.sleep(RETRY_SECONDS)
            refused = [each for each in refused if not self._run_action(each)]

    def _run_action(self, following: _PendingAction) -> bool:
        self._now = following.description
        if not following.act():
            return False
        with self._changed:
            self._unfinished -= 1
            self._changed.notify_all()
        return True

    def _record_failure(self, why: str) -> None:
        with self._changed:
            self._error = why
            self._pending.clear()
            self._changed.notify_all()
        self._on_error()
