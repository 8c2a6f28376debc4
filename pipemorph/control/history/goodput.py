"""Goodput: fraction of a job's time in its place that went into iterations that count.

It is the time of the finished iterations, each counted once, over the time since the ranks first
had their place, without the time in which the job was suspended or waited in a queue. Starts,
losses, repeated iterations and waits between iterations reduce it; slow iterations do not.
Iterations of fewer replicas count by their share.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from pipemorph.protocol import IterationSample

MOST_ASSUMED_ITERATIONS = 1024
"""Iterations of a gap that are remembered. Ranks report a few at most."""


@dataclass
class GoodputMeter:
    """Iterations that count. ``seconds``: their time; ``iterations``: number of the job's finished
    iterations, by those that were reported."""

    seconds: float = 0.0
    iterations: int = 0
    _assumed_seconds: dict[int, float] = field(default_factory=dict, repr=False, compare=False)
    """Assumed seconds of iterations in the newest gap, until they are reported."""

    def add_iterations(self, samples: Iterable[IterationSample], share: float = 1.0) -> None:
        """Add reported iterations. A repeated one does not count again. Iterations that ranks could
        not report before their end count like the others on average, unless the next ranks report
        them after their own first one. ``share``: fraction of the job's replicas, and of its batch,
        that ran them."""
        for sample in samples:
            new = sample.index + 1 - self.iterations
            if new <= 0:
                if (assumed := self._assumed_seconds.pop(sample.index, None)) is not None:
                    self.seconds += sample.seconds * share - assumed
                continue
            if new > 1:
                # A job may begin after iterations of another one, which it never reports.
                usual = self.seconds / self.iterations if self.iterations else 0.0
                newest = range(self.iterations, sample.index)[-MOST_ASSUMED_ITERATIONS:]
                self._assumed_seconds = dict.fromkeys(newest, usual)
                self.seconds += usual * (new - 1)
            self.seconds += sample.seconds * share
            self.iterations += new

    def compute_goodput(self, seconds: float) -> float | None:
        """Goodput after the job had its place for ``seconds``, 0 to 1; None if no iteration is
        known to be finished."""
        if not self.iterations or seconds <= 0:
            return None
        return min(1.0, self.seconds / seconds)
