"""Lower bounds: heads (earliest start of an op), tails (least time after it) and the makespan.

The longest path of the precedence graph is a weak bound, since a stage runs one op at a time. So
heads and tails also count the ops that must run on the same stage, and the bound of a stage is the
preemptive one-machine schedule of its ops between their heads and tails (Jackson's rule, as Carlier
and Pinson use it for job shops).
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from pipemorph.planning.problem import Problem
from pipemorph.planning.simulation.costs import INF, Costs

# Relative tolerance of equal makespans: sums of the same times in different order.
SAME = 1e-9


class Times(NamedTuple):
    """One number per op: ``forward[stage][microbatch]`` and so on."""

    forward: list[list[float]]
    backward: list[list[float]]
    weight: list[list[float]]


def lower_bound(problem: Problem) -> float:
    """Lower bound of the makespan of all schedules of the problem, in its unit.

    Valid for split and fused backwards, with and without offload, static and online dispatch, and
    all link models: limits on sends only delay messages.
    """
    costs, caps = Costs.of(problem).least(), hard_caps(problem)
    return machine_bound(costs, heads(costs, caps), tails(costs, caps))


def hard_caps(problem: Problem) -> tuple[int, ...]:
    """``K_i`` as a number: N for no cap."""
    n = problem.microbatches
    return tuple(n if k is None else min(k, n) for k in problem.in_flight_limits())


def heads(costs: Costs, caps: Sequence[int]) -> Times:
    """Earliest start of every op."""
    n, stages = costs.microbatches, costs.stage_count
    times = _zeros(stages, n)
    forward, backward, weight = times
    # Keep arrivals: a queue delays each message by the one before it.
    from_above, from_below = _zeros(stages, n)[:2]
    for m in range(n):
        for i in range(stages):
            f, b, w = costs.forward[i], costs.backward_input[i], costs.backward_weight[i]
            start = forward[i][m - 1] + f if m else 0.0
            if i:
                arrival = forward[i - 1][m] + costs.forward[i - 1]
                from_above[i][m] = _arrival(costs, i - 1, from_above[i], m, arrival)
                start = max(start, from_above[i][m])
            if m >= caps[i]:
                start = max(start, weight[i][m - caps[i]] + w)
            # Ops before it on this stage: m F, and B and W of those no longer in flight.
            over = max(0, m - caps[i] + 1)
            forward[i][m] = max(start, forward[i][0] + m * f + over * (b + w))
        for i in range(stages - 1, -1, -1):
            f, b, w = costs.forward[i], costs.backward_input[i], costs.backward_weight[i]
            start = forward[i][m] + f
            if i < stages - 1:
                arrival = backward[i + 1][m] + costs.backward_input[i + 1]
                from_below[i][m] = _arrival(costs, i, from_below[i], m, arrival)
                start = max(start, from_below[i][m])
            if m:
                start = max(start, backward[i][m - 1] + b)
            over = max(0, m - caps[i] + 1)
            start = max(start, forward[i][0] + (m + 1) * f + m * b + over * w)
            backward[i][m] = start
            weight[i][m] = max(start + b, weight[i][m - 1] + w if m else 0.0)
    return times


def _arrival(costs: Costs, link: int, arrivals: list[float], m: int, sent: float) -> float:
    queues = costs.queues[link]
    leaves = max(sent, arrivals[m - queues]) if queues and m >= queues else sent
    return leaves + costs.delay[link]


def tails(costs: Costs, caps: Sequence[int]) -> Times:
    """Least time from the start of every op to the end of the iteration."""
    n, stages = costs.microbatches, costs.stage_count
    times = _zeros(stages, n + 1)
    forward, backward, weight = times
    for m in range(n - 1, -1, -1):
        left = n - m
        for i in range(stages):
            f, b, w = costs.forward[i], costs.backward_input[i], costs.backward_weight[i]
            # F that must wait for the W of this microbatch or a later one.
            held = max(0, left - caps[i])
            freed = forward[i][m + caps[i]] if held else 0.0
            weight[i][m] = max(w + max(weight[i][m + 1], freed), left * w + held * (f + b))
            above = costs.delay[i - 1] + backward[i - 1][m] if i else 0.0
            after = b + max(weight[i][m], backward[i][m + 1], above)
            last = backward[i][n - 1] - b if m < n - 1 else 0.0
            backward[i][m] = max(after, left * (b + w) + held * f, left * b + held * (f + w) + last)
        for i in range(stages - 1, -1, -1):
            f, b, w = costs.forward[i], costs.backward_input[i], costs.backward_weight[i]
            held = max(0, left - caps[i])
            below = costs.delay[i] + forward[i + 1][m] if i < stages - 1 else 0.0
            after = f + max(forward[i][m + 1], backward[i][m], below)
            # Ops after it on this stage: all; up to the last B; up to the last F.
            last_backward = backward[i][n - 1] - b
            last_forward = forward[i][n - 1] - f if m < n - 1 else 0.0
            forward[i][m] = max(
                after,
                left * (f + b + w),
                left * (f + b) + held * w + last_backward,
                left * f + held * (b + w) + last_forward,
            )
    return times


def machine_bound(costs: Costs, head: Times, tail: Times) -> float:
    """The largest one-machine bound over the stages."""
    n = costs.microbatches
    best = 0.0
    for i in range(costs.stage_count):
        ops = []
        for kind, took in (
            (0, costs.forward[i]),
            (1, costs.backward_input[i]),
            (2, costs.backward_weight[i]),
        ):
            ops += [(head[kind][i][m], tail[kind][i][m] - took, took) for m in range(n)]
        best = max(best, _one_machine(ops))
    return best


def _one_machine(ops: list[tuple[float, float, float]]) -> float:
    """Makespan of ops ``(head, tail after the op, duration)`` on one machine, with preemption.

    The released op with the longest tail always runs, which is optimal.
    """
    ops.sort()
    released: list[tuple[float, float]] = []
    now = best = 0.0
    position, count = 0, len(ops)
    while position < count or released:
        if not released:
            now = max(now, ops[position][0])
        while position < count and ops[position][0] <= now:
            _, after, took = ops[position]
            heappush(released, (-after, took))
            position += 1
        minus_after, took = heappop(released)
        until = ops[position][0] if position < count else INF
        if now + took <= until:
            now += took
            best = max(best, now - minus_after)
        else:
            heappush(released, (minus_after, took - (until - now)))
            now = until
    return best


def _zeros(stages: int, n: int) -> Times:
    return Times(*([[0.0] * n for _ in range(stages)] for _ in range(3)))
