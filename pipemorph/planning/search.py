"""The pipemorph policy: a search over ways to list-schedule, which knows when it is done.

1. B before F before W, as the paper has it; and if that is not the shortest possible, the
   paper's algorithm with its warm-up, so that the result is never worse.
2. The list scheduler by urgency, with a few tunings that do well on most problems.
3. A local search that bends urgency and caps stage by stage.
4. The same makespan with fewer microbatches in flight, if that is to be had.

It stops at the lower bound. Effort is counted in ops scheduled, never in time, so that
every machine finds the same plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from pipemorph.planning.adapt import paper_warmup
from pipemorph.planning.bounds import hard_caps, heads, machine_bound, tails
from pipemorph.planning.costs import INF, Costs
from pipemorph.planning.dispatch import Rules, dispatch
from pipemorph.planning.ir import Schedule
from pipemorph.planning.listing import Bias, OpTable, Tuning, list_schedule, mean_op, uniform
from pipemorph.planning.policies import as_schedule
from pipemorph.planning.problem import Problem
from pipemorph.planning.simulator import makespan_of, run_static
from pipemorph.planning.slim import IN_ORDER, SAME, slim

T = TypeVar("T")

# Ops scheduled before the search settles for what it has: about 10 ms.
EFFORT = 12_000

# Even a problem larger than that gets this many tries.
FEWEST_TRIES = 3

# (forward, backward, weight) in mean ops, and patience; in the order tried.
PORTFOLIO = (
    Bias(patience=0.3),
    Bias(),
    Bias(backward=0.5, patience=0.3),
    Bias(forward=-0.5, patience=0.3),
    Bias(weight=0.5, patience=0.3),
    Bias(backward=-1.0, patience=0.3),
    Bias(backward=1.0, patience=0.3),
    Bias(patience=0.6),
    Bias(backward=3.0, patience=0.3),
    Bias(weight=1.0, patience=0.3),
    Bias(patience=1.0),
)


def search(problem: Problem, effort: int = EFFORT) -> tuple[Schedule, float]:
    """The best schedule found for a problem, and its lower bound, in the problem's unit."""
    return _Search(problem, effort).run()


class _Search:
    def __init__(self, problem: Problem, effort: int) -> None:
        self.problem = problem
        self.costs = Costs.of(problem)
        self.caps = hard_caps(problem)
        self.tails = tails(self.costs, self.caps)
        self.bound = machine_bound(self.costs, heads(self.costs, self.caps), self.tails)
        self.table = OpTable(problem.microbatches)
        self.budget = effort
        self.tries = 0
        self.makespan = INF
        self.schedule: Schedule | None = None
        self.tuning: Tuning | None = None

    def run(self) -> tuple[Schedule, float]:
        self._try(uniform(self.costs, self.caps, IN_ORDER, self.problem.warmup))
        self.tuning = None  # nothing to bend: with these biases only the kind counts
        if not self._done():
            self._paper()
        for bias in PORTFOLIO:
            if self._done():
                break
            self._try(uniform(self.costs, self.caps, bias, self.problem.warmup))
        self._bend()
        assert self.schedule is not None
        schedule = slim(
            self.problem,
            self.schedule,
            self.makespan,
            tuning=self.tuning,
            tail=self.tails,
            table=self.table,
        )
        return schedule, self.bound

    def _done(self) -> bool:
        if self.makespan <= self.bound * (1 + SAME):
            return True
        return self.budget <= 0 and self.tries >= FEWEST_TRIES

    def _paper(self) -> None:
        """The paper's algorithm, so that the result is never worse."""
        warmup = self.problem.warmup or paper_warmup(self.problem)
        exact = self.problem.warmup is not None
        found = dispatch(self.costs, Rules.of(self.problem, warmup, exact_warmup=exact))
        if found.makespan < self.makespan * (1 - SAME):
            self.makespan = found.makespan
            self.schedule = as_schedule(found.runs, self.problem)
        self.budget -= 3 * self.problem.microbatches * self.problem.stage_count

    def _try(self, tuning: Tuning, *, or_equal: bool = False) -> bool:
        """Keep what ``tuning`` gives if it is shorter, or as short with ``or_equal``."""
        bound = self.makespan * (1 + SAME if or_equal else 1 - SAME)
        found = list_schedule(self.costs, self.tails, tuning, self.table, bound)
        self.budget -= found.ops_run
        self.tries += 1
        if found.schedule is None:
            return False
        makespan = found.makespan
        if any(self.costs.half_duplex):
            # The list scheduler takes the directions of a link for independent.
            makespan = makespan_of(
                found.schedule, run_static(found.schedule, self.costs), self.costs
            )
            if makespan >= bound:
                return False
        self.schedule, self.makespan = found.schedule, min(self.makespan, makespan)
        self.tuning = tuning
        return True

    def _bend(self) -> None:
        """Local search: change a few stages' tuning, keep what is no longer."""
        dice = _Dice()
        unit = mean_op(self.costs)
        tuning = self.tuning or uniform(self.costs, self.caps, PORTFOLIO[0], self.problem.warmup)
        while not self._done():
            candidate = tuning
            for _ in range(dice.pick((1, 1, 2, 3))):
                candidate = self._bent(candidate, dice, unit)
            if self._try(candidate, or_equal=True):
                tuning = candidate

    def _bent(self, tuning: Tuning, dice: _Dice, unit: float) -> Tuning:
        stages = self.costs.stage_count
        stage = dice.below(stages)
        biases, caps = list(tuning.biases), list(tuning.caps)
        what = dice.below(20)
        if what < 9:
            kind = dice.below(3)
            change = unit * dice.pick((-2.0, -1.0, -0.5, -0.25, 0.25, 0.5, 1.0, 2.0))
            first, last = stage, stage
            if dice.below(2):
                first, last = sorted((stage, dice.below(stages)))
            for i in range(first, last + 1):
                values = list(biases[i])
                values[kind] += change
                biases[i] = Bias(*values)
        elif what < 16:
            biases[stage] = biases[stage]._replace(patience=dice.pick((0.0, 0.3, 0.6, 1.0)))
        else:
            least = tuning.warmup[stage] if tuning.warmup else 1
            cap = caps[stage] + dice.pick((-1, 1))
            caps[stage] = min(self.caps[stage], max(least, cap))
        return replace(tuning, biases=tuple(biases), caps=tuple(caps))


class _Dice:
    """A small generator of its own, so that every Python version rolls the same."""

    def __init__(self) -> None:
        self.state = 20250831

    def below(self, count: int) -> int:
        self.state = (self.state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (self.state >> 33) % count

    def pick(self, choices: Sequence[T]) -> T:
        return choices[self.below(len(choices))]
