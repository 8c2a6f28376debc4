"""Model of a microbatch's op time by the lengths of its samples, and its fit to measured times."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from pipemorph.errors import InputError
from pipemorph.protocol import FittedCosts

Moments = NDArray[np.float64]
"""Sums over measured microbatches, see :func:`compute_moments`."""
_TERMS = 3
"""Terms of the model: one, tokens, squared lengths."""
_LEAST_EIGENVALUE = 1e-10
"""Least eigenvalue of the terms' products, scaled to a diagonal of 1, with which they differ."""
_ROUNDING = 1e-12
"""Difference of two errors that rounding of the sums may cause, per microbatch."""


@dataclass(frozen=True)
class CostModel:
    """Time of a microbatch, in one unit: ``base + per_token · tokens + per_square · Σ length²``.

    ``tokens``: sum of its samples' lengths. The squares stand for attention, whose samples see only
    themselves; with all else in a transformer, time grows with the tokens. Raises
    :class:`InputError` unless the coefficients are at least 0, and one is above.
    """

    base: float = 0.0
    """Time that every microbatch takes, whatever its samples."""
    per_token: float = 0.0
    per_square: float = 0.0

    def __post_init__(self) -> None:
        for name in ("base", "per_token", "per_square"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise InputError(f"{name} is {value}; expected a number from 0 on")
        if not (self.base or self.per_token or self.per_square):
            raise InputError("base, per_token and per_square are 0; expected one above 0")

    def price_sample(self, length: float) -> float:
        """Cost that a sample of this length adds to its microbatch."""
        return self.per_token * length + self.per_square * length * length

    def price_microbatch(self, lengths: Sequence[float], *, padded: bool = False) -> float:
        """Cost of a microbatch with samples of these lengths. ``padded``: all are as long as the
        longest."""
        if padded and lengths:
            lengths = [max(lengths)] * len(lengths)
        return self.base + math.fsum(map(self.price_sample, lengths))


def fit_costs(
    lengths: Sequence[Sequence[float]], seconds: Sequence[float], *, padded: bool = False
) -> CostModel:
    """Fit a :class:`CostModel` to measured times of microbatches: the least squares of the relative
    errors, with no coefficient below 0.

    ``lengths[k]``: those of the samples of microbatch *k*; ``seconds[k]``: its measured time, such
    as that of its F, B and W on a stage. ``padded``: see :meth:`CostModel.price_microbatch`. With
    microbatches of one kind only, the simplest model that fits is returned. Raises
    :class:`InputError` if there is none, or if a time is not above 0.
    """
    if len(lengths) != len(seconds) or not lengths:
        raise InputError(
            f"lengths are of {len(lengths)} microbatches, and seconds of {len(seconds)}; expected"
            " one list of lengths and one time for each of at least one microbatch"
        )
    for k, (row, took) in enumerate(zip(lengths, seconds, strict=True)):
        if not (math.isfinite(took) and took > 0):
            raise InputError(f"seconds[{k}] is {took}; expected a time above 0")
        if not row or not all(math.isfinite(each) and each >= 0 for each in row):
            raise InputError(f"lengths[{k}] is {list(row)[:8]}; expected lengths from 0 on")
    rows = [[max(row)] * len(row) if padded else row for row in lengths]
    sizes = [(math.fsum(row), math.fsum(x * x for x in row)) for row in rows]
    found = fit_moments(compute_moments(sizes, seconds))
    if found is None:
        raise InputError("lengths are all 0; expected at least one above 0")
    return CostModel(found.base, found.per_token, found.per_square)


def compute_moments(sizes: Sequence[tuple[float, float]], seconds: Sequence[float]) -> Moments:
    """Compute the sums over microbatches from which a model is fitted, shape (4, 4): of products of
    1, tokens, squared lengths and time, divided by the square of the time. Sums of several sets of
    microbatches add up. ``sizes``: tokens and squared lengths of each. ``seconds``: above 0."""
    times = np.array(seconds, dtype=float)[:, None]
    # Relative errors count: else a few long microbatches decide alone.
    terms = np.column_stack([np.ones(len(times)), np.array(sizes, dtype=float), times]) / times
    moments: Moments = terms.T @ terms
    return moments


def fit_moments(moments: Moments) -> FittedCosts | None:
    """Fit the model with the least squares of relative errors; None if no coefficient but ``base``
    can be found, since all lengths are 0."""
    count = float(moments[_TERMS, _TERMS])
    scales = np.sqrt(np.diag(moments)[:_TERMS])
    scales = np.where(scales > 0, scales, 1.0)
    products = moments[:_TERMS, :_TERMS] / np.outer(scales, scales)
    target = moments[:_TERMS, _TERMS] / scales
    best: tuple[float, list[float]] | None = None
    for size in range(1, _TERMS + 1):
        # Tokens first: of two equally good models, the one by tokens.
        for used in combinations((1, 0, 2), size):
            part, wanted = products[np.ix_(used, used)], target[list(used)]
            if np.linalg.eigvalsh(part)[0] < _LEAST_EIGENVALUE:
                continue
            found = np.linalg.solve(part, wanted)
            if (found < 0).any():
                continue
            error = float(found @ part @ found - 2 * wanted @ found + count)
            if best is None or error < best[0] * (1 - 1e-6) - _ROUNDING * count:
                values = [0.0] * _TERMS
                for term, value in zip(used, found, strict=True):
                    values[term] = float(value / scales[term])
                best = error, values
    if best is None or not moments[1, 1]:
        return None
    equal = count - target[0] ** 2 / products[0, 0]
    error, equal_error = (math.sqrt(max(0.0, each) / count) for each in (best[0], float(equal)))
    base, per_token, per_square = best[1]
    return FittedCosts(
        base=base, per_token=per_token, per_square=per_square, microbatches=round(count),
        error=min(error, 1.0), equal_error=min(equal_error, 1.0),
    )  # fmt: skip
