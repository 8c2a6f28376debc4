"""Arrival times of messages over links: latency, queues, blocking sends."""

from __future__ import annotations

from collections.abc import Callable

from pipemorph.planning.simulation.costs import INF, Costs

DelayAt = Callable[[int, float], float]
"""(link, time of send) → delay, in the problem's unit."""


def send(costs: Costs, link: int, arrivals: list[float], m: int, end: float) -> tuple[float, float]:
    """Send message ``m`` at ``end``; returns when compute may continue, and the arrival.

    For links with independent directions. Messages of a direction leave in microbatch order and all
    take ``delay``, so of the last ``q`` sends the oldest arrives first. ``arrivals``: arrivals of
    earlier messages, by microbatch; that of ``m`` is recorded in it.
    """
    free = end
    bound, queues = costs.outstanding[link], costs.queues[link]
    if bound and m >= bound:
        free = max(free, arrivals[m - bound])
    leaves = max(free, arrivals[m - queues]) if queues and m >= queues else free
    arrival = arrivals[m] = leaves + costs.delay[link]
    return free, arrival


class Wires:
    """The messages of one iteration. Sends must be in order of time, so that directions can share
    queues.

    ``above[i][m]``: arrival at stage *i* of the forward from stage *i-1*; ``below[i][m]``: of the
    gradient from stage *i+1*. INF until sent. The executor sets the entries without a message: the
    inputs of the first stage and the gradients of the last.

    ``delay_at(link, sent)``: delay of a message sent at ``sent``, for delays that change within the
    iteration; by default those of ``costs``.
    """

    def __init__(self, costs: Costs, delay_at: DelayAt | None = None) -> None:
        n, stages = costs.microbatches, costs.stage_count
        self.costs = costs
        self.delay_at = delay_at
        self.above = [[INF] * n for _ in range(stages)]
        self.below = [[INF] * n for _ in range(stages)]
        self.above[0] = [0.0] * n
        # Arrivals over each half-duplex link, both directions in the order of their sends.
        self._shared: list[list[float]] = [[] for _ in costs.delay]

    def forward_clear(self, stage: int, m: int) -> float:
        """Earliest time at which ``stage`` can send forward ``m`` without blocking its compute."""
        return self._clear(stage, self.above[stage + 1], m)

    def backward_clear(self, stage: int, m: int) -> float:
        """Same for the gradient of ``m``, to stage ``stage - 1``."""
        return self._clear(stage - 1, self.below[stage - 1], m)

    def send_forward(self, stage: int, m: int, now: float) -> float:
        """Send forward ``m`` from ``stage`` at ``now``; returns its arrival."""
        return self._enter(stage, self.above[stage + 1], m, now)

    def send_backward(self, stage: int, m: int, now: float) -> float:
        """Send the gradient of ``m`` from ``stage`` at ``now``; returns its arrival."""
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
