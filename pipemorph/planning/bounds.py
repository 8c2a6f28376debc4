"""A makespan no schedule can beat, under pure latency.

Queues and bounds on sends only make messages later, so it holds for them too. Every term
is what some chain of ops must take; the bound is the largest of them.
"""

from __future__ import annotations

from pipemorph.planning.costs import Costs
from pipemorph.planning.problem import Problem


def lower_bound(problem: Problem) -> float:
    """The bound for a problem, in its unit. Holds for split and for fused backwards."""
    costs = Costs.of(problem)
    limits = problem.in_flight_limits()
    return bound_for(costs, limits)


def bound_for(costs: Costs, limits: tuple[int | None, ...]) -> float:
    """Same, for costs and caps. See the comments for each term.

    Notation for stage i: ``head`` is the earliest its first F can start, ``back`` the time
    from the end of one of its F to the earliest start of that microbatch's B (the round
    trip through the stages after it), ``tail`` the least time from the end of its last B to
    the end of the iteration (its own W, or the way up through the stages before it).
    """
    n, stages = costs.microbatches, costs.stage_count
    tf, tb, tw, c = costs.forward, costs.backward_input, costs.backward_weight, costs.delay

    head = [0.0] * stages
    for i in range(1, stages):
        head[i] = head[i - 1] + tf[i - 1] + c[i - 1]
    back = [0.0] * stages
    for i in range(stages - 2, -1, -1):
        back[i] = c[i] + tf[i + 1] + back[i + 1] + tb[i + 1] + c[i]
    # After B of stage i: its W, or the message up, B there, and so on.
    tail = [0.0] * stages
    for i in range(stages):
        tail[i] = tw[i] if i == 0 else max(tw[i], c[i - 1] + tb[i - 1] + tail[i - 1])

    best = 0.0
    reach = n  # most microbatches that can be between F and B here: smallest cap so far
    for i in range(stages):
        limit = limits[i]
        cap = n if limit is None else min(n, limit)
        reach = min(reach, cap)
        f, b, w = tf[i], tb[i], tw[i]
        trip = f + back[i] + b
        best = max(
            best,
            # All the work of the stage, from when it can first start.
            head[i] + n * (f + b + w),
            # Before the first B only `reach` F can fill the round trip.
            head[i] + max(trip - b, reach * f) + (n - reach) * f + n * (b + w),
            # At the last B all F and B are over and all W but those of `cap` microbatches.
            head[i] + n * (f + b) + (n - cap) * w + tail[i],
            # At the last F the B of all but `reach` are over; then its round trip.
            head[i] + n * f + (n - reach) * b + (n - cap) * w + back[i] + b + tail[i],
            # F of m waits for W of m - cap: rounds of F, round trip, B, W.
            head[i] + (n - 1) // cap * (trip + w) + trip + tail[i],
        )
    return best
