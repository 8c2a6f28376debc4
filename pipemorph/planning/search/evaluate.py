"""Executes an order statically and records what each op waited for; the local search's inner loop.

Computes exactly the times of :func:`~pipemorph.planning.simulation.simulator.run_static`, and keeps
them so that the critical path can be traced back.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipemorph.planning.search.order import BACKWARD, FORWARD, WEIGHT, Order, to_schedule
from pipemorph.planning.simulation.costs import INF, Costs
from pipemorph.planning.simulation.links import send
from pipemorph.planning.simulation.lower_bound import Times
from pipemorph.planning.simulation.simulator import makespan_of, run_static


class Executor:
    """Executes orders of one problem. Ops are indexed by their position on their stage.

    After :meth:`run_independent`: ``start[stage][position]`` is the op's start,
    ``free[stage][position]`` when its stage was free again (after its end if a send blocked),
    ``microbatch[stage][position]`` its microbatch, ``position[kind][stage][microbatch]`` its
    position, ``arrival[kind][stage][microbatch]`` the arrival of its message, and ``end[stage]``
    the end of the stage. ``ops_run`` counts executed ops.
    """

    def __init__(self, costs: Costs) -> None:
        n, stages = costs.microbatches, costs.stage_count
        self.costs = costs
        self.ops_run = 0
        self.start = [[0.0] * (3 * n) for _ in range(stages)]
        self.free = [[0.0] * (3 * n) for _ in range(stages)]
        self.microbatch = [[0] * (3 * n) for _ in range(stages)]
        self.position = [[[0] * n for _ in range(stages)] for _ in range(3)]
        self.arrival: list[list[list[float]]] = []
        self.end: list[float] = []

    def run(self, order: Order, delay: Sequence[float] | None = None) -> float:
        """The makespan, with ``delay`` instead of the problem's delays if given.

        INF if stages deadlock.
        """
        costs = self.costs if delay is None else self.costs._replace(delay=list(delay))
        if not any(costs.half_duplex):
            return self.run_independent(order, costs)
        schedule = to_schedule(order, costs.microbatches)
        return makespan_of(schedule, run_static(schedule, costs), costs)

    def run_independent(
        self, order: Order, costs: Costs, tail: Times | None = None, limit: float = INF
    ) -> float:
        """The same, for links with independent directions.

        With ``tail``, stops and returns INF once an op's start plus its tail reaches ``limit``.
        """
        n, stages = costs.microbatches, costs.stage_count
        last = stages - 1
        self.ops_run = ops_run = 0
        above = [[INF] * n for _ in range(stages)]
        below = [[INF] * n for _ in range(stages)]
        above[0] = [0.0] * n
        self.arrival = [above, below]
        self.end = [0.0] * stages
        done = [[0] * stages for _ in range(3)]
        todo = list(range(last, -1, -1))
        queued = [True] * stages
        while todo:
            i = todo.pop()
            queued[i] = False
            now = self.end[i]
            kinds, turn = order[i], [done[kind][i] for kind in range(3)]
            took = (costs.forward[i], costs.backward_input[i], costs.backward_weight[i])
            arrivals, start, free = (above[i], below[i]), self.start[i], self.free[i]
            microbatch, position_of = self.microbatch[i], [kept[i] for kept in self.position]
            sent_down = sent_up = False
            for position in range(sum(turn), 3 * n):
                kind = kinds[position]
                m = turn[kind]
                if kind != WEIGHT:
                    arrival = arrivals[kind][m]
                    if arrival == INF:
                        break
                    now = max(now, arrival)
                if tail is not None and now + tail[kind][i][m] >= limit:
                    self.ops_run = ops_run
                    return INF
                ops_run += 1
                turn[kind] = m + 1
                start[position] = now
                microbatch[position] = m
                position_of[kind][m] = position
                now += took[kind]
                if kind == FORWARD:
                    if i == last:
                        below[i][m] = now
                    else:
                        now, _ = send(costs, i, above[i + 1], m, now)
                        sent_down = True
                elif kind == BACKWARD and i:
                    now, _ = send(costs, i - 1, below[i - 1], m, now)
                    sent_up = True
                free[position] = now
            self.end[i] = now
            for kind in range(3):
                done[kind][i] = turn[kind]
            if sent_up and not queued[i - 1]:
                queued[i - 1] = True
                todo.append(i - 1)
            if sent_down and not queued[i + 1]:
                queued[i + 1] = True
                todo.append(i + 1)
        self.ops_run = ops_run
        return max(self.end) if min(done[WEIGHT]) == n else INF
