"""Spread of the work of an iteration's microbatches, measured by the op times of a stage."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from pipemorph.planning.ir import OpKind
from pipemorph_trainer.executor.device_times import MeasuredOp


class WorkVariance(NamedTuple):
    """Variance of the work of microbatches, relative to the square of its mean. ``whole``: of all
    of it; ``unexplained``: of the work per cost, equal to ``whole`` without costs.

    It is the covariance of forward and backward times, since pauses and rounding lengthen one op
    and not the other one. So it may be negative by chance.
    """

    whole: float = 0.0
    unexplained: float = 0.0

    def compute_error(self, microbatches: int) -> float:
        """Compute the relative standard error of mean op times by unexplained work."""
        return math.sqrt(max(0.0, self.unexplained) / microbatches)


def measure_work(
    ops: Sequence[MeasuredOp],
    costs: Sequence[float] = (),
    copying: Mapping[tuple[OpKind, int], float] | None = None,
) -> WorkVariance | None:
    """Measure the variance by the ops of an iteration; None with fewer than two microbatches or
    without backwards. ``costs``: of the microbatches. ``copying``: seconds of copies in an op."""
    forward: dict[int, float] = {}
    backward: dict[int, float] = {}
    for op in ops:
        kind, microbatch, start, end = op
        took = end - start - (copying.get((kind, microbatch), 0.0) if copying else 0.0)
        times = forward if kind is OpKind.F else backward
        times[microbatch] = times.get(microbatch, 0.0) + took
    rows = [(forward[m], backward[m], m) for m in forward if m in backward]
    whole = _compute_covariance([(f, b) for f, b, _ in rows])
    if whole is None or not costs:
        return None if whole is None else WorkVariance(whole, whole)
    per_cost = [(f / costs[m], b / costs[m]) for f, b, m in rows if costs[m] > 0]
    return WorkVariance(whole, _compute_covariance(per_cost) or 0.0)


def _compute_covariance(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Covariance over the product of the means; None if it is not defined."""
    if len(pairs) < 2:
        return None
    first, second = (fmean(values) for values in zip(*pairs, strict=True))
    if first <= 0 or second <= 0:
        return None
    products = ((x / first - 1) * (y / second - 1) for x, y in pairs)
    return math.fsum(products) / (len(pairs) - 1)
