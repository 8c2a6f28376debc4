"""The search of the pipemorph policy, in Python.

1. B before F before W, as in the paper; if that is not at the lower bound, the paper's algorithm
   with its warm-up, so that the result is never worse.
2. The list scheduler by urgency, with a few tunings that suit most problems.
3. A local search that adjusts urgency and caps stage by stage.
4. A local search on the order, along the critical path.
5. The same makespan with fewer microbatches in flight, if possible.

The search stops at the lower bound. Its effort is limited in ops, not in time, so that every
machine finds the same plan. This is the reference for ``csrc/planner``, which finds the same order
op by op, about fifty times as fast; :mod:`pipemorph.planning.search.backend` selects between them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from pipemorph.planning.search.evaluate import Executor
from pipemorph.planning.search.list_scheduler import (
    Bias,
    Tuning,
    in_order,
    list_schedule,
    mean_op,
    uniform,
)
from pipemorph.planning.search.local_search import shift
from pipemorph.planning.search.order import Order
from pipemorph.planning.search.reduce_memory import reduce_memory
from pipemorph.planning.search.rng import Rng
from pipemorph.planning.simulation.costs import INF, Costs
from pipemorph.planning.simulation.lower_bound import SAME, heads, machine_bound, tails

# Effort of the two local searches in executed ops; the one with the list scheduler has at least
# FEWEST_LISTINGS runs.
LISTING_EFFORT = 120_000
FEWEST_LISTINGS = 12
SHIFTING_EFFORT = 240_000
# Skip shifting ops if the effort allows fewer steps than this.
FEWEST_STEPS = 50

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


class Task(NamedTuple):
    """Input of a search.

    ``caps``: ``K_i``, N for no cap; ``warmup``: fixed counts or None; ``paper_warmup``: counts of
    the paper's rules, or the fixed ones; ``start``: an initial order; the result is never worse.
    """

    costs: Costs
    caps: tuple[int, ...]
    warmup: tuple[int, ...] | None
    paper_warmup: tuple[int, ...]
    start: Order | None = None
    listing_effort: int = LISTING_EFFORT
    shifting_effort: int = SHIFTING_EFFORT


class Found(NamedTuple):
    """The best order found, its makespan, and the lower bound."""

    order: Order
    makespan: float
    bound: float


def search(task: Task) -> Found:
    """Run the search in Python."""
    return _Search(task).run()


class _Search:
    def __init__(self, task: Task) -> None:
        self.task = task
        self.costs = costs = task.costs
        self.tails = tails(costs, task.caps)
        self.bound = machine_bound(costs, heads(costs, task.caps), self.tails)
        self.unit = mean_op(costs)
        self.executor = Executor(costs)
        self.rng = Rng()
        self.shared = any(costs.half_duplex)
        self.budget = task.listing_effort
        self.tries = 0
        self.makespan = INF
        self.order: Order = []
        self.tuning: Tuning | None = None
        if task.start is not None:
            self.order, self.makespan = task.start, self.executor.run(task.start)

    def run(self) -> Found:
        self._in_order()
        self._by_urgency(PORTFOLIO[0], self.task.warmup)
        if self.task.warmup is None:
            self._by_urgency(PORTFOLIO[0], self.task.paper_warmup)
        for bias in PORTFOLIO[1:]:
            self._by_urgency(bias, self.task.warmup)
        self._adjust_tuning()
        if self._shift():
            return self._found(self.order)
        order = reduce_memory(
            self.costs,
            self.order,
            self.makespan,
            tuning=self.tuning or in_order(self.costs, self.task.caps, self.task.warmup),
            warmup=self.task.paper_warmup,
            free_warmup=self.task.warmup is None,
            tail=self.tails,
            executor=self.executor,
        )
        return self._found(order)

    def _found(self, order: Order) -> Found:
        # Recompute the makespan as the simulator does, for equal rounding.
        return Found(order, self.executor.run(order), self.bound)

    def _at_bound(self) -> bool:
        return self.makespan <= self.bound * (1 + SAME)

    def _done(self) -> bool:
        return self._at_bound() or (self.budget <= 0 and self.tries > 0)

    def _in_order(self) -> None:
        """The paper's order, with and without its warm-up."""
        task = self.task
        self._try(in_order(self.costs, task.caps, task.warmup))
        if not self._done():
            free = task.warmup is None
            self._try(in_order(self.costs, task.caps, task.paper_warmup, at_least=free))
        self.tuning = None  # Nothing to adjust: urgency depends only on the kind.

    def _by_urgency(self, bias: Bias, warmup: tuple[int, ...] | None) -> None:
        if not self._done():
            self._try(uniform(self.costs, self.task.caps, bias, warmup))

    def _try(self, tuning: Tuning, *, or_equal: bool = False) -> bool:
        """Keep the order of ``tuning`` if it is shorter, or equally short with ``or_equal``."""
        bound = self.makespan * (1 + SAME if or_equal else 1 - SAME)
        found = list_schedule(self.costs, self.tails, tuning, bound)
        self.budget -= found.ops_run
        self.tries += 1
        if found.order is None:
            return False
        makespan = found.makespan
        if self.shared:
            # The list scheduler models the directions of a link as independent.
            makespan = self.executor.run(found.order)
            if makespan >= bound:
                return False
        self.order, self.makespan = found.order, min(self.makespan, makespan)
        self.tuning = tuning
        return True

    def _adjust_tuning(self) -> None:
        """Local search: change the tuning of a few stages, keep it if the order is not longer."""
        tuning = self.tuning or uniform(self.costs, self.task.caps, PORTFOLIO[0], self.task.warmup)
        while not self._done():
            candidate = tuning
            for _ in range(self.rng.pick((1, 1, 2, 3))):
                candidate = self._adjusted(candidate)
            if self._try(candidate, or_equal=True):
                tuning = candidate

    def _adjusted(self, tuning: Tuning) -> Tuning:
        rng, stages = self.rng, self.costs.stage_count
        stage = rng.below(stages)
        biases, caps = list(tuning.biases), list(tuning.caps)
        what = rng.below(20)
        if what < 9:
            kind = rng.below(3)
            change = self.unit * rng.pick((-2.0, -1.0, -0.5, -0.25, 0.25, 0.5, 1.0, 2.0))
            first, last = stage, stage
            if rng.below(2):
                first, last = sorted((stage, rng.below(stages)))
            for i in range(first, last + 1):
                values = list(biases[i])
                values[kind] += change
                biases[i] = Bias(*values)
        elif what < 16:
            biases[stage] = biases[stage]._replace(patience=rng.pick((0.0, 0.3, 0.6, 1.0)))
        else:
            least = tuning.warmup[stage] if tuning.warmup else 1
            cap = caps[stage] + rng.pick((-1, 1))
            caps[stage] = min(self.task.caps[stage], max(least, cap))
        return replace(tuning, biases=tuple(biases), caps=tuple(caps))

    def _shift(self) -> bool:
        """Local search on the order; returns whether it found a shorter one."""
        listed = self.makespan
        steps = self.task.shifting_effort / (3 * self.costs.microbatches * self.costs.stage_count)
        if self._at_bound() or self.shared or steps < FEWEST_STEPS:
            return False
        self.order, self.makespan = shift(
            self.costs,
            self.tails,
            self.executor,
            self.rng,
            unit=self.unit,
            bound=self.bound,
            effort=self.task.shifting_effort,
            warmup=self.task.warmup,
            caps=self.task.caps,
            order=self.order,
            makespan=listed,
        )
        return self.makespan < listed
