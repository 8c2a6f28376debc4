"""Goodput: how much of the time that a job had its place went into iterations that count.

The time of the finished iterations, each counted once, over the time since the ranks were first
given their place, without the time in which the job was suspended or waited in a queue. Starts,
losses, iterations that are run again and waits between iterations make it smaller; slow iterations
do not. Those of fewer replicas count by their share.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from pipemorph.wire import IterationSample

MOST_ASSUMED = 1024
"""Iterations of a gap that are remembered. Ranks report a few at most."""


@dataclass
class Useful:
    """The iterations that count. ``seconds``: their time; ``iterations``: how many of the job are
    finished, by those that were reported."""

    seconds: float = 0.0
    iterations: int = 0
    _assumed: dict[int, float] = field(default_factory=dict, repr=False, compare=False)
    """Seconds that iterations of the newest gap count with until they are reported."""

    def take(self, samples: Iterable[IterationSample], share: float = 1.0) -> None:
        """Take reported iterations. One that was run again does not count again. Those of which
        nothing was heard, as ranks ended before they could report, count like the others on
        average; the next ranks report them after their own first one if they know of them.
        ``share``: the part of the job's replicas that had them, and of its batch."""
        for sample in samples:
            new = sample.index + 1 - self.iterations
            if new <= 0:
                if (assumed := self._assumed.pop(sample.index, None)) is not None:
                    self.seconds += sample.seconds * share - assumed
                continue
            if new > 1:
                # A job may begin with iterations that another one has finished: these are not
                # reported.
                usual = self.seconds / self.iterations if self.iterations else 0.0
                newest = range(self.iterations, sample.index)[-MOST_ASSUMED:]
                self._assumed = dict.fromkeys(newest, usual)
                self.seconds += usual * (new - 1)
            self.seconds += sample.seconds * share
            self.iterations += new

    def goodput(self, seconds: float) -> float | None:
        """The goodput after the job had its place for so many ``seconds``, 0 to 1; None if no
        iteration is known to be finished."""
        if not self.iterations or seconds <= 0:
            return None
        return min(1.0, self.seconds / seconds)
