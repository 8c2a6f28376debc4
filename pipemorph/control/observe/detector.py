"""Is one direction of one link slow, and by how much? Pure arithmetic, no clock.

A change point *and* the size of the change. Wire times come in windows (about 50 ms each);
the normal wire time of the link (its base: moving 16 MB takes time, which is not a delay) is
learned while it is healthy, and what is above it is the delay.

Why CUSUM and not Bayesian change-point detection (Greyhound; Adams & MacKay 2007). Here the
level before the change is known and so is the least change that matters, and for that case a
cumulative sum is the quickest test there is for a given rate of false alarms (Lorden 1971),
costs a few additions per window, and has a threshold that can be read: how many windows it
takes. ``benchmarks/detector.py`` runs both on the same series. Three things are added:

- increments are clipped to ±1, so that no single window, however late, can raise an alarm;
- an alarm is verified by the median of the windows since the change point: at least
  ``min_delay``, ``relative`` of the base and four times the link's own noise;
- both edges have their own test: to be slow takes ``ALARM`` windows above the threshold, to be
  healthy again ``CLEAR`` windows (more) below half of it. Between the two, nothing changes.

Memory is bounded: sums, and at most ``RECENT`` values.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from math import erf, sqrt
from statistics import fmean, median, pstdev

ALARM = 3.0
"""Windows well above the threshold before an alarm: the fewest that are not one hiccup."""
CLEAR = 8.0
"""Windows well below half the threshold before all is well: more, since going back early
costs a slow iteration and going back late costs little."""
LEARN = 5
"""Windows that make a first base."""
RECENT = 40
"""Windows an estimate of the delay is averaged over: about two seconds."""
SHIFT = 12
"""Windows in a row on one side of the estimate before the older ones are dropped. Longer than
a delay that is redrawn every 400 ms stays, so that jitter is averaged and a step followed."""
NOISE_UP, NOISE_DOWN = 0.01, 0.001
"""How fast the noise of a link follows its windows: what it was like in the last minute counts,
and its worse moments more."""
DRIFT, DROP = 0.005, 0.1
"""How fast the base follows its windows: hardly, so that a delay that creeps in does not become
normal; but quickly down to windows far below it, since first windows are often slow."""


class Level(StrEnum):
    """What a detector believes. LEARNING: no base yet."""

    LEARNING = "learning"
    HEALTHY = "healthy"
    SLOW = "slow"


@dataclass(frozen=True)
class Thresholds:
    """What counts as a change. ``min_delay`` in seconds; ``relative`` is a fraction of the base."""

    min_delay: float = 0.002
    relative: float = 0.25
    noise: float = 4.0

    def of(self, base: float, noise: float) -> float:
        """Least delay that counts. Noise raises it to at most ``noise`` times what it is
        without, so that a link that is often slow does not make slowness normal."""
        quiet = max(self.min_delay, self.relative * base)
        return max(quiet, self.noise * min(noise, quiet))


@dataclass
class _Base:
    """Normal wire time over one route, seconds, and its spread (mean absolute deviation)."""

    value: float
    noise: float = 0.0
    exact: bool = True
    guessed: bool = False
    """First used while the link was slow: no window of the healthy link has been seen."""


class DelayDetector:
    """One direction of one link of one replica. All times in seconds.

    Feed it windows with :meth:`observe`; read ``level``, ``delay`` (above the base),
    ``wire_time`` (base and delay), ``confidence`` and ``changed_at``.
    """

    def __init__(self, thresholds: Thresholds | None = None) -> None:
        self.thresholds = thresholds or Thresholds()
        self.level = Level.LEARNING
        self.route: str | None = None
        self.changed_at: int | None = None
        """Mark of the first window of the present level: that after the last window which still
        showed the level before."""
        self._bases: dict[str, _Base] = {}
        self._learning: list[tuple[float, bool]] = []
        self._sum = 0.0
        self._since: deque[float] = deque(maxlen=RECENT)
        self._suspected_at: int | None = None
        self._turned_at: int | None = None
        """Mark of the first of the newest windows that all show the other level. A suspicion may
        be older: it starts at half the threshold, and single windows do not end it."""
        self._side = 0
        self._alarmed_at = 0.0  # The delay at the last alarm.
        self._carried = (0.0, 0.0, 0.0)
        """Base, delay and noise of the route before this one."""

    # --- what is believed -----------------------------------------------------------------

    @property
    def base(self) -> float | None:
        """Normal wire time on the present route; None while it is learned."""
        known = self._bases.get(self.route) if self.route is not None else None
        return known.value if known is not None else None

    @property
    def base_is_exact(self) -> bool:
        """False where no arrival was ever observed when it happened: the base is a bound."""
        known = self._bases.get(self.route) if self.route is not None else None
        return known is not None and known.exact

    @property
    def threshold(self) -> float:
        """Least delay that counts, on the present route."""
        known = self._bases.get(self.route) if self.route is not None else None
        return self.thresholds.of(known.value, known.noise) if known else self.thresholds.min_delay

    @property
    def delay(self) -> float:
        """One-way delay above the base; 0 unless slow."""
        if self.level is not Level.SLOW or not self._since:
            return 0.0
        base = self.base
        return self._carried[1] if base is None else max(0.0, fmean(self._since) - base)

    @property
    def wire_time(self) -> float:
        """One-way time of a message as it is now: base and delay. While a route's base is
        learned, that of the route before."""
        base = self.base
        return (self._carried[0] if base is None else base) + self.delay

    @property
    def suspected_at(self) -> int | None:
        """Mark of the window at which the present doubt began; None without doubt."""
        return self._suspected_at

    @property
    def confidence(self) -> float:
        """Probability, 0 … 1, that the level is right: that the mean of its windows is on its
        side of the middle between base and threshold (normal approximation)."""
        base = self.base
        if base is None:
            return 0.0
        middle = base + self.threshold / 2
        if self.level is Level.SLOW and self._since:
            spread = max(pstdev(self._since), self.threshold / 8)
            z = (fmean(self._since) - middle) / (spread / sqrt(len(self._since)))
        else:
            z = (1 - self._sum / ALARM) * 3
        return 0.5 * (1 + erf(z / sqrt(2)))

    # --- evidence -------------------------------------------------------------------------

    def is_late(self, value: float, *, route: str, slack: float = 0.0) -> bool | None:
        """Whether a window is above the threshold; None where there is nothing to judge it by, or
        the link is slow already. ``slack``: by so much ``value`` may be above the truth."""
        known = self._bases.get(route)
        if self.level is not Level.HEALTHY or known is None or route != self.route:
            return None
        return value - slack - known.value > self.thresholds.of(known.value, known.noise)

    def observe(
        self,
        value: float,
        *,
        mark: int,
        route: str,
        exact: bool = True,
        slack: float = 0.0,
        weight: float = 1.0,
    ) -> None:
        """One window: its median wire time, the iteration it belongs to (``mark``), its route.

        ``exact=False``: ``value`` is an upper bound, at most ``slack`` (one op of the
        receiver) above the truth. It then says only what lies outside that interval.
        ``weight``: what it counts for towards an alarm, where something else than this link may
        have made it late.
        """
        if route != self.route:
            self._switch(route)
        known = self._bases.get(route)
        if known is not None and self.changed_at is None:
            self.changed_at = mark  # Restored: known of it is the time since now.
        if known is None:
            self._learn(value, exact, mark)
            return
        if exact and not known.exact:
            # The base was a bound. The first true value may put it right, downwards.
            known.exact, known.value = True, min(known.value, value)
        if not exact:
            expected = self.wire_time
            if value - slack <= expected <= value:
                return
            if value > expected:
                # Certain is the bound less one op; from here on as good as a true value.
                value, slack = value - slack, 0.0
        if self.level is Level.SLOW:
            self._observe_slow(known, value, mark, 0.0 if exact else slack)
        else:
            self._observe_healthy(known, value, mark, weight)

    def lower_base(self, base: float) -> bool:
        """Take ``base`` for normal, as the link's peers suggest, if that is less by enough.

        For a link that was slow before anything could be learned about it. True if taken.
        """
        known = self._bases.get(self.route) if self.route is not None else None
        if known is None or not known.exact or self.level is not Level.HEALTHY:
            return False
        limit = self.thresholds.of(base, known.noise)
        # Twice what counts: links of one job differ somewhat, and that is no fault.
        if known.value - base < 2 * limit:
            return False
        self._since = deque([known.value] * LEARN, RECENT)
        known.value = base
        self._become(Level.SLOW, self.changed_at)
        return True

    def restore_base(self, route: str, base: float) -> None:
        """Start from a base learned earlier (a host that was restarted)."""
        self._bases[route] = _Base(base)
        if self.route is None:
            self.route = route
            self.level = Level.HEALTHY

    def restore_slow(self, delay: float) -> None:
        """Start from a delay that was there when the base was kept, after :meth:`restore_base`.
        It takes as much evidence as ever to be healthy again: what nobody watched is no
        recovery."""
        base = self.base
        if base is None:
            return
        self._since = deque([base + delay] * LEARN, RECENT)
        self._alarmed_at = delay
        self.level = Level.SLOW

    def bases(self) -> dict[str, float]:
        """Normal wire time per route, to be kept by a host."""
        return {route: known.value for route, known in self._bases.items()}

    # --- the parts ------------------------------------------------------------------------

    def _switch(self, route: str) -> None:
        """The bytes travel another way: another base. The level stays until windows tell."""
        before = self._bases.get(self.route) if self.route is not None else None
        if before is not None:
            self._carried = (before.value, self.delay, before.noise)
        if route not in self._bases:
            self._learning.clear()
        elif self.level is Level.SLOW and self.base is not None:
            shift = self._bases[route].value - self.base
            self._since = deque((value + shift for value in self._since), RECENT)
        self.route = route
        self._sum, self._suspected_at, self._turned_at = 0.0, None, None

    def _learn(self, value: float, exact: bool, mark: int) -> None:
        assert self.route is not None
        if not self._learning:
            self._suspected_at = mark
        self._learning.append((value, exact))
        true = [v for v, was_exact in self._learning if was_exact]
        # A slow link's delay may vary: enough windows to see more than one draw of it.
        enough = 2 * LEARN if self.level is Level.SLOW else LEARN
        if len(true) < enough and len(self._learning) < 4 * LEARN:
            return
        values = sorted(true or (v for v, _ in self._learning))
        level = median(true) if true else min(v for v, _ in self._learning)
        self._learning.clear()
        if self.level is Level.SLOW:
            # Another route of a slow link. Either this route avoids what is wrong, and all of it
            # is its base; or the delay came along, and the rest is.
            usual, delay, noise = self._carried
            came_along = values[int(0.8 * len(values))] - usual > delay / 4
            base = max(min(usual, level), level - delay) if came_along else level
            self._bases[self.route] = _Base(base, noise, exact=bool(true), guessed=came_along)
            self._since = deque([level] * LEARN, RECENT)
            if not came_along:
                self._since.clear()
                self._become(Level.HEALTHY, self._suspected_at)
        else:
            spread = median(abs(v - level) for v in true) if true else 0.0
            self._bases[self.route] = _Base(level, spread, exact=bool(true))
            self.changed_at = self._suspected_at
            self.level = Level.HEALTHY
        self._suspected_at = None

    def _observe_healthy(self, known: _Base, value: float, mark: int, weight: float) -> None:
        threshold = self.thresholds.of(known.value, known.noise)
        step = min(1.0, max(-1.0, (value - known.value) / threshold - 0.5))
        self._sum = max(0.0, self._sum + (step * weight if step > 0 else step))
        # Also from windows under suspicion: a shared machine has hiccups of many windows.
        deviation = min(abs(value - known.value), threshold)
        self._turn(value - known.value >= threshold, mark)
        rate = NOISE_UP if deviation > known.noise else NOISE_DOWN
        known.noise += rate * (deviation - known.noise)
        if self._sum == 0.0:
            self._since.clear()
            far_below = known.value - value > self.thresholds.of(known.value, 0.0) / 2
            known.value += (DROP if far_below else DRIFT) * (value - known.value)
            if far_below:
                known.noise -= DROP * known.noise
            return
        self._since.append(value)
        if self._sum >= ALARM:
            self._sum = ALARM
            if median(self._since) - known.value >= threshold:
                self._alarmed_at = median(self._since) - known.value
                self._become(Level.SLOW, mark if self._turned_at is None else self._turned_at)

    def _observe_slow(self, known: _Base, value: float, mark: int, slack: float) -> None:
        """``slack`` above 0: ``value`` is a bound. Below the line it proves more than a value
        with noise on it; above, it proves nothing if the truth may still be below."""
        if known.guessed:
            # Guessed too high, low draws of a varying delay would pass for recovery.
            known.value = min(known.value, value + 3 * known.noise)
        threshold = self.thresholds.of(known.value, known.noise)
        line = known.value + threshold / 2
        step = min(2.0 if slack else 1.0, max(-1.0, 4 * (line - value) / threshold))
        if not (slack and value - slack <= line < value):
            self._sum = max(0.0, self._sum + step)
            self._turn(value <= line, mark)
        if self._sum == 0.0:
            self._suspected_at = None
        elif self._suspected_at is None:
            self._suspected_at = mark
        # With a guessed base, twice the evidence: more than one draw of a delay that varies.
        if self._sum >= (2 * CLEAR if known.guessed else CLEAR):
            if len(self._since) < RECENT and not known.guessed:
                # A hiccup: if there are more of its size, they are the link's noise.
                known.noise = max(known.noise, 1.2 * self._alarmed_at / self.thresholds.noise)
            known.guessed = False
            self._since.clear()
            self._become(Level.HEALTHY, mark if self._turned_at is None else self._turned_at)
        else:
            self._follow(value, threshold)

    def _follow(self, value: float, threshold: float) -> None:
        """Keep the estimate: an average, restarted when the delay has moved for good."""
        if self._since:
            estimate = fmean(self._since)
            margin = max(threshold / 2, 0.2 * (estimate - (self.base or 0.0)))
            side = (value > estimate + margin) - (value < estimate - margin)
            self._side = self._side + side if side * self._side > 0 else side
        self._since.append(value)
        if abs(self._side) >= SHIFT:
            self._since = deque(list(self._since)[-SHIFT:], RECENT)
            self._side = 0

    def _turn(self, shows_other_level: bool, mark: int) -> None:
        """Keep :attr:`_turned_at` after one more window."""
        if not shows_other_level:
            self._turned_at = None
        elif self._turned_at is None:
            self._turned_at = mark

    def _become(self, level: Level, mark: int | None) -> None:
        self.level = level
        self.changed_at = mark
        self._sum, self._side = 0.0, 0
        self._suspected_at = self._turned_at = None
