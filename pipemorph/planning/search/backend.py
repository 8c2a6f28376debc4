"""Selects the search backend: compiled C++ if built, else the Python reference.

Both find the same order, op by op, since every rank and the controller derive the first plan
independently and some may lack the compiled backend. ``tests/core`` checks that they are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipemorph.planning.policies.classic import paper_warmup, zero_bubble_warmup
from pipemorph.planning.problem import Problem
from pipemorph.planning.search import reference as plain
from pipemorph.planning.search.evaluate import Executor
from pipemorph.planning.search.order import KINDS, Order
from pipemorph.planning.search.reference import Found, Task
from pipemorph.planning.simulation.costs import Costs
from pipemorph.planning.simulation.lower_bound import hard_caps
from pipemorph.planning.simulation.lower_bound import lower_bound as plain_lower_bound
from pipemorph.planning.simulation.online import Rules, dispatch

try:
    import pipemorph.planning._planner as compiled
except ImportError:  # Sources without a build, as in an image without compiler.
    compiled = None  # type: ignore[assignment, unused-ignore]


def search(problem: Problem) -> Found:
    """The best order found for a problem, and its lower bound, in the problem's unit."""
    return search_task(task_for(problem))


def task_for(problem: Problem) -> Task:
    """The search of a problem."""
    costs = Costs.of(problem)
    warmup = problem.warmup or paper_warmup(problem)
    ops = 3 * costs.microbatches * costs.stage_count
    return Task(
        costs=costs,
        caps=hard_caps(problem),
        warmup=problem.warmup,
        paper_warmup=warmup,
        start=None if _plain(costs) else _start(problem, costs, warmup),
        listing_effort=max(plain.LISTING_EFFORT, plain.FEWEST_LISTINGS * ops),
    )


def search_task(task: Task) -> Found:
    """Run the search of a task with the available backend."""
    if compiled is None:
        return plain.search(task)
    order, makespan, bound = compiled.search(
        _costs(task.costs, task.caps, task.warmup),
        list(task.paper_warmup),
        [bytes(kinds) for kinds in task.start or ()],
        task.listing_effort,
        task.shifting_effort,
    )
    return Found([bytearray(kinds) for kinds in order], makespan, bound)


def lower_bound(problem: Problem) -> float:
    """A lower bound of the makespan; see ``simulation.lower_bound``. Compiled if built."""
    if compiled is None:
        return plain_lower_bound(problem)
    return compiled.lower_bound(_costs(Costs.of(problem).least(), hard_caps(problem), None))


def _costs(costs: Costs, caps: Sequence[int], warmup: Sequence[int] | None) -> Any:
    return (
        costs.microbatches,
        (costs.forward, costs.backward_input, costs.backward_weight),
        costs.delay,
        costs.queues,
        costs.outstanding,
        costs.half_duplex,
        list(caps),
        list(warmup or ()),
    )


def _plain(costs: Costs) -> bool:
    """Whether the list scheduler in the paper's order gives exactly the result of online dispatch.

    Not if a send can block or a queue is shared, nor if ops take no time, so that ops and the
    messages they wait for are simultaneous.
    """
    times = (*costs.forward, *costs.backward_input, *costs.backward_weight)
    return min(times) > 0 and not any(costs.outstanding) and not any(costs.half_duplex)


def _start(problem: Problem, costs: Costs, warmup: tuple[int, ...]) -> Order:
    """The order of the paper's algorithm. If both directions share a link, which the list scheduler
    does not model, or its order with the warm-up of zero-bubble if that is shorter."""
    paper = _in_order(problem, costs, warmup)
    if problem.warmup is not None or not any(costs.half_duplex):
        return paper
    other = _in_order(problem, costs, zero_bubble_warmup(problem))
    return min(paper, other, key=Executor(costs).run)


def _in_order(problem: Problem, costs: Costs, warmup: tuple[int, ...]) -> Order:
    """The order of running ready ops, B before F before W."""
    rules = Rules.of(problem, warmup, exact_warmup=problem.warmup is not None)
    found = dispatch(costs, rules)
    return [bytearray(KINDS.index(run[0]) for run in stage) for stage in found.runs]
