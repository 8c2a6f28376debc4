"""Determines the cause of every bubble (idle time of a stage) of an iteration.

A bubble before a stage's first op is *fill*, one after its last op is *drain*. In between, the
cause at any moment is the first that applies of:

1. *link*: the stage's own last send blocks its compute;
2. *cap*: the input of a forward has arrived, and only the stage's ``in_flight_limit`` forbids it;
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
from pipemorph.planning.simulation.costs import INF
from pipemorph.planning.simulation.interleaved import InterleavedSimulation
from pipemorph.planning.simulation.messages import Delivery, Message, deliver
from pipemorph.planning.simulation.simulator import Simulation, TimedOp


class Cause(StrEnum):
    """The cause of a stage's idle time."""

    FILL = "fill"
    DRAIN = "drain"
    DEPENDENCY = "dependency"
    LINK = "link"
    CAP = "cap"
    ORDER = "order"


class Bubble(NamedTuple):
    """Idle time of one stage, in the problem's unit."""

    start: float
    end: float
    cause: Cause


class Explanation(NamedTuple):
    """``bubbles[stage]`` in order of time; ``messages`` in the order of their sends."""

    bubbles: list[list[Bubble]]
    messages: list[Message]

    def by_cause(self) -> dict[Cause, list[float]]:
        """Idle time per cause and stage."""
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
    arrivals = _Arrivals(simulation, delivery)
    end = simulation.makespan
    limits = problem.in_flight_limits()
    bubbles = []
    for i, ops in enumerate(simulation.stages):
        idle = _between(i, ops, arrivals, delivery.held[i], limits[i])
        if ops[0].start > 0:
            idle.insert(0, Bubble(0.0, ops[0].start, Cause.FILL))
        if end > ops[-1].end:
            idle.append(Bubble(ops[-1].end, end, Cause.DRAIN))
        bubbles.append(idle)
    return Explanation(bubbles, delivery.messages)


class _Arrivals:
    """When the inputs of each stage's ops were computed, and when they arrived."""

    def __init__(self, simulation: Simulation, delivery: Delivery) -> None:
        n, last = simulation.microbatches, len(simulation.stages) - 1
        here = (-INF, -INF)
        # (computed, arrived) per stage and microbatch: the input of F, and that of B or BW.
        self.above = [[here] * n for _ in simulation.stages]
        self.below = [[here] * n for _ in simulation.stages]
        for link, forward, m, sent, arrived in delivery.messages:
            if forward:
                self.above[link + 1][m] = (sent, arrived)
            else:
                self.below[link][m] = (sent, arrived)
        for op in simulation.stages[last]:
            if op.kind is OpKind.F:
                self.below[last][op.microbatch] = (op.end, op.end)

    def of(self, stage: int, op: TimedOp) -> tuple[float, float]:
        if op.kind is OpKind.W:
            return (-INF, -INF)
        return (self.above if op.kind is OpKind.F else self.below)[stage][op.microbatch]


def _between(
    stage: int,
    ops: Sequence[TimedOp],
    arrivals: _Arrivals,
    held: dict[int, float],
    limit: int | None,
) -> list[Bubble]:
    """The bubbles between the first and the last op of a stage."""
    found: list[Bubble] = []
    microbatches = len(arrivals.above[stage])
    f = b = w = 0
    cap = INF if limit is None else limit
    for position, op in enumerate(ops):
        before = ops[position - 1].end if position else op.start
        if op.start > before:
            forward_at = arrivals.above[stage][f][1] if f < microbatches else INF
            backward_at = arrivals.below[stage][b][1] if b < f else INF
            state = _State(
                op=op,
                made=arrivals.of(stage, op)[0],
                held_until=held.get(position - 1, -INF),
                capped_from=forward_at if f - w >= cap and op.kind is not OpKind.F else INF,
                other_from=min(
                    backward_at if op.kind in (OpKind.F, OpKind.W) else INF,
                    -INF if w < b and op.kind is not OpKind.W else INF,
                ),
            )
            found += _split(before, op.start, state)
        f += op.kind is OpKind.F
        b += op.kind in (OpKind.B, OpKind.BW)
        w += op.kind in (OpKind.W, OpKind.BW)
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


def explain_interleaved(ran: InterleavedSimulation) -> Explanation:
    """Same for ranks with several stages: ``bubbles[rank]``. Causes are fill, drain, dependency and
    link only: caps and orders belong to stages, but idle time to ranks."""
    arrivals = _Arrivals(ran.simulation, delivery := deliver(ran.simulation))
    messages = [
        message
        for message in delivery.messages
        if ran.placement[message.link] != ran.placement[message.link + 1]
    ]
    bubbles = []
    for ops_of_rank in ran.by_rank():
        idle: list[Bubble] = []
        now = 0.0
        for stage, op in ops_of_rank:
            if op.start > now:
                state = _State(op, arrivals.of(stage, op)[0], -INF, INF, INF)
                first = op is ops_of_rank[0][1]
                idle += (
                    [Bubble(0.0, op.start, Cause.FILL)] if first else _split(now, op.start, state)
                )
            now = op.end
        if ran.makespan > now:
            idle.append(Bubble(now, ran.makespan, Cause.DRAIN))
        bubbles.append(idle)
    return Explanation(bubbles, messages)
