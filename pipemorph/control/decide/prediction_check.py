"""Compares predictions with measured iterations, before a change of plan and after it.

A prediction is only as good as its delays and op times, and on a busy machine both may show a fault
that is not there. So measured iterations decide:

- Before a change, iterations of the current plan that ran in the present state must take as long as
  predicted. If they are shorter by more than the gain of the change, the evidence is held for some
  iterations, and the plan stays.
- After a change, its first iterations must bring half of the predicted gain. If they do not, and
  are hardly shorter than those before, the plan before returns, and the links (or op times) that
  were the reason are *doubted*: the next change for them needs iterations that confirm it, more
  each time. Doubt fades slowly.
- A plan that was measured to be slower than the one before is undone as soon as noise allows that
  conclusion, whatever was predicted; the return is measured in turn. Until the state changes, a
  change must gain more than the error of that prediction.

An iteration takes longer than its ops: optimizer, data loading, gradient norm. This *overhead* is
the time of earlier iterations beyond their prediction (:class:`MeasuredReference`), so that only
changes of the iteration time are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import median

from pipemorph.control.decide.forecast import EQUAL_WITHIN, Forecast, PlanOption
from pipemorph.control.decide.situation import Situation
from pipemorph.planning import Plan

FEWEST_ITERATIONS, MOST_ITERATIONS = 3, 8
"""Iterations in a median of measured times."""
JUDGED_AFTER, UNDECIDED_AFTER = 4, 20
"""Iterations under a new plan, without its first, after which its gain is judged; and after which
it is never judged, if noise still allows both results."""
PROMISED_FRACTION, STAYING_GAIN = 0.5, 0.02
"""Fraction of the predicted gain that a change must bring. A change that saves the fraction
STAYING_GAIN of an iteration stays even if it promised more: the plan before it is slower."""
SLOWER_ALLOWED = 0.05
"""Fraction of an iteration by which a new plan may be slower until it is judged, if too few
iterations before it are known for a spread."""
EXPLAINED_OVERHEAD = 0.25
"""Fraction of an iteration beyond its prediction that optimizer and data loading may explain. If it
is more, the prediction misses something."""
NOISE_SIGMAS = 2.0
"""Standard errors of a median that count as noise."""
MODEL_ERROR = 0.05
"""Least difference of predictions, as a fraction, that measurements can distinguish."""


@dataclass(frozen=True)
class MeasuredReference:
    """Measured iterations of a plan in a known situation. ``seconds``: their median; ``spread``:
    standard deviation of one iteration, robust to outliers."""

    plan: Plan
    situation: Situation
    seconds: float
    spread: float


@dataclass(frozen=True)
class SituationEvidence:
    """Evidence for a situation. ``measured_seconds``: seconds of iterations of the current plan
    that ran entirely in it; ``situation_if_wrong``: the situation if the new evidence is wrong;
    ``error_seconds``: error of an earlier prediction in this state."""

    reference: MeasuredReference | None = None
    situation_if_wrong: Situation | None = None
    measured_seconds: tuple[float, ...] = ()
    error_seconds: float = 0.0
    waited_too_long: bool = False


@dataclass(frozen=True)
class PromisedTimes:
    """Predicted iteration times of a change of plan in seconds, including overhead.

    ``seconds_before``: with the old plan; ``seconds_after``: with the new one;
    ``seconds_if_wrong``: with the new one if the evidence is wrong, None if unknown;
    ``may_revert``: True if in this case the old plan is no slower than the new one. ``spread``:
    standard deviation of a measured iteration; ``error_seconds``: seconds that the model of the old
    plan misses, or 0.
    """

    seconds_before: float
    seconds_after: float
    seconds_if_wrong: float | None = None
    may_revert: bool = True
    spread: float = 0.0
    error_seconds: float = 0.0

    @property
    def gain_seconds(self) -> float:
        return self.seconds_before - self.seconds_after


def compute_overhead(forecast: Forecast, evidence: SituationEvidence) -> float:
    """Seconds that an iteration takes beyond its prediction; 0 if none was measured."""
    if (known := evidence.reference) is None:
        return 0.0
    predicted = forecast.for_situation(known.situation).predict_option(known.plan).seconds
    # A pipeline is never faster than its ops: a negative overhead is an error of the op times.
    return max(0.0, known.seconds - predicted)


def promise_times(
    forecast: Forecast, current: PlanOption, chosen: PlanOption, evidence: SituationEvidence
) -> PromisedTimes:
    """Predict the times of a change from ``current`` to ``chosen``."""
    reference, overhead = evidence.reference, compute_overhead(forecast, evidence)
    old, new = current.seconds, chosen.seconds
    if evidence.situation_if_wrong is not None:
        other = forecast.for_situation(evidence.situation_if_wrong)
        old, new = (
            other.predict_option(current.plan).seconds,
            other.predict_option(chosen.plan).seconds,
        )
    unexplained = overhead > EXPLAINED_OVERHEAD * (overhead + current.seconds)
    return PromisedTimes(
        seconds_before=overhead + current.seconds,
        seconds_after=overhead + chosen.seconds,
        seconds_if_wrong=overhead + new if reference is not None else None,
        may_revert=old <= new * (1 + EQUAL_WITHIN),
        spread=reference.spread if reference is not None else 0.0,
        error_seconds=max(evidence.error_seconds, overhead if unexplained else 0.0),
    )


def estimate_spread(seconds: Sequence[float]) -> float:
    """Standard deviation of one iteration among ``seconds``, robust to outliers."""
    middle = median(seconds)
    return 1.4826 * median(abs(each - middle) for each in seconds)


def is_slower(spread: float, before: Sequence[float], after: Sequence[float]) -> bool:
    """True if a new plan is so much slower than the one before that it must end. ``after``: with
    the very first iteration, which includes the change; ``spread``: see :class:`PromisedTimes`."""
    if not before or len(after) < 2:
        return False
    spread = max(
        spread,
        estimate_spread(before),
        estimate_spread(after) if len(after) > FEWEST_ITERATIONS else 0.0,
    )
    noise = NOISE_SIGMAS * spread * sqrt(1 / len(before) + 1 / (len(after) - 1))
    lost = min(after[0], median(after[1:])) - median(before)
    least = EQUAL_WITHIN if len(before) >= FEWEST_ITERATIONS else SLOWER_ALLOWED
    return lost > max(noise, least * median(before))


def has_failed(
    promised: PromisedTimes, before: Sequence[float], part: Sequence[float], after: Sequence[float]
) -> bool | None:
    """True if the change must be undone; None if noise allows both. ``part``: the iteration of the
    old plan that ran in this state for a part of its time."""
    middle = median(after)
    spread = max(promised.spread, estimate_spread(after))
    half = PROMISED_FRACTION * promised.gain_seconds
    shorter = False
    if old := before or part:
        # A change without a promised gain must not be slower.
        least = min(half, STAYING_GAIN * median(old)) if half > 0 else -EQUAL_WITHIN * median(old)
        noise = NOISE_SIGMAS * spread * sqrt(1 / len(old) + 1 / len(after))
        saved = median(old) - middle
        shorter = saved > least
        # The whole of the iteration in ``part`` would have taken longer, so it is no proof of
        # failure.
        if abs(saved - least) >= noise and (before or shorter):
            return not shorter
        if before:
            return None
    if promised.seconds_if_wrong is None:
        return None  # The overhead is not known.
    # Compare with the two predictions for the new plan: with the evidence, and without it.
    noise = NOISE_SIGMAS * spread / sqrt(len(after))
    if not shorter and middle - promised.seconds_after > half + noise:
        return True
    if (
        abs(promised.seconds_after - promised.seconds_if_wrong)
        < MODEL_ERROR * promised.seconds_after
    ):
        return None
    between = (promised.seconds_after + promised.seconds_if_wrong) / 2
    if abs(middle - between) < noise:
        return None
    return (middle < between) == (promised.seconds_if_wrong < promised.seconds_after)
