"""Describes what the main thread is waiting for, even if it is blocked in C++."""

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
    """The current wait. Set by the main thread around every wait, read by any thread.

    Waits may nest, since a long wait handles other events meanwhile. The innermost is described.
    """

    def __init__(self, who: str) -> None:
        self._who = who
        self._stack: list[tuple[str | Callable[..., str], tuple[Any, ...], float]] = []

    def begin(self, what: str | Callable[..., str], *args: Any) -> None:
        """Begin a wait. ``what``: its description, or what returns it for ``args``, in any thread:
        most waits are over before somebody asks."""
        self._stack.append((what, args, time.monotonic()))

    def end(self) -> None:
        self._stack.pop()

    def __bool__(self) -> bool:
        """Whether there is a wait."""
        return bool(self._stack)

    def describe(self) -> str:
        """``rank 2 (stage 2) waited 3.2 s for F of microbatch 3 …``, or that it was not waiting."""
        stack = self._stack[-1:]  # Atomic, since the main thread may pop meanwhile.
        if not stack:
            return f"{self._who} was not waiting for a message"
        what, args, since = stack[0]
        text = what if isinstance(what, str) else what(*args)
        return f"{self._who} waited {time.monotonic() - since:.1f} s for {text}"


class CollectiveWait:
    """Waits for collectives on CPU tensors, each at most ``deadline`` seconds."""

    def __init__(self, waiting: Waiting, deadline: float) -> None:
        self.waiting, self._deadline = waiting, deadline
        self.who_is_gone: Callable[[], str | None] = lambda: None
        """Finds the lost peer after a connection failed, which does not name it."""

    def allow(self, deadline: float) -> None:
        """Set the longest time of each collective, seconds."""
        self._deadline = deadline

    def __call__(self, work: Any, what: str | None = None) -> None:
        """Wait for a collective. ``what``: its description; None: the one given to
        :attr:`waiting`. Raises :class:`PipelineError` with the description."""
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
