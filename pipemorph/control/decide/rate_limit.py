"""Limits how often a plan may change. Counts iterations, since a change costs iterations."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

HURRY = 3
"""Most directives in a row for links that became slow."""
REFILL = 4
"""Iterations until one more of these directives is allowed."""
SETTLE = 3
"""Iterations under a plan before a change that is not urgent: enough to measure the plan."""
FIRST_HOLD, HOLD, BACKOFF, MOST_FLAPS = 1, 2, 4, 4
"""Iterations for which a link must be healthy before its old plan returns: FIRST_HOLD, or HOLD
multiplied by BACKOFF each time it became slow again soon, at most MOST_FLAPS times. A return that
fails costs a few iterations of several times their length, waiting mostly costs a few per cent of
each: hence the factor. It also stops the changes for a fault of the direct route only, which ends
whenever it is avoided."""
SOON = 10
"""A link that becomes slow again within this many holds, each of HOLD iterations at least, has
flapped. Another link that becomes slow has not."""


@dataclass
class Pacing:
    """Rate limits of one attempt. ``finished`` is the index of the newest finished iteration."""

    flaps: int = 0
    _at_once: bool = False
    """Whether the plan in effect costs more than it can save once links are well."""
    _spent: int = 0
    _refilled_at: int = 0
    _issued_at: int | None = None
    _returned: dict[int, int] = field(default_factory=dict)
    """Per link that is healthy again: when the plan for that was issued."""

    @property
    def hold(self) -> int:
        return HOLD * int(BACKOFF**self.flaps) if self.flaps else FIRST_HOLD

    def may_hurry(self, finished: int) -> bool:
        """Whether a link that became slow may cause a directive at once: not if there were too
        many."""
        regained = max(0, finished - self._refilled_at) // REFILL
        return self._spent - regained < HURRY

    def hurried(self, finished: int, links: Iterable[int]) -> None:
        """Record a directive for slow ``links``. Counts for the limit, and detects flaps."""
        regained = max(0, finished - self._refilled_at) // REFILL
        self._spent = max(0, self._spent - regained) + 1
        self._refilled_at = max(self._refilled_at, finished)
        hold = max(HOLD, self.hold)
        again = self._returned.keys() & set(links)
        lately = {i: at for i, at in self._returned.items() if finished - at <= SOON * hold}
        if again & lately.keys():
            self.flaps = min(MOST_FLAPS, self.flaps + 1)
        elif self._returned and not lately:
            self.flaps = 0
        self._returned = {i: at for i, at in lately.items() if i not in again}

    def is_settled(self, finished: int) -> bool:
        """Whether other causes may change the plan: after the last change has been measured."""
        return self._issued_at is None or finished - self._issued_at >= SETTLE

    def may_return(self, finished: int, well_since: int, *, all_well: bool, varied: bool) -> bool:
        """Whether the plan of a link that is healthy since iteration ``well_since`` may return.
        ``all_well``: no other link is slow; ``varied``: delays varied while links were slow, which
        may be only a pause."""
        if self._at_once and all_well and not self.flaps:
            return True
        hold = max(self.hold, HOLD * BACKOFF) if varied else self.hold
        return finished - well_since >= hold

    def issued(
        self, finished: int, returning: Iterable[int], *, returns_at_once: bool = False
    ) -> None:
        """Record a directive that avoids the links ``returning`` less than the one before.
        ``returns_at_once``: of its proposal."""
        self._issued_at, self._at_once = finished, returns_at_once
        self._returned |= dict.fromkeys(returning, finished)


__all__ = ["Pacing"]
