"""Chooses the link windows of the next report if not all of them fit.

A job of 64 stages and 16 replicas has 2016 series of windows, and a report has room for about 200.
The room is shared by three goals:

- A link that becomes slow or recovers is in the next report and in the following ones, since a
  detector needs several windows. First: the largest difference to the recently reported values.
- A slow link stays in the reports. First: the slowest.
- Every link is reported regularly, since its state would otherwise become unknown. First: the
  longest unreported. This uses all remaining room, so every series is reported again within a
  bounded number of reports.

Once a window is delivered, older windows of its series are dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from pipemorph.wire import LinkSample, WireModel

WINDOWS_PER_LINK = 8
"""Windows kept per link, direction and route while no report can be delivered."""
LINKS_PER_REPORT = 512
CHANGED_SHARE = SLOWEST_SHARE = 1 / 8
"""Shares of a report's bytes, for about 25 series each."""

FADING = 1 / 4
"""Weight of the newest report in the mean of a series' reported values. After a step of 30 ms the
mean still differs by 2 ms after nine reports, as many as a detector needs to confirm a recovery."""

LinkKey = tuple[int, int, str, str]
"""link, replica, direction, route"""


@dataclass
class Budget:
    """Bytes left in one report."""

    bytes_left: int

    def admit(self, item: WireModel) -> bool:
        """Use the bytes that ``item`` needs, if there are enough."""
        size = len(item.body()) + 1
        if size > self.bytes_left:
            return False
        self.bytes_left -= size
        return True

    def part(self, size: float) -> Budget:
        """Split off at most ``size`` bytes; the rest of them comes :meth:`back` later."""
        part = Budget(min(int(size), self.bytes_left))
        self.bytes_left -= part.bytes_left
        return part

    def back(self, part: Budget) -> None:
        """Take back the bytes that ``part`` has not used."""
        self.bytes_left += part.bytes_left


@dataclass
class _Series:
    """Unreported windows of one direction of one link on one route, oldest first."""

    waiting: deque[LinkSample] = field(default_factory=lambda: deque(maxlen=WINDOWS_PER_LINK))
    told_at: int = 0
    """Number of the last report with this series; 0: none."""
    told: float = 0.0
    """Reported slowness in seconds: a mean with exponentially decreasing weights."""

    @property
    def slowness(self) -> float:
        """Slowness of the newest window."""
        return _slowness(self.waiting[-1])

    @property
    def change(self) -> float:
        return abs(self.slowness - self.told)

    def delivered(self, newest: LinkSample, report: int) -> None:
        """Record that ``report`` delivered this series up to the window ``newest``."""
        slowness = _slowness(newest)
        self.told += (slowness - self.told) * (FADING if self.told_at else 1.0)
        self.told_at = report
        if any(sample is newest for sample in self.waiting):
            while self.waiting.popleft() is not newest:
                pass


class LinkWindows:
    """All series of a job, and when each was last reported."""

    def __init__(self) -> None:
        self._series: dict[LinkKey, _Series] = {}
        self._delivered = 0

    def __bool__(self) -> bool:
        """Whether any window waits."""
        return any(series.waiting for series in self._series.values())

    def add(self, sample: LinkSample) -> None:
        self._series.setdefault(_key(sample), _Series()).waiting.append(sample)

    def choose(self, budget: Budget, room: int) -> list[_Series]:
        """Choose series whose newest windows fit, and use their bytes. ``room``: bytes of the
        report."""
        waiting = [series for series in self._series.values() if series.waiting]
        chosen: dict[int, _Series] = {}

        def admit(share: float, order: Callable[[_Series], float]) -> None:
            part = budget.part(room * share)
            for series in sorted(waiting, key=order):
                if id(series) in chosen:
                    continue
                if len(chosen) >= LINKS_PER_REPORT or not part.admit(series.waiting[-1]):
                    break
                chosen[id(series)] = series
            budget.back(part)

        admit(CHANGED_SHARE, lambda series: -series.change)
        admit(SLOWEST_SHARE, lambda series: -series.slowness)
        admit(1.0, lambda series: series.told_at)
        return list(chosen.values())

    def samples(self, chosen: Iterable[_Series], budget: Budget) -> list[LinkSample]:
        """The newest windows of ``chosen``, and as many older ones as fit, in the order of
        measurement."""
        found = [series.waiting[-1] for series in chosen]
        for series in chosen:
            for sample in list(series.waiting)[-2::-1]:
                if len(found) >= LINKS_PER_REPORT or not budget.admit(sample):
                    break
                found.append(sample)
        at = {id(w): i for series in chosen for i, w in enumerate(series.waiting)}
        return sorted(found, key=lambda sample: (sample.iteration, at[id(sample)]))

    def delivered(self, samples: Iterable[LinkSample]) -> None:
        """Drop these windows and older ones; newer ones stay."""
        self._delivered += 1
        newest = {_key(sample): sample for sample in samples}
        for key, sample in newest.items():
            self._series[key].delivered(sample, self._delivered)


def _slowness(window: LinkSample) -> float:
    """Seconds on the wire and in the queue."""
    return window.wire.p50 + window.queue_p50


def _key(sample: LinkSample) -> LinkKey:
    return (sample.link, sample.replica, sample.direction, sample.route.value)
