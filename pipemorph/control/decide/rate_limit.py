"""Limits how often a plan may change. Counts iterations, since a change costs iterations."""

from __future__ import annotations

from dataclasses import dataclass

HURRY = 3
"""Most directives in a row for links that became slow."""
REFILL = 4
"""Iterations until one more of these directives is allowed."""
SETTLE = 3
"""Iterations under a plan before a change that is not urgent: enough to measure the plan."""
HOLD, BACKOFF, MOST_FLAPS = 2, 4, 4
"""Iterations for which a link must be healthy before its old plan returns; multiplied by BACKOFF
each time it became slow again soon, at most MOST_FLAPS times. A return that fails costs a few
iterations of several times their length, waiting costs a few per cent of each: hence the factor. It
also stops the changes for a fault of the direct route only, which ends whenever it is avoided."""
SOON = 10
"""A link that becomes slow again within this many holds has flapped."""


@dataclass
class Pacing:
    """Rate limits of one attempt. ``finished`` is the index of the newest finished iteration."""

    flaps: int = 0
    _spent: int = 0
    _refilled_at: int = 0
    _issued_at: int | None = None
    _returned_at: int | None = None

    @property
    def hold(self) -> int:
        return HOLD * int(BACKOFF**self.flaps)

    def may_hurry(self, finished: int) -> bool:
        """Whether a link that became slow may cause a directive at once: not if there were too
        many."""
        regained = max(0, finished - self._refilled_at) // REFILL
        return self._spent - regained < HURRY

    def hurried(self, finished: int) -> None:
        """Record a directive for a slow link. Counts for the limit, and detects flaps."""
        regained = max(0, finished - self._refilled_at) // REFILL
        self._spent = max(0, self._spent - regained) + 1
        self._refilled_at = max(self._refilled_at, finished)
        if self._returned_at is not None:
            soon = finished - self._returned_at <= SOON * self.hold
            self.flaps = min(MOST_FLAPS, self.flaps + 1) if soon else 0
            self._returned_at = None

    def is_settled(self, finished: int) -> bool:
        """Whether other causes may change the plan: after the last change has been measured."""
        return self._issued_at is None or finished - self._issued_at >= SETTLE

    def may_return(self, finished: int, well_since: int) -> bool:
        """Whether the plan of a link that is healthy since iteration ``well_since`` may return."""
        return finished - well_since >= self.hold

    def issued(self, finished: int, *, returning: bool) -> None:
        self._issued_at = finished
        if returning:
            self._returned_at = finished


__all__ = ["Pacing"]
