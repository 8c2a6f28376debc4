"""Search of the pipemorph policy for the best order of split backwards.

1. B before F before W, as in the paper; if that is not at the lower bound, the paper's algorithm
   with its warm-up, so that the result is never worse.
2. The list scheduler by urgency, with a few tunings that suit most problems.
3. A local search that adjusts urgency and caps stage by stage.
4. A local search on the order, along the critical path.
5. Narrowing of the ops' start windows (``csrc/planner/windows.hpp``), if the effort suffices. It
   proves that no schedule is shorter, or gives better urgencies. In that case steps 2 to 4 follow
   once more, then 3 and 4 again.
6. The same makespan with fewer microbatches in flight, if possible.

The search stops at the lower bound. Its effort is limited in ops, not in time, so that every
machine finds the same plan. It is compiled (``csrc/planner``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipemorph.errors import InputError
from pipemorph.planning import _planner
from pipemorph.planning.ir import Schedule
from pipemorph.planning.problem import Link, Problem, convert_to_grains
from pipemorph.planning.simulation import execution
from pipemorph.planning.simulation.execution import (
    RELATIVE_TOLERANCE,
    Costs,
    DispatchRules,
    choose_paper_warmup,
    compute_zero_bubble_warmup,
    list_hard_caps,
)

# Effort of the two local searches per round, in executed ops. The search with the list scheduler
# has at least FEWEST_LISTINGS runs.
LISTING_EFFORT = 120_000
FEWEST_LISTINGS = 12
SHIFTING_EFFORT = 360_000


class SearchResult(NamedTuple):
    """Best order found, in the core's codes, its makespan or period by the problem's objective,
    and a lower bound of that objective."""

    order: list[bytes]
    objective: float
    bound: float
    microbatches: int
    placement: Sequence[int]

    @property
    def schedule(self) -> Schedule:
        return execution.decode_schedule(self.order, self.microbatches, self.placement)


def search_order(
    problem: Problem,
    *,
    effort: int = 1,
    listing_effort: int | None = None,
    shifting_effort: int | None = None,
    near: float = 0.0,
) -> SearchResult:
    """Search the best order for a problem. Times in the problem's unit.

    ``listing_effort`` and ``shifting_effort``: ops that the two local searches may execute in each
    of their rounds, by default ``effort`` times their usual number. ``near``: gap to the lower
    bound, as a fraction, that is short enough.
    """
    grained, grain = convert_to_grains(problem)
    found = _search_grained(grained, effort, listing_effort, shifting_effort, near)
    return found._replace(
        objective=compute_objective(problem, found.order), bound=found.bound * grain
    )


def _search_grained(
    problem: Problem,
    effort: int,
    listing_effort: int | None,
    shifting_effort: int | None,
    near: float,
) -> SearchResult:
    costs, n = Costs.from_problem(problem), problem.microbatches
    less = 0.0
    if problem.objective == "period":
        costs, less = costs.for_period(), costs.find_last_start()
    warmup = problem.warmup or choose_paper_warmup(problem)
    if listing_effort is None:
        least = FEWEST_LISTINGS * 3 * n * costs.stage_count
        listing_effort = effort * max(LISTING_EFFORT, least)
    if shifting_effort is None:
        shifting_effort = effort * SHIFTING_EFFORT
    start: list[bytes] = []
    if any(costs.transfer):
        # If links are hardly ever busy, the order for an equal delay may be better.
        delayed = problem.model_copy(update={"links": tuple(map(_convert_to_delay, problem.links))})
        start = _search_grained(delayed, effort, listing_effort, shifting_effort, near).order
    elif problem.multi_stage and less:
        # The order of the shortest makespan may have the shorter period.
        again = problem.model_copy(update={"objective": "makespan"})
        start = _search_grained(again, effort, listing_effort, shifting_effort, near).order
    elif not problem.multi_stage and not _is_plain_problem(costs):
        start = _find_start_order(problem, costs, warmup)
    order, makespan, bound = _planner.search_order(
        costs.pack_for_planner(),
        list_hard_caps(problem),
        problem.warmup or (),
        warmup,
        start,
        listing_effort,
        shifting_effort,
        max(near, RELATIVE_TOLERANCE),
    )
    if not order:
        if problem.warmup is None:
            memory = problem.rank_memory
            raise InputError(f"rank_memory is {memory}, too little for a microbatch on all stages")
        shown = list(problem.warmup)
        raise InputError(f"warmup is {shown}, more than the limits of the stages allow")
    return SearchResult(order, makespan - less, bound - less, n, problem.stage_ranks)


def compute_objective(problem: Problem, order: Sequence[bytes]) -> float:
    """Makespan or period, by the problem's objective, of an order in the core's codes."""
    costs = Costs.from_problem(problem)
    if problem.objective == "makespan":
        return execution.compute_makespan(costs, order)
    ran = execution.execute_in_order(costs, order)
    rows = zip(ran.start, ran.end, costs.rank_tails, strict=True)
    return max(end[-1] + tail - start[0] for start, end, tail in rows)


def _convert_to_delay(link: Link) -> Link:
    """Link with the same wire time as pure delay, without a limit on concurrent messages."""
    update = {"delay": link.wire_time, "transfer": 0.0, "gbps": None, "message_bytes": None}
    return link.model_copy(update=update)


def _is_plain_problem(costs: Costs) -> bool:
    """True if the list scheduler in the paper's order gives exactly the order of running ready ops.

    False if a send can block, a queue is shared, or ops take no time, so that ops and the messages
    that they wait for are simultaneous.
    """
    times = (*costs.forward, *costs.backward_input, *costs.backward_weight)
    costly = all(min(row) > 0 for row in costs.factors)
    return costly and min(times) > 0 and not any(costs.outstanding) and not any(costs.half_duplex)


def _find_start_order(problem: Problem, costs: Costs, warmup: Sequence[int]) -> list[bytes]:
    """Order of the paper's algorithm. If both directions share a link, which the list scheduler
    does not model: that order, or the one with the warm-up of zero-bubble if it is shorter."""
    paper = _order_ready_ops(problem, costs, warmup)
    if problem.warmup is not None or not any(costs.half_duplex):
        return paper
    other = _order_ready_ops(problem, costs, compute_zero_bubble_warmup(problem))
    return min(paper, other, key=lambda order: execution.compute_makespan(costs, order))


def _order_ready_ops(problem: Problem, costs: Costs, warmup: Sequence[int]) -> list[bytes]:
    """Order of running ready ops, B before F before W."""
    rules = DispatchRules.from_problem(problem, warmup, exact_warmup=problem.warmup is not None)
    return list(execution.schedule_online(costs, rules)[0])
