"""Health of a job's links: one detector per direction and column, one state per link.

A plan has one one-way delay per link. So a link is as slow as its slowest direction in its slowest
column: an activation and its gradient cross the link once each way, and the slower way determines
the slackness that is needed. Replicas may have plans of their own, so each of them with a slow link
has such states, too.

While most links of a job are late, a late window counts for little: links rarely fail together, but
machines stall.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import isfinite
from statistics import median
from typing import Any, NamedTuple, Protocol

from pipemorph.api.mesh import MeshShape
from pipemorph.control.observe.detector import (
    RECENT,
    DelayDetector,
    Level,
    Thresholds,
    alarm_level,
)
from pipemorph.planning.ir import Route
from pipemorph.wire import LinkSample

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
EXPLAINS = 0.5
"""Part of a window's lateness for which a rank must have waited to explain it."""


class Health(StrEnum):
    """State of a link. UNKNOWN: no samples, too few to know its base, or no recent ones."""

    HEALTHY = "healthy"
    SLOW = "slow"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class LinkHealth:
    """The estimated state of one link. Times in seconds, one way."""

    link: int
    health: Health
    delay: float = 0.0
    """Above the normal wire time; 0 unless slow."""
    wire_time: float = 0.0
    """Current one-way time of a message: normal wire time plus delay."""
    transfer: float = 0.0
    """Of the wire time, how long a message occupies the link, if that is the larger part: messages
    are sent one at a time, so that more queues do not help. 0 if unknown."""
    confidence: float = 0.0
    """Probability that ``health`` is right."""
    in_doubt: bool = False
    """Slow, but the newest windows suggest recovery: the delay is about to change."""
    since_iteration: int | None = None
    """Iteration of the first window that showed this state."""
    replica: int = 0
    direction: str = FORWARD
    """Column (see :class:`~pipemorph.api.mesh.MeshShape`) and direction with the longest wire
    time."""
    recent: tuple[float, ...] = ()
    """Delays of the newest windows, oldest first, if they vary; else empty. See
    :attr:`~pipemorph.control.observe.detector.DelayDetector.recent`."""
    column: str = ""
    """The column's name for messages; empty if there is only one."""

    @property
    def name(self) -> str:
        """``link 2 of replica 1, tensor 0``."""
        return f"link {self.link}{' of ' if self.column else ''}{self.column}"

    def record(self) -> dict[str, Any]:
        """For report.json and status."""
        return {
            "link": self.link,
            "health": self.health.value,
            "delay": round(self.delay, 6),
            "wire_time": round(self.wire_time, 6),
            "transfer": round(self.transfer, 6),
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
    """Times of the newest window that could be judged, and of the newest late one."""
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


Key = tuple[int, int, str]
"""link, replica, direction"""


class LinkBook:
    """All links of a job. Bounded: one detector per link, column and direction."""

    def __init__(self, mesh: MeshShape, *, thresholds: Thresholds, stale_after: float) -> None:
        self._mesh, self._links = mesh, mesh.stages - 1
        series = self._links * mesh.columns * len((FORWARD, BACKWARD))
        self._thresholds = replace(thresholds, alarm=alarm_level(series))
        self._stale_after = stale_after
        self._series: dict[Key, _Series] = {}
        self._waited: dict[tuple[int, int], tuple[float, float]] = {}
        """Per rank, its newest wait for a processor, and when it was reported. Seconds."""
        self._known_bases: dict[Key, dict[str, float]] = {}
        self._known_delays: dict[Key, float] = {}

    def observe(self, samples: Sequence[LinkSample], now: float, *, ends: Ends) -> None:
        """Process the windows of a report. A window without an exact arrival may be too long by the
        longest op of its receiver."""
        windows = [self._window(s, now, ends) for s in samples if s.wire.count > 0]
        late_ones: list[bool] = []
        for window in windows:
            late = window.series.detector.is_late(
                window.value, route=window.route, slack=window.slack
            )
            if late is not None:
                window.series.judged_at = now
            if late:
                window.series.late_at = now
            later = window.series.detector.is_later(
                window.value, route=window.route, slack=window.slack
            )
            late_ones.append(late is True or later)
        common = any(late_ones) and self._most_are_late(now)
        for window, late in zip(windows, late_ones, strict=True):
            doubted = late and (common or self._is_explained(window, now, ends))
            window.series.detector.observe(
                window.value,
                mark=window.mark,
                route=window.route,
                exact=window.exact,
                slack=window.slack,
                weight=DOUBTED_WEIGHT if doubted else 1.0,
            )
            window.series.take(window)

    def _window(self, sample: LinkSample, now: float, ends: Ends) -> _Window:
        key = (sample.link, sample.replica, sample.direction)
        series = self._series.get(key)
        if series is None:
            series = self._series[key] = _Series(DelayDetector(self._thresholds), now)
            for route, base in self._known_bases.get(key, {}).items():
                series.detector.restore_base(route, base)
            if (delay := self._known_delays.get(key)) is not None:
                series.detector.restore_slow(delay)
        series.seen_at = max(series.seen_at, now)
        lower, upper = (sample.link, sample.replica), (sample.link + 1, sample.replica)
        sender, receiver = (lower, upper) if sample.direction == FORWARD else (upper, lower)
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
        judged = {key[0] for key, s in self._series.items() if s.judged_at >= since}
        late = {key[0] for key, s in self._series.items() if s.late_at >= since}
        return len(judged) >= FEW_LINKS and 2 * len(late) > len(judged)

    def compare_peers(self) -> None:
        """Find links that were slow from the start, so that their base was learned too high.

        Messages between the stages of a job are alike, so a link's normal wire time should be close
        to that of its peers. The lower quartile is used, since several may be slow at once.
        """
        by_route: dict[str | None, list[DelayDetector]] = {}
        for series in self._series.values():
            if series.detector.base is not None:
                by_route.setdefault(series.detector.route, []).append(series.detector)
        for detectors in by_route.values():
            # Fewer cannot outvote the two directions of one link.
            if len(detectors) < 4:
                continue
            bases = sorted(d.base or 0.0 for d in detectors)
            usual = bases[(len(bases) - 1) // 4]
            for detector in detectors:
                detector.lower_base(usual)

    def is_silent(self, now: float) -> bool:
        """Whether all links have been without samples for longer than ``stale_after``."""
        return all(now - s.seen_at > self._stale_after for s in self._series.values())

    @property
    def any_slow(self) -> bool:
        """Whether any direction of any link is slow, with or without recent samples."""
        return any(s.detector.level is Level.SLOW for s in self._series.values())

    def states(self, now: float) -> tuple[LinkHealth, ...]:
        """One state per link."""
        by_link: dict[int, list[tuple[Key, _Series]]] = {}
        for key, series in self._series.items():
            by_link.setdefault(key[0], []).append((key, series))
        return tuple(self._state(link, by_link.get(link, ()), now) for link in range(self._links))

    def own_states(
        self, states: Sequence[LinkHealth], now: float
    ) -> list[tuple[tuple[int, ...], tuple[LinkHealth, ...]]]:
        """Replicas, and one state per link of these: each that has a slow link, and all others
        together. Empty if there is one replica, or no link is slow.

        ``states``: those of all replicas together. Links that are well are as in any replica.
        """
        mesh = self._mesh
        if mesh.replicas == 1:
            return []
        slow: dict[int, dict[int, list[tuple[Key, _Series]]]] = {}
        for key, series in self._series.items():
            if series.detector.level is Level.SLOW:
                slow.setdefault(mesh.replica_of(key[1]), {}).setdefault(key[0], [])
        if not slow:
            return []
        well: dict[int, list[tuple[Key, _Series]]] = {
            link: [] for found in slow.values() for link in found
        }
        for key, series in self._series.items():
            if key[0] in well:
                found = slow.get(mesh.replica_of(key[1]), {}).get(key[0], well[key[0]])
                found.append((key, series))
        usual = tuple(
            self._state(link, well[link], now) if link in well else state
            for link, state in enumerate(states)
        )
        own: list[tuple[tuple[int, ...], tuple[LinkHealth, ...]]] = [
            (
                (replica,),
                tuple(
                    self._state(link, found[link], now) if link in found else state
                    for link, state in enumerate(usual)
                ),
            )
            for replica, found in sorted(slow.items())
        ]
        others = tuple(replica for replica in range(mesh.replicas) if replica not in slow)
        return [*own, (others, usual)] if others else own

    def _state(
        self, link: int, all_series: Iterable[tuple[Key, _Series]], now: float
    ) -> LinkHealth:
        if self._mesh.placed[link] == self._mesh.placed[link + 1]:
            # Within a rank, where nothing is sent.
            return LinkHealth(link, Health.HEALTHY)
        by_key = dict(all_series)
        fresh = [
            (key, series.detector)
            for key, series in by_key.items()
            if now - series.seen_at <= self._stale_after
            and series.detector.level is not Level.LEARNING
        ]
        if not fresh:
            return LinkHealth(link, Health.UNKNOWN)
        slow = [(key, d) for key, d in fresh if d.level is Level.SLOW]
        key, worst = max(slow or fresh, key=lambda pair: pair[1].wire_time)
        _, replica, direction = key
        since = [d.changed_at for _, d in slow or fresh if d.changed_at is not None]
        # Slow since the first direction became slow; healthy since the last one recovered.
        began = (min if slow else max)(since) if since else None
        return LinkHealth(
            link=link,
            health=Health.SLOW if slow else Health.HEALTHY,
            delay=max((d.delay for _, d in slow), default=0.0),
            wire_time=_plannable(by_key[key]),
            transfer=(transfer := by_key[key].transfer),
            recent=() if transfer else worst.recent,
            confidence=max(d.confidence for _, d in slow)
            if slow
            else min(d.confidence for _, d in fresh),
            in_doubt=any(d.suspected_at is not None for _, d in slow),
            since_iteration=began,
            replica=replica,
            direction=direction,
            column=self._mesh.column_name(replica),
        )

    def bases(self) -> list[tuple[int, int, str, dict[str, float]]]:
        """Normal wire times learned so far, for a snapshot."""
        return [
            (*key, bases)
            for key, s in sorted(self._series.items())
            if (bases := s.detector.bases())
        ]

    def restore_bases(self, rows: Iterable[tuple[int, int, str, Mapping[str, float]]]) -> None:
        """Inverse of :meth:`bases`. Call before the first sample."""
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
        """Inverse of :meth:`delays`. Call before the first sample."""
        for link, replica, direction, delay in rows:
            self._known_delays[link, replica, direction] = delay


def _plannable(series: _Series) -> float:
    """One-way time for the planner. A base that is only an upper bound counts as a small part of
    the op that hides it: as a whole, every busy receiver would look like a slow link; as nothing,
    plans would have no room for the little time that every message takes."""
    detector = series.detector
    if detector.base_is_exact:
        return detector.wire_time
    return detector.delay + min(detector.base or 0.0, HIDDEN * series.op)
