"""Determines the cause of every bubble (idle time of a rank) of an iteration.

A bubble before a rank's first op is *fill*, one after its last op is *drain*. In between, the
cause is the first of these that applies:

1. *link*: the rank's last send blocks its compute;
2. *cap*: the input of a forward has arrived, and only its stage's ``in_flight_limit`` forbids it;
3. *order*: another B or W could run, but the schedule runs this op first (guided dispatch would
   not wait);
4. *link*: the input of the next op has been sent, but not arrived (delay or queue of a link);
5. *dependency*: the input of the next op has not been computed yet.

A forward that could run within the cap, but is not next, is no cause: the plan may hold it back to
save memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple

from pipemorph.planning.ir import OpKind
from pipemorph.planning.problem import Problem
from pipemorph.planning.simulation.execution import INF
from pipemorph.planning.simulation.simulator import Message, Simulation, TimedOp, trace_messages


class IdleCause(StrEnum):
    """Cause of a rank's idle time."""

    FILL = "fill"
    DRAIN = "drain"
    DEPENDENCY = "dependency"
    LINK = "link"
    CAP = "cap"
    ORDER = "order"


class Bubble(NamedTuple):
    """Idle interval of a rank, in the problem's unit."""

    start: float
    end: float
    cause: IdleCause


class IdleBreakdown(NamedTuple):
    """Idle times and messages of an iteration. ``bubbles[rank]``: in order of time; ``messages``:
    in the order of their sends."""

    bubbles: list[list[Bubble]]
    messages: list[Message]

    def sum_by_cause(self) -> dict[IdleCause, list[float]]:
        """Idle time per cause and rank."""
        return {
            cause: [
                sum(bubble.end - bubble.start for bubble in bubbles if bubble.cause is cause)
                for bubbles in self.bubbles
            ]
            for cause in IdleCause
        }


def explain_idle_time(simulation: Simulation, problem: Problem) -> IdleBreakdown:
    """Explain all idle time of ``simulation``, an execution under ``problem``."""
    delivery = trace_messages(simulation)
    arrivals = _InputTimes(simulation)
    end = simulation.makespan
    limits = problem.list_in_flight_limits()
    bubbles = []
    for mine, ops, held in zip(
        simulation.schedule.stages_by_rank, simulation.ranks, delivery.blocked_until, strict=True
    ):
        idle = _find_inner_bubbles(mine, ops, arrivals, held, limits)
        if ops[0].start > 0:
            idle.insert(0, Bubble(0.0, ops[0].start, IdleCause.FILL))
        if end > ops[-1].end:
            idle.append(Bubble(ops[-1].end, end, IdleCause.DRAIN))
        bubbles.append(idle)
    return IdleBreakdown(bubbles, delivery.messages)


class _InputTimes:
    """Times at which the inputs of each stage's ops were computed and arrived."""

    def __init__(self, simulation: Simulation) -> None:
        n, last = simulation.schedule.microbatches, simulation.schedule.stage_count - 1
        ran = simulation.execution
        # (computed, arrived) per stage and microbatch: the input of F, and that of B or BW.
        self.above = [[(-INF, -INF)] * n for _ in simulation.stages]
        self.below = [[(-INF, -INF)] * n for _ in simulation.stages]
        for stage, ops in enumerate(simulation.stages):
            for op in ops:
                m = op.microbatch
                if op.kind is OpKind.F and stage < last:
                    self.above[stage + 1][m] = op.end, ran.forward_arrivals[stage + 1][m]
                elif op.kind is OpKind.F:
                    self.below[last][m] = op.end, op.end
                elif op.kind is not OpKind.W and stage:
                    self.below[stage - 1][m] = op.end, ran.gradient_arrivals[stage - 1][m]

    def get_input_times(self, stage: int, op: TimedOp) -> tuple[float, float]:
        if op.kind is OpKind.W:
            return (-INF, -INF)
        return (self.above if op.kind is OpKind.F else self.below)[stage][op.microbatch]


def _find_inner_bubbles(
    mine: Sequence[int],
    ops: Sequence[TimedOp],
    arrivals: _InputTimes,
    held: dict[int, float],
    limits: Sequence[int | None],
) -> list[Bubble]:
    """Bubbles between the first and the last op of a rank with the stages ``mine``."""
    found: list[Bubble] = []
    done = [[0, 0, 0] for _ in mine]
    """Counts of F, B and W, by chunk."""
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
            made = arrivals.get_input_times(mine[op.chunk], op)[0]
            state = _GapMoments(op, made, held.get(position - 1, -INF), capped, other)
            found += _split_gap(before, op.start, state)
        done[op.chunk][0] += op.kind is OpKind.F
        done[op.chunk][1] += op.kind in (OpKind.B, OpKind.BW)
        done[op.chunk][2] += op.kind in (OpKind.W, OpKind.BW)
    return found


class _GapMoments(NamedTuple):
    """Moments at which a cause of the gap before ``op`` begins or ends."""

    op: TimedOp
    computed_at: float
    blocked_until: float
    capped_from: float
    other_from: float

    def find_cause_at(self, at: float) -> IdleCause:
        if at < self.blocked_until:
            return IdleCause.LINK
        if at >= self.capped_from:
            return IdleCause.CAP
        if at >= self.other_from:
            return IdleCause.ORDER
        return IdleCause.LINK if at >= self.computed_at else IdleCause.DEPENDENCY


def _split_gap(start: float, end: float, state: _GapMoments) -> list[Bubble]:
    edges = {state.computed_at, state.blocked_until, state.capped_from, state.other_from}
    moments = [start, *sorted(edge for edge in edges if start < edge < end), end]
    pieces: list[Bubble] = []
    for begin, until in pairwise(moments):
        cause = state.find_cause_at(begin)
        joins = bool(pieces) and pieces[-1].cause is cause
        pieces.append(Bubble(pieces.pop().start if joins else begin, until, cause))
    return pieces
