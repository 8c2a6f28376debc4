"""The search of the pipemorph policy: the best order found for split backwards.

1. B before F before W, as in the paper; if that is not at the lower bound, the paper's algorithm
   with its warm-up, so that the result is never worse.
2. The list scheduler by urgency, with a few tunings that suit most problems.
3. A local search that adjusts urgency and caps stage by stage.
4. A local search on the order, along the critical path.
5. Where there is time to narrow the windows of ops (``csrc/planner/windows.hpp``): either there is
   no shorter schedule, or they say more about what is urgent, and steps 2 to 4 follow once more,
   and 3 and 4 again.
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
from pipemorph.planning.problem import Link, Problem, in_grains
from pipemorph.planning.simulation import core
from pipemorph.planning.simulation.core import (
    SAME,
    Costs,
    Rules,
    hard_caps,
    paper_warmup,
    zero_bubble_warmup,
)

# Effort of the two local searches in executed ops, in each of their rounds; the one with the list
# scheduler has at least FEWEST_LISTINGS runs.
LISTING_EFFORT = 120_000
FEWEST_LISTINGS = 12
SHIFTING_EFFORT = 360_000


class Found(NamedTuple):
    """The best order found, as the core's codes, its makespan or period, as the problem asks for,
    and a lower bound of all."""

    order: list[bytes]
    objective: float
    bound: float
    microbatches: int
    placement: Sequence[int]

    @property
    def schedule(self) -> Schedule:
        return core.decode(self.order, self.microbatches, self.placement)


def search(
    problem: Problem,
    *,
    effort: int = 1,
    listing_effort: int | None = None,
    shifting_effort: int | None = None,
    near: float = 0.0,
) -> Found:
    """The best order found for a problem. Times in the problem's unit.

    ``listing_effort`` and ``shifting_effort``: ops that the two local searches may execute in each
    of their rounds, by default ``effort`` times their usual number. ``near``: what is above the
    lower bound by no more than this, as a fraction, is short enough.
    """
    grained, grain = in_grains(problem)
    found = _search(grained, effort, listing_effort, shifting_effort, near)
    return found._replace(objective=objective_of(problem, found.order), bound=found.bound * grain)


def _search(
    problem: Problem,
    effort: int,
    listing_effort: int | None,
    shifting_effort: int | None,
    near: float,
) -> Found:
    costs, n = Costs.of(problem), problem.microbatches
    less = 0.0
    if problem.objective == "period":
        costs, less = costs.for_period(), costs.last_start()
    warmup = problem.warmup or paper_warmup(problem)
    if listing_effort is None:
        least = FEWEST_LISTINGS * 3 * n * costs.stage_count
        listing_effort = effort * max(LISTING_EFFORT, least)
    if shifting_effort is None:
        shifting_effort = effort * SHIFTING_EFFORT
    start: list[bytes] = []
    if any(costs.transfer):
        # Where links are hardly ever busy, the order for as much delay may be the better one.
        delayed = problem.model_copy(update={"links": tuple(map(_as_delay, problem.links))})
        start = _search(delayed, effort, listing_effort, shifting_effort, near).order
    elif problem.several and less:
        # The order of the shortest makespan may have the shorter period.
        again = problem.model_copy(update={"objective": "makespan"})
        start = _search(again, effort, listing_effort, shifting_effort, near).order
    elif not problem.several and not _plain(costs):
        start = _start(problem, costs, warmup)
    order, makespan, bound = _planner.search(
        costs.packed(),
        hard_caps(problem),
        problem.warmup or (),
        warmup,
        start,
        listing_effort,
        shifting_effort,
        max(near, SAME),
    )
    if not order:
        if problem.warmup is None:
            memory = problem.rank_memory
            raise InputError(f"rank_memory is {memory}, too little for a microbatch on all stages")
        shown = list(problem.warmup)
        raise InputError(f"warmup is {shown}, more than the limits of the stages allow")
    return Found(order, makespan - less, bound - less, n, problem.placed)


def objective_of(problem: Problem, order: Sequence[bytes]) -> float:
    """Makespan or period of an order in the core's codes, as the problem asks for."""
    costs = Costs.of(problem)
    if problem.objective == "makespan":
        return core.makespan(costs, order)
    ran = core.in_order(costs, order)
    rows = zip(ran.start, ran.end, costs.after, strict=True)
    return max(end[-1] + tail - start[0] for start, end, tail in rows)


def _as_delay(link: Link) -> Link:
    """The same wire time, without a limit on how many messages share it."""
    update = {"delay": link.wire_time, "transfer": 0.0, "gbps": None, "message_bytes": None}
    return link.model_copy(update=update)


def _plain(costs: Costs) -> bool:
    """Whether the list scheduler in the paper's order gives exactly the order of running ready
    ops.

    Not if a send can block or a queue is shared, nor if ops take no time, so that ops and the
    messages they wait for are simultaneous.
    """
    times = (*costs.forward, *costs.backward_input, *costs.backward_weight)
    return min(times) > 0 and not any(costs.outstanding) and not any(costs.half_duplex)


def _start(problem: Problem, costs: Costs, warmup: Sequence[int]) -> list[bytes]:
    """The order of the paper's algorithm. If both directions share a link, which the list scheduler
    does not model, or its order with the warm-up of zero-bubble if that is shorter."""
    paper = _in_order(problem, costs, warmup)
    if problem.warmup is not None or not any(costs.half_duplex):
        return paper
    other = _in_order(problem, costs, zero_bubble_warmup(problem))
    return min(paper, other, key=lambda order: core.makespan(costs, order))


def _in_order(problem: Problem, costs: Costs, warmup: Sequence[int]) -> list[bytes]:
    """The order of running ready ops, B before F before W."""
    rules = Rules.of(problem, warmup, exact_warmup=problem.warmup is not None)
    return list(core.online(costs, rules)[0])
