"""Wire times of windows, exact or within bounds, and recent delays of slow links."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from itertools import pairwise
from statistics import fmean, median, pstdev
from typing import NamedTuple

TRIMMED_FRACTION = 0.1
"""Fraction of the windows at either end that an average omits: outliers of a busy machine."""
MOST_RECENT, FEWEST_RECENT, VARYING_SPREAD, VARYING_TURNS = 160, 20, 0.2, 3
"""A delay varies if the standard deviation of its newest windows, FEWEST_RECENT to
MOST_RECENT, is the fraction VARYING_SPREAD of it, and if it crossed its mean VARYING_TURNS times: a
step crosses it once."""
CHECK_WINDOWS = 8
"""Windows until this is computed again."""


class WireTimeBounds(NamedTuple):
    """Bounds of a window's wire time, ``low`` to ``high``; both are equal if it is exact."""

    low: float
    high: float

    @staticmethod
    def from_exact(value: float) -> WireTimeBounds:
        return WireTimeBounds(value, value)


def estimate_wire_times(windows: Iterable[WireTimeBounds]) -> list[float]:
    """Likely wire times of windows in ascending order, without outliers: for each window the one
    within its bounds that is nearest to the median of all bounds. If all bounds overlap, that is
    the middle of their intersection; exact windows stay."""
    known = list(windows)
    middle = median([end for window in known for end in window])
    values = sorted(min(max(middle, low), high) for low, high in known)
    cut = int(TRIMMED_FRACTION * len(values))
    return values[cut : len(values) - cut]


class RecentDelays:
    """Newest :data:`MOST_RECENT` windows of a link that is slow, or was lately. Compact, since all
    links of a large job may be slow at once."""

    __slots__ = ("_added", "_check_at", "_high", "_low", "_varying")

    def __init__(self) -> None:
        self.clear()

    def __len__(self) -> int:
        return len(self._low)

    def add_delay(self, delay: WireTimeBounds) -> None:
        self._added += 1
        for ends, end in zip((self._low, self._high), delay, strict=True):
            ends.append(end)
            if len(ends) > MOST_RECENT:
                del ends[0]

    def clear(self) -> None:
        self._low, self._high = array("f"), array("f")
        self._added = self._check_at = 0
        self._varying: tuple[float, ...] = ()

    def get_varying(self, least: float) -> tuple[float, ...]:
        """Delays, oldest first and without outliers, if they vary; else empty. A mean below
        ``least`` is noise of a recovered link. Computed every :data:`CHECK_WINDOWS` windows."""
        if self._added >= self._check_at:
            self._check_at = self._added + CHECK_WINDOWS
            windows = [WireTimeBounds(*ends) for ends in zip(self._low, self._high, strict=True)]
            self._varying = _find_varying(windows, least)
        return self._varying


def _find_varying(windows: list[WireTimeBounds], least_mean: float) -> tuple[float, ...]:
    """Delays of ``windows`` if they vary, within the range of likely values; else empty."""
    if len(windows) < FEWEST_RECENT:
        return ()
    values = estimate_wire_times(windows)
    mean, least, most = fmean(values), max(0.0, values[0]), values[-1]
    spread = pstdev(values, mean)
    if mean < least_mean or spread < VARYING_SPREAD * mean:
        return ()
    # Take values near the mean: a window without an exact arrival is known within bounds only.
    values = [min(max(mean, window.low), window.high) for window in windows]
    sides = [value > mean for value in values if abs(value - mean) > spread / 2]
    if sum(a != b for a, b in pairwise(sides)) < VARYING_TURNS:
        return ()
    return tuple(min(max(value, least), most) for value in values)
