"""Judges a job's links: one detector per direction and column.

The cost of a report is that of its windows and of the directions that are slow: nothing here walks
all series but :meth:`LinkBook.compare_peers`, :meth:`LinkBook.rest` of a link, and the rare calls
that say so.

While most links of a job are late, a late window counts for little: links rarely fail together, but
machines stall.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from math import isfinite
from statistics import median
from typing import NamedTuple, Protocol

from pipemorph.api.mesh import MeshShape
from pipemorph.control.observe.detector import (
    RECENT,
    DelayDetector,
    Level,
    Thresholds,
    alarm_level,
)
from pipemorph.planning.ir import Route
from pipemorph.wire import DirectionState, LinkSample, LinkState, SlowDirection
from pipemorph.wire.states import Direction

FORWARD, BACKWARD = "forward", "backward"

FEW_LINKS = 4
"""With fewer links, most of them may really be slow at once."""
TOGETHER_SECONDS = 0.15
"""Windows that end within this time count as simultaneous: ranks report every 50 ms, but not in
step."""
NARROW = 0.5
"""A link is narrow if this part of a wire time or more is a message's transfer. It shows in two
ways. A few bytes that leave with the message do not take as long (the direct route, from the first
window). And messages that wait for each other arrive that far apart: if they only travelled for
long, they would arrive as close together as they were sent (the delegated route)."""
FEW_SPACINGS = 5
"""Windows that show it in the spacing of arrivals."""
DOUBTED_WEIGHT = 1 / 8
"""Weight of a late window that something else than the link explains: most links are late at once,
which is mostly a machine that stalls for tens of milliseconds; or one of the two ranks waited for a
processor, or its ops took longer than they do. If the link is slow as well, detection takes 24
windows in a row."""
HIDDEN = 0.1
"""Part of an op that a wire time is assumed to take if ops always hide it."""
DIGITS = 7
"""Of seconds in states."""
EXPLAINS = 0.5
"""Part of a window's lateness for which a rank must have waited to explain it."""


Key = tuple[int, int, Direction]
"""link, column, direction"""


@dataclass
class _Series:
    key: Key
    detector: DelayDetector
    seen_at: float
    spacings: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    """Between arrivals on the delegated route while slow, see :class:`LinkSample`."""
    transfers: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=RECENT))
    """Bounds of the wire time beyond the latency, while slow or suspected to be."""
    op: float = 0.0
    """Of the receiver, which hid the newest arrival that was not seen as it happened."""
    well: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    """Latencies while healthy."""

    @property
    def transfer(self) -> float:
        """How long a message occupies the link; 0 if that is unknown or the smaller part."""
        if self.detector.level is not Level.SLOW:
            return 0.0
        wire = self.detector.wire_time
        if len(self.spacings) >= FEW_SPACINGS:
            # Of messages whose delay varies, some arrive close together.
            transfer = sorted(self.spacings)[len(self.spacings) // 10]
        elif self.transfers:
            transfer = median([end for bounds in self.transfers for end in bounds])
        else:
            return 0.0
        return min(transfer, wire) if transfer >= NARROW * wire else 0.0

    def take(self, window: _Window) -> None:
        """Process the spacing of arrivals and the latency, after the wire time. Spacing on the
        direct route says nothing: it has one queue, where messages arrive apart from each other
        whatever the reason."""
        slow, latency = self.detector.level is Level.SLOW, window.latency
        self.op = window.slack if isfinite(window.slack) and window.slack else self.op
        if not slow:
            self.spacings.clear()
        elif window.spacing is not None and window.route == Route.DELEGATED:
            self.spacings.append(window.spacing)
        if not slow and not self.detector.suspects:
            self.transfers.clear()
            if latency is not None:
                self.well.append(latency)
        elif latency is not None:
            beyond = window.value - latency
            self.transfers.append((beyond - window.slack, beyond))

    def refined(self, low: float, high: float, latency: float | None) -> float | None:
        """The wire time from its bounds and the latency, which is exact even if the receiver
        computes: what is normal without latency, and the latency. None if that is unknown, or not
        within the bounds."""
        base = self.detector.base
        if latency is None or base is None or not self.well:
            return None
        value = max(0.0, base - median(self.well)) + latency
        return value if low <= value <= high else None


class _Window(NamedTuple):
    """One sample, as input of a detector."""

    series: _Series
    value: float
    mark: int
    route: str
    exact: bool
    slack: float
    latency: float | None
    spacing: float | None
    sender: tuple[int, int]
    receiver: tuple[int, int]
    """Their ranks: stage and column."""


class Ends(Protocol):
    """What is known of the ranks at the ends of links."""

    def longest_op(self, stage: int) -> float:
        """Longest op of a stage in seconds, infinite if unknown."""

    def inflated(self, stage: int, replica: int) -> bool:
        """Whether the newest ops of a rank took longer than they can."""


class LinkBook:
    """All links of a job. Bounded: one detector per link, column and direction."""

    def __init__(self, mesh: MeshShape, *, thresholds: Thresholds, stale_after: float) -> None:
        self._mesh = mesh
        self._series: list[dict[Key, _Series]] = [{} for _ in range(mesh.stages - 1)]
        """By link."""
        self.set(thresholds, stale_after)
        self._count = 0
        self._slow: dict[Key, _Series] = {}
        self._judged_at = [float("-inf")] * (mesh.stages - 1)
        self._late_at = [float("-inf")] * (mesh.stages - 1)
        """Per link, times of the newest window that could be judged, and of the newest late one."""
        self._waited: dict[tuple[int, int], tuple[float, float]] = {}
        """Per rank, its newest wait for a processor, and when it was reported. Seconds."""
        self._moved: dict[Key, None] = {}
        """Slow directions with windows since :meth:`touched`, those that wait the longest first."""
        self._flipped: dict[Key, None] = {}
        """Directions that have turned slow or well since then."""
        self._turned: dict[int, None] = {}
        """Links of which a direction has changed its state, or is heard of again, since
        :meth:`turned`."""

    def set(self, thresholds: Thresholds, stale_after: float) -> None:
        """Judge by these from now on. Bases and states stay: windows change them, as usual."""
        series = (self._mesh.stages - 1) * self._mesh.columns * len((FORWARD, BACKWARD))
        self._thresholds = replace(thresholds, alarm=alarm_level(series))
        self._stale_after = stale_after
        for each in self._all():
            each.detector.thresholds = self._thresholds

    def _all(self) -> Iterator[_Series]:
        for found in self._series:
            yield from found.values()

    def __len__(self) -> int:
        """Number of directions with windows."""
        return self._count

    def observe(self, samples: Sequence[LinkSample], now: float, *, ends: Ends) -> None:
        """Process the windows of a report. A window without an exact arrival may be too long by the
        longest op of its receiver."""
        windows = self._unusual(samples, now, ends)
        late_ones: list[bool] = []
        for window in windows:
            link = window.series.key[0]
            late = window.series.detector.is_late(
                window.value, route=window.route, slack=window.slack
            )
            if late is not None:
                self._judged_at[link] = now
            if late:
                self._late_at[link] = now
            later = window.series.detector.is_later(
                window.value, route=window.route, slack=window.slack
            )
            late_ones.append(late is True or later)
        common = any(late_ones) and self._most_are_late(now)
        for window, late in zip(windows, late_ones, strict=True):
            doubted = late and (common or self._is_explained(window, now, ends))
            detector, was = window.series.detector, window.series.detector.level
            detector.observe(
                window.value,
                mark=window.mark,
                route=window.route,
                exact=window.exact,
                slack=window.slack,
                weight=DOUBTED_WEIGHT if doubted else 1.0,
            )
            window.series.take(window)
            self._note(window.series, was)

    def _unusual(self, samples: Sequence[LinkSample], now: float, ends: Ends) -> list[_Window]:
        """Process the windows that are as usual, which nearly all are, and return the others. Those
        of one direction stay in order."""
        windows: list[_Window] = []
        waiting: set[Key] = set()
        for sample in samples:
            wire, link = sample.wire, sample.link
            if not wire.count:
                continue
            key: Key = (link, sample.replica, sample.direction)
            series = self._series[link].get(key)
            if (
                series is None
                or not wire.exact
                or key in waiting
                or now - series.seen_at > self._stale_after
                or not series.detector.passes(wire.p50, sample.route)
            ):
                windows.append(self._window(sample, now, ends))
                waiting.add(key)
                continue
            series.seen_at = max(series.seen_at, now)
            self._judged_at[link] = now
            if series.spacings:
                series.spacings.clear()
            if series.transfers:
                series.transfers.clear()
            if sample.latency is not None:
                series.well.append(sample.latency)
            if sample.waited is not None:
                self._waited[_ranks_of(sample)[1]] = (sample.waited, now)
        return windows

    def _note(self, series: _Series, was: Level) -> None:
        """Note what has become of a direction that was at the level ``was``."""
        level, key = series.detector.level, series.key
        if level is was:
            if level is Level.SLOW:
                self._moved[key] = None
            return
        self._turned[key[0]] = None
        if level is Level.SLOW:
            self._slow[key] = series
        elif self._slow.pop(key, None) is None:
            return  # It has learned its base.
        self._flipped[key] = None
        self._moved.pop(key, None)

    def _window(self, sample: LinkSample, now: float, ends: Ends) -> _Window:
        key: Key = (sample.link, sample.replica, sample.direction)
        series = self._series[sample.link].get(key)
        if series is None:
            series = self._add(key, now)
        if not self._is_fresh(series, now):
            self._turned[sample.link] = None
        series.seen_at = max(series.seen_at, now)
        sender, receiver = _ranks_of(sample)
        if sample.waited is not None:
            self._waited[receiver] = (sample.waited, now)
        exact = sample.wire.exact > 0
        # Of several upper bounds, the least is the closest.
        value = sample.wire.p50 if exact else sample.wire.min
        slack = 0.0 if exact else ends.longest_op(receiver[0])
        if not exact and sample.route.value == series.detector.route:
            refined = series.refined(value - slack, value, sample.latency)
            if refined is not None:
                value, slack, exact = refined, 0.0, True
        return _Window(
            series,
            value,
            sample.iteration,
            sample.route.value,
            exact,
            slack,
            sample.latency,
            sample.spacing,
            sender,
            receiver,
        )

    def _add(self, key: Key, now: float) -> _Series:
        """A direction without windows. Also replaces one."""
        self._count += key not in self._series[key[0]]
        series = _Series(key, DelayDetector(self._thresholds), now)
        self._series[key[0]][key] = series
        return series

    def _is_explained(self, window: _Window, now: float, ends: Ends) -> bool:
        """Whether a window may be late because one of its ranks had no processor. Nothing delays
        the latency but the link and the sender."""
        detector = window.series.detector
        if detector.base is None:
            return False
        least = EXPLAINS * (window.value - window.slack - detector.wire_time)
        sent, received = (self._waits(rank, now) for rank in (window.sender, window.receiver))
        well = window.series.well
        usual = median(well) + detector.delay if well else None
        if window.latency is not None and usual is not None and window.latency - usual >= least:
            return sent >= least
        if max(sent, received) >= least:
            return True
        return ends.inflated(*window.sender) or ends.inflated(*window.receiver)

    def _waits(self, rank: tuple[int, int], now: float) -> float:
        waited, at = self._waited.get(rank, (0.0, now))
        return waited if now - at <= TOGETHER_SECONDS else 0.0

    def _most_are_late(self, now: float) -> bool:
        """Whether most links that are not slow already were late at this moment. The cause is then
        something they share, the machine or the job."""
        since = now - TOGETHER_SECONDS
        judged = sum(at >= since for at in self._judged_at)
        late = sum(at >= since for at in self._late_at)
        return judged >= FEW_LINKS and 2 * late > judged

    def compare_peers(self) -> None:
        """Find links that were slow from the start, so that their base was learned too high.

        Messages between the stages of a job are alike, so a link's normal wire time should be close
        to that of its peers. The lower quartile is used, since several may be slow at once.
        """
        by_route: dict[str | None, list[tuple[float, _Series]]] = {}
        for series in self._all():
            if (base := series.detector.base) is not None:
                by_route.setdefault(series.detector.route, []).append((base, series))
        for found in by_route.values():
            # Fewer cannot outvote the two directions of one link.
            if len(found) < 4:
                continue
            usual = sorted(base for base, _ in found)[(len(found) - 1) // 4]
            for _, series in found:
                was = series.detector.level
                if series.detector.lower_base(usual):
                    self._note(series, was)

    @property
    def count(self) -> int:
        """Number of links."""
        return len(self._series)

    def directions(self, link: int) -> int:
        """Number of directions of a link with windows."""
        return len(self._series[link])

    @property
    def any_slow(self) -> bool:
        """Whether any direction of any link is slow, with or without recent samples."""
        return bool(self._slow)

    def silent(self, now: float, most: int) -> list[Key]:
        """At most ``most`` slow directions without recent windows."""
        return [key for key in islice(self._slow, most) if not self._is_fresh(self._slow[key], now)]

    def touched(self, *, moves: int, turns: int) -> list[Key]:
        """At most ``turns`` directions that have turned slow or well since they were last returned
        here, and at most ``moves`` that are slow and have windows since; those that wait the
        longest."""
        found = []
        for keys, most in ((self._flipped, turns), (self._moved, moves)):
            for key in list(islice(keys, most)):
                del keys[key]
                found.append(key)
        return found

    def turned(self, most: int) -> list[int]:
        """Links of which a direction has changed its state since the last call: those that wait the
        longest, with at most ``most`` directions together, or one."""
        found: list[int] = []
        for link in list(self._turned):
            most -= len(self._series[link])
            if found and most < 0:
                break
            del self._turned[link]
            found.append(link)
        return found

    def _is_fresh(self, series: _Series, now: float) -> bool:
        return now - series.seen_at <= self._stale_after

    def direction(self, key: Key, now: float) -> DirectionState:
        """The state of a direction that is slow, or was lately."""
        link, column, direction = key
        series = self._series[link][key]
        found = series.detector
        if found.level is not Level.SLOW:
            return DirectionState(
                link=link,
                column=column,
                direction=direction,
                health="healthy",
                since_iteration=found.changed_at,
                recent=(),
            )
        transfer = series.transfer
        # Without validation: this runs with each window of a slow direction.
        return DirectionState.model_construct(
            link=link,
            column=column,
            direction=direction,
            health="slow" if self._is_fresh(series, now) else "unknown",
            delay=round(found.delay, DIGITS),
            wire_time=round(_plannable(series), DIGITS),
            transfer=round(transfer, DIGITS),
            confidence=round(found.confidence, 4),
            in_doubt=found.suspected_at is not None,
            since_iteration=found.changed_at,
            recent=() if transfer else tuple(round(each, DIGITS) for each in found.recent),
            bases={route: round(base, DIGITS) for route, base in found.bases().items()},
        )

    def rest(self, link: int, now: float) -> LinkState:
        """The state of those directions of a link that are not slow. Walks all of the link's."""
        worst, least, longest, newest = None, 1.0, -1.0, None
        for series in self._series[link].values():
            found = series.detector
            if found.level is not Level.HEALTHY or not self._is_fresh(series, now):
                continue
            wire = found.wire_time
            if wire > longest:
                worst, longest = series, wire
            least = min(least, found.confidence)
            if found.changed_at is not None and (newest is None or found.changed_at > newest):
                newest = found.changed_at
        if worst is None:
            return LinkState(link=link, health="unknown")
        return LinkState.model_construct(
            link=link,
            health="healthy",
            wire_time=round(_plannable(worst), DIGITS),
            confidence=round(least, 4),
            since_iteration=newest,
            column=worst.key[1],
            direction=worst.key[2],
        )

    def restore(self, rows: Iterable[SlowDirection], now: float) -> None:
        """Start with directions that were slow when an earlier agent ended, for which windows of
        this one cannot tell what is normal. Each needs the usual evidence to become healthy."""
        for row in rows:
            series = self._add((row.link, row.column, row.direction), now)
            for route, base in row.bases.items():
                series.detector.restore_base(route, base)
            series.detector.restore_slow(row.delay)
            self._note(series, Level.LEARNING)


def _ranks_of(sample: LinkSample) -> tuple[tuple[int, int], tuple[int, int]]:
    """The sender and the receiver of a link's direction, as stage and column."""
    lower, upper = (sample.link, sample.replica), (sample.link + 1, sample.replica)
    return (lower, upper) if sample.direction == FORWARD else (upper, lower)


def _plannable(series: _Series) -> float:
    """One-way time for the planner. A base that is only an upper bound counts as a small part of
    the op that hides it: as a whole, every busy receiver would look like a slow link; as nothing,
    plans would have no room for the little time that every message takes."""
    detector = series.detector
    if detector.base_is_exact:
        return detector.wire_time
    return detector.delay + min(detector.base or 0.0, HIDDEN * series.op)
