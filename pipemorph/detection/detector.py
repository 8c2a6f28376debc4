"""Detects if one direction of one link is slow, and by how much. Pure, without a clock.

The detector finds the change point *and* the size of the change. Wire times come in windows of
about 50 ms. It learns the normal wire time of the link (its *base*: to move 16 MB takes time
without any delay) while the link is healthy. The excess over the base is the delay.

Why CUSUM and not Bayesian change-point detection (Greyhound; Adams & MacKay 2007): the level before
the change and the least relevant change are known. For this case a cumulative sum is the fastest
test for a given rate of false alarms (Lorden 1971). It costs a few additions per window, and its
threshold has a meaning: the number of windows. ``benchmarks/detector.py`` runs both on the same
series. The detector adds to CUSUM:

- Increments are clipped to ±1, so that no single window can raise an alarm.
- The median of the windows since the change point must confirm an alarm: it must exceed the base by
  ``min_delay``, by the fraction ``relative`` of the base, and by four times the link's noise.
- Both changes have their own test: to become slow takes ``ALARM_WINDOWS`` above the
  threshold, to become healthy ``CLEAR_WINDOWS`` (more) below half of it.
- Stalls come in runs: an alarm takes more windows, by the size of earlier suspicions.
- Congestion comes in runs, too: a link that is late often raises an alarm, however short its runs,
  and if its delay varies it takes longer until it counts as healthy.
- A slow link may become slower. A step of a steady delay takes as many windows as an alarm; until
  then the estimate stays, since a plan for half of the step would be wrong.

Memory is bounded: sums, and at most ``RECENT_WINDOWS`` and ``MOST_RECENT`` values.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from math import erf, log2, sqrt
from statistics import fmean, median, pstdev

from pipemorph.detection.windows import (
    MOST_RECENT,
    TRIMMED_FRACTION,
    RecentDelays,
    WireTimeBounds,
    estimate_wire_times,
)

MIN_DELAY_FRACTION = 0.25
"""Fraction of a normal wire time by which a delay must change to count."""
ALARM_WINDOWS = 3.0
"""Windows well above the threshold before an alarm: just more than one short stall has."""
SUSPICION_DECAY = 0.9995
"""Factor on the longest earlier suspicion by window: half of it remains after a good minute."""
MOST_EARLIER_SUSPICION = 6.0
"""Most that earlier suspicions add to the windows of an alarm."""
CLEAR_WINDOWS = 8.0
"""Windows well below half the threshold before the link counts as healthy. More than for an alarm,
since returning too early costs a slow iteration and returning late costs little."""
FEW_SERIES = 16
"""Directions of links of a job for which ``ALARM_WINDOWS`` is enough: eight stages."""
LATE_EVIDENCE, PUNCTUAL_EVIDENCE, LATE_ALARM = 1.0, 0.25, 10.0
"""Evidence that the link is late often: gain by a window that is certainly late, loss by any other,
and the alarm. A link that is late in over a fifth of its windows reaches it, in runs of any
length."""
PAUSE_FACTOR = 3
"""Factor on the windows until a link with a varying delay counts as healthy: it may be a pause."""
LEARNING_WINDOWS = 5
"""Windows from which the first base is learned."""
CERTAIN_FRACTION = 0.8
"""Fraction of these windows that may lie below the least possible base."""
RECENT_WINDOWS = 40
"""Windows in the average that estimates the delay: about two seconds."""
SHIFT_WINDOWS = 12
"""Windows in a row on one side of the estimate before older ones are dropped. Jitter that changes
every 400 ms stays on one side for fewer, so jitter is averaged and a step is followed."""
STEADY_WINDOWS = 20
"""Windows in which a delay must have been the same for a step upwards to take fewer. Jitter that
changes every 400 ms is hardly ever so steady."""
GUESS_ERROR = 0.05
"""Fraction of a delay by which the guessed base may be too low, on a route that was first used with
that delay."""
NOISE_UP, NOISE_DOWN = 0.01, 0.001
"""Rates at which the noise estimate follows the windows, upwards and downwards: over about the last
minute, with more weight on noisy times."""
BASE_DRIFT, BASE_DROP = 0.005, 0.1
"""Rates at which the base follows the windows: slow, so that a gradual delay does not become
normal, but fast down to windows far below it, since the first windows are often slow."""


class DetectorLevel(StrEnum):
    """State of a detector. LEARNING: no base yet."""

    LEARNING = "learning"
    HEALTHY = "healthy"
    SLOW = "slow"


def compute_alarm_level(series: int) -> float:
    """Windows of evidence in a job with ``series`` directions of links. A stall is about half as
    likely to last one window longer, and a large job must have no more false alarms than a small
    one."""
    return ALARM_WINDOWS + log2(max(1.0, series / FEW_SERIES))


@dataclass(frozen=True)
class DetectorThresholds:
    """Thresholds of a change. ``min_delay``: seconds; ``relative``: fraction of the base;
    ``alarm``: windows of evidence."""

    min_delay: float = 0.002
    relative: float = MIN_DELAY_FRACTION
    noise: float = 4.0
    alarm: float = ALARM_WINDOWS

    def compute_threshold(self, base: float, noise: float) -> float:
        """Least delay that counts, seconds. Noise raises it by at most the factor ``noise``, so
        that a link that is often slow does not make slow times normal."""
        quiet = max(self.min_delay, self.relative * base)
        return max(quiet, self.noise * min(noise, quiet))


@dataclass
class _RouteBase:
    """Normal wire time on one route in seconds, and its noise (mean absolute deviation)."""

    value: float
    noise: float = 0.0
    is_exact: bool = True
    least_value: float = 0.0
    """Least possible value, if ``value`` is an upper bound."""
    is_guessed: bool = False
    """True if the route was first used while the link was slow: it had no healthy window."""


class DelayDetector:
    """Detector for one direction of one link of one replica. All times in seconds.

    Feed it windows with :meth:`observe_window`; read ``level``, ``delay`` (above the base),
    ``wire_time`` (base and delay), ``confidence`` and ``changed_at``.
    """

    def __init__(self, thresholds: DetectorThresholds | None = None) -> None:
        self.thresholds = thresholds or DetectorThresholds()
        self.level = DetectorLevel.LEARNING
        self.route: str | None = None
        self.changed_at: int | None = None
        """Mark of the first window after the last one that showed the previous level."""
        self._bases: dict[str, _RouteBase] = {}
        self._learning: list[tuple[WireTimeBounds, bool]] = []
        self._newest_windows: deque[WireTimeBounds] = deque(maxlen=LEARNING_WINDOWS)
        """Newest windows, without usual ones."""
        self._first_mark: int | None = None
        """Mark of the first window."""
        self._learned_at: int | None = None
        """Mark of the last window that the first base was learned from."""
        self._evidence = 0.0
        self._late_evidence = 0.0
        """Evidence that the link is late often."""
        self._lately_windows: deque[WireTimeBounds] = deque(maxlen=RECENT_WINDOWS)
        """Windows since this evidence began."""
        self._peak_evidence = self._earlier_peak = 0.0
        """Largest sum of this suspicion; and of earlier ones, which decays."""
        self._level_windows: deque[WireTimeBounds] = deque(maxlen=RECENT_WINDOWS)
        self._suspected_at: int | None = None
        self._turned_at: int | None = None
        """Mark of the first of the newest windows that all show the other level. A suspicion may be
        older, since it starts at half the threshold and single windows do not end it."""
        self._windows_against_turn = 0
        """Number of windows in a row that show the present level after one of the other."""
        self._slow_windows = 0
        """Number of windows since the link became slow."""
        self._estimate_side = 0
        self._fell_at: int | None = None
        """Mark of the first of the newest windows that are all far below the delay, or of a step
        down to a delay that raises no alarm."""
        self._step_windows: list[WireTimeBounds] = []
        """Newest windows of a steady delay, all on one side of it: not in the estimate yet."""
        self._step_evidence = 0.0
        """Evidence that they are a step upwards."""
        self.step_count = 0
        """Number of permanent changes of a slow link's delay."""
        self._alarm_delay = 0.0  # Delay at the last alarm.
        self._recent_delays = RecentDelays()
        """Recent delays above the base of their route."""
        self._healthy_windows = 0
        """Number of windows since the link recovered."""
        self._previous_route = (0.0, 0.0, 0.0, 0.0)
        """Base, delay, noise and confidence of the previous route."""
        self._expected_base: float | None = None
        """Normal wire time on the next route without a base, see :meth:`expect_base`."""

    # --- estimates ------------------------------------------------------------------------

    @property
    def base(self) -> float | None:
        """Normal wire time on the current route; None while it is being learned."""
        known = self._bases.get(self.route) if self.route is not None else None
        return known.value if known is not None else None

    @property
    def base_is_exact(self) -> bool:
        """True if any arrival was observed exactly. If not, the base is an upper bound."""
        known = self._bases.get(self.route) if self.route is not None else None
        return known is not None and known.is_exact

    @property
    def least_base(self) -> float:
        """Least possible base."""
        known = self._bases.get(self.route) if self.route is not None else None
        return 0.0 if known is None else known.value if known.is_exact else known.least_value

    @property
    def threshold(self) -> float:
        """Least delay that counts on the current route."""
        known = self._bases.get(self.route) if self.route is not None else None
        return (
            self.thresholds.compute_threshold(known.value, known.noise)
            if known
            else self.thresholds.min_delay
        )

    @property
    def delay(self) -> float:
        """Delay above the base, one way; 0 unless slow."""
        base = self.base
        if self.level is not DetectorLevel.SLOW:
            return 0.0
        if base is None:
            return self._previous_route[1]
        return (
            max(0.0, fmean(estimate_wire_times(self._level_windows)) - base)
            if self._level_windows
            else 0.0
        )

    @property
    def recent_delays(self) -> tuple[float, ...]:
        """Delays of the newest windows, oldest first and without outliers, if they vary so much
        that their mean says little; else empty. Includes windows before a short recovery."""
        return (
            self._recent_delays.get_varying(self.threshold / 2)
            if self.level is DetectorLevel.SLOW
            else ()
        )

    @property
    def wire_time(self) -> float:
        """Current one-way time of a message: base plus delay. While a route's base is being
        learned, the value of the previous route."""
        base = self.base
        return (self._previous_route[0] if base is None else base) + self.delay

    @property
    def suspected_at(self) -> int | None:
        """Mark of the window at which the current suspicion began; None without one."""
        return self._suspected_at

    @property
    def is_doubtful(self) -> bool:
        """True if the link is slow, but its delay is too small to distinguish from a healthy link:
        it is about to change, or in a pause."""
        return self.level is DetectorLevel.SLOW and self.delay < self.threshold / 2

    @property
    def is_stepping(self) -> bool:
        """True if the newest windows of a slow link seem to be a step of its delay."""
        return abs(self._estimate_side) > 1

    @property
    def alarm_windows(self) -> float:
        """Windows of evidence that an alarm takes now."""
        return self.thresholds.alarm + min(self._earlier_peak, MOST_EARLIER_SUSPICION)

    @property
    def is_suspected(self) -> bool:
        """True if the link is healthy, but its newest windows may be those of a slow one."""
        return self.level is DetectorLevel.HEALTHY and self._evidence > 0

    @property
    def suspicion(self) -> float:
        """Evidence for an alarm, as a fraction of the needed evidence; 0 while slow."""
        return self._evidence / self.alarm_windows if self.level is DetectorLevel.HEALTHY else 0.0

    @property
    def confidence(self) -> float:
        """Probability, 0 … 1, that the level is right: that the mean of the windows is on the right
        side of the middle between base and threshold (normal approximation)."""
        base = self.base
        if base is None:
            return self._previous_route[3] if self.level is DetectorLevel.SLOW else 0.0
        middle = base + self.threshold / 2
        if self.level is DetectorLevel.SLOW and self._level_windows:
            values = estimate_wire_times(self._level_windows)
            spread = max(pstdev(values), self.threshold / 8)
            z = (fmean(values) - middle) / (spread / sqrt(len(values)))
        else:
            z = (1 - self._evidence / self.alarm_windows) * 3
        return 0.5 * (1 + erf(z / sqrt(2)))

    # --- evidence -------------------------------------------------------------------------

    def is_late(self, value: float, *, route: str, slack: float = 0.0) -> bool | None:
        """True if a window is above the threshold; None if there is no base yet or the link is
        already slow. ``slack``: seconds by which ``value`` may exceed the true value."""
        known = self._bases.get(route)
        if self.level is not DetectorLevel.HEALTHY or known is None or route != self.route:
            return None
        return value - slack - known.value > self.thresholds.compute_threshold(
            known.value, known.noise
        )

    def is_later(self, value: float, *, route: str, slack: float = 0.0) -> bool:
        """True if the link is slow, and a window is longer than its present delay explains."""
        if self.level is not DetectorLevel.SLOW or self.base is None or route != self.route:
            return False
        return value - slack > self.wire_time + self._compute_margin(self.threshold, self.delay)

    def observe_usual_window(self, value: float, route: str) -> bool:
        """Process an exact window much faster than :meth:`observe_window`, with the same result, if
        the link is not suspect and the window is as usual. Else return False: call that."""
        if (
            self._evidence
            or self._late_evidence
            or self._peak_evidence
            or self._recent_delays
            or self._level_windows
        ):
            return False
        known = self._bases.get(route)
        if (
            known is None
            or not known.is_exact
            or self.level is not DetectorLevel.HEALTHY
            or route != self.route
            or self.changed_at is None
        ):
            return False
        beyond = value - known.value
        limits = self.thresholds
        quiet = max(limits.min_delay, limits.relative * known.value)
        threshold = max(quiet, limits.noise * min(known.noise, quiet))
        if not -quiet / 2 <= beyond < threshold / 2:
            return False
        deviation = abs(beyond)
        known.noise += (NOISE_UP if deviation > known.noise else NOISE_DOWN) * (
            deviation - known.noise
        )
        self._earlier_peak *= SUSPICION_DECAY
        self._turned_at = None
        known.value += BASE_DRIFT * beyond
        return True

    def observe_window(
        self,
        value: float,
        *,
        mark: int,
        route: str,
        exact: bool = True,
        slack: float = 0.0,
        weight: float = 1.0,
        follows_base: bool = False,
        hold: bool = False,
    ) -> None:
        """Process one window: its median wire time, its iteration (``mark``), its route.

        ``exact=False``: ``value`` is an upper bound, at most ``slack`` (one op of the receiver)
        above the true value, so it only excludes values outside that interval. ``weight``: its
        weight towards an alarm, less than 1 if something other than this link may have made it
        late. ``follows_base``: an exact value was computed from the base, so it says nothing about
        it. ``hold``: raise no alarm yet.
        """
        if route != self.route:
            self._switch_route(route)
        known = self._bases.get(route)
        if known is not None and self.changed_at is None:
            self.changed_at = mark  # After a restore, the earlier time is unknown.
        within = (
            WireTimeBounds.from_exact(value)
            if exact
            else WireTimeBounds(max(0.0, value - slack), value)
        )
        self._newest_windows.append(within)
        if known is None:
            self._learn_base(within, exact, mark)
            return
        if exact and not known.is_exact and not follows_base:
            # The base was an upper bound. The first exact value may lower it.
            known.is_exact, known.value = True, min(known.value, value)
        self._remember_window(within, known.value)
        if not exact:
            expected = self.wire_time
            if within.low <= expected <= value:
                if self.level is DetectorLevel.SLOW:
                    self._level_windows.append(within)
                elif self._level_windows and value < median(
                    window.low for window in self._level_windows
                ):
                    # The window is as expected, and earlier than those that raised a suspicion.
                    self._observe_healthy(known, known.value, within, mark, weight, hold=hold)
                else:
                    self._turned_at = None
                return
            if value > expected:
                # The bound minus one op is certain, so it counts like an exact value.
                value, slack = within.low, 0.0
        if self.level is DetectorLevel.SLOW:
            slack = 0.0 if exact else slack
            self._observe_slow(known, value, within, mark, slack=slack, weight=weight)
        else:
            self._observe_healthy(known, value, within, mark, weight, hold=hold)

    def discount_evidence(self, factor: float) -> None:
        """Reduce the evidence for an alarm so far: something else explains it."""
        self._evidence *= factor
        self._late_evidence *= factor

    def expect_base(self, base: float) -> None:
        """Judge the next route without a base by ``base``, unless its first windows are near it:
        the link moved there because its route broke, not because the new one is fast."""
        self._expected_base = base

    def lower_base(self, base: float, late: float = 0.0) -> bool:
        """Use ``base``, from the link's peers, as the normal wire time if it is much lower.

        It corrects a link that was slow before its base was learned. ``late``: seconds by which its
        notes are later than those of its peers. Returns True if the base was used.
        """
        # Receivers that compute may need iterations to learn it, and the last ones were slow.
        return self._lower_base_since(base, self._learned_at, late)

    def _lower_base_since(self, base: float, since: int | None, late: float = 0.0) -> bool:
        """Lower the base to ``base`` and become slow ``since``, if recent windows confirm it."""
        known = self._bases.get(self.route) if self.route is not None else None
        if known is None or self.level is not DetectorLevel.HEALTHY:
            return False
        limit = self.thresholds.compute_threshold(base, known.noise)
        low, high = self.least_base, known.value
        if late and not known.is_exact:
            low = high = max(low, base + late)
        # Twice the threshold, since healthy links of a job differ somewhat.
        least = base + 2 * limit
        if low < least:
            return False
        # The newest windows may contradict it: the link was slow, and its base is falling.
        if min((seen.high for seen in self._newest_windows), default=0.0) < least:
            return False
        if not late and max(seen.low for seen in self._newest_windows) < least:
            return False
        # The delay is exact: a receiver that waits sees messages as soon as they arrive.
        self._level_windows = deque(
            [WireTimeBounds.from_exact(high)] * LEARNING_WINDOWS, RECENT_WINDOWS
        )
        known.value, known.least_value = base, min(base, known.least_value)
        self._change_level(DetectorLevel.SLOW, since)
        return True

    def restore_base(self, route: str, base: float) -> None:
        """Restore a base that was learned before a restart of the host."""
        self._bases[route] = _RouteBase(base)
        if self.route is None:
            self.route = route
            self.level = DetectorLevel.HEALTHY

    def restore_slow(self, delay: float) -> None:
        """Restore a delay that was saved with the base. Call after :meth:`restore_base`. The link
        needs the usual evidence to become healthy."""
        base = self.base
        if base is None:
            return
        self._level_windows = deque(
            [WireTimeBounds.from_exact(base + delay)] * LEARNING_WINDOWS, RECENT_WINDOWS
        )
        self._alarm_delay = delay
        self.level = DetectorLevel.SLOW

    def list_bases(self) -> dict[str, float]:
        """Normal wire time by route, for a snapshot."""
        return {route: known.value for route, known in self._bases.items()}

    # --- steps of the detection -----------------------------------------------------------

    def _switch_route(self, route: str) -> None:
        """Change to another route, which has its own base. The level stays for now."""
        before = self._bases.get(self.route) if self.route is not None else None
        if before is not None:
            self._previous_route = (before.value, self.delay, before.noise, self.confidence)
        if route not in self._bases:
            self._learning.clear()
        elif self.level is DetectorLevel.SLOW and self.base is not None:
            shift = self._bases[route].value - self.base
            self._level_windows = deque(
                (WireTimeBounds(low + shift, high + shift) for low, high in self._level_windows),
                RECENT_WINDOWS,
            )
        self.route = route
        self._evidence, self._suspected_at, self._turned_at = 0.0, None, None
        self._estimate_side, self._step_evidence, self._fell_at = 0, 0.0, None
        self._step_windows.clear()
        self._newest_windows.clear()

    def _learn_base(self, within: WireTimeBounds, exact: bool, mark: int) -> None:
        """Learn the base of a route from its first windows; of a slow link, less its delay."""
        assert self.route is not None
        if self._first_mark is None:
            self._first_mark = mark
        first = self.level is DetectorLevel.LEARNING and mark == self._first_mark
        if (
            self.level is DetectorLevel.LEARNING
            and not first
            and self._suspected_at == self._first_mark
        ):
            # Ranks that have just begun send their first messages tens of milliseconds late.
            self._learning.clear()
        if not self._learning:
            self._suspected_at = mark
        self._learning.append((within, exact))
        true = [seen.high for seen, was_exact in self._learning if was_exact]
        enough = LEARNING_WINDOWS
        if first:
            enough = (
                4 * LEARNING_WINDOWS
            )  # First messages are few among the windows of a long iteration.
        elif self.level is DetectorLevel.SLOW:
            enough = (
                2 * LEARNING_WINDOWS
            )  # The delay may vary: enough windows to see several values of it.
        if len(true) < enough and len(self._learning) < 4 * LEARNING_WINDOWS:
            return
        values = sorted(true or (seen.high for seen, _ in self._learning))
        level = median(true) if true else values[0]
        lows = sorted(seen.low for seen, _ in self._learning)
        low = min(level, lows[int(CERTAIN_FRACTION * (len(lows) - 1))])
        self._learning.clear()
        if self.level is DetectorLevel.SLOW:
            # This is another route of a slow link. If it avoids the fault, its whole wire time is
            # its base; if the delay is here too, the base is the rest.
            usual, delay, noise, _ = self._previous_route
            came_along = values[int(0.8 * len(values))] - usual > delay / 4
            base = max(min(usual, level), level - delay) if came_along else level
            low = min(base, low)
            self._bases[self.route] = _RouteBase(
                base, noise, bool(true), low, is_guessed=came_along
            )
            self._level_windows = deque(
                [WireTimeBounds.from_exact(level)] * LEARNING_WINDOWS, RECENT_WINDOWS
            )
            if came_along and self.is_doubtful:
                # Most windows are as usual and some are late: their mean is the delay.
                self._level_windows = deque(map(WireTimeBounds.from_exact, values), RECENT_WINDOWS)
                came_along = not self.is_doubtful
            if not came_along:
                self._level_windows.clear()
                self._change_level(DetectorLevel.HEALTHY, self._suspected_at)
        else:
            spread = median(abs(v - level) for v in true) if true else 0.0
            if self._bases and values[-1] - values[0] > self.thresholds.compute_threshold(
                values[0], 0.0
            ):
                # The other direction caused the change of route; this one is slow now and then.
                level, spread = values[0], self._previous_route[2]
            self._bases[self.route] = _RouteBase(level, spread, bool(true), min(level, low))
            self.changed_at, self._learned_at = self._suspected_at, mark
            self.level = DetectorLevel.HEALTHY
            if self._expected_base is not None:
                self._lower_base_since(self._expected_base, self._suspected_at)
        self._suspected_at = self._expected_base = None

    def _observe_healthy(
        self,
        known: _RouteBase,
        value: float,
        within: WireTimeBounds,
        mark: int,
        weight: float,
        *,
        hold: bool,
    ) -> None:
        """Process a window while healthy: evidence for an alarm, noise, and drift of the base."""
        threshold = self.thresholds.compute_threshold(known.value, known.noise)
        step = min(1.0, max(-1.0, (value - known.value) / threshold - 0.5))
        self._evidence = max(0.0, self._evidence + (step * weight if step > 0 else step))
        # Suspicious windows count, too: stalls of a shared machine last many windows.
        deviation = min(abs(value - known.value), threshold)
        self._update_turn(value - known.value >= threshold, mark)
        rate = NOISE_UP if deviation > known.noise else NOISE_DOWN
        known.noise += rate * (deviation - known.noise)
        self._earlier_peak *= SUSPICION_DECAY
        self._peak_evidence = max(self._peak_evidence, self._evidence)
        late = within.low - known.value >= threshold
        self._late_evidence = max(
            0.0, self._late_evidence + (LATE_EVIDENCE * weight if late else -PUNCTUAL_EVIDENCE)
        )
        self._lately_windows.append(within)
        enough = self.thresholds.alarm - ALARM_WINDOWS + LATE_ALARM
        self._late_evidence = min(self._late_evidence, enough)
        if self._late_evidence == 0.0:
            self._lately_windows.clear()
        elif self._late_evidence == enough and not hold and self._is_late_on_average(known.value):
            self._level_windows = self._lately_windows.copy()
            self._alarm_delay = fmean(window.low for window in self._level_windows) - known.value
            if not self._recent_delays:
                for each in self._level_windows:
                    self._recent_delays.add_delay(
                        WireTimeBounds(each.low - known.value, each.high - known.value)
                    )
            self._change_level(DetectorLevel.SLOW, mark)
            return
        if self._evidence == 0.0:
            if self._peak_evidence > 1.0:  # More than one window.
                self._earlier_peak = max(self._earlier_peak, self._peak_evidence)
            self._peak_evidence = 0.0
            self._level_windows.clear()
            far_below = (
                known.value - value > self.thresholds.compute_threshold(known.value, 0.0) / 2
            )
            known.value += (BASE_DROP if far_below else BASE_DRIFT) * (value - known.value)
            if far_below:
                known.noise -= BASE_DROP * known.noise
            return
        self._level_windows.append(within)
        if self._evidence >= self.alarm_windows:
            self._evidence = self.alarm_windows
            certain = median(window.low for window in self._level_windows) - known.value
            if certain >= threshold and not hold:
                self._alarm_delay = certain
                # The first late window may include messages from before the change.
                line = known.value + certain / 2
                self._level_windows = deque(
                    (w for w in self._level_windows if w.high >= line), RECENT_WINDOWS
                )
                self._change_level(
                    DetectorLevel.SLOW, mark if self._turned_at is None else self._turned_at
                )

    def _is_late_on_average(self, base: float) -> bool:
        """True if the mean of windows that are late now and then is a delay that counts."""
        return fmean(estimate_wire_times(self._lately_windows)) - base >= self.threshold / 2

    def _observe_slow(
        self,
        known: _RouteBase,
        value: float,
        within: WireTimeBounds,
        mark: int,
        *,
        slack: float,
        weight: float,
    ) -> None:
        """Process a window while slow. If ``slack`` is above 0, ``value`` is an upper bound: below
        the line it is stronger evidence than a noisy value; above it, it is no evidence if the true
        value may be below."""
        self._slow_windows += 1
        if known.is_guessed:
            # If the guess is too high, low values of a varying delay would look like recovery.
            known.value = min(known.value, value + 3 * known.noise)
        threshold = self.thresholds.compute_threshold(known.value, known.noise)
        line = known.value + threshold / 2
        step = min(2.0 if slack else 1.0, max(-1.0, 4 * (line - value) / threshold))
        if not (slack and value - slack <= line < value):
            if step < 0 and self.recent_delays:
                step *= PAUSE_FACTOR  # Pauses must not add up to a recovery.
            self._evidence = max(0.0, self._evidence + step)
            self._update_turn(value <= line, mark, patience=1)
        if self._evidence == 0.0:
            self._suspected_at = None
        elif self._suspected_at is None:
            self._suspected_at = mark
        if self._evidence >= CLEAR_WINDOWS and self._evidence >= self._windows_to_clear(known):
            if self._slow_windows < RECENT_WINDOWS and not known.is_guessed:
                # It was a short stall: further ones of its size are noise of the link.
                known.noise = max(known.noise, 1.2 * self._alarm_delay / self.thresholds.noise)
            if known.is_guessed:
                # The guess is the least of these windows; noise above it would look like a delay.
                known.value = max(known.value, median(estimate_wire_times(self._newest_windows)))
            known.is_guessed = False
            self._level_windows.clear()
            turned = mark if self._turned_at is None else self._turned_at
            if self._fell_at is not None and not self.recent_delays:
                turned = min(turned, self._fell_at)
            self._change_level(DetectorLevel.HEALTHY, turned)
        else:
            self._update_estimate(known, within, mark, threshold, weight)

    def _windows_to_clear(self, known: _RouteBase) -> float:
        """Number of windows of evidence for a recovery."""
        if self.recent_delays:
            return PAUSE_FACTOR * CLEAR_WINDOWS
        # A guessed base needs twice the evidence, as long as the delay may vary.
        may_vary = known.is_guessed and len(self._recent_delays) < RECENT_WINDOWS
        return 2 * CLEAR_WINDOWS if may_vary else CLEAR_WINDOWS

    def _update_estimate(
        self, known: _RouteBase, within: WireTimeBounds, mark: int, threshold: float, weight: float
    ) -> None:
        """Update the estimate: an average, restarted when the delay has changed permanently."""
        if not self._level_windows:
            self._level_windows.append(within)
            return
        estimate = fmean(estimate_wire_times(self._level_windows))
        delay = estimate - known.value
        margin = self._compute_margin(threshold, delay)
        side = _side_of_margin(within, estimate, margin)
        if side * self._estimate_side <= 0:
            self._estimate_side, self._step_evidence = 0, 0.0
            self._level_windows.extend(self._step_windows)  # It was jitter.
            self._step_windows.clear()
            if delay >= threshold:
                self._fell_at = mark if side < 0 else None
        self._estimate_side += side
        if side and (self._step_windows or self._is_steady(estimate, margin)):
            self._step_windows.append(within)
            self._step_evidence += weight if side > 0 else 0.0
        else:
            self._level_windows.append(within)
        if abs(self._estimate_side) >= SHIFT_WINDOWS or self._step_evidence >= self.alarm_windows:
            fell = self._estimate_side < 0
            self._level_windows = deque(
                self._step_windows or list(self._level_windows)[-SHIFT_WINDOWS:], RECENT_WINDOWS
            )
            self.step_count += 1
            self._estimate_side, self._step_evidence = 0, 0.0
            self._step_windows.clear()
            if fell and known.is_guessed:
                self._raise_guess(known, threshold)

    def _raise_guess(self, known: _RouteBase, threshold: float) -> None:
        """Treat a step down as the end of the fault, and a small remaining delay as the error of
        the guess, unless the step may be a phase of a varying delay."""
        usual, delay, _, _ = self._previous_route
        phase = self.recent_delays or self.wire_time - usual > delay / 4
        if self.delay < max(threshold, GUESS_ERROR * delay) and not phase:
            known.value, self._evidence = self.wire_time, max(self._evidence, float(SHIFT_WINDOWS))

    def _compute_margin(self, threshold: float, delay: float) -> float:
        """Seconds by which windows of a slow link may differ from its delay without a change."""
        return max(threshold / 2, 0.2 * delay)

    def _is_steady(self, estimate: float, margin: float) -> bool:
        """True if hardly any window of the estimate is outside its ``margin``."""
        if len(self._level_windows) < STEADY_WINDOWS or self.recent_delays:
            return False
        outside = sum(
            _side_of_margin(window, estimate, margin) != 0 for window in self._level_windows
        )
        return outside <= TRIMMED_FRACTION * len(self._level_windows)

    def _remember_window(self, within: WireTimeBounds, base: float) -> None:
        """Store a window of a link that is slow, or was lately."""
        if self.level is DetectorLevel.SLOW:
            self._healthy_windows = 0
        elif self._recent_delays:
            self._healthy_windows += 1
            if self._healthy_windows >= MOST_RECENT:
                self._recent_delays.clear()
        if self.level is DetectorLevel.SLOW or self._recent_delays:
            self._recent_delays.add_delay(WireTimeBounds(within.low - base, within.high - base))

    def _update_turn(self, shows_other_level: bool, mark: int, patience: int = 0) -> None:
        """Update :attr:`_turned_at` after a window. ``patience``: windows in a row that may show
        the present level without deferring the turn: on a busy machine single ones are late."""
        self._windows_against_turn = 0 if shows_other_level else self._windows_against_turn + 1
        if self._windows_against_turn > patience:
            self._turned_at = None
        elif shows_other_level and self._turned_at is None:
            self._turned_at = mark

    def _change_level(self, level: DetectorLevel, mark: int | None) -> None:
        """Change the level, and drop the evidence for it."""
        self.level = level
        self.changed_at = mark
        self._evidence, self._peak_evidence, self._late_evidence = 0.0, 0.0, 0.0
        self._slow_windows, self._estimate_side, self._step_evidence, self._fell_at = (
            0,
            0,
            0.0,
            None,
        )
        self._lately_windows.clear()
        self._step_windows.clear()
        self._suspected_at = self._turned_at = None


def _side_of_margin(within: WireTimeBounds, middle: float, margin: float) -> int:
    """Side of a wire time: 1 above the margin around the middle, -1 below, 0 if maybe inside."""
    return (within.low > middle + margin) - (within.high < middle - margin)
