"""Judges the directions of links that a rank receives: one detector per direction.

A late window counts little if something other than the link explains it: one of its two ranks had
no processor, or the job's agent reports that most links are late at once. Links rarely fail
together, but machines stall.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median

from pipemorph.detection.detector import (
    DelayDetector,
    DetectorLevel,
    DetectorThresholds,
    compute_alarm_level,
)
from pipemorph.detection.direction_series import (
    NOTES,
    DirectionKey,
    DirectionSeries,
    DirectionWindow,
)
from pipemorph.protocol import Health, LinkSample, LinkState
from pipemorph.spec.mesh import MeshShape

DOUBTED_WEIGHT = 1 / 8
"""Weight of a late window that something else than the link explains: most links are late at once,
which is mostly a machine that stalls for tens of milliseconds; or one of the two ranks waited for a
processor, or its ops took longer than usual. If the link is slow, too, detection takes 24 windows
in a row."""
STATE_DIGITS = 7
"""Digits of seconds in states."""
EXPLAINING_FRACTION = 0.5
"""Fraction of a window's lateness for which a rank must have waited to explain it."""
SUSPECT_EVIDENCE = 0.25
"""Fraction of an alarm's evidence from which a link is reported as suspect: at its first late
window in a small job, and long before the alarm in a large one."""
SUSPECT_SECONDS = 0.2
"""Seconds for which a link is suspect after its newest late window."""
ANSWER_SECONDS = 0.5
"""Seconds for which an alarm waits for the agent's answer to the suspicion."""


class LinkMonitor:
    """Directions that one rank receives. Times are seconds by any one clock.

    ``longest_op(stage)``: longest op of a stage of this rank; infinite if unknown.
    """

    def __init__(
        self,
        mesh: MeshShape,
        *,
        thresholds: DetectorThresholds,
        stale_after: float,
        longest_op: Callable[[int], float],
    ) -> None:
        self._mesh, self._longest_op = mesh, longest_op
        self._series: dict[DirectionKey, DirectionSeries] = {}
        self.change_settings(thresholds, stale_after)
        self._usual: Mapping[str, float] = {}
        self._usual_on_rare_routes: Mapping[str, float] = {}
        self.most_links_late = False
        """True if most links of the job are late, as the agent reports."""
        self.has_agent = False
        """True if there is an agent that answers suspicions."""
        self.has_unusual_window = False
        """True if a window was unusual since this was last cleared."""
        self.suspicion_number = self.answered_number = 0
        """Numbers of the newest suspicion, and of the newest one that the agent has answered."""
        self._suspected_at = float("-inf")
        """Time of the newest suspicion."""
        self._late_at: dict[int, float] = {}
        """Suspect links, and the time of the newest window that was late."""

    def change_settings(self, thresholds: DetectorThresholds, stale_after: float) -> None:
        """Change the settings. Bases and states stay: windows change them, as usual."""
        series = (self._mesh.stages - 1) * self._mesh.columns * 2
        self._thresholds = replace(thresholds, alarm=compute_alarm_level(series))
        self._stale_after = stale_after
        for each in self._series.values():
            each.detector.thresholds = self._thresholds

    def observe_samples(
        self, samples: Iterable[LinkSample], now: float, *, inflated: bool = False
    ) -> None:
        """Process windows. One without an exact arrival may be too long by the longest op of its
        receiver. ``inflated``: True if the newest ops of this rank took longer than they can."""
        for sample in samples:
            if not sample.wire.count:
                continue
            key: DirectionKey = (sample.link, sample.replica, sample.direction)
            series = self._series.get(key)
            if series is None:
                series = self._add_direction(key)
            if not self._observe_usual_sample(series, sample):
                self._judge_window(self._make_window(series, sample, inflated=inflated), now)
            self.has_unusual_window |= now - series.newest_at > self._stale_after
            series.newest_at, series.transport = now, sample.transport
            series.sender_waited = sample.sender_waited
        self._expire_suspects(now)

    @staticmethod
    def _observe_usual_sample(series: DirectionSeries, sample: LinkSample) -> bool:
        """Process a usual window, as nearly all are. Returns False if it is unusual."""
        if (
            not sample.wire.exact
            or sample.failed_over != series.failed_over
            or not series.detector.observe_usual_window(sample.wire.p50, sample.route)
        ):
            return False
        series.spacings.clear()
        series.transfers.clear()
        if sample.latency is not None:
            series.healthy_latencies.append(sample.latency)
        return True

    def _make_window(
        self, series: DirectionSeries, sample: LinkSample, *, inflated: bool
    ) -> DirectionWindow:
        """Make the detector's input: an exact value, or an upper bound and its slack."""
        exact = sample.wire.exact > 0
        # Of several upper bounds, the least is the closest.
        value = sample.wire.p50 if exact else sample.wire.min
        link, _, direction = series.key
        stage = link + 1 if direction == "forward" else link
        slack = 0.0
        if not exact:
            slack = self._longest_op(stage) if sample.slack is None else sample.slack
        refined = False
        if not exact and sample.route.value == series.detector.route:
            known = series.refine_wire_time(value - slack, value, sample.latency)
            if known is not None:
                value, slack, exact, refined = known, 0.0, True, True
        return DirectionWindow(
            series,
            value,
            sample.iteration,
            sample.route.value,
            exact,
            refined,
            slack,
            sample.latency,
            sample.transfer,
            sample.spacing,
            sample.failed_over,
            sample.sender_waited,
            sample.waited or 0.0,
            inflated or sample.sender_inflated,
        )

    def _judge_window(self, window: DirectionWindow, now: float) -> None:
        """Feed a window to its detector, with little weight if something else explains it."""
        series, detector = window.series, window.series.detector
        self.has_unusual_window = True
        route, slack = window.route, window.slack
        late = detector.is_late(window.value, route=route, slack=slack) or detector.is_later(
            window.value, route=route, slack=slack
        )
        doubted = late and (self.most_links_late or self._is_explained(window))
        if window.failed_over != series.failed_over:
            self._record_failover(window)
        detector.observe_window(
            window.value,
            mark=window.mark,
            route=window.route,
            exact=window.exact,
            slack=window.slack,
            weight=DOUBTED_WEIGHT if doubted else 1.0,
            follows_base=window.refined,
            hold=self.has_agent and self._awaits_answer(now),
        )
        series.process_window(window)
        series.lower_base(self._usual)
        if late and detector.suspicion >= SUSPECT_EVIDENCE:
            link = series.key[0]
            if link not in self._late_at:
                self.suspicion_number, self._suspected_at = self.suspicion_number + 1, now
            self._late_at[link] = now

    def _awaits_answer(self, now: float) -> bool:
        """True if the agent may still answer that most links are late. A link that is not suspect
        yet is far from its alarm, unless it is late often."""
        waits = now - self._suspected_at < ANSWER_SECONDS
        return waits and self.answered_number < self.suspicion_number

    def _expire_suspects(self, now: float) -> None:
        for link in [k for k, at in self._late_at.items() if now - at >= SUSPECT_SECONDS]:
            del self._late_at[link]

    @property
    def suspect_links(self) -> list[int]:
        """Links with a direction that may soon be slow."""
        return sorted(self._late_at)

    def process_answer(self, suspicion: int, *, most_late: bool) -> None:
        """Process the agent's answer to suspicions up to this number. If most links are late,
        evidence gathered before that was known counts little, too."""
        if most_late and not self.most_links_late:
            for series in self._series.values():
                series.detector.discount_evidence(DOUBTED_WEIGHT)
        self.most_links_late = most_late
        self.answered_number = max(self.answered_number, suspicion)

    def reset_answers(self) -> None:
        """Let the agent of a new connection answer the present suspicion."""
        self.most_links_late, self.answered_number = False, 0

    def _add_direction(self, key: DirectionKey) -> DirectionSeries:
        """Add a direction without windows, or replace it."""
        series = self._series[key] = DirectionSeries(key, DelayDetector(self._thresholds))
        return series

    def _record_failover(self, window: DirectionWindow) -> None:
        """Record that the direct route of a direction broke, or is back. Its replacement may be
        slow from the first message on, so it is compared with links that already use that route, or
        else with the route that broke."""
        series = window.series
        series.failed_over = window.failed_over
        known = dict(self._usual_on_rare_routes) | dict(self._usual)
        expected = known.get(window.route, series.detector.base)
        if series.failed_over and expected is not None:
            series.detector.expect_base(expected)

    @staticmethod
    def _is_explained(window: DirectionWindow) -> bool:
        """True if a window may be late because one of its ranks had no processor. Only the link and
        the sender delay the latency."""
        series, detector = window.series, window.series.detector
        if detector.base is None:
            return False
        least = EXPLAINING_FRACTION * (window.value - window.slack - detector.wire_time)
        sent = max(window.sender_waited, series.sender_waited)
        usual = (
            median(series.healthy_latencies) + detector.delay if series.healthy_latencies else None
        )
        if window.latency is not None and usual is not None and window.latency - usual >= least:
            return sent >= least
        return max(sent, window.waited) >= least or window.inflated

    def set_usual_times(self, usual: Mapping[str, float], rare: Mapping[str, float]) -> None:
        """Compare all directions with the ``usual`` wire times of the job by route, from now on.
        This finds links that were slow from the start, whose base was learned too high: messages
        between the stages of a job are alike. ``rare``: times on routes of too few directions."""
        self._usual, self._usual_on_rare_routes, self.has_unusual_window = usual, rare, True
        for series in self._series.values():
            series.lower_base(usual)

    def list_states(self, now: float) -> list[LinkState]:
        """List the states of all directions with windows."""
        return [self._build_state(series, now) for series in self._series.values()]

    def _build_state(self, series: DirectionSeries, now: float) -> LinkState:
        """Build the state of a direction; unknown without a base or recent windows."""
        found = series.detector
        link, replica, direction = series.key
        slow, fresh = found.level is DetectorLevel.SLOW, now - series.newest_at <= self._stale_after
        known = fresh and found.level is not DetectorLevel.LEARNING
        return LinkState(
            link=link,
            health=Health.UNKNOWN if not known else Health.SLOW if slow else Health.HEALTHY,
            delay=round(found.delay, STATE_DIGITS),
            wire_time=round(series.planned_wire_time, STATE_DIGITS) if known or slow else 0.0,
            transfer=round(series.transfer_time, STATE_DIGITS),
            confidence=round(found.confidence, 4),
            in_doubt=slow
            and (found.suspected_at is not None or series.in_doubt or found.is_doubtful),
            since_iteration=found.changed_at,
            replica=replica,
            direction=direction,
            recent=tuple(round(each, STATE_DIGITS) for each in found.recent_delays),
            failed_over=series.failed_over,
            bases={route: round(base, STATE_DIGITS) for route, base in series.bases.items()},
            route=found.route or "",
            transport=series.transport,
        )

    def restore_slow_directions(self, rows: Sequence[LinkState], now: float) -> None:
        """Restore directions that were slow when earlier ranks ended: their windows alone do not
        show a normal wire time. Each needs the usual evidence to become healthy. A detector that
        has learned a base is not changed."""
        for row in rows:
            self.has_unusual_window = True
            known = self._series.get(row.key)
            if known is not None and known.detector.level is not DetectorLevel.LEARNING:
                continue
            series = self._add_direction(row.key)
            series.newest_at = now
            bases = dict(row.bases)
            series.normal_latency = bases.pop(NOTES, None)
            for route, base in bases.items():
                series.detector.restore_base(route, base)
            series.detector.restore_slow(row.delay)
