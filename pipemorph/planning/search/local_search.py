"""Local search on the order: shifts ops along the critical path.

Finds orders that a list scheduler cannot. A move shifts an op within a block, a run of consecutive
ops of a stage on a critical path (to an end of the block, as Nowicki and Smutnicki do for job
shops, or anywhere in it), since no other move can shorten the schedule. A longer schedule is
accepted with a probability that decreases to zero (simulated annealing; the threshold is drawn
uniformly, to avoid functions whose rounding differs between machines).
"""

from __future__ import annotations

from typing import NamedTuple

from pipemorph.planning.search.evaluate import Executor
from pipemorph.planning.search.order import BACKWARD, FORWARD, WEIGHT, Order
from pipemorph.planning.search.rng import Rng
from pipemorph.planning.simulation.costs import INF, Costs
from pipemorph.planning.simulation.lower_bound import SAME, Times

# Initial limit, in mean ops, by which a step may lengthen the schedule; decreases to zero.
HEAT = 1.0


class Block(NamedTuple):
    """Positions of consecutive ops of a stage on the critical path."""

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
    """The shortest order found, starting from ``order``, and its makespan.

    Stops at ``bound``, or after ``effort`` executed ops. ``unit``: duration of a mean op. Requires
    links with independent directions.
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
        # Count steps that are not executed too: else the search might never end on a short path.
        effort -= 1
        if kinds[begin] == kinds[end] and abs(begin - end) <= 1:
            continue
        kinds.insert(end, kinds.pop(begin))
        within = length + HEAT * unit * (effort / everything) * rng.unit()
        # Slightly larger, so that an equally long order is not rejected.
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

    If an op waited for its stage and its message equally long, ``rng`` chooses which to follow.
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
    """Whether a stage's order is valid up to position ``until``."""
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
