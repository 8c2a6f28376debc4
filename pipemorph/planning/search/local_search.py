"""Local search on the order itself: shift ops along the critical path.

What a list scheduler cannot reach it reaches from there: an op is moved within a run of ops
that follow each other on a stage on a critical path (to an end of the run, as Nowicki and
Smutnicki do for job shops, or anywhere in it), since no other move can shorten the schedule.
A step that lengthens it is taken with a chance that falls to nothing (simulated annealing,
with a threshold drawn evenly: no function that rounds differently elsewhere is used).
"""

from __future__ import annotations

from typing import NamedTuple

from pipemorph.planning.search.evaluate import Executor
from pipemorph.planning.search.order import BACKWARD, FORWARD, WEIGHT, Order
from pipemorph.planning.search.rng import Rng
from pipemorph.planning.simulation.costs import INF, Costs
from pipemorph.planning.simulation.lower_bound import SAME, Times

# A step may lengthen the schedule by this many mean ops at first, by nothing at the end.
HEAT = 1.0


class Block(NamedTuple):
    """Positions of ops that follow each other on a stage, on the critical path."""

    stage: int
    first: int
    last: int


def shift(
    costs: Costs,
    tail: Times,
    executor: Executor,
    rng: Rng,
    *,
    unit: float,
    bound: float,
    effort: int,
    warmup: tuple[int, ...] | None,
    caps: tuple[int, ...],
    order: Order,
    makespan: float,
) -> tuple[Order, float]:
    """The shortest order found from ``order``, and its makespan.

    Stops at ``bound``, or once ``effort`` ops were run. ``unit`` is a mean op. Only where the
    directions of every link are independent.
    """
    present = [bytearray(kinds) for kinds in order]
    everything = effort
    length = executor.run_independent(present, costs)
    effort -= executor.ops_run
    blocks = _trace(costs, executor, present, rng)
    while effort > 0 and makespan > bound * (1 + SAME) and blocks:
        stage, first, last = blocks[rng.below(len(blocks))]
        what = rng.below(4)
        if what == 0:
            begin, end = last, last - 1
        elif what == 1:
            begin, end = first, first + 1
        else:
            begin = first + rng.below(last - first + 1)
            end = first + rng.below(last - first + 1)
        kinds = present[stage]
        # A step that was not run still counts, or a short path could be searched for ever.
        effort -= 1
        if kinds[begin] == kinds[end] and abs(begin - end) <= 1:
            continue
        kinds.insert(end, kinds.pop(begin))
        within = length + HEAT * unit * (effort / everything) * rng.unit()
        # A hair more, so that what is just as long is not given up.
        limit = within * (1 + SAME)
        found = INF
        fixed = None if warmup is None else warmup[stage]
        if _allowed(kinds, max(begin, end), caps[stage], fixed):
            found = executor.run_independent(present, costs, tail, limit)
            effort -= executor.ops_run
        if found > limit:
            kinds.insert(begin, kinds.pop(end))
            continue
        length = found
        if found < makespan * (1 - SAME):
            makespan = found
            order = [bytearray(kinds) for kinds in present]
        blocks = _trace(costs, executor, present, rng)
    return order, makespan


def _trace(costs: Costs, executor: Executor, order: Order, rng: Rng) -> list[Block]:
    """A critical path, from its end.

    Where an op waited for its stage and its message alike, the rng say which is followed.
    """
    last = costs.stage_count - 1
    blocks = []
    stage = executor.end.index(max(executor.end))
    position = end = 3 * costs.microbatches - 1
    while True:
        start = executor.start[stage][position]
        kind, m = order[stage][position], executor.microbatch[stage][position]
        received = stage > 0 if kind == FORWARD else kind == BACKWARD and stage < last
        message = received and executor.arrival[kind][stage][m] == start
        machine = position > 0 and executor.free[stage][position - 1] == start
        if machine and message and rng.below(2):
            machine = False
        if machine:
            position -= 1
            continue
        if end > position:
            blocks.append(Block(stage, position, end))
        if not message:
            return blocks
        stage += -1 if kind == FORWARD else 1
        position = end = executor.position[kind][stage][m]


def _allowed(kinds: bytearray, until: int, cap: int, warmup: int | None) -> bool:
    """Whether a stage may run its ops in this order, as far as ``until``."""
    forwards = backwards = weights = 0
    for kind in kinds[: until + 1]:
        if kind == FORWARD:
            forwards += 1
            if forwards - weights > cap:
                return False
        elif kind == BACKWARD:
            backwards += 1
            if backwards > forwards:
                return False
            if backwards == 1 and warmup is not None and forwards != warmup:
                return False
        elif kind == WEIGHT:
            weights += 1
            if weights > backwards:
                return False
    return True
