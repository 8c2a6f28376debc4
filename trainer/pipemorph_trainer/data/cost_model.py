"""Model of a microbatch's op time by the lengths of its samples, and its fit to measured times."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from pipemorph.errors import InputError

_TERMS = 3
"""Terms of the model: one, tokens, squared lengths."""


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
    terms = np.array([[1.0, math.fsum(row), math.fsum(x * x for x in row)] for row in rows])
    # Relative errors count: else a few long microbatches decide alone.
    terms /= np.array(seconds, dtype=float)[:, None]
    scales = terms.max(axis=0)
    terms = terms / np.where(scales > 0, scales, 1.0)
    best: tuple[float, list[float]] | None = None
    for count in range(1, _TERMS + 1):
        # Tokens first: of two equally good models, the one by tokens.
        for used in combinations((1, 0, 2), count):
            part = terms[:, used]
            found, _, rank, _ = np.linalg.lstsq(part, np.ones(len(rows)), rcond=None)
            if rank < count or (found < 0).any():
                continue
            error = float(np.sum((part @ found - 1.0) ** 2))
            if best is None or error < best[0] * (1 - 1e-6) - 1e-18:
                values = [0.0] * _TERMS
                for term, value in zip(used, found, strict=True):
                    values[term] = float(value / scales[term])
                best = error, values
    if best is None:
        raise InputError("lengths are all 0; expected at least one above 0")
    return CostModel(*best[1])
