"""Derives the messages of a simulated iteration, and their arrivals."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import NamedTuple

from pipemorph.planning.ir import OpKind
from pipemorph.planning.problem import Problem
from pipemorph.planning.simulation.costs import Costs
from pipemorph.planning.simulation.links import Wires
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


def deliver(simulation: Simulation, problem: Problem) -> Delivery:
    """Compute the messages of a simulation by replaying its sends in order of time."""
    costs = Costs.of(problem)
    wires = Wires(costs)
    last = costs.stage_count - 1
    sends = [
        (op.end, stage, position)
        for stage, ops in enumerate(simulation.stages)
        for position, op in enumerate(ops)
        if (stage < last if op.kind is OpKind.F else stage > 0 and op.kind is not OpKind.W)
    ]
    heapify(sends)
    messages: list[Message] = []
    held: list[dict[int, float]] = [{} for _ in simulation.stages]
    while sends:
        now, stage, position = heappop(sends)
        kind, m, _, end = simulation.stages[stage][position]
        forward = kind is OpKind.F
        clear = wires.forward_clear(stage, m) if forward else wires.backward_clear(stage, m)
        if clear > now:
            held[stage][position] = clear
            heappush(sends, (clear, stage, position))
            continue
        send = wires.send_forward if forward else wires.send_backward
        arrived = send(stage, m, now)
        messages.append(Message(stage if forward else stage - 1, forward, m, end, arrived))
    return Delivery(messages, held)
