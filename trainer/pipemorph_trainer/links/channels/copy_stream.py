"""A side stream, and a thread that acts once what was copied in it is there.

The executor's thread gives copies to the stream and goes on at once. What comes after them, such
as handing a message to the engine, is for the thread: it waits for an event behind the copies,
without the interpreter, and then acts. A stream works in order, so the thread need only look at
the oldest.
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
"""Pause before something that could not be done yet is tried again."""
JOIN_SECONDS = 5.0

Act = Callable[[], bool]
"""Does what follows a copy. False: not possible yet, ask again. Called in the stream's thread."""


class _Following(NamedTuple):
    event: Event
    act: Act
    what: str


class CopyStream:
    """One side stream of a rank. :meth:`follow`, :meth:`check`, :meth:`drain` and :meth:`close`
    are for the executor's thread.

    ``on_error`` is called in the stream's thread when something failed: it wakes the executor,
    whose next :meth:`check` raises. The thread starts with the first copy.
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
        """Do ``act`` once all that the stream was given so far is done; the event of that.
        ``what`` names it in errors: ``F of microbatch 3 of iteration 7 on link 1``."""
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
        """Raise :class:`PipelineError` naming what failed in the thread, if anything did."""
        if self._error is not None:
            raise PipelineError(self._error)

    def drain(self, seconds: float) -> None:
        """Wait until everything was acted on. Raises :class:`WaitTimeoutError` naming the
        oldest that was not, and :class:`PipelineError` if something failed."""
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
        """End the thread; whether it has ended. ``abandon``: what has not been acted on is
        given up, except for a wait that is under way. Idempotent."""
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
            # With something refused, do not sleep in a wait for the device.
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
