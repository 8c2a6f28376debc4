"""A side stream for copies, and a thread that runs an action after each copy.

The executor's thread launches copies on the stream and continues at once. The action after a copy,
such as giving a message to the engine, runs in the thread: it waits for an event behind the copy,
without holding the interpreter, and then acts. A stream runs in order, so the thread waits only for
the oldest copy.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from pipemorph_trainer.errors import PipelineError, WaitTimeoutError, first_sentence
from pipemorph_trainer.topology.accelerator import Accelerator, Event

RETRY_SECONDS = 0.0005
"""Pause before an action that was not possible is tried again."""
JOIN_SECONDS = 5.0

Act = Callable[[], bool]
"""The action after a copy. Returns False if it must be tried again. Runs in the stream's thread."""


class _Following(NamedTuple):
    event: Event
    act: Act
    what: str


class CopyStream:
    """One side stream of a rank. The executor's thread calls :meth:`follow`, :meth:`check`,
    :meth:`drain` and :meth:`close`.

    ``on_error``: called in the stream's thread after a failure, to wake the executor, whose next
    :meth:`check` raises. The thread starts with the first copy.
    """

    def __init__(self, name: str, accelerator: Accelerator, on_error: Callable[[], None]) -> None:
        self.stream = accelerator.new_stream()
        self._name, self._accelerator = name, accelerator
        self._on_error = on_error
        self._changed = threading.Condition()
        self._following: deque[_Following] = deque()
        self._left = 0
        self._closing = self._abandoned = False
        self._error: str | None = None
        self._thread: threading.Thread | None = None

    def follow(self, act: Act, what: str) -> Event:
        """Run ``act`` when all work of the stream so far is done; return the event of that.
        ``what`` is its name in errors: ``F of microbatch 3 of iteration 7 on link 1``."""
        event = self._accelerator.record(self.stream)
        with self._changed:
            self._following.append(_Following(event, act, what))
            self._left += 1
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        return event

    def check(self) -> None:
        """Raise :class:`PipelineError` if an action failed, with its name."""
        if self._error is not None:
            raise PipelineError(self._error)

    def drain(self, seconds: float) -> None:
        """Wait for all actions. Raises :class:`WaitTimeoutError`, which names the oldest unfinished
        one, and :class:`PipelineError` if one failed."""
        with self._changed:
            done = self._changed.wait_for(lambda: not self._left or self._error, seconds)
            left, oldest = self._left, self._following[0].what if self._following else ""
        self.check()
        if not done:
            raise WaitTimeoutError(
                f"{left} copies from or to the device are not done, the oldest: "
                f"{oldest or 'one that is waited for'}; the deadline is {seconds:g} s"
            )

    def close(self, *, abandon: bool = False, seconds: float = JOIN_SECONDS) -> bool:
        """End the thread; return whether it has ended. ``abandon``: drop unfinished actions, except
        one that is being waited for. Idempotent."""
        with self._changed:
            self._closing = True
            self._abandoned |= abandon
            self._changed.notify_all()
        if self._thread is None:
            return True
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._accelerator.enter_thread()
            self._work()
        except (RuntimeError, PipelineError) as error:
            self._fail(f"{self._now}: {first_sentence(error)}")
        except BaseException as error:
            self._fail(f"{self._now}: {error!r}")
            raise

    _now = "the start of the thread"

    def _work(self) -> None:
        refused: list[_Following] = []
        while True:
            with self._changed:
                while not (self._following or refused or self._closing):
                    self._changed.wait()
                if self._abandoned or not (self._following or refused):
                    return
                oldest = self._following[0] if self._following else None
            # While an action must be retried, do not block in a wait for the device.
            if oldest is not None and (not refused or oldest.event.query()):
                self._now = oldest.what
                oldest.event.synchronize()
                with self._changed:
                    self._following.popleft()
                refused.append(oldest)
            else:
                time.sleep(RETRY_SECONDS)
            refused = [each for each in refused if not self._acted(each)]

    def _acted(self, following: _Following) -> bool:
        self._now = following.what
        if not following.act():
            return False
        with self._changed:
            self._left -= 1
            self._changed.notify_all()
        return True

    def _fail(self, why: str) -> None:
        with self._changed:
            self._error = why
            self._following.clear()
            self._changed.notify_all()
        self._on_error()
