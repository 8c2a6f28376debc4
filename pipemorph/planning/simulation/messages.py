"""Derives the messages of a simulated iteration, and their arrivals."""

from __future__ import annotations

from operator import itemgetter
from typing import NamedTuple

from pipemorph.planning.ir import OpKind
from pipemorph.planning.simulation.simulator import Simulation


class Message(NamedTuple):
    """One message over link *i*. ``forward``: from stage *i* to *i+1*, else from *i+1* to *i*.

    ``sent``: end of the op that computed it; ``arrived``: when the receiver may use it.
    """

    link: int
    forward: bool
    microbatch: int
    sent: float
    arrived: float


class Delivery(NamedTuple):
    """The messages of an iteration, and compute blocked by sends. Times in the problem's unit.

    ``held[rank]``: position of an op → time until which its send blocked the rank's compute (by
    ``Link.outstanding``).
    """

    messages: list[Message]
    held: list[dict[int, float]]


def deliver(simulation: Simulation) -> Delivery:
    """The messages of a simulation between its ranks, in the order of their sends."""
    placement, stages_of = simulation.schedule.placement, simulation.schedule.stages_of
    last = len(placement) - 1
    above, below = simulation.ran.above, simulation.ran.below
    sent: list[tuple[float, Message]] = []
    held: list[dict[int, float]] = []
    for rank, ops in enumerate(simulation.ranks):
        blocked: dict[int, float] = {}
        held.append(blocked)
        for position, (op, at) in enumerate(zip(ops, simulation.ran.free[rank], strict=True)):
            stage = stages_of[rank][op.chunk]
            kind, m, end = op.kind, op.microbatch, op.end
            if at > end:
                blocked[position] = at
            if kind is OpKind.F and stage < last and placement[stage + 1] != rank:
                sent.append((at, Message(stage, True, m, end, above[stage + 1][m])))
            elif kind in (OpKind.B, OpKind.BW) and stage and placement[stage - 1] != rank:
                sent.append((at, Message(stage - 1, False, m, end, below[stage - 1][m])))
    return Delivery([message for _, message in sorted(sent, key=itemgetter(0))], held)
