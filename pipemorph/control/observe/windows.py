"""Wire times of windows, which may be known within bounds only, and those of the last seconds."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from itertools import pairwise
from statistics import fmean, median, pstdev
from typing import NamedTuple

TRIM = 0.1
"""Part of the windows at either end that an average leaves out: outliers of a busy machine."""
MEMORY, FEWEST_RECENT, VARIES, TURNS = 160, 20, 0.2, 3
"""A delay varies if the standard deviation of its newest windows, from FEWEST_RECENT to MEMORY, is
the part VARIES of it, and if it turned from one side of its mean to the other TURNS times: a step
does so once."""
LOOK_EVERY = 8
"""Windows until this is computed again."""


class Within(NamedTuple):
    """A window's wire time is from ``low`` to ``high``; both are the same if it is exact."""

    low: float
    high: float

    @staticmethod
    def exactly(value: float) -> Within:
        return Within(value, value)


def likely(windows: Iterable[Within]) -> list[float]:
    """One wire time per window, in ascending order, without the outliers: the one within its bounds
    that is nearest to the median of all bounds. Where all bounds agree, that is the middle of what
    they have in common; exact windows stay as they are."""
    known = list(windows)
    middle = median([end for window in known for end in window])
    values = sorted(min(max(middle, low), high) for low, high in known)
    cut = int(TRIM * len(values))
    return values[cut : len(values) - cut]


class RecentDelays:
    """The newest :data:`MEMORY` windows of a link that is slow, or was lately. In little space,
    since all links of a large job may be slow at once."""

    __slots__ = ("_added", "_high", "_look_at", "_low", "_varying")

    def __init__(self) -> None:
        self.clear()

    def __len__(self) -> int:
        return len(self._low)

    def add(self, delay: Within) -> None:
        self._added += 1
        for ends, end in zip((self._low, self._high), delay, strict=True):
            ends.append(end)
            if len(ends) > MEMORY:
                del ends[0]

    def clear(self) -> None:
        self._low, self._high = array("f"), array("f")
        self._added = self._look_at = 0
        self._varying: tuple[float, ...] = ()

    def varying(self, least: float) -> tuple[float, ...]:
        """The delays, oldest first and without outliers, if they vary; else empty. Of delays below
        ``least`` on average nobody can tell: that is the noise of a link that is well again.
        Computed anew every :data:`LOOK_EVERY` windows."""
        if self._added >= self._look_at:
            self._look_at = self._added + LOOK_EVERY
            windows = [Within(*ends) for ends in zip(self._low, self._high, strict=True)]
            self._varying = _varying(windows, least)
        return self._varying


def _varying(windows: list[Within], least_mean: float) -> tuple[float, ...]:
    if len(windows) < FEWEST_RECENT:
        return ()
    values = likely(windows)
    mean, least, most = fmean(values), max(0.0, values[0]), values[-1]
    spread = pstdev(values, mean)
    if mean < least_mean or spread < VARIES * mean:
        return ()
    # Around their mean, since a window without exact arrival is nearest to what it can be.
    values = [min(max(mean, window.low), window.high) for window in windows]
    sides = [value > mean for value in values if abs(value - mean) > spread / 2]
    if sum(a != b for a, b in pairwise(sides)) < TURNS:
        return ()
    return tuple(min(max(value, least), most) for value in values)
