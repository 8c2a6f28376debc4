"""Determines the cause of every bubble (idle time of a rank) of an iteration.

A bubble before a rank's first op is *fill*, one after its last op is *drain*. In between, the
cause at any moment is the first that applies of:

1. *link*: the rank's own last send blocks its compute;
2. *cap*: the input of a forward has arrived, and only its stage's ``in_flight_limit`` forbids it;
3. *order*: another B or W could run, but the schedule runs this op first (guided dispatch would
   not wait);
4. *link*: the input of the next op has been sent, but not arrived (delay or queue of a link);
5. *dependency*: the input of the next op has not been computed yet.

A forward that could run within the cap, but is not next, is no cause: it would take memory, which
the plan may save deliberately.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple

from pipemorph.planning.ir import OpKind
from pipemorph.planning.problem import Problem
from pipemorph.planning.simulation.core import INF
from pipemorph.planning.simulation.simulator import Message, Simulation, TimedOp, deliver


class Cause(StrEnum):
    """The cause of a rank's idle time."""

    FILL = "fill"
    DRAIN = "drain"
    DEPENDENCY = "dependency"
    LINK = "link"
    CAP = "cap"
    ORDER = "order"


class Bubble(NamedTuple):
    """Idle time of one rank, in the problem's unit."""

    start: float
    end: float
    cause: Cause


class Explanation(NamedTuple):
    """``bubbles[rank]`` in order of time; ``messages`` in the order of their sends."""

    bubbles: list[list[Bubble]]
    messages: list[Message]

    def by_cause(self) -> dict[Cause, list[float]]:
        """Idle time per cause and rank."""
        return {
            cause: [
                sum(bubble.end - bubble.start for bubble in bubbles if bubble.cause is cause)
                for bubbles in self.bubbles
            ]
            for cause in Cause
        }


def explain(simulation: Simulation, problem: Problem) -> Explanation:
    """Explain all idle time of ``simulation``, an execution under ``problem``."""
    delivery = deliver(simulation)
    arrivals = _Arrivals(simulation)
    end = simulation.makespan
    limits = problem.in_flight_limits()
    bubbles = []
    for mine, ops, held in zip(
        simulation.schedule.stages_of, simulation.ranks, delivery.held, strict=True
    ):
        idle = _between(mine, ops, arrivals, held, limits)
        if ops[0].start > 0:
            idle.insert(0, Bubble(0.0, ops[0].start, Cause.FILL))
        if end > ops[-1].end:
            idle.append(Bubble(ops[-1].end, end, Cause.DRAIN))
        bubbles.append(idle)
    return Explanation(bubbles, delivery.messages)


class _Arrivals:
    """When the inputs of each stage's ops were computed, and when they arrived."""

    def __init__(self, simulation: Simulation) -> None:
        n, last = simulation.schedule.microbatches, simulation.schedule.stage_count - 1
        ran = simulation.ran
        # (computed, arrived) per stage and microbatch: the input of F, and that of B or BW.
        self.above = [[(-INF, -INF)] * n for _ in simulation.stages]
        self.below = [[(-INF, -INF)] * n for _ in simulation.stages]
        for stage, ops in enumerate(simulation.stages):
            for op in ops:
                m = op.microbatch
                if op.kind is OpKind.F and stage < last:
                    self.above[stage + 1][m] = op.end, ran.above[stage + 1][m]
                elif op.kind is OpKind.F:
                    self.below[last][m] = op.end, op.end
                elif op.kind is not OpKind.W and stage:
                    self.below[stage - 1][m] = op.end, ran.below[stage - 1][m]

    def of(self, stage: int, op: TimedOp) -> tuple[float, float]:
        if op.kind is OpKind.W:
            return (-INF, -INF)
        return (self.above if op.kind is OpKind.F else self.below)[stage][op.microbatch]


def _between(
    mine: Sequence[int],
    ops: Sequence[TimedOp],
    arrivals: _Arrivals,
    held: dict[int, float],
    limits: Sequence[int | None],
) -> list[Bubble]:
    """The bubbles between the first and the last op of a rank with the stages ``mine``."""
    found: list[Bubble] = []
    done = [[0, 0, 0] for _ in mine]
    """Per chunk: F, B and W."""
    for position, op in enumerate(ops):
        before = ops[position - 1].end if position else op.start
        if op.start > before:
            capped = other = INF
            for chunk, (stage, (f, b, w)) in enumerate(zip(mine, done, strict=True)):
                waits_for = op.kind if chunk == op.chunk else None
                limit = limits[stage]
                if limit is not None and f - w >= limit and waits_for is not OpKind.F:
                    capped = min([capped, *(at for _, at in arrivals.above[stage][f : f + 1])])
                if b < f and waits_for not in (OpKind.B, OpKind.BW):
                    other = min(other, arrivals.below[stage][b][1])
                if w < b and waits_for is not OpKind.W:
                    other = -INF
            made = arrivals.of(mine[op.chunk], op)[0]
            state = _State(op, made, held.get(position - 1, -INF), capped, other)
            found += _split(before, op.start, state)
        done[op.chunk][0] += op.kind is OpKind.F
        done[op.chunk][1] += op.kind in (OpKind.B, OpKind.BW)
        done[op.chunk][2] += op.kind in (OpKind.W, OpKind.BW)
    return found


class _State(NamedTuple):
    """The moments at which a cause of the gap before ``op`` begins or ends."""

    op: TimedOp
    made: float
    held_until: float
    capped_from: float
    other_from: float

    def cause(self, at: float) -> Cause:
        if at < self.held_until:
            return Cause.LINK
        if at >= self.capped_from:
            return Cause.CAP
        if at >= self.other_from:
            return Cause.ORDER
        return Cause.LINK if at >= self.made else Cause.DEPENDENCY


def _split(start: float, end: float, state: _State) -> list[Bubble]:
    edges = {state.made, state.held_until, state.capped_from, state.other_from}
    moments = [start, *sorted(edge for edge in edges if start < edge < end), end]
    pieces: list[Bubble] = []
    for left, right in pairwise(moments):
        cause = state.cause(left)
        joins = bool(pieces) and pieces[-1].cause is cause
        pieces.append(Bubble(pieces.pop().start if joins else left, right, cause))
    return pieces
