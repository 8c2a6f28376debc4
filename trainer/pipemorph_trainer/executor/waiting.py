"""What the main thread waits for, in words, whatever it is stuck in."""

from __future__ import annotations

import time


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
