"""Static execution where both directions of a link share its queues.

What ``torch.distributed`` gives a pair of ranks on NCCL: one communicator and one stream for
both directions, so that a send waits for the receive issued before it. Who goes first then
depends on when each side sends, so this execution advances in order of time, which the one
for independent directions need not.
"""

from __future__ import annotations

from heapq import heappop, heappush

from pipemorph.planning.costs import INF, Costs
from pipemorph.planning.ir import OpKind, Schedule

_FINISH, _START = 0, 1
"""At one time what ends comes first: its message may be what another stage waits for."""


def starts_in_time(schedule: Schedule, costs: Costs) -> list[list[float]]:
    """Start time of every op, in the schedule's order; short where a stage waits for ever."""
    n, stages = costs.microbatches, costs.stage_count
    last = stages - 1
    above = [[INF] * n for _ in range(stages)]
    below = [[INF] * n for _ in range(stages)]
    above[0] = [0.0] * n
    starts: list[list[float]] = [[] for _ in range(stages)]
    running = [False] * stages
    # Arrivals of a link's messages, both directions where they share its queues.
    shared: list[list[float]] = [[] for _ in range(last)]
    events = [(0.0, _START, i) for i in range(stages)]

    def enter(link: int, arrivals: list[float], m: int, now: float) -> float:
        """Put message ``m`` on its queue at ``now``; its arrival."""
        queues = costs.queues[link]
        if costs.half_duplex[link]:
            history = shared[link]
            busy = history[-queues] if queues and len(history) >= queues else now
        else:
            history = []
            busy = arrivals[m - queues] if queues and m >= queues else now
        arrivals[m] = arrival = max(now, busy) + costs.delay[link]
        history.append(arrival)
        return arrival

    while events:
        now, phase, i = heappop(events)
        ops, done = schedule.stages[i], starts[i]
        if phase == _FINISH:
            kind, m = ops[len(done) - 1]
            receiver = i
            if kind is OpKind.F and i < last:
                link, arrivals, receiver = i, above[i + 1], i + 1
            elif kind is OpKind.F:
                below[i][m] = now
            elif kind is not OpKind.W and i:
                link, arrivals, receiver = i - 1, below[i - 1], i - 1
            if receiver != i:
                bound = costs.outstanding[link]
                if bound and m >= bound and arrivals[m - bound] > now:
                    heappush(events, (arrivals[m - bound], _FINISH, i))
                    continue
                heappush(events, (enter(link, arrivals, m, now), _START, receiver))
            running[i] = False
        if running[i] or len(done) == len(ops):
            continue
        kind, m = ops[len(done)]
        if kind is OpKind.F:
            ready, took = above[i][m], costs.forward[i]
        elif kind is OpKind.W:
            ready, took = 0.0, costs.backward_weight[i]
        else:
            ready, took = below[i][m], costs.backward_input[i]
            if kind is OpKind.BW:
                took += costs.backward_weight[i]
        # Not here yet: its arrival is an event of its own.
        if ready <= now:
            done.append(now)
            running[i] = True
            heappush(events, (now + took, _FINISH, i))
    return starts
