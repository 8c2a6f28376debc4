"""Judges the directions of links that a rank receives: one detector per direction.

A late window counts little if something other than the link explains it: one of its two ranks had
no processor, or most links of the job are late at once, which the job's agent says. Links rarely
fail together, but machines stall.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median

from pipemorph.api.mesh import MeshShape
from pipemorph.control.observe.detector import (
    DelayDetector,
    Level,
    Thresholds,
    alarm_level,
)
from pipemorph.control.observe.series import NOTES, Key, Series, Window
from pipemorph.wire import Health, LinkSample, LinkState

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
"""Part of an alarm's evidence from which the agent is told that a link is suspect: its first late
window in a small job, and long before the alarm in a large one."""
SUSPECT_SECONDS = 0.2
"""How long a link is suspect after its newest late window."""
ANSWER_SECONDS = 0.5
"""How long an alarm waits for the agent's answer to the suspicion."""


class LinkBook:
    """The directions that one rank receives. Times are seconds by any one clock.

    ``longest_op(stage)``: longest op of a stage of this rank; infinite if unknown.
    """

    def __init__(
        self,
        mesh: MeshShape,
        *,
        thresholds: Thresholds,
        stale_after: float,
        longest_op: Callable[[int], float],
    ) -> None:
        self._mesh, self._longest_op = mesh, longest_op
        self._series: dict[Key, Series] = {}
        self.set(thresholds, stale_after)
        self._usual: Mapping[str, float] = {}
        self._rare: Mapping[str, float] = {}
        self.most_late = False
        """Whether most links of the job are late, as the agent says."""
        self.connected = False
        """Whether there is an agent that answers suspicions."""
        self.changed = False
        """Whether a window since this was last cleared was not as usual."""
        self.suspicion = self.answered = 0
        """Numbers of the newest suspicion, and of the newest one that the agent has answered."""
        self._suspected_at = float("-inf")
        """Time of the newest suspicion."""
        self._late_at: dict[int, float] = {}
        """Suspect links, and the time of the newest window that was late."""

    def set(self, thresholds: Thresholds, stale_after: float) -> None:
        """Judge by these from now on. Bases and states stay: windows change them, as usual."""
        series = (self._mesh.stages - 1) * self._mesh.columns * 2
        self._thresholds = replace(thresholds, alarm=alarm_level(series))
        self._stale_after = stale_after
        for each in self._series.values():
            each.detector.thresholds = self._thresholds

    def observe(self, samples: Iterable[LinkSample], now: float, *, inflated: bool = False) -> None:
        """Process windows. A window without an exact arrival may be too long by the longest op of
        its receiver. ``inflated``: whether the newest ops of this rank took longer than they
        can."""
        for sample in samples:
            if not sample.wire.count:
                continue
            key: Key = (sample.link, sample.replica, sample.direction)
            series = self._series.get(key)
            if series is None:
                series = self._add(key)
            if not self._is_usual(series, sample):
                self._judge(self._window(series, sample, inflated=inflated), now)
            self.changed |= now - series.seen_at > self._stale_after
            series.seen_at, series.transport = now, sample.transport
            series.sender_waited = sample.sender_waited
        self._expire(now)

    @staticmethod
    def _is_usual(series: Series, sample: LinkSample) -> bool:
        """Process a window that is as usual, as nearly all are. Returns whether it was."""
        if (
            not sample.wire.exact
            or sample.failed_over != series.failed_over
            or not series.detector.passes(sample.wire.p50, sample.route)
        ):
            return False
        series.spacings.clear()
        series.transfers.clear()
        if sample.latency is not None:
            series.well.append(sample.latency)
        return True

    def _window(self, series: Series, sample: LinkSample, *, inflated: bool) -> Window:
        exact = sample.wire.exact > 0
        # Of several upper bounds, the least is the closest.
        value = sample.wire.p50 if exact else sample.wire.min
        link, _, direction = series.key
        stage = link + 1 if direction == "forward" else link
        slack = 0.0 if exact else self._longest_op(stage)
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
            sample.sender_waited,
            sample.waited or 0.0,
            inflated or sample.sender_inflated,
        )

    def _judge(self, window: Window, now: float) -> None:
        series, detector = window.series, window.series.detector
        self.changed = True
        route, slack = window.route, window.slack
        late = detector.is_late(window.value, route=route, slack=slack) or detector.is_later(
            window.value, route=route, slack=slack
        )
        doubted = late and (self.most_late or self._is_explained(window))
        if window.failed_over != series.failed_over:
            self._fail_over(window)
        detector.observe(
            window.value,
            mark=window.mark,
            route=window.route,
            exact=window.exact,
            slack=window.slack,
            weight=DOUBTED_WEIGHT if doubted else 1.0,
            follows_base=window.refined,
            hold=self.connected and self._is_unanswered(now),
        )
        series.take(window)
        series.lower(self._usual)
        if late and detector.suspicion >= SUSPECT:
            link = series.key[0]
            if link not in self._late_at:
                self.suspicion, self._suspected_at = self.suspicion + 1, now
            self._late_at[link] = now

    def _is_unanswered(self, now: float) -> bool:
        """Whether the agent may still say that most links are late. A link that is not suspect yet
        is far from its alarm, unless it is late often."""
        waits = now - self._suspected_at < ANSWER_SECONDS
        return waits and self.answered < self.suspicion

    def _expire(self, now: float) -> None:
        for link in [k for k, at in self._late_at.items() if now - at >= SUSPECT_SECONDS]:
            del self._late_at[link]

    @property
    def suspects(self) -> list[int]:
        """Links of which a direction may turn slow soon."""
        return sorted(self._late_at)

    def answer(self, suspicion: int, *, most_late: bool) -> None:
        """Process the agent's answer to suspicions up to this number. If most links are late,
        evidence gathered before that was known counts little, too."""
        if most_late and not self.most_late:
            for series in self._series.values():
                series.detector.discount(DOUBTED_WEIGHT)
        self.most_late = most_late
        self.answered = max(self.answered, suspicion)

    def reconnect(self) -> None:
        """Let the agent of a new connection answer the present suspicion."""
        self.most_late, self.answered = False, 0

    def _add(self, key: Key) -> Series:
        """A direction without windows. Also replaces one."""
        series = self._series[key] = Series(key, DelayDetector(self._thresholds))
        return series

    def _fail_over(self, window: Window) -> None:
        """Note that the direct route of a direction broke, or is back. The route that replaces it
        may be slow from its first message on, so it is compared with links that use it already, or
        else with the route that broke."""
        series = window.series
        series.failed_over = window.failed_over
        known = dict(self._rare) | dict(self._usual)
        expected = known.get(window.route, series.detector.base)
        if series.failed_over and expected is not None:
            series.detector.expect(expected)

    @staticmethod
    def _is_explained(window: Window) -> bool:
        """Whether a window may be late because one of its ranks had no processor. Nothing delays
        the latency but the link and the sender."""
        series, detector = window.series, window.series.detector
        if detector.base is None:
            return False
        least = EXPLAINS * (window.value - window.slack - detector.wire_time)
        sent = max(window.sender_waited, series.sender_waited)
        usual = median(series.well) + detector.delay if series.well else None
        if window.latency is not None and usual is not None and window.latency - usual >= least:
            return sent >= least
        return max(sent, window.waited) >= least or window.inflated

    def compare(self, usual: Mapping[str, float], rare: Mapping[str, float]) -> None:
        """Compare all directions with the usual wire time of the job's directions on their route,
        from now on. Finds links that were slow from the start, so that their base was learned too
        high: messages between the stages of a job are alike. ``rare``: on routes of too few
        directions for that."""
        self._usual, self._rare, self.changed = usual, rare, True
        for series in self._series.values():
            series.lower(usual)

    def states(self, now: float) -> list[LinkState]:
        """The states of all directions with windows."""
        return [self._state(series, now) for series in self._series.values()]

    def _state(self, series: Series, now: float) -> LinkState:
        found = series.detector
        link, replica, direction = series.key
        slow, fresh = found.level is Level.SLOW, now - series.seen_at <= self._stale_after
        known = fresh and found.level is not Level.LEARNING
        return LinkState(
            link=link,
            health=Health.UNKNOWN if not known else Health.SLOW if slow else Health.HEALTHY,
            delay=round(found.delay, DIGITS),
            wire_time=round(series.plannable, DIGITS) if known or slow else 0.0,
            transfer=round(series.transfer, DIGITS),
            confidence=round(found.confidence, 4),
            in_doubt=slow
            and (found.suspected_at is not None or series.in_doubt or found.is_doubtful),
            since_iteration=found.changed_at,
            replica=replica,
            direction=direction,
            recent=tuple(round(each, DIGITS) for each in found.recent),
            failed_over=series.failed_over,
            bases={route: round(base, DIGITS) for route, base in series.bases.items()},
            route=found.route or "",
            transport=series.transport,
        )

    def restore(self, rows: Sequence[LinkState], now: float) -> None:
        """Begin with directions that were slow when earlier ranks ended, from whose windows alone
        nobody can tell what is normal. Each needs the usual evidence to become healthy. A detector
        that has learned what is normal knows better."""
        for row in rows:
            self.changed = True
            known = self._series.get(row.key)
            if known is not None and known.detector.level is not Level.LEARNING:
                continue
            series = self._add(row.key)
            series.seen_at = now
            bases = dict(row.bases)
            series.first = bases.pop(NOTES, None)
            for route, base in bases.items():
                series.detector.restore_base(route, base)
            series.detector.restore_slow(row.delay)
