"""When a message sent over a link arrives: latency, queues, blocking sends."""

from __future__ import annotations

from pipemorph.planning.costs import Costs


def send(costs: Costs, link: int, arrivals: list[float], m: int, end: float) -> tuple[float, float]:
    """Send message ``m`` at ``end``: when compute may go on, and when it arrives (recorded).

    Messages of a direction leave in microbatch order and all take ``delay``, so the oldest
    of the last ``q`` sends is the first of them to arrive. ``arrivals`` holds those
    before ``m``, by microbatch.
    """
    free = end
    bound, queues = costs.outstanding[link], costs.queues[link]
    if bound and m >= bound:
        free = max(free, arrivals[m - bound])
    leaves = max(free, arrivals[m - queues]) if queues and m >= queues else free
    arrival = arrivals[m] = leaves + costs.delay[link]
    return free, arrival
