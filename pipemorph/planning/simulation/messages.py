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

    ``held[stage]``: position of an op → time until which its send blocked the stage's compute (by
    ``Link.outstanding``).
    """

    messages: list[Message]
    held: list[dict[int, float]]


def deliver(simulation: Simulation) -> Delivery:
    """The messages of a simulation, in the order of their sends."""
    last = len(simulation.stages) - 1
    sent: list[tuple[float, Message]] = []
    held: list[dict[int, float]] = []
    for stage, ops in enumerate(simulation.stages):
        free = simulation.free[stage]
        blocked: dict[int, float] = {}
        held.append(blocked)
        for position, (op, at) in enumerate(zip(ops, free, strict=True)):
            kind, m, _, end = op
            if at > end:
                blocked[position] = at
            if kind is OpKind.F and stage < last:
                sent.append((at, Message(stage, True, m, end, simulation.above[stage + 1][m])))
            elif kind in (OpKind.B, OpKind.BW) and stage:
                sent.append((at, Message(stage - 1, False, m, end, simulation.below[stage - 1][m])))
    return Delivery([message for _, message in sorted(sent, key=itemgetter(0))], held)
