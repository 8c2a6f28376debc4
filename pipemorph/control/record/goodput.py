"""Goodput: how much of the time that a job had its place went into iterations that count.

The time of the finished iterations, each counted once, over the time since the ranks were first
given their place, without the time in which the job was suspended or waited in a queue. Starts,
losses, iterations that are run again and waits between iterations make it smaller; slow iterations
do not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pipemorph.wire import IterationSample


@dataclass
class Useful:
    """The iterations that count. ``seconds``: their time; ``iterations``: how many of the job are
    finished, by those that were reported."""

    seconds: float = 0.0
    iterations: int = 0

    def take(self, samples: Iterable[IterationSample]) -> None:
        """Take reported iterations, in their order. One that was run again does not count again.
        Those of which nothing was heard, as ranks ended before they could report, count like the
        next one."""
        for sample in samples:
            new = sample.index + 1 - self.iterations
            if new <= 0:
                continue
            # A job may begin with iterations that another one has finished.
            self.seconds += sample.seconds * (new if self.iterations else 1)
            self.iterations += new

    def goodput(self, seconds: float) -> float | None:
        """The goodput after the job had its place for so many ``seconds``, 0 to 1; None if no
        iteration is known to be finished."""
        if not self.iterations or seconds <= 0:
            return None
        return min(1.0, self.seconds / seconds)
