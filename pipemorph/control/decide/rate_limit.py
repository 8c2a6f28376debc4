"""How often a plan may change. Counts iterations, not seconds: a change costs iterations."""

from __future__ import annotations

from dataclasses import dataclass

HURRY = 3
"""Directives in a row for links that became slow (several rarely do so in one window)."""
REFILL = 4
"""Iterations until one more of those."""
SETTLE = 3
"""Iterations under a plan before a change that can wait: enough to measure it."""
HOLD, BACKOFF, MOST_FLAPS = 2, 4, 4
"""Iterations a link must have been well before its old plan comes back; times BACKOFF for each
time it turned slow soon after, at most MOST_FLAPS times. Going back in vain costs a few
iterations at several times their length, staying costs each a few per cent: hence the factor.
It also settles a fault that only the direct route has, which ends the moment it is avoided."""
SOON = 10
"""A link that is slow again within this many holds has flapped."""


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
        """For a link that became slow: at once, unless that happened too often lately."""
        regained = max(0, finished - self._refilled_at) // REFILL
        return self._spent - regained < HURRY

    def hurried(self, finished: int) -> None:
        """A slow link was judged. Counts against the limit, and tells a flap from a fault."""
        regained = max(0, finished - self._refilled_at) // REFILL
        self._spent = max(0, self._spent - regained) + 1
        self._refilled_at = max(self._refilled_at, finished)
        if self._returned_at is not None:
            soon = finished - self._returned_at <= SOON * self.hold
            self.flaps = min(MOST_FLAPS, self.flaps + 1) if soon else 0
            self._returned_at = None

    def is_settled(self, finished: int) -> bool:
        """For everything else: once the last change has been measured."""
        return self._issued_at is None or finished - self._issued_at >= SETTLE

    def may_return(self, finished: int, well_since: int) -> bool:
        """For a link that is well again since iteration ``well_since``."""
        return finished - well_since >= self.hold

    def issued(self, finished: int, *, returning: bool) -> None:
        self._issued_at = finished
        if returning:
            self._returned_at = finished


__all__ = ["Pacing"]
