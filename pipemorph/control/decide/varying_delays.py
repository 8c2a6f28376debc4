"""Varying delays: predicts the mean time of a plan over the recent delays of links.

A plan for the mean of a varying delay is wrong: a message later than the mean blocks the pipeline,
and an earlier one gains nothing. So if a link's delay varies, every plan is simulated under the
recent delays themselves, window by window, from several points in time, the same for all plans.
Windows of different links that ended together stay together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipemorph.planning import Plan, Problem, StageTimes, predict_changing
from pipemorph.planning.simulation.execution import Changes, DelayAt

WINDOW_SECONDS = 0.05
"""Seconds of a telemetry window. Windows are further apart if messages are."""
MOST_DRAWS = 8
"""Most iterations that are simulated for a plan."""
MOST_CELLS = 8192
"""Most stages × microbatches for which all draws are simulated: about 10 ms each. Larger problems
get fewer draws, and below FEWEST_DRAWS only the mean counts."""
FEWEST_DRAWS = 4
LONGER_SHARES = (0.5, 1.0)
"""Parts of the way from the mean to the longest delay: other delays to plan for."""


@dataclass(frozen=True)
class VaryingDelays:
    """Recent delays of links. ``recent_excess[i]``: seconds above the mean of link *i* in the
    newest windows, oldest first; empty if its delay is constant. ``step_seconds``: between two."""

    recent_excess: tuple[tuple[float, ...], ...]
    step_seconds: float
    draw_count: int

    @staticmethod
    def from_recent(
        recent: Sequence[Sequence[float]],
        means: Sequence[float],
        stages: Sequence[StageTimes],
        cells: int,
    ) -> VaryingDelays | None:
        """Build from recent delays and their means; None if no link varies, or if simulations would
        take too long. ``cells``: stages × microbatches."""
        draws = min(MOST_DRAWS, MOST_DRAWS * MOST_CELLS // cells)
        if not any(recent) or draws < FEWEST_DRAWS:
            return None
        # A stage sends one message per microbatch and direction.
        apart = max(s.forward + s.backward_input + s.backward_weight for s in stages)
        above = tuple(
            tuple(value - mean for value in values)
            for values, mean in zip(recent, means, strict=True)
        )
        return VaryingDelays(above, max(WINDOW_SECONDS, apart), draws)

    def list_longer_delays(self) -> Iterator[list[float]]:
        """Yield delays to plan for besides the mean, as seconds above it by link."""
        for share in LONGER_SHARES:
            yield [share * max(above, default=0.0) for above in self.recent_excess]

    def predict_seconds(self, plan: Plan, problem: Problem) -> float:
        """Predict the mean time of an iteration of a valid plan. ``problem``: with mean delays."""
        changes = list(self._draw_delays(problem))
        return predict_changing(plan.schedule, problem, changes, plan.dispatch, plan.waits)

    def _draw_delays(self, problem: Problem) -> Iterator[Changes]:
        """Draw delays for each simulated iteration. On a narrow link, the rate varies instead."""
        delays = [link.delay for link in problem.links]
        transfers = [link.transfer for link in problem.links]
        varied = [i for i, recent in enumerate(self.recent_excess) if recent]
        narrow = frozenset(i for i in varied if transfers[i] > 0.0)
        longest = max(map(len, self.recent_excess))
        for draw in range(self.draw_count):
            start = longest * draw // self.draw_count
            both = (
                self._make_delay_function(means, start, longest) for means in (delays, transfers)
            )
            delay_at, transfer_at = both
            if not narrow:
                yield delay_at, None
                continue
            yield (
                _restrict_to_links(delay_at, delays, frozenset(varied) - narrow),
                _restrict_to_links(transfer_at, transfers, narrow),
            )

    def _make_delay_function(self, means: Sequence[float], start: int, longest: int) -> DelayAt:
        """Delays, or transfers, of an iteration that begins in window ``start`` of the ``longest``
        memory, and continues at its begin after its end."""
        recent, step = self.recent_excess, self.step_seconds

        def delay(link: int, sent: float) -> float:
            """Delay of a message on ``link`` that is ``sent`` so many seconds after the start."""
            above = recent[link]
            if not above:
                return means[link]
            # Count from the newest window, which has the same time on all links.
            window = (start + int(sent / step)) % longest - longest
            return max(0.0, means[link] + above[window % len(above)])

        return delay


def _restrict_to_links(at: DelayAt, means: Sequence[float], links: frozenset[int]) -> DelayAt:
    """Restrict ``at`` to ``links``; all others have their mean."""
    return lambda link, sent: at(link, sent) if link in links else means[link]
