"""Delays that vary: what a plan takes on average over the delays that links had lately.

A plan for the mean of a delay is no plan for a delay that varies: what comes later than the mean
holds up the pipeline, and what comes earlier gains nothing. So where a link's delay varies, every
plan is simulated under the recent delays themselves, window by window, from several points in time
on, the same for all plans. Windows of different links that end together stay together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipemorph.planning import Plan, Problem, StageTimes, predict_changing
from pipemorph.planning.simulation.core import Changes, DelayAt

WINDOW = 0.05
"""Seconds of a window of telemetry. Where messages are further apart, windows are."""
DRAWS = 8
"""Iterations that are simulated per plan."""
CELLS = 8192
"""Largest number of stages × microbatches for which all draws are simulated: about 10 ms each.
Larger problems get fewer draws, and below FEWEST_DRAWS only the mean counts."""
FEWEST_DRAWS = 4
LONGER = (0.5, 1.0)
"""Of the way from the mean to the longest delay: other delays to plan for."""


@dataclass(frozen=True)
class Varying:
    """``recent[i]``: by how much the delay of link *i* was above its mean in its newest windows,
    oldest first, seconds; empty if it does not vary. ``step``: seconds from one to the next."""

    recent: tuple[tuple[float, ...], ...]
    step: float
    draws: int

    @staticmethod
    def of(
        recent: Sequence[Sequence[float]],
        means: Sequence[float],
        stages: Sequence[StageTimes],
        cells: int,
    ) -> Varying | None:
        """From recent delays and their means; None if no link varies, or if it would take too long.
        ``cells``: stages × microbatches."""
        draws = min(DRAWS, DRAWS * CELLS // cells)
        if not any(recent) or draws < FEWEST_DRAWS:
            return None
        # A stage sends one message per microbatch and direction.
        apart = max(s.forward + s.backward_input + s.backward_weight for s in stages)
        above = tuple(
            tuple(value - mean for value in values)
            for values, mean in zip(recent, means, strict=True)
        )
        return Varying(above, max(WINDOW, apart), draws)

    def longer(self) -> Iterator[list[float]]:
        """Delays to plan for besides the mean, as what is added to it per link."""
        for share in LONGER:
            yield [share * max(above, default=0.0) for above in self.recent]

    def seconds(self, plan: Plan, problem: Problem) -> float:
        """Mean time of an iteration of a valid plan. ``problem``: with the links' mean delays."""
        changes = list(self._drawn(problem))
        return predict_changing(plan.schedule, problem, changes, plan.dispatch, plan.waits)

    def _drawn(self, problem: Problem) -> Iterator[Changes]:
        """What varies of a narrow link is its rate."""
        delays = [link.delay for link in problem.links]
        transfers = [link.transfer for link in problem.links]
        varied = [i for i, recent in enumerate(self.recent) if recent]
        narrow = frozenset(i for i in varied if transfers[i] > 0.0)
        longest = max(map(len, self.recent))
        for draw in range(self.draws):
            start = longest * draw // self.draws
            both = (self._at(means, start, longest) for means in (delays, transfers))
            delay_at, transfer_at = both
            if not narrow:
                yield delay_at, None
                continue
            yield (
                _of(delay_at, delays, frozenset(varied) - narrow),
                _of(transfer_at, transfers, narrow),
            )

    def _at(self, means: Sequence[float], start: int, longest: int) -> DelayAt:
        """The delays, or transfers, of an iteration that begins in window ``start`` of the
        ``longest`` memory, and after its end at its begin."""
        recent, step = self.recent, self.step

        def delay(link: int, sent: float) -> float:
            above = recent[link]
            if not above:
                return means[link]
            # Counted from the newest window, which is that of the same time for all links.
            window = (start + int(sent / step)) % longest - longest
            return max(0.0, means[link] + above[window % len(above)])

        return delay


def _of(at: DelayAt, means: Sequence[float], links: frozenset[int]) -> DelayAt:
    """``at`` for some links, the mean for all others."""
    return lambda link, sent: at(link, sent) if link in links else means[link]
