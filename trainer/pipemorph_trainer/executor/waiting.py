"""What the main thread waits for, in words, whatever it is stuck in."""

from __future__ import annotations

import time


class Waiting:
    """Set by the main thread around every wait; read by any thread.

    A lock-free single reference: good enough for a description, and free when not read.
    """

    def __init__(self, who: str) -> None:
        self._who = who
        self._what: tuple[str, float] | None = None

    def begin(self, what: str) -> None:
        self._what = (what, time.monotonic())

    def end(self) -> None:
        self._what = None

    def describe(self) -> str:
        """``rank 2 (stage 2) waited 3.2 s for F of microbatch 3 …``, or that it computes."""
        what = self._what
        if what is None:
            return f"{self._who} was not waiting for a message"
        return f"{self._who} waited {time.monotonic() - what[1]:.1f} s for {what[0]}"
