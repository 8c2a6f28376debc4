"""What the main thread waits for, in words, whatever it is stuck in."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from pipemorph_trainer.errors import (
    PeerLostError,
    PipelineError,
    WaitTimeoutError,
    first_sentence,
)


class Waiting:
    """Set by the main thread around every wait; read by any thread.

    Waits may nest: a long one looks after other things meanwhile. The innermost is told.
    """

    def __init__(self, who: str) -> None:
        self._who = who
        self._stack: list[tuple[str, float]] = []

    def begin(self, what: str) -> None:
        self._stack.append((what, time.monotonic()))

    def end(self) -> None:
        self._stack.pop()

    def __bool__(self) -> bool:
        """Whether there is a wait at all."""
        return bool(self._stack)

    def describe(self) -> str:
        """``rank 2 (stage 2) waited 3.2 s for F of microbatch 3 …``, or that it computes."""
        stack = self._stack[-1:]  # one step, so that another thread may pop meanwhile
        if not stack:
            return f"{self._who} was not waiting for a message"
        what, since = stack[0]
        return f"{self._who} waited {time.monotonic() - since:.1f} s for {what}"


class CollectiveWait:
    """Waits for collectives on CPU tensors, each at most ``deadline`` seconds."""

    def __init__(self, waiting: Waiting, deadline: float) -> None:
        self.waiting, self._deadline = waiting, deadline
        self.who_is_gone: Callable[[], str | None] = lambda: None
        """Asked when a connection failed, which by itself names nobody."""

    def allow(self, deadline: float) -> None:
        """Seconds that each collective may take from now on."""
        self._deadline = deadline

    def __call__(self, work: Any, what: str | None = None) -> None:
        """Wait for one. ``what``: what for; None: as was said to :attr:`waiting`. Raises
        :class:`PipelineError` naming it."""
        if what is not None:
            self.waiting.begin(what)
        began = time.monotonic()
        try:
            work.wait(timedelta(seconds=self._deadline))
        except RuntimeError as error:
            raise self._failed(error, time.monotonic() - began) from error
        if what is not None:
            self.waiting.end()

    def _failed(self, error: RuntimeError, seconds: float) -> PipelineError:
        if seconds >= self._deadline:
            return WaitTimeoutError(
                f"{self.waiting.describe()}; the deadline is {self._deadline:g} s"
            )
        gone = self.who_is_gone()
        if gone is not None:
            return PeerLostError(f"{self.waiting.describe()}; {gone}")
        return PipelineError(
            f"{self.waiting.describe()}; a connection failed: {first_sentence(error)}"
        )
