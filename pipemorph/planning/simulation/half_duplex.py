"""Static execution for links whose directions share their queues.

Models ``torch.distributed`` with NCCL, where a pair of ranks has one communicator and one stream
for both directions, so that a send waits for the receive issued before it. The order of messages
then depends on when each side sends. So this execution proceeds in order of time, which the one for
independent directions does not need to.
"""

from __future__ import annotations

from heapq import heappop, heappush

from pipemorph.planning.ir import OpKind, Schedule
from pipemorph.planning.simulation.costs import Costs
from pipemorph.planning.simulation.links import Wires

_FINISH, _START = 0, 1
"""At equal times ends are processed first: another stage may wait for their message."""


def starts_in_time(
    schedule: Schedule, costs: Costs, wires: Wires | None = None
) -> list[list[float]]:
    """Start time of every op, in the schedule's order; incomplete for a stage that deadlocks."""
    stages = costs.stage_count
    last = stages - 1
    wires = Wires(costs) if wires is None else wires
    above, below = wires.above, wires.below
    starts: list[list[float]] = [[] for _ in range(stages)]
    durations = costs.durations(schedule)
    running = [False] * stages
    events = [(0.0, _START, i) for i in range(stages)]
    while events:
        now, phase, i = heappop(events)
        ops, done = schedule.stages[i], starts[i]
        if phase == _FINISH:
            kind, m = ops[len(done) - 1]
            if kind is OpKind.F and i == last:
                below[i][m] = now
            elif kind is OpKind.F:
                if (clear := wires.forward_clear(i, m)) > now:
                    heappush(events, (clear, _FINISH, i))
                    continue
                heappush(events, (wires.send_forward(i, m, now), _START, i + 1))
            elif kind is not OpKind.W and i:
                if (clear := wires.backward_clear(i, m)) > now:
                    heappush(events, (clear, _FINISH, i))
                    continue
                heappush(events, (wires.send_backward(i, m, now), _START, i - 1))
            running[i] = False
        if running[i] or len(done) == len(ops):
            continue
        kind, m = ops[len(done)]
        ready = 0.0
        if kind is not OpKind.W:
            ready = (above if kind is OpKind.F else below)[i][m]
        # Its message has not arrived; the arrival is a separate event.
        if ready <= now:
            done.append(now)
            running[i] = True
            heappush(events, (now + durations[i][len(done) - 1], _FINISH, i))
    return starts
