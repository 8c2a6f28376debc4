"""Health of a job's links: a detector per direction and replica, one state per link.

A plan holds for all replicas and knows one one-way delay per link, so a link is as slow as
its slowest direction on its slowest replica: an activation and the gradient that answers it
pass it once each way, and the slower of the two decides how much slackness is needed.

Links do not fail together, machines stall: a late window counts for little while most links of
the job are late.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from pipemorph.control.observe.detector import DelayDetector, Level, Thresholds
from pipemorph.wire import LinkSample

FORWARD, BACKWARD = "forward", "backward"

FEW_LINKS = 4
"""With fewer, most of them may well be slow at once."""
TOGETHER_SECONDS = 0.15
"""Windows that close within this time show the same moment: ranks report every 50 ms, each at
its own."""
COMMON_WEIGHT = 1 / 8
"""What a late window counts for while most links are late: a machine that stalls, for tens of
milliseconds and not for seconds. Should all links be slow indeed, that is 24 windows in a row."""


class Health(StrEnum):
    """State of a link. UNKNOWN: no samples yet, too few to know its base, or none lately."""

    HEALTHY = "healthy"
    SLOW = "slow"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class LinkHealth:
    """What is believed of one link. Times in seconds, one way."""

    link: int
    health: Health
    delay: float = 0.0
    """Above the normal wire time; 0 unless slow."""
    wire_time: float = 0.0
    """As a message experiences it now: normal wire time and delay."""
    confidence: float = 0.0
    """Probability that ``health`` is right."""
    in_doubt: bool = False
    """Slow, but the latest windows look like recovery: the delay is about to change."""
    since_iteration: int | None = None
    """Iteration of the first window that showed it."""
    replica: int = 0
    direction: str = FORWARD
    """Replica and direction with the longest wire time."""

    def record(self) -> dict[str, Any]:
        """For report.json and status."""
        return {
            "link": self.link,
            "health": self.health.value,
            "delay": round(self.delay, 6),
            "wire_time": round(self.wire_time, 6),
            "confidence": round(self.confidence, 4),
            "replica": self.replica,
            "direction": self.direction,
        }


@dataclass
class _Series:
    detector: DelayDetector
    seen_at: float
    judged_at: float = float("-inf")
    late_at: float = float("-inf")
    """When a window last could be judged, and when one was late."""


class _Window(NamedTuple):
    """One sample, as a detector takes it."""

    series: _Series
    value: float
    mark: int
    route: str
    exact: bool
    slack: float


Key = tuple[int, int, str]
"""link, replica, direction"""


class LinkBook:
    """All links of a job. Bounded: one detector per link, replica and direction."""

    def __init__(self, links: int, *, thresholds: Thresholds, stale_after: float) -> None:
        self._links = links
        self._thresholds = thresholds
        self._stale_after = stale_after
        self._series: dict[Key, _Series] = {}
        self._known_bases: dict[Key, dict[str, float]] = {}
        self._known_delays: dict[Key, float] = {}

    def observe(
        self, samples: Sequence[LinkSample], now: float, *, op_time: Callable[[int], float]
    ) -> None:
        """Take in the windows of a report. ``op_time(stage)``: longest op of a stage, seconds,
        infinite if not known; by so much may a window without an exact arrival be too long."""
        windows = [self._window(s, now, op_time) for s in samples if s.wire.count > 0]
        any_late = False
        for window in windows:
            late = window.series.detector.is_late(
                window.value, route=window.route, slack=window.slack
            )
            if late is not None:
                window.series.judged_at = now
            if late:
                window.series.late_at = now
                any_late = True
        weight = COMMON_WEIGHT if any_late and self._most_are_late(now) else 1.0
        for window in windows:
            window.series.detector.observe(
                window.value,
                mark=window.mark,
                route=window.route,
                exact=window.exact,
                slack=window.slack,
                weight=weight,
            )

    def _window(self, sample: LinkSample, now: float, op_time: Callable[[int], float]) -> _Window:
        key = (sample.link, sample.replica, sample.direction)
        series = self._series.get(key)
        if series is None:
            series = self._series[key] = _Series(DelayDetector(self._thresholds), now)
            for route, base in self._known_bases.get(key, {}).items():
                series.detector.restore_base(route, base)
            if (delay := self._known_delays.get(key)) is not None:
                series.detector.restore_slow(delay)
        series.seen_at = max(series.seen_at, now)
        receiver = sample.link + 1 if sample.direction == FORWARD else sample.link
        exact = sample.wire.exact > 0
        return _Window(
            series,
            # Of upper bounds the least is the closest.
            sample.wire.p50 if exact else sample.wire.min,
            sample.iteration,
            sample.route.value,
            exact,
            0.0 if exact else op_time(receiver),
        )

    def _most_are_late(self, now: float) -> bool:
        """Whether most links were late at this moment, of those that are not slow already: then
        it is what they share, the machine or the job, and not each of them."""
        since = now - TOGETHER_SECONDS
        judged = {key[0] for key, s in self._series.items() if s.judged_at >= since}
        late = {key[0] for key, s in self._series.items() if s.late_at >= since}
        return len(judged) >= FEW_LINKS and 2 * len(late) > len(judged)

    def compare_peers(self) -> None:
        """Find links that were slow from the start, when their own base was learned slow.

        Messages between stages of one job are alike, so a link's normal wire time should be
        about that of its peers: the lower quartile, since several may be slow at once.
        """
        by_route: dict[str | None, list[DelayDetector]] = {}
        for series in self._series.values():
            if series.detector.base is not None:
                by_route.setdefault(series.detector.route, []).append(series.detector)
        for detectors in by_route.values():
            # Two directions of one link are no majority against each other.
            if len(detectors) < 4:
                continue
            bases = sorted(d.base or 0.0 for d in detectors)
            usual = bases[(len(bases) - 1) // 4]
            for detector in detectors:
                detector.lower_base(usual)

    def is_silent(self, now: float) -> bool:
        """Whether no link has been heard of for the time after which samples are stale."""
        return all(now - s.seen_at > self._stale_after for s in self._series.values())

    @property
    def any_slow(self) -> bool:
        """Whether any direction of any link is taken for slow, heard of lately or not."""
        return any(s.detector.level is Level.SLOW for s in self._series.values())

    def states(self, now: float) -> tuple[LinkHealth, ...]:
        """One state per link."""
        by_link: dict[int, list[tuple[Key, _Series]]] = {}
        for key, series in self._series.items():
            by_link.setdefault(key[0], []).append((key, series))
        return tuple(self._state(link, by_link.get(link, ()), now) for link in range(self._links))

    def _state(
        self, link: int, all_series: Iterable[tuple[Key, _Series]], now: float
    ) -> LinkHealth:
        fresh = [
            (key, series.detector)
            for key, series in all_series
            if now - series.seen_at <= self._stale_after
            and series.detector.level is not Level.LEARNING
        ]
        if not fresh:
            return LinkHealth(link, Health.UNKNOWN)
        slow = [(key, d) for key, d in fresh if d.level is Level.SLOW]
        (_, replica, direction), worst = max(slow or fresh, key=lambda pair: pair[1].wire_time)
        since = [d.changed_at for _, d in slow or fresh if d.changed_at is not None]
        # Slow began with the first direction that showed it; healthy with the last.
        began = (min if slow else max)(since) if since else None
        return LinkHealth(
            link=link,
            health=Health.SLOW if slow else Health.HEALTHY,
            delay=max((d.delay for _, d in slow), default=0.0),
            wire_time=_plannable(worst),
            confidence=max(d.confidence for _, d in slow)
            if slow
            else min(d.confidence for _, d in fresh),
            in_doubt=any(d.suspected_at is not None for _, d in slow),
            since_iteration=began,
            replica=replica,
            direction=direction,
        )

    def bases(self) -> list[tuple[int, int, str, dict[str, float]]]:
        """Normal wire times learned so far, for a snapshot."""
        return [
            (*key, bases)
            for key, s in sorted(self._series.items())
            if (bases := s.detector.bases())
        ]

    def restore_bases(self, rows: Iterable[tuple[int, int, str, Mapping[str, float]]]) -> None:
        """Inverse of :meth:`bases`, before the first sample."""
        for link, replica, direction, bases in rows:
            self._known_bases[link, replica, direction] = dict(bases)

    def delays(self) -> list[tuple[int, int, str, float]]:
        """Delays of the directions that are slow, for a snapshot."""
        return [
            (*key, s.detector.delay)
            for key, s in sorted(self._series.items())
            if s.detector.level is Level.SLOW
        ]

    def restore_delays(self, rows: Iterable[tuple[int, int, str, float]]) -> None:
        """Inverse of :meth:`delays`, before the first sample."""
        for link, replica, direction, delay in rows:
            self._known_delays[link, replica, direction] = delay


def _plannable(detector: DelayDetector) -> float:
    """One-way time to plan with. A base that is only a bound counts as nothing: it would make
    every busy receiver look like a slow wire."""
    return detector.wire_time if detector.base_is_exact else detector.delay
