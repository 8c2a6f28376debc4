"""What follows the failure of a rank: another generation, another attempt, or the job's end. Pure.

A generation goes on where the job is: with the state that the ranks have kept, or the newest
checkpoint, and with the plan in force. So it does where a pod was lost and another one has taken
its place (``pod``). An attempt begins with the plan of the spec and with nothing
kept: what failed may have come of either.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class Rung(StrEnum):
    """The next step. Its value is its name in ``report.json``."""

    GENERATION = "generation"
    POD = "pod"
    ATTEMPT = "attempt"
    NONE = "none"


class Failure(Protocol):
    """How the ranks ended."""

    @property
    def retry(self) -> bool:
        """Whether a restart may succeed."""

    @property
    def error(self) -> str | None:
        """The exception that ended them, as one line; None if something else did."""


@dataclass
class Ladder:
    """Counts failures. ``most``: ``spec.failurePolicy.maxRestarts``; with 0 a failure ends the job.

    A failure after one more iteration than ever before is not counted: their number is bounded by
    that of the iterations.
    """

    most: int
    counted: int = 0
    best: int = 0
    """Most iterations that were finished at any failure."""
    idle: int = 0
    """Failures since then."""
    error: str | None = None
    """Of the last failure."""

    @property
    def recovers(self) -> bool:
        """Whether a failure may be followed by another start."""
        return self.most > 0

    def after(
        self, failure: Failure, done: int, *, replaced: bool = False, counted: bool = True
    ) -> tuple[Rung, str]:
        """What follows a failure when a rank has finished ``done`` iterations, and why. That is by
        the ranks' own counts: what they report comes later, or never. ``replaced``: a lost pod is
        back as another one. ``counted``: False if the program has no part in it."""
        again = Rung.POD if replaced else Rung.GENERATION
        if not failure.retry or not self.recovers:
            return Rung.NONE, ""
        progress = done > self.best
        same = not progress and failure.error is not None and failure.error == self.error
        self.best, self.error = max(self.best, done), failure.error
        if same:
            return (
                Rung.NONE,
                f"not started again: iteration {done} failed twice, with the same error",
            )
        if progress:
            self.idle = 0
            return again, f"after {done} iterations"
        if not counted:
            return again, f"after {done} iterations, not counted"
        self.idle += 1
        self.counted += 1
        if self.counted > self.most:
            return Rung.NONE, (
                f"not started again: {self.counted} times no iteration was finished before a "
                f"failure, and spec.failurePolicy.maxRestarts is {self.most}"
            )
        count = f"restart {self.counted} of at most {self.most}"
        # What failed at the start may fail so in each of these pods, but not in another one.
        if self.idle > 1 or (done == 0 and not replaced):
            return Rung.ATTEMPT, count
        return again, f"{count}, after {done} iterations"
