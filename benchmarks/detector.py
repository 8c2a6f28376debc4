"""Quality of the detection of slow links, on simulated wire times with known faults.

    python benchmarks/detector.py [--seeds 100] [--json FILE]

A window is 50 ms. Normal wire time is 6 ms with 8% noise, and one window in a hundred is an
outlier of up to 20 times that, as on a shared machine. Each scenario runs with many seeds,
through the detector and, as the named baseline, through Bayesian online change-point detection
(Adams & MacKay 2007, normal-gamma, hazard 1/250, run lengths cut at 100; alarm when the mass on
run lengths of at most 5 exceeds 0.9 and at least 3 windows are past the change), verified by
the same size of change.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from math import exp, lgamma, log, log1p, pi
from statistics import fmean, median
from time import perf_counter
from typing import Protocol

from goals import make_parser, write_figures

from pipemorph.detection.detector import (
    DelayDetector,
    DetectorLevel,
    DetectorThresholds,
    compute_alarm_level,
)

WINDOW = 0.05
BASE = 0.006
LEAD = 60
"""Healthy windows before a fault."""

Series = list[float | None]
"""Wire time of each window in seconds; None for a window without messages."""


class LinkJudge(Protocol):
    """Detector under test: receives windows, and reports whether the link is slow and its delay."""

    def observe(self, value: float, mark: int) -> None: ...

    @property
    def slow(self) -> bool: ...

    @property
    def delay(self) -> float: ...


class CusumJudge:
    """Detector of the product."""

    def __init__(self, series: int = 1) -> None:
        self._detector = DelayDetector(DetectorThresholds(alarm=compute_alarm_level(series)))

    def observe(self, value: float, mark: int) -> None:
        self._detector.observe_window(value, mark=mark, route="direct")

    @property
    def slow(self) -> bool:
        return self._detector.level is DetectorLevel.SLOW

    @property
    def delay(self) -> float:
        return self._detector.delay


class BayesianJudge:
    """Bayesian online change-point detection with the same verification of size."""

    CUT, SHORT, HAZARD = 100, 5, 1 / 250

    def __init__(self) -> None:
        self.slow, self.delay = False, 0.0
        self._recent: list[float] = []
        self._base: float | None = None
        # For each run length: log mass, and the normal-gamma's mean, weight, shape, rate.
        self._prior = (BASE, 0.1, 1.0, (0.1 * BASE) ** 2)
        self._runs: list[tuple[float, float, float, float, float]] = [(0.0, *self._prior)]

    def observe(self, value: float, mark: int) -> None:
        grown, change = [], 0.0
        peak = max(run[0] for run in self._runs)
        for mass, mean, weight, shape, rate in self._runs:
            likely = mass + _log_student(value, mean, weight, shape, rate)
            change += exp(mass - peak) * self.HAZARD
            grown.append(
                (
                    likely + log1p(-self.HAZARD),
                    (weight * mean + value) / (weight + 1),
                    weight + 1,
                    shape + 0.5,
                    rate + weight * (value - mean) ** 2 / (2 * (weight + 1)),
                )
            )
        fresh = log(change) + peak + _log_student(value, *self._prior)
        mean, weight, shape, rate = self._prior
        first = (
            fresh,
            (weight * mean + value) / (weight + 1),
            weight + 1,
            shape + 0.5,
            rate + weight * (value - mean) ** 2 / (2 * (weight + 1)),
        )
        runs = [first, *grown][: self.CUT]
        top = max(run[0] for run in runs)
        total = log(sum(exp(run[0] - top) for run in runs)) + top
        self._runs = [(run[0] - total, *run[1:]) for run in runs]
        self._recent = [*self._recent, value][-self.CUT :]
        self._update_verdict()

    def _update_verdict(self) -> None:
        short = sum(exp(run[0]) for run in self._runs[: self.SHORT])
        likeliest = max(range(len(self._runs)), key=lambda i: self._runs[i][0]) + 1
        level = fmean(self._recent[-likeliest:])
        if self._base is None:
            if len(self._recent) >= self.SHORT:
                self._base = median(self._recent)
            return
        threshold = max(0.002, 0.25 * self._base)
        above = level - self._base
        sure = short > 0.9 and likeliest >= 3
        if not self.slow and sure and above >= threshold:
            self.slow = True
        elif self.slow and sure and above < threshold / 2:
            self.slow = False
        elif not self.slow and likeliest > 2 * self.SHORT and above < threshold / 2:
            self._base = level
        self.delay = max(0.0, above) if self.slow else 0.0


def _log_student(value: float, mean: float, weight: float, shape: float, rate: float) -> float:
    degrees = 2 * shape
    scale = rate * (weight + 1) / (shape * weight)
    return (
        lgamma((degrees + 1) / 2)
        - lgamma(degrees / 2)
        - 0.5 * log(degrees * pi * scale)
        - (degrees + 1) / 2 * log1p((value - mean) ** 2 / (degrees * scale))
    )


QUIET = ((0.0, 1.0), (0.01, 1.0), (0.05, 1.0), (0.01, 2.0), (0.05, 2.0))
"""Fraction of late windows of a healthy link, and mean number of late windows in a row."""
STALLS = (0.01, 2.0)

# --- scenarios -----------------------------------------------------------------------------


def make_quiet_series(
    rng: random.Random, count: int, outliers: float = 0.01, run: float = 1.0
) -> list[float]:
    """Wire times of a healthy link. ``outliers``: fraction of the windows; ``run``: mean number of
    outliers in a row, as when a machine stalls."""
    values, stalled = [], False
    for _ in range(count):
        stalled = rng.random() < (1 - 1 / run if stalled else outliers / run)
        late = BASE * rng.uniform(3, 20) if stalled else rng.gauss(BASE, 0.08 * BASE)
        values.append(max(1e-4, late))
    return values


def make_step(delay: float, *, missing: float = 0.0) -> Callable[[random.Random], Series]:
    def add_step(rng: random.Random) -> Series:
        values: Series = [*make_quiet_series(rng, LEAD)]
        values += [value + delay for value in make_quiet_series(rng, 200)]
        values += make_quiet_series(rng, 200)
        return [None if rng.random() < missing else value for value in values]

    return add_step


def add_jitter(rng: random.Random) -> Series:
    """Delays redrawn every 50-400 ms from N(30, 10) ms (paper, "numbers to stand next to")."""
    values: Series = [*make_quiet_series(rng, LEAD)]
    delay, windows = 0.0, 0
    for value in make_quiet_series(rng, 200):
        if windows == 0:
            delay, windows = max(0.0, rng.gauss(0.030, 0.010)), rng.randint(1, 8)
        windows -= 1
        values.append(value + delay)
    return [*values, *make_quiet_series(rng, 200)]


def add_ramp(rng: random.Random) -> Series:
    """Delay that grows from 0 to 30 ms in ten seconds, then returns to 0 at once."""
    values: Series = [*make_quiet_series(rng, LEAD)]
    values += [value + 0.030 * i / 200 for i, value in enumerate(make_quiet_series(rng, 200))]
    return [*values, *make_quiet_series(rng, 200)]


@dataclass(frozen=True)
class ScenarioFigures:
    """Result of a judge in a scenario, over all seeds. Windows, and milliseconds."""

    scenario: str
    judge: str
    found: float
    windows_p50: float
    windows_p99: float
    cleared_p50: float
    extra_alarms: float
    error_ms: float


def run_fault(
    name: str, make: Callable[[random.Random], Series], judge: Callable[[], LinkJudge],
    seeds: int, truth: float,
) -> ScenarioFigures:  # fmt: skip
    """Run a judge on a fault from window LEAD to LEAD + 200."""
    delays, clears, extra, errors, found = [], [], 0, [], 0
    for seed in range(seeds):
        it, was, alarm, clear = judge(), False, None, None
        for i, value in enumerate(make(random.Random(seed))):
            if value is not None:
                it.observe(value, i)
            if it.slow and not was:
                if alarm is None and i >= LEAD:
                    alarm = i
                else:
                    extra += 1
            if was and not it.slow and i >= LEAD + 200 and clear is None:
                clear = i
            was = it.slow
            if i == LEAD + 199 and it.slow:
                errors.append(abs(it.delay - truth) * 1e3)
        if alarm is not None and alarm < LEAD + 200:
            found += 1
            delays.append(alarm - LEAD + 1)
        if clear is not None:
            clears.append(clear - LEAD - 200 + 1)
    nan = float("nan")
    return ScenarioFigures(
        scenario=name,
        judge=judge.__name__.lower(),
        found=found / seeds,
        windows_p50=median(delays) if delays else nan,
        windows_p99=sorted(delays)[int(0.99 * (len(delays) - 1))] if delays else nan,
        cleared_p50=median(clears) if clears else nan,
        extra_alarms=extra / seeds,
        error_ms=median(errors) if errors else nan,
    )


def measure_false_alarms(
    judge: Callable[[], LinkJudge], seeds: int, outliers: float, run: float
) -> tuple[float, float]:
    """Alarms per hour of a healthy link, and microseconds per window."""
    alarms, took, windows = 0, 0.0, 2000
    for seed in range(seeds):
        values = make_quiet_series(random.Random(10_000 + seed), windows, outliers, run)
        it, was = judge(), False
        began = perf_counter()
        for i, value in enumerate(values):
            it.observe(value, i)
            alarms += it.slow and not was
            was = it.slow
        took += perf_counter() - began
    hours = seeds * windows * WINDOW / 3600
    return alarms / hours, took / (seeds * windows) * 1e6


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="runs per scenario (default 100)")
    args = parser.parse_args()
    scenarios: list[tuple[str, Callable[[random.Random], Series], float]] = [
        *((f"step {ms} ms", make_step(ms / 1e3), ms / 1e3) for ms in (3, 10, 30, 60)),
        ("step 30 ms, half missing", make_step(0.030, missing=0.5), 0.030),
        ("N(30,10) every 50-400 ms", add_jitter, 0.030),
        ("ramp to 30 ms in 10 s", add_ramp, 0.030),
    ]
    judges: list[tuple[Callable[[], LinkJudge], int]] = [
        (CusumJudge, args.seeds),
        (BayesianJudge, max(1, args.seeds // 10)),
    ]
    figures = [
        run_fault(name, make, judge, seeds, truth)
        for name, make, truth in scenarios
        for judge, seeds in judges
    ]
    quiet_figures = []
    for judge, seeds in judges:
        for outliers, length in QUIET:
            rate, cost = measure_false_alarms(judge, seeds, outliers, length)
            quiet_figures.append(
                {
                    "judge": judge.__name__.lower(),
                    "outliers": outliers,
                    "run": length,
                    "alarms_per_hour": rate,
                    "microseconds_per_window": cost,
                }
            )
    faults = [vars(f) for f in figures]
    write_figures({"window_seconds": WINDOW, "faults": faults, "quiet": quiet_figures}, args.json)
    print(f"{'scenario':26}{'detector':>10}{'found':>8}{'windows to alarm':>18}"
          f"{'to clear':>10}{'extra':>7}{'error':>9}")  # fmt: skip
    for f in figures:
        print(
            f"{f.scenario:26}{f.judge:>10}{f.found:>8.0%}"
            f"{f'{f.windows_p50:g} (p99 {f.windows_p99:g})':>18}"
            f"{f.cleared_p50:>10g}{f.extra_alarms:>7.2f}{f.error_ms:>6.1f} ms"
        )
    for series in (16, 2016, 20160):
        rate, _ = measure_false_alarms(lambda n=series: CusumJudge(n), args.seeds, *STALLS)
        print(
            f"a job of {series} link directions, {STALLS[0]:.0%} outliers in runs of"
            f" {STALLS[1]:g}: {rate:.2f} false alarms per hour and direction"
        )
    print()
    for q in quiet_figures:
        print(
            f"healthy, {q['outliers']:.0%} outliers in runs of {q['run']:g}: {q['judge']:>9} "
            f"{q['alarms_per_hour']:.2f} false alarms per hour and link direction, "
            f"{q['microseconds_per_window']:.1f} µs per window"
        )


if __name__ == "__main__":
    main()
