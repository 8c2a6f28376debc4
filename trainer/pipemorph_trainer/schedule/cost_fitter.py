"""Fits the costs of microbatches to measured op times, where the script gives lengths of samples.

In each of the first iterations, stage 0 of each column measures its microbatches. The sums of all
columns go along with the loss, so that all ranks have the same model after the same iteration, and
costs have one unit in all replicas. The model never changes afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipemorph.protocol import FittedCosts
from pipemorph_trainer.data.cost_model import Moments, compute_moments, fit_moments
from pipemorph_trainer.executor.microbatch_costs import SampleSizes
from pipemorph_trainer.executor.stage_executor import StageRecord

FITTED_ITERATIONS = 8
"""Number of iterations that are measured. The first ones of a run, which are slower, do not
count."""
_SIDE = 4
_UPPER = np.triu_indices(_SIDE)
MOMENTS = len(_UPPER[0])
"""Numbers that ranks add up."""


class CostFitter:
    """Fitter of a rank. Main thread only. In each iteration: :meth:`price_microbatches`,
    :meth:`take_moments`, :meth:`add_moments`, :meth:`measure_microbatches`."""

    def __init__(self) -> None:
        self._fit: FittedCosts | None = None
        self._sizes: Sequence[SampleSizes] = ()
        """Sizes of the current iteration's microbatches; empty: none were given."""
        self._mine: list[float] = [0.0] * MOMENTS
        """Moments of this rank that are not added up yet."""
        self._sum: Moments = np.zeros((_SIDE, _SIDE))
        self._iterations = 0

    def price_microbatches(
        self, costs: tuple[float, ...] | tuple[SampleSizes, ...]
    ) -> tuple[float, ...]:
        """Return the costs of an iteration's microbatches: those given, or seconds on stage 0 by
        the model of given sizes; empty before there is a model."""
        sizes = [each for each in costs if isinstance(each, SampleSizes)]
        self._sizes = sizes
        if not sizes:
            return tuple(each for each in costs if not isinstance(each, SampleSizes))
        if self._fit is None:
            return ()
        model = self._fit
        return tuple(
            model.base + model.per_token * each.tokens + model.per_square * each.squares
            for each in sizes
        )

    def measure_microbatches(self, outcome: StageRecord) -> None:
        """Measure the microbatches of an iteration by its ops on stage 0."""
        if not self._sizes or self._fit is not None:
            return
        seconds = [0.0] * len(self._sizes)
        for _, microbatch, start, end in outcome.ops:
            seconds[microbatch] += end - start
        for copy in outcome.copies:
            seconds[copy.microbatch] -= copy.end - copy.start
        pairs = zip(self._sizes, seconds, strict=True)
        measured = [(size, took) for size, took in pairs if took > 0]
        if measured:
            moments = compute_moments(*zip(*measured, strict=True))
            self._mine = moments[_UPPER].tolist()

    def take_moments(self) -> list[float]:
        """Return the moments of the last iteration on this rank, once; zeros without any."""
        mine, self._mine = self._mine, [0.0] * MOMENTS
        return mine

    def add_moments(self, total: Sequence[float]) -> FittedCosts | None:
        """Add the sum of all ranks' moments. Returns the model once, when it has been fitted."""
        if self._fit is not None or not any(total):
            return None
        self._sum[_UPPER] += total
        self._iterations += 1
        if self._iterations < FITTED_ITERATIONS:
            return None
        self._fit = fit_moments(np.triu(self._sum) + np.triu(self._sum, 1).T)
        if self._fit is None:
            self._sum[:], self._iterations = 0.0, 0
        return self._fit
