"""Wait of the main thread: any thread can describe it, even if the main thread is blocked in
C++."""

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


class CurrentWait:
    """Current wait of the main thread, which sets it around every wait. Any thread may read it.

    Waits may nest, since a long wait handles other events meanwhile. The innermost is described.
    """

    def __init__(self, who: str) -> None:
        self._who = who
        self._stack: list[tuple[str | Callable[..., str], tuple[Any, ...], float]] = []

    def begin_wait(self, what: str | Callable[..., str], *args: Any) -> None:
        """Begin a wait. ``what``: its description, or a function of ``args`` that returns it, in
        any thread: most waits end before a description is needed."""
        self._stack.append((what, args, time.monotonic()))

    def end_wait(self) -> None:
        self._stack.pop()

    def __bool__(self) -> bool:
        """True if there is a wait."""
        return bool(self._stack)

    def describe_wait(self) -> str:
        """Describe the wait: ``rank 2 (stage 2) waited 3.2 s for F of microbatch 3 …``, or none."""
        stack = self._stack[-1:]  # Atomic, since the main thread may pop meanwhile.
        if not stack:
            return f"{self._who} was not waiting for a message"
        what, args, since = stack[0]
        text = what if isinstance(what, str) else what(*args)
        return f"{self._who} waited {time.monotonic() - since:.1f} s for {text}"


class CollectiveWaiter:
    """Waits for collectives on CPU tensors, each for at most ``deadline`` seconds."""

    def __init__(self, waiting: CurrentWait, deadline: float) -> None:
        self.waiting, self._deadline = waiting, deadline
        self.find_lost_peer: Callable[[], str | None] = lambda: None
        """Finds the lost peer after a connection failed, which does not name it."""

    def set_deadline(self, deadline: float) -> None:
        """Set the longest time of each collective, seconds."""
        self._deadline = deadline

    def __call__(self, work: Any, what: str | None = None) -> None:
        """Wait for a collective. ``what``: its description; None: the one given to
        :attr:`waiting`. Raises :class:`PipelineError` with the description."""
        if what is not None:
            self.waiting.begin_wait(what)
        began = time.monotonic()
        try:
            work.wait(timedelta(seconds=self._deadline))
        except RuntimeError as error:
            raise self._make_error(error, time.monotonic() - began) from error
        if what is not None:
            self.waiting.end_wait()

    def _make_error(self, error: RuntimeError, seconds: float) -> PipelineError:
        if seconds >= self._deadline:
            return WaitTimeoutError(
                f"{self.waiting.describe_wait()}; the deadline is {self._deadline:g} s"
            )
        gone = self.find_lost_peer()
        if gone is not None:
            return PeerLostError(f"{self.waiting.describe_wait()}; {gone}")
        return PipelineError(
            f"{self.waiting.describe_wait()}; a connection failed: {first_sentence(error)}"
        )
