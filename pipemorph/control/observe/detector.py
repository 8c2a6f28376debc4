"""Detects whether one direction of one link is slow, and by how much. Pure, without a clock.

Finds the change point *and* the size of the change. Wire times come in windows of about 50 ms. The
detector learns the normal wire time of the link (its *base*: to move 16 MB takes time without any
delay) while the link is healthy. The excess over the base is the delay.

Why CUSUM and not Bayesian change-point detection (Greyhound; Adams & MacKay 2007): the level before
the change and the least relevant change are known. For this case a cumulative sum is the fastest
test for a given rate of false alarms (Lorden 1971). It costs a few additions per window, and its
threshold has a meaning: the number of windows. ``benchmarks/detector.py`` runs both on the same
series. Added are:

- Increments are clipped to ±1, so that no single window can raise an alarm.
- The median of the windows since the change point must confirm an alarm: it must exceed the base by
  ``min_delay``, by the fraction ``relative`` of the base, and by four times the link's noise.
- Both changes have their own test: to become slow takes ``ALARM`` windows above the threshold, to
  become healthy ``CLEAR`` windows (more) below half of it.
- Stalls come in runs: as far as earlier suspicions of a healthy link went, an alarm takes more.
- Congestion comes in runs, too: a link that is late often raises an alarm, however short its runs,
  and if its delay varies it takes longer until it counts as healthy.
- A slow link may become slower. Of a delay that was steady, a step takes as many windows as an
  alarm; until then the estimate stays, since a plan for half of the step would be wrong.

Memory is bounded: sums, and at most ``RECENT`` and ``MEMORY`` values.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from math import erf, log2, sqrt
from statistics import fmean, median, pstdev

from pipemorph.control.observe.windows import MEMORY, TRIM, RecentDelays, Within, likely

MIN_DELAY_FRACTION = 0.25
"""Part of a normal wire time by which a delay must change to count."""
ALARM = 3.0
"""Windows well above the threshold before an alarm: the fewest that one short stall does not
reach."""
FORGET = 0.9995
"""Part of the longest earlier suspicion that is left after one more window: half of it after a good
minute."""
MOST_EARLIER = 6.0
"""Most that earlier suspicions add to the windows of an alarm."""
CLEAR = 8.0
"""Windows well below half the threshold before the link counts as healthy. More than for an alarm,
since returning too early costs a slow iteration and returning late costs little."""
FEW_SERIES = 16
"""Directions of links of a job for which ``ALARM`` is enough: eight stages."""
OFTEN, SELDOM, LATE_ALARM = 1.0, 0.25, 10.0
"""What a window that is certainly late adds to the evidence that the link is late often, what any
other takes from it, and the alarm: a link that is late in more than a fifth of its windows gets
there, in runs however short."""
PAUSE = 3
"""Times as many windows until a link counts as healthy if its delay varies: it may be a pause."""
LEARN = 5
"""Windows from which the first base is learned."""
CERTAIN = 0.8
"""Part of these in which a message may have taken less than the least that the base can be."""
RECENT = 40
"""Windows in the average that estimates the delay: about two seconds."""
SHIFT = 12
"""Windows in a row on one side of the estimate before older ones are dropped. This is longer than
jitter that changes every 400 ms stays on one side, so that jitter is averaged and a step
followed."""
STEADY = 20
"""Windows in which a delay must have been the same for a step upwards to take fewer. Jitter that
changes every 400 ms is hardly ever so steady."""
GUESS = 0.05
"""Part of a delay by which the base of a route that was first used with it may be guessed too
low."""
NOISE_UP, NOISE_DOWN = 0.01, 0.001
"""How fast the noise estimate follows the windows, upwards and downwards: over about the last
minute, with more weight on noisy times."""
DRIFT, DROP = 0.005, 0.1
"""How fast the base follows the windows: slowly, so that a gradual delay does not become normal,
but fast down to windows far below it, since the first windows are often slow."""


class Level(StrEnum):
    """State of a detector. LEARNING: no base yet."""

    LEARNING = "learning"
    HEALTHY = "healthy"
    SLOW = "slow"


def alarm_level(series: int) -> float:
    """Windows of evidence in a job with so many directions of links. A stall is about half as
    likely to last one window longer, and a large job must have no more false alarms than a small
    one."""
    return ALARM + log2(max(1.0, series / FEW_SERIES))


@dataclass(frozen=True)
class Thresholds:
    """Least change that counts. ``min_delay``: seconds; ``relative``: fraction of the base;
    ``alarm``: windows of evidence for it."""

    min_delay: float = 0.002
    relative: float = MIN_DELAY_FRACTION
    noise: float = 4.0
    alarm: float = ALARM

    def of(self, base: float, noise: float) -> float:
        """Least delay that counts. Noise raises it by at most the factor ``noise``, so that a link
        that is often slow does not make slow times normal."""
        quiet = max(self.min_delay, self.relative * base)
        return max(quiet, self.noise * min(noise, quiet))


@dataclass
class _Base:
    """Normal wire time on one route in seconds, and its noise (mean absolute deviation)."""

    value: float
    noise: float = 0.0
    exact: bool = True
    low: float = 0.0
    """If it is not exact, an upper bound: the least that it can be."""
    guessed: bool = False
    """The route was first used while the link was slow, so no healthy window was seen on it."""


class DelayDetector:
    """Detector for one direction of one link of one replica. All times in seconds.

    Feed it windows with :meth:`observe`; read ``level``, ``delay`` (above the base),
    ``wire_time`` (base and delay), ``confidence`` and ``changed_at``.
    """

    def __init__(self, thresholds: Thresholds | None = None) -> None:
        self.thresholds = thresholds or Thresholds()
        self.level = Level.LEARNING
        self.route: str | None = None
        self.changed_at: int | None = None
        """Mark of the first window of the current level: the one after the last window that showed
        the previous level."""
        self._bases: dict[str, _Base] = {}
        self._learning: list[tuple[Within, bool]] = []
        self._newest: deque[Within] = deque(maxlen=LEARN)
        """Windows, but for those as usual."""
        self._first: int | None = None
        """Mark of the first window of all."""
        self._learned_at: int | None = None
        """Mark of the last window that the first base was learned from."""
        self._sum = 0.0
        self._late = 0.0
        """Evidence that the link is late often, and the windows since there is any."""
        self._lately: deque[Within] = deque(maxlen=RECENT)
        self._peak = self._earlier = 0.0
        """Largest sum of this suspicion; and of earlier ones that ended, less by less."""
        self._since: deque[Within] = deque(maxlen=RECENT)
        self._suspected_at: int | None = None
        self._turned_at: int | None = None
        """Mark of the first of the newest windows that all show the other level. A suspicion may be
        older, since it starts at half the threshold and single windows do not end it."""
        self._against = 0
        """Windows in a row that show the present level after one that showed the other."""
        self._slow_for = 0
        """Windows since the link became slow."""
        self._side = 0
        self._fell_at: int | None = None
        """Mark of the first of the newest windows that are all far below the delay; or of a step
        down to one that raises no alarm."""
        self._step: list[Within] = []
        """The newest windows of a delay that was steady, if all are on one side of it: not in the
        estimate yet."""
        self._stepped = 0.0
        """Evidence that they are a step upwards."""
        self.steps = 0
        """How often the delay of a slow link has changed for good."""
        self._alarmed_at = 0.0  # The delay at the last alarm.
        self._memory = RecentDelays()
        """Above the base of their route."""
        self._well = 0
        """Windows since the link recovered."""
        self._carried = (0.0, 0.0, 0.0, 0.0)
        """Base, delay, noise and confidence of the previous route."""
        self._expected: float | None = None
        """What is normal on the next route without a base, see :meth:`expect`."""

    # --- estimates ------------------------------------------------------------------------

    @property
    def base(self) -> float | None:
        """Normal wire time on the current route; None while it is being learned."""
        known = self._bases.get(self.route) if self.route is not None else None
        return known.value if known is not None else None

    @property
    def base_is_exact(self) -> bool:
        """Whether any arrival was observed exactly. If not, the base is an upper bound."""
        known = self._bases.get(self.route) if self.route is not None else None
        return known is not None and known.exact

    @property
    def least_base(self) -> float:
        """The least that the base can be."""
        known = self._bases.get(self.route) if self.route is not None else None
        return 0.0 if known is None else known.value if known.exact else known.low

    @property
    def threshold(self) -> float:
        """Least delay that counts on the current route."""
        known = self._bases.get(self.route) if self.route is not None else None
        return self.thresholds.of(known.value, known.noise) if known else self.thresholds.min_delay

    @property
    def delay(self) -> float:
        """One-way delay above the base; 0 unless slow."""
        base = self.base
        if self.level is not Level.SLOW:
            return 0.0
        if base is None:
            return self._carried[1]
        return max(0.0, fmean(likely(self._since)) - base) if self._since else 0.0

    @property
    def recent(self) -> tuple[float, ...]:
        """Delays of the newest windows, oldest first and without outliers, if they differ so much
        that their mean says little; else empty. Also from before a recovery, if that was lately."""
        return self._memory.varying(self.threshold / 2) if self.level is Level.SLOW else ()

    @property
    def wire_time(self) -> float:
        """Current one-way time of a message: base plus delay. While a route's base is being
        learned, the value of the previous route."""
        base = self.base
        return (self._carried[0] if base is None else base) + self.delay

    @property
    def suspected_at(self) -> int | None:
        """Mark of the window at which the current suspicion began; None without suspicion."""
        return self._suspected_at

    @property
    def is_doubtful(self) -> bool:
        """Whether the link is slow, but by less than what is told from a link that is well: its
        delay is about to change, or in a pause."""
        return self.level is Level.SLOW and self.delay < self.threshold / 2

    @property
    def stepping(self) -> bool:
        """Whether the newest windows of a slow link seem to be a step of its delay."""
        return abs(self._side) > 1

    @property
    def alarm(self) -> float:
        """Windows of evidence that an alarm takes now."""
        return self.thresholds.alarm + min(self._earlier, MOST_EARLIER)

    @property
    def suspects(self) -> bool:
        """Whether the link is healthy, but its newest windows may be those of a slow one."""
        return self.level is Level.HEALTHY and self._sum > 0

    @property
    def suspicion(self) -> float:
        """Evidence for an alarm, as a part of what it takes; 0 while slow."""
        return self._sum / self.alarm if self.level is Level.HEALTHY else 0.0

    @property
    def confidence(self) -> float:
        """Probability, 0 … 1, that the level is right: that the mean of the windows is on the right
        side of the middle between base and threshold (normal approximation)."""
        base = self.base
        if base is None:
            return self._carried[3] if self.level is Level.SLOW else 0.0
        middle = base + self.threshold / 2
        if self.level is Level.SLOW and self._since:
            values = likely(self._since)
            spread = max(pstdev(values), self.threshold / 8)
            z = (fmean(values) - middle) / (spread / sqrt(len(values)))
        else:
            z = (1 - self._sum / self.alarm) * 3
        return 0.5 * (1 + erf(z / sqrt(2)))

    # --- evidence -------------------------------------------------------------------------

    def is_late(self, value: float, *, route: str, slack: float = 0.0) -> bool | None:
        """Whether a window is above the threshold; None if there is no base yet or the link is slow
        already. ``slack``: how much ``value`` may exceed the true value."""
        known = self._bases.get(route)
        if self.level is not Level.HEALTHY or known is None or route != self.route:
            return None
        return value - slack - known.value > self.thresholds.of(known.value, known.noise)

    def is_later(self, value: float, *, route: str, slack: float = 0.0) -> bool:
        """Whether the link is slow, and a window longer than its present delay accounts for."""
        if self.level is not Level.SLOW or self.base is None or route != self.route:
            return False
        return value - slack > self.wire_time + self._margin(self.threshold, self.delay)

    def passes(self, value: float, route: str) -> bool:
        """Process an exact window, in a fraction of the time of :meth:`observe` and with the same
        result, if nothing suspects the link and the window is as usual. Else return False, and
        leave it to that."""
        if self._sum or self._late or self._peak or self._memory or self._since:
            return False
        known = self._bases.get(route)
        if (
            known is None
            or not known.exact
            or self.level is not Level.HEALTHY
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
        self._earlier *= FORGET
        self._turned_at = None
        known.value += DRIFT * beyond
        return True

    def observe(
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
        late. ``follows_base``: an exact value was found from the base, so it says nothing about it.
        ``hold``: raise no alarm yet.
        """
        if route != self.route:
            self._switch(route)
        known = self._bases.get(route)
        if known is not None and self.changed_at is None:
            self.changed_at = mark  # After a restore, the earlier time is unknown.
        within = Within.exactly(value) if exact else Within(max(0.0, value - slack), value)
        self._newest.append(within)
        if known is None:
            self._learn(within, exact, mark)
            return
        if exact and not known.exact and not follows_base:
            # The base was an upper bound. The first exact value may lower it.
            known.exact, known.value = True, min(known.value, value)
        self._remember(within, known.value)
        if not exact:
            expected = self.wire_time
            if within.low <= expected <= value:
                if self.level is Level.SLOW:
                    self._since.append(within)
                elif self._since and value < median(window.low for window in self._since):
                    # As expected, and not as late as those that raised a suspicion.
                    self._observe_healthy(known, known.value, within, mark, weight, hold=hold)
                else:
                    self._turned_at = None
                return
            if value > expected:
                # The bound minus one op is certain, and from here on as good as an exact value.
                value, slack = within.low, 0.0
        if self.level is Level.SLOW:
            slack = 0.0 if exact else slack
            self._observe_slow(known, value, within, mark, slack=slack, weight=weight)
        else:
            self._observe_healthy(known, value, within, mark, weight, hold=hold)

    def discount(self, factor: float) -> None:
        """Let the evidence for an alarm so far count less: something else explains it."""
        self._sum *= factor
        self._late *= factor

    def expect(self, base: float) -> None:
        """Judge the next route that has no base by ``base``, unless its first windows are near it:
        the link was moved there since its route broke, not since this one is quick."""
        self._expected = base

    def lower_base(self, base: float, late: float = 0.0) -> bool:
        """Use ``base``, from the link's peers, as the normal wire time if it is much lower.

        For a link that was slow before its base was learned. ``late``: how much longer its notes
        take than those of its peers. Returns whether it was used.
        """
        # Receivers that compute may need iterations to learn it, of which the last ones were slow.
        return self._lower(base, self._learned_at, late)

    def _lower(self, base: float, since: int | None, late: float = 0.0) -> bool:
        known = self._bases.get(self.route) if self.route is not None else None
        if known is None or self.level is not Level.HEALTHY:
            return False
        limit = self.thresholds.of(base, known.noise)
        low, high = self.least_base, known.value
        if late and not known.exact:
            low = high = max(low, base + late)
        # Twice the threshold, since healthy links of a job differ somewhat.
        least = base + 2 * limit
        if low < least:
            return False
        # Not if its newest windows say otherwise: it was slow, and its base is on its way down.
        if min((seen.high for seen in self._newest), default=0.0) < least:
            return False
        if not late and max(seen.low for seen in self._newest) < least:
            return False
        # How slow: a link that is waited for is seen as soon as its messages are there.
        self._since = deque([Within.exactly(high)] * LEARN, RECENT)
        known.value, known.low = base, min(base, known.low)
        self._become(Level.SLOW, since)
        return True

    def restore_base(self, route: str, base: float) -> None:
        """Start with a base learned earlier, before a restart of the host."""
        self._bases[route] = _Base(base)
        if self.route is None:
            self.route = route
            self.level = Level.HEALTHY

    def restore_slow(self, delay: float) -> None:
        """Start with the delay that was saved with the base. Call after :meth:`restore_base`. The
        link needs the usual evidence to become healthy."""
        base = self.base
        if base is None:
            return
        self._since = deque([Within.exactly(base + delay)] * LEARN, RECENT)
        self._alarmed_at = delay
        self.level = Level.SLOW

    def bases(self) -> dict[str, float]:
        """Normal wire time per route, for a snapshot."""
        return {route: known.value for route, known in self._bases.items()}

    # --- the parts ------------------------------------------------------------------------

    def _switch(self, route: str) -> None:
        """Change to another route, which has its own base. The level stays until windows change
        it."""
        before = self._bases.get(self.route) if self.route is not None else None
        if before is not None:
            self._carried = (before.value, self.delay, before.noise, self.confidence)
        if route not in self._bases:
            self._learning.clear()
        elif self.level is Level.SLOW and self.base is not None:
            shift = self._bases[route].value - self.base
            self._since = deque(
                (Within(low + shift, high + shift) for low, high in self._since), RECENT
            )
        self.route = route
        self._sum, self._suspected_at, self._turned_at = 0.0, None, None
        self._side, self._stepped, self._fell_at = 0, 0.0, None
        self._step.clear()
        self._newest.clear()

    def _learn(self, within: Within, exact: bool, mark: int) -> None:
        assert self.route is not None
        if self._first is None:
            self._first = mark
        first = self.level is Level.LEARNING and mark == self._first
        if self.level is Level.LEARNING and not first and self._suspected_at == self._first:
            # Ranks that have just begun are late for their first messages by tens of milliseconds.
            self._learning.clear()
        if not self._learning:
            self._suspected_at = mark
        self._learning.append((within, exact))
        true = [seen.high for seen, was_exact in self._learning if was_exact]
        enough = LEARN
        if first:
            enough = 4 * LEARN  # Those are few among the windows of a long iteration.
        elif self.level is Level.SLOW:
            enough = 2 * LEARN  # The delay may vary: enough windows to see several values of it.
        if len(true) < enough and len(self._learning) < 4 * LEARN:
            return
        values = sorted(true or (seen.high for seen, _ in self._learning))
        level = median(true) if true else values[0]
        lows = sorted(seen.low for seen, _ in self._learning)
        low = min(level, lows[int(CERTAIN * (len(lows) - 1))])
        self._learning.clear()
        if self.level is Level.SLOW:
            # Another route of a slow link. Either it avoids the fault, and its whole wire time is
            # its base; or the delay is here too, and the base is the rest.
            usual, delay, noise, _ = self._carried
            came_along = values[int(0.8 * len(values))] - usual > delay / 4
            base = max(min(usual, level), level - delay) if came_along else level
            low = min(base, low)
            self._bases[self.route] = _Base(base, noise, bool(true), low, guessed=came_along)
            self._since = deque([Within.exactly(level)] * LEARN, RECENT)
            if came_along and self.is_doubtful:
                # Most windows are as usual, and some are late: their mean is the delay.
                self._since = deque(map(Within.exactly, values), RECENT)
                came_along = not self.is_doubtful
            if not came_along:
                self._since.clear()
                self._become(Level.HEALTHY, self._suspected_at)
        else:
            spread = median(abs(v - level) for v in true) if true else 0.0
            if self._bases and values[-1] - values[0] > self.thresholds.of(values[0], 0.0):
                # The route was changed for the other direction, and this one is slow now and then.
                level, spread = values[0], self._carried[2]
            self._bases[self.route] = _Base(level, spread, bool(true), min(level, low))
            self.changed_at, self._learned_at = self._suspected_at, mark
            self.level = Level.HEALTHY
            if self._expected is not None:
                self._lower(self._expected, self._suspected_at)
        self._suspected_at = self._expected = None

    def _observe_healthy(
        self,
        known: _Base,
        value: float,
        within: Within,
        mark: int,
        weight: float,
        *,
        hold: bool,
    ) -> None:
        threshold = self.thresholds.of(known.value, known.noise)
        step = min(1.0, max(-1.0, (value - known.value) / threshold - 0.5))
        self._sum = max(0.0, self._sum + (step * weight if step > 0 else step))
        # Suspicious windows count as well: stalls of a shared machine last many windows.
        deviation = min(abs(value - known.value), threshold)
        self._turn(value - known.value >= threshold, mark)
        rate = NOISE_UP if deviation > known.noise else NOISE_DOWN
        known.noise += rate * (deviation - known.noise)
        self._earlier *= FORGET
        self._peak = max(self._peak, self._sum)
        late = within.low - known.value >= threshold
        self._late = max(0.0, self._late + (OFTEN * weight if late else -SELDOM))
        self._lately.append(within)
        enough = self.thresholds.alarm - ALARM + LATE_ALARM
        self._late = min(self._late, enough)
        if self._late == 0.0:
            self._lately.clear()
        elif self._late == enough and not hold and self._is_late(known.value):
            self._since = self._lately.copy()
            self._alarmed_at = fmean(window.low for window in self._since) - known.value
            if not self._memory:
                for each in self._since:
                    self._memory.add(Within(each.low - known.value, each.high - known.value))
            self._become(Level.SLOW, mark)
            return
        if self._sum == 0.0:
            if self._peak > 1.0:  # More than one window.
                self._earlier = max(self._earlier, self._peak)
            self._peak = 0.0
            self._since.clear()
            far_below = known.value - value > self.thresholds.of(known.value, 0.0) / 2
            known.value += (DROP if far_below else DRIFT) * (value - known.value)
            if far_below:
                known.noise -= DROP * known.noise
            return
        self._since.append(within)
        if self._sum >= self.alarm:
            self._sum = self.alarm
            certain = median(window.low for window in self._since) - known.value
            if certain >= threshold and not hold:
                self._alarmed_at = certain
                # The first late window may have messages from before the change.
                line = known.value + certain / 2
                self._since = deque((w for w in self._since if w.high >= line), RECENT)
                self._become(Level.SLOW, mark if self._turned_at is None else self._turned_at)

    def _is_late(self, base: float) -> bool:
        """Whether windows that are late now and then make a delay, on average, that counts."""
        return fmean(likely(self._lately)) - base >= self.threshold / 2

    def _observe_slow(
        self, known: _Base, value: float, within: Within, mark: int, *, slack: float, weight: float
    ) -> None:
        """Process a window while slow. If ``slack`` is above 0, ``value`` is an upper bound: below
        the line it is stronger evidence than a noisy value; above it, it is none if the true value
        may be below."""
        self._slow_for += 1
        if known.guessed:
            # If the guess is too high, low values of a varying delay would look like recovery.
            known.value = min(known.value, value + 3 * known.noise)
        threshold = self.thresholds.of(known.value, known.noise)
        line = known.value + threshold / 2
        step = min(2.0 if slack else 1.0, max(-1.0, 4 * (line - value) / threshold))
        if not (slack and value - slack <= line < value):
            if step < 0 and self.recent:
                step *= PAUSE  # Or pauses would add up to a recovery.
            self._sum = max(0.0, self._sum + step)
            self._turn(value <= line, mark, patience=1)
        if self._sum == 0.0:
            self._suspected_at = None
        elif self._suspected_at is None:
            self._suspected_at = mark
        if self._sum >= CLEAR and self._sum >= self._clear(known):
            if self._slow_for < RECENT and not known.guessed:
                # A short stall: further ones of its size are noise of the link.
                known.noise = max(known.noise, 1.2 * self._alarmed_at / self.thresholds.noise)
            if known.guessed:
                # It is the least of these windows, and noise above it would look like a delay.
                known.value = max(known.value, median(likely(self._newest)))
            known.guessed = False
            self._since.clear()
            turned = mark if self._turned_at is None else self._turned_at
            if self._fell_at is not None and not self.recent:
                turned = min(turned, self._fell_at)
            self._become(Level.HEALTHY, turned)
        else:
            self._follow(known, within, mark, threshold, weight)

    def _clear(self, known: _Base) -> float:
        """Windows of evidence for a recovery."""
        if self.recent:
            return PAUSE * CLEAR
        # A guessed base needs twice the evidence, as long as the delay may vary.
        may_vary = known.guessed and len(self._memory) < RECENT
        return 2 * CLEAR if may_vary else CLEAR

    def _follow(
        self, known: _Base, within: Within, mark: int, threshold: float, weight: float
    ) -> None:
        """Update the estimate: an average, restarted when the delay has changed permanently."""
        if not self._since:
            self._since.append(within)
            return
        estimate = fmean(likely(self._since))
        delay = estimate - known.value
        margin = self._margin(threshold, delay)
        side = _side(within, estimate, margin)
        if side * self._side <= 0:
            self._side, self._stepped = 0, 0.0
            self._since.extend(self._step)  # It was jitter.
            self._step.clear()
            if delay >= threshold:
                self._fell_at = mark if side < 0 else None
        self._side += side
        if side and (self._step or self._is_steady(estimate, margin)):
            self._step.append(within)
            self._stepped += weight if side > 0 else 0.0
        else:
            self._since.append(within)
        if abs(self._side) >= SHIFT or self._stepped >= self.alarm:
            fell = self._side < 0
            self._since = deque(self._step or list(self._since)[-SHIFT:], RECENT)
            self.steps += 1
            self._side, self._stepped = 0, 0.0
            self._step.clear()
            if fell and known.guessed:
                self._raise_guess(known, threshold)

    def _raise_guess(self, known: _Base, threshold: float) -> None:
        """Take what is left of a delay after a step down for the error of the guess, if that is
        little, and the step for the end of the fault, unless it may be a phase of a delay that
        varies."""
        usual, delay, _, _ = self._carried
        phase = self.recent or self.wire_time - usual > delay / 4
        if self.delay < max(threshold, GUESS * delay) and not phase:
            known.value, self._sum = self.wire_time, max(self._sum, float(SHIFT))

    def _margin(self, threshold: float, delay: float) -> float:
        """By how much windows of a slow link may differ from its delay without being a change."""
        return max(threshold / 2, 0.2 * delay)

    def _is_steady(self, estimate: float, margin: float) -> bool:
        """Whether hardly any window of the estimate is outside its ``margin``."""
        if len(self._since) < STEADY or self.recent:
            return False
        outside = sum(_side(window, estimate, margin) != 0 for window in self._since)
        return outside <= TRIM * len(self._since)

    def _remember(self, within: Within, base: float) -> None:
        """Keep a window of a link that is slow, or was lately."""
        if self.level is Level.SLOW:
            self._well = 0
        elif self._memory:
            self._well += 1
            if self._well >= MEMORY:
                self._memory.clear()
        if self.level is Level.SLOW or self._memory:
            self._memory.add(Within(within.low - base, within.high - base))

    def _turn(self, shows_other_level: bool, mark: int, patience: int = 0) -> None:
        """Update :attr:`_turned_at` after a window. ``patience``: windows in a row that may show
        the present level without putting the turn off: on a busy machine single ones are late."""
        self._against = 0 if shows_other_level else self._against + 1
        if self._against > patience:
            self._turned_at = None
        elif shows_other_level and self._turned_at is None:
            self._turned_at = mark

    def _become(self, level: Level, mark: int | None) -> None:
        self.level = level
        self.changed_at = mark
        self._sum, self._peak, self._late = 0.0, 0.0, 0.0
        self._slow_for, self._side, self._stepped, self._fell_at = 0, 0, 0.0, None
        self._lately.clear()
        self._step.clear()
        self._suspected_at = self._turned_at = None


def _side(within: Within, middle: float, margin: float) -> int:
    """1 if a wire time is above the margin around the middle, -1 if it is below, 0 if it may be
    within."""
    return (within.low > middle + margin) - (within.high < middle - margin)
