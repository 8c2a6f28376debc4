"""Compares predictions with measured iterations, before a change of plan and after it.

A prediction is only as good as the delays and op times it is made of, and on a busy machine both
may show a fault that is not there. So the iterations themselves have the last word:

- Before a change, iterations of the current plan that ran in the present state must take as long as
  predicted. If they are shorter by more than the gain of the change, the evidence is not believed
  for now, and the plan stays.
- After a change, its first iterations must bring half of the predicted gain. If not, and if they
  are hardly shorter than those before, the plan before comes back, and the links (or op times)
  that were the reason are *doubted*: next time a change for them needs iterations that confirm it,
  more each time. Doubt fades slowly.
- Whatever is predicted, a plan that was measured to be slower than the one before is taken back as
  soon as noise allows to say so, and that is measured in turn. By how much the prediction was wrong
  is what a change must gain at least until the state is another one.

An iteration takes longer than its ops: optimizer, data loading, gradient norm. This *overhead* is
what earlier iterations took beyond their prediction (:class:`Reference`), so that only changes of
the iteration time are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import median

from pipemorph.control.decide.forecast import SAME, Forecast, Option
from pipemorph.control.decide.situation import Situation
from pipemorph.planning import Plan

FEWEST, MOST = 3, 8
"""Iterations in a median of measured times."""
JUDGED_AFTER, GIVEN_UP_AFTER = 4, 20
"""Iterations under a new plan, without its first, from which its gain is judged; and after which it
is left open, if noise still allows both results."""
KEPT_PROMISE, PAYS = 0.5, 0.02
"""Fraction of the predicted gain that a change must bring. If it saves the fraction PAYS of an
iteration it stays, even if it promised more: the plan before is measured to be slower."""
SLOWER = 0.05
"""Fraction of an iteration by which a new plan may be slower until it has been judged, as long as
so few iterations are known before it that their spread is not."""
OUTSIDE = 0.25
"""Fraction of an iteration beyond its prediction that may be optimizer and data loading. If it is
more, the prediction misses something."""
SIGMAS = 2.0
"""Standard errors of a median that count as noise."""
MODEL_ERROR = 0.05
"""Predictions that differ by less, as a fraction, are not told apart by measuring."""


@dataclass(frozen=True)
class Reference:
    """Measured iterations of a plan in a known situation. ``seconds``: their median; ``spread``:
    standard deviation of one of them, robust to outliers."""

    plan: Plan
    situation: Situation
    seconds: float
    spread: float


@dataclass(frozen=True)
class Evidence:
    """What is known about a situation beside the situation itself. ``measured``: seconds of
    iterations of the current plan that ran in it from start to end; ``otherwise``: the situation if
    what is new in it is wrong; ``missed``: seconds by which the prediction of a change in this
    state was wrong; ``overdue``: it has been waiting for too long."""

    reference: Reference | None = None
    otherwise: Situation | None = None
    measured: tuple[float, ...] = ()
    missed: float = 0.0
    overdue: bool = False


@dataclass(frozen=True)
class Promise:
    """Predicted iteration times of a change of plan in seconds, including overhead.

    ``before``: with the old plan; ``after``: with the new one; ``if_wrong``: with the new one if
    the evidence is wrong, None if unknown; ``may_go_back``: whether in this case the old plan is
    no slower than the new one. ``spread``: standard deviation of a measured iteration;
    ``missed``: seconds that the model of the old plan misses, or 0.
    """

    before: float
    after: float
    if_wrong: float | None = None
    may_go_back: bool = True
    spread: float = 0.0
    missed: float = 0.0

    @property
    def seconds(self) -> float:
        return self.before - self.after

    @property
    def gain(self) -> float:
        """Fraction of an iteration that the change saves."""
        return 1 - self.after / self.before if self.before > 0 else 0.0


def overhead_of(forecast: Forecast, evidence: Evidence) -> float:
    """Seconds that an iteration takes beyond its prediction; 0 if none was measured."""
    if (known := evidence.reference) is None:
        return 0.0
    predicted = forecast.under(known.situation).of(known.plan).seconds
    # A pipeline is never faster than its ops: a negative overhead is an error of the op times.
    return max(0.0, known.seconds - predicted)


def promise(forecast: Forecast, current: Option, chosen: Option, evidence: Evidence) -> Promise:
    """The promise of a change from ``current`` to ``chosen``."""
    reference, overhead = evidence.reference, overhead_of(forecast, evidence)
    old, new = current.seconds, chosen.seconds
    if evidence.otherwise is not None:
        other = forecast.under(evidence.otherwise)
        old, new = other.of(current.plan).seconds, other.of(chosen.plan).seconds
    unexplained = overhead > OUTSIDE * (overhead + current.seconds)
    return Promise(
        before=overhead + current.seconds,
        after=overhead + chosen.seconds,
        if_wrong=overhead + new if reference is not None else None,
        may_go_back=old <= new * (1 + SAME),
        spread=reference.spread if reference is not None else 0.0,
        missed=max(evidence.missed, overhead if unexplained else 0.0),
    )


def spread_of(seconds: Sequence[float]) -> float:
    """Standard deviation of one of some iterations, robust to outliers."""
    middle = median(seconds)
    return 1.4826 * median(abs(each - middle) for each in seconds)


def is_slower(spread: float, before: Sequence[float], after: Sequence[float]) -> bool:
    """Whether a new plan is so much slower than the one before that it must not run on. ``after``:
    from its very first iteration on, which shows it as well, but with the change; ``spread``: see
    :class:`Promise`."""
    if not before or len(after) < 2:
        return False
    spread = max(spread, spread_of(before), spread_of(after) if len(after) > FEWEST else 0.0)
    noise = SIGMAS * spread * sqrt(1 / len(before) + 1 / (len(after) - 1))
    lost = min(after[0], median(after[1:])) - median(before)
    least = SAME if len(before) >= FEWEST else SLOWER
    return lost > max(noise, least * median(before))


def has_failed(
    promised: Promise, before: Sequence[float], part: Sequence[float], after: Sequence[float]
) -> bool | None:
    """Whether the change is to be taken back; None if noise allows both. ``part``: the iteration of
    the old plan that ran in this state for a part of its time."""
    middle = median(after)
    spread = max(promised.spread, spread_of(after))
    half = KEPT_PROMISE * promised.seconds
    shorter = False
    if old := before or part:
        # What promised nothing must only not be slower.
        least = min(half, PAYS * median(old)) if half > 0 else -SAME * median(old)
        noise = SIGMAS * spread * sqrt(1 / len(old) + 1 / len(after))
        saved = median(old) - middle
        shorter = saved > least
        # The whole of the iteration in ``part`` would have taken longer, so it is no proof of
        # failure.
        if abs(saved - least) >= noise and (before or shorter):
            return not shorter
        if before:
            return None
    if promised.if_wrong is None:
        return None  # What iterations take beyond their prediction is not known.
    # Compare with the two predictions for the new plan: with the evidence, and without it.
    noise = SIGMAS * spread / sqrt(len(after))
    if not shorter and middle - promised.after > half + noise:
        return True
    if abs(promised.after - promised.if_wrong) < MODEL_ERROR * promised.after:
        return None
    between = (promised.after + promised.if_wrong) / 2
    if abs(middle - between) < noise:
        return None
    return (middle < between) == (promised.if_wrong < promised.after)
