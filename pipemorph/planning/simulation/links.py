"""When a message sent over a link arrives: latency, queues, blocking sends."""

from __future__ import annotations

from collections.abc import Callable

from pipemorph.planning.simulation.costs import INF, Costs

DelayAt = Callable[[int, float], float]
"""Link and moment → delay, in the problem's unit."""


def send(costs: Costs, link: int, arrivals: list[float], m: int, end: float) -> tuple[float, float]:
    """Send message ``m`` at ``end``: when compute may go on, and when it arrives (recorded).

    For links whose directions are independent. Messages of a direction leave in microbatch
    order and all take ``delay``, so the oldest of the last ``q`` sends is the first of them
    to arrive. ``arrivals`` holds those before ``m``, by microbatch.
    """
    free = end
    bound, queues = costs.outstanding[link], costs.queues[link]
    if bound and m >= bound:
        free = max(free, arrivals[m - bound])
    leaves = max(free, arrivals[m - queues]) if queues and m >= queues else free
    arrival = arrivals[m] = leaves + costs.delay[link]
    return free, arrival


class Wires:
    """Every message of one iteration, sent in order of time, so that directions can share queues.

    ``above[i][m]``: arrival at stage *i* of the forward from stage *i-1*; ``below[i][m]``: of
    the gradient from stage *i+1*. INF until sent. What a stage has of its own is put in by
    who executes.

    ``delay_at(link, sent)`` gives the delay of a message handed over at ``sent``, where delays
    change within the iteration; by default those of ``costs``.
    """

    def __init__(self, costs: Costs, delay_at: DelayAt | None = None) -> None:
        n, stages = costs.microbatches, costs.stage_count
        self.costs = costs
        self.delay_at = delay_at
        self.above = [[INF] * n for _ in range(stages)]
        self.below = [[INF] * n for _ in range(stages)]
        self.above[0] = [0.0] * n
        # Arrivals over each half-duplex link, both directions in the order they were sent.
        self._shared: list[list[float]] = [[] for _ in costs.delay]

    def forward_clear(self, stage: int, m: int) -> float:
        """When stage ``stage`` may send forward ``m`` without holding up its compute."""
        return self._clear(stage, self.above[stage + 1], m)

    def backward_clear(self, stage: int, m: int) -> float:
        """Same for the gradient of ``m``, to stage ``stage - 1``."""
        return self._clear(stage - 1, self.below[stage - 1], m)

    def send_forward(self, stage: int, m: int, now: float) -> float:
        """Send forward ``m`` from ``stage`` at ``now``; its arrival."""
        return self._enter(stage, self.above[stage + 1], m, now)

    def send_backward(self, stage: int, m: int, now: float) -> float:
        """Send the gradient of ``m`` from ``stage`` at ``now``; its arrival."""
        return self._enter(stage - 1, self.below[stage - 1], m, now)

    def _clear(self, link: int, arrivals: list[float], m: int) -> float:
        bound = self.costs.outstanding[link]
        return arrivals[m - bound] if bound and m >= bound else 0.0

    def _enter(self, link: int, arrivals: list[float], m: int, now: float) -> float:
        queues = self.costs.queues[link]
        delay = self.costs.delay[link] if self.delay_at is None else self.delay_at(link, now)
        if self.costs.half_duplex[link]:
            history = self._shared[link]
            busy = history[-queues] if queues and len(history) >= queues else now
            history.append(max(now, busy) + delay)
        else:
            busy = arrivals[m - queues] if queues and m >= queues else now
        arrivals[m] = arrival = max(now, busy) + delay
        return arrival
