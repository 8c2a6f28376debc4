"""Judges a job's links: one detector per direction and column.

The cost of a report is that of its windows and of the directions that are slow: nothing here walks
all series but :meth:`LinkBook.compare_peers`, :meth:`LinkBook.rest` of a link, and the rare calls
that say so.

While most links of a job are late, a late window counts for little: links rarely fail together, but
machines stall.

Where agents of parts observe a job, each has a book for the directions that its ranks receive. What
takes all of a job's directions, the job's agent finds from its own book and from what those agents
tell: links that are late, and normal wire times in buckets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from math import exp, log
from statistics import median
from typing import Protocol

from pipemorph.api.mesh import MeshShape
from pipemorph.control.observe.detector import (
    DelayDetector,
    Level,
    Thresholds,
    alarm_level,
)
from pipemorph.control.observe.series import LEAST_BASE, Key, Series, Window
from pipemorph.wire import Health, LinkSample, LinkState
from pipemorph.wire.parts import RouteBases

FORWARD, BACKWARD = "forward", "backward"

FEW_LINKS = 4
"""With fewer links, most of them may really be slow at once."""
TOGETHER_SECONDS = 0.15
"""Windows that end within this time count as simultaneous: ranks report every 50 ms, but not in
step."""
DOUBTED_WEIGHT = 1 / 8
"""Weight of a late window that something else than the link explains: most links are late at once,
which is mostly a machine that stalls for tens of milliseconds; or one of the two ranks waited for a
processor, or its ops took longer than they do. If the link is slow as well, detection takes 24
windows in a row."""
DIGITS = 7
"""Of seconds in states."""
EXPLAINS = 0.5
"""Part of a window's lateness for which a rank must have waited to explain it."""
SUSPECT = 0.25
"""Part of an alarm's evidence from which other agents are told that a link is late: its first late
window in a small job, and long before the alarm in a large one."""
LATE_SECONDS = 0.5
"""How long a link is told to be late after its newest late window."""
BUCKET, BUCKETS_APART = 0.01, 3
"""Relative width of a bucket of normal wire times; and buckets by which one must have moved to be
in another than before."""


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
        self._series: list[dict[Key, Series]] = [{} for _ in range(mesh.stages - 1)]
        """By link."""
        self.set(thresholds, stale_after)
        self._count = 0
        self._slow: dict[Key, Series] = {}
        self._judged_at = [float("-inf")] * (mesh.stages - 1)
        self._late_at = [float("-inf")] * (mesh.stages - 1)
        """Per link, times of the newest window that could be judged, and of the newest late one."""
        self._suspect_at = [float("-inf")] * (mesh.stages - 1)
        """Times of the newest window that is late and suspicious."""
        self.late_elsewhere: Collection[int] = ()
        self.judged_elsewhere: Collection[int] = ()
        """Links that are late, and that can be judged, in parts that other agents observe."""
        self.most_late: bool | None = None
        """Whether most links of the job are late, as the job's agent tells; None: found here."""
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

    def _all(self) -> Iterator[Series]:
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
        common = any(late_ones) and self.most_are_late(now)
        for window, late in zip(windows, late_ones, strict=True):
            doubted = late and (common or self._is_explained(window, now, ends))
            detector, was = window.series.detector, window.series.detector.level
            if window.failed_over != window.series.failed_over:
                self._fail_over(window)
            detector.observe(
                window.value,
                mark=window.mark,
                route=window.route,
                exact=window.exact,
                slack=window.slack,
                weight=DOUBTED_WEIGHT if doubted else 1.0,
                follows_base=window.refined,
            )
            window.series.take(window)
            self._note(window.series, was)
            if late and detector.suspicion >= SUSPECT:
                self._suspect_at[window.series.key[0]] = now

    def _unusual(self, samples: Sequence[LinkSample], now: float, ends: Ends) -> list[Window]:
        """Process the windows that are as usual, which nearly all are, and return the others. Those
        of one direction stay in order."""
        windows: list[Window] = []
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
                or sample.failed_over != series.failed_over
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

    def _note(self, series: Series, was: Level) -> None:
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

    def _window(self, sample: LinkSample, now: float, ends: Ends) -> Window:
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
        refined = False
        if not exact and sample.route.value == series.detector.route:
            known = series.refined(value - slack, value, sample.latency)
            if known is not None:
                value, slack, exact, refined = known, 0.0, True, True
        return Window(
            series,
            value,
            sample.iteration,
            sample.route.value,
            exact,
            refined,
            slack,
            sample.latency,
            sample.spacing,
            sample.failed_over,
            sender,
            receiver,
        )

    def _add(self, key: Key, now: float) -> Series:
        """A direction without windows. Also replaces one."""
        self._count += key not in self._series[key[0]]
        series = Series(key, DelayDetector(self._thresholds), now)
        self._series[key[0]][key] = series
        return series

    def _fail_over(self, window: Window) -> None:
        """Note that the direct route of a direction broke, or is back. The route that replaces it
        may be slow from its first message on, so it is compared with links that use it already, or
        else with the route that broke. Walks all series: it happens once to a link."""
        series, route = window.series, window.route
        series.failed_over = window.failed_over
        self._turned[series.key[0]] = None
        if not series.failed_over:
            return
        used = [
            base
            for each in self._all()
            if each.key[0] != series.key[0] and each.detector.route == route
            if (base := each.detector.base) is not None
        ]
        expected = sorted(used)[(len(used) - 1) // 4] if used else series.detector.base
        if expected is not None:
            series.detector.expect(expected)

    def _is_explained(self, window: Window, now: float, ends: Ends) -> bool:
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

    def most_are_late(self, now: float) -> bool:
        """Whether most links that are not slow already were late at this moment. The cause is then
        something they share, the machine or the job."""
        if self.most_late is not None:
            return self.most_late
        since = now - TOGETHER_SECONDS
        judged = _links(self._judged_at, since, self.judged_elsewhere)
        late = _links(self._late_at, since, self.late_elsewhere)
        return judged >= FEW_LINKS and 2 * late > judged

    def late(self, now: float) -> list[int]:
        """Links of which a direction may turn slow soon, for the job's agent."""
        since = now - LATE_SECONDS
        return [link for link, at in enumerate(self._suspect_at) if at >= since]

    def bases(self) -> list[RouteBases]:
        """Normal wire times of all directions, in buckets by route. Walks all of them. A little
        noise puts none into another bucket."""
        counts: dict[str, Counter[int]] = {}
        for series in self._all():
            base, route = series.detector.base, series.detector.route
            if base is None or route is None:
                continue
            now = bucket(base)
            if series.bucket is None or abs(now - series.bucket) >= BUCKETS_APART:
                series.bucket = now
            counts.setdefault(route, Counter())[series.bucket] += 1
        return [RouteBases(route=route, counts=dict(found)) for route, found in counts.items()]

    def compare_peers(
        self, elsewhere: Mapping[str, Mapping[int, int]] | None = None
    ) -> dict[str, float]:
        """Find links that were slow from the start, so that their base was learned too high.

        Messages between the stages of a job are alike, so a link's normal wire time should be close
        to that of its peers. The lower quartile is used, since several may be slow at once.
        ``elsewhere``: those of other parts, how many per route and bucket. Returns the usual wire
        time per route.
        """
        known: dict[str, list[tuple[float, int]]] = {
            route: [(middle(number), count) for number, count in counts.items()]
            for route, counts in (elsewhere or {}).items()
        }
        for series in self._all():
            base, route = series.detector.base, series.detector.route
            if base is not None and route is not None:
                known.setdefault(route, []).append((base, 1))
        usual = {}
        for route, found in known.items():
            count = sum(each for _, each in found)
            # Fewer cannot outvote the two directions of one link.
            if count >= 4:
                usual[route] = _at(found, (count - 1) // 4)
        self.lower_bases(usual)
        return usual

    def lower_bases(self, usual: Mapping[str, float]) -> None:
        """Compare all directions with the usual wire time of their route."""
        for series in self._all():
            base = usual.get(series.detector.route or "")
            was = series.detector.level
            if base is not None and series.detector.lower_base(base):
                self._note(series, was)

    @property
    def count(self) -> int:
        """Number of links."""
        return len(self._series)

    def directions(self, link: int) -> int:
        """Number of directions of a link with windows."""
        return len(self._series[link])

    def has(self, key: Key) -> bool:
        """Whether a direction has windows, or is known from before."""
        return key in self._series[key[0]]

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

    def _is_fresh(self, series: Series, now: float) -> bool:
        return now - series.seen_at <= self._stale_after

    def direction(self, key: Key, now: float) -> LinkState:
        """The state of a direction that is slow, or was lately."""
        link, column, direction = key
        series = self._series[link][key]
        found = series.detector
        if found.level is not Level.SLOW:
            return LinkState(
                link, Health.HEALTHY, since_iteration=found.changed_at, replica=column,
                direction=direction,
            )  # fmt: skip
        return LinkState(
            link=link,
            health=Health.SLOW if self._is_fresh(series, now) else Health.UNKNOWN,
            delay=round(found.delay, DIGITS),
            wire_time=round(series.plannable, DIGITS),
            transfer=round(series.transfer, DIGITS),
            confidence=round(found.confidence, 4),
            in_doubt=found.suspected_at is not None or series.in_doubt or found.is_doubtful,
            since_iteration=found.changed_at,
            replica=column,
            direction=direction,
            recent=tuple(round(each, DIGITS) for each in found.recent),
            failed_over=series.failed_over,
            bases={route: round(base, DIGITS) for route, base in found.bases().items()},
        )

    def rest(self, link: int, now: float, elsewhere: Iterable[LinkState] = ()) -> LinkState:
        """The state of those directions of a link that are not slow. Walks all of the link's.
        ``elsewhere``: the states of those of other parts."""
        return _merged(link, (self._rest(link, now), *elsewhere))

    def _rest(self, link: int, now: float) -> LinkState:
        worst, least, longest, newest = None, 1.0, -1.0, None
        failed_over = False
        for series in self._series[link].values():
            found = series.detector
            if found.level is not Level.HEALTHY or not self._is_fresh(series, now):
                continue
            wire = found.wire_time
            if wire > longest:
                worst, longest = series, wire
            least = min(least, found.confidence)
            failed_over |= series.failed_over
            if found.changed_at is not None and (newest is None or found.changed_at > newest):
                newest = found.changed_at
        if worst is None:
            return LinkState(link, Health.UNKNOWN)
        return LinkState(
            link=link,
            health=Health.HEALTHY,
            wire_time=round(worst.plannable, DIGITS),
            confidence=round(least, 4),
            since_iteration=newest,
            replica=worst.key[1],
            direction=worst.key[2],
            failed_over=failed_over,
        )

    def restore(self, rows: Iterable[LinkState], now: float) -> None:
        """Start with directions that were slow when an earlier agent ended, for which windows of
        this one cannot tell what is normal. Each needs the usual evidence to become healthy."""
        for row in rows:
            series = self._add(row.key, now)
            for route, base in row.bases.items():
                series.detector.restore_base(route, base)
            series.detector.restore_slow(row.delay)
            self._note(series, Level.LEARNING)


def bucket(base: float) -> int:
    """The bucket of a normal wire time."""
    return round(log(max(base, LEAST_BASE)) / BUCKET)


def middle(number: int) -> float:
    """The wire time in the middle of a bucket, seconds."""
    return exp(number * BUCKET)


def _at(counted: Iterable[tuple[float, int]], index: int) -> float:
    """Of values and their counts, the value at ``index`` of all of them in order."""
    for value, count in sorted(counted):
        index -= count
        if index < 0:
            return value
    raise IndexError(index)


def _links(times: Sequence[float], since: float, elsewhere: Collection[int]) -> int:
    """Number of links with a time from ``since`` on, here or elsewhere."""
    return sum(at >= since or link in elsewhere for link, at in enumerate(times))


def _merged(link: int, states: Iterable[LinkState]) -> LinkState:
    worst, least, newest, several, failed_over = None, 1.0, None, False, False
    for state in states:
        if state.health is not Health.HEALTHY:
            continue
        failed_over |= state.failed_over
        if worst is None:
            worst, least, newest = state, state.confidence, state.since_iteration
            continue
        several = True
        if state.wire_time > worst.wire_time:
            worst = state
        least = min(least, state.confidence)
        since = state.since_iteration
        if since is not None and (newest is None or since > newest):
            newest = since
    if worst is None:
        return LinkState(link, Health.UNKNOWN)
    if not several:
        return worst
    return replace(worst, confidence=least, since_iteration=newest, failed_over=failed_over)


def _ranks_of(sample: LinkSample) -> tuple[tuple[int, int], tuple[int, int]]:
    """The sender and the receiver of a link's direction, as stage and column."""
    lower, upper = (sample.link, sample.replica), (sample.link + 1, sample.replica)
    return (lower, upper) if sample.direction == FORWARD else (upper, lower)
