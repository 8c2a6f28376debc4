"""The planner's list scheduler: simulates stages that run their most urgent ready op.

The urgency of an op is its tail, the least time from its start to the end of the iteration (see
``simulation.lower_bound``). Under in-flight caps a W that frees a slot can then precede a B that
delays no other op; with the fixed order B, F, W (paper, "full schedule") it cannot.
:class:`Tuning` adjusts urgency per stage; the search tries several tunings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

from pipemorph.planning.search.order import BACKWARD, FORWARD, WEIGHT, Order
from pipemorph.planning.simulation.costs import INF, Costs
from pipemorph.planning.simulation.links import send
from pipemorph.planning.simulation.lower_bound import Times


class Bias(NamedTuple):
    """One stage's tuning.

    ``forward``, ``backward`` and ``weight``: times added to the urgency of the kind. ``patience``:
    the stage waits if the input of a more urgent op arrives within this fraction of the duration of
    the op that it would start.
    """

    forward: float = 0.0
    backward: float = 0.0
    weight: float = 0.0
    patience: float = 0.0


@dataclass(frozen=True)
class Tuning:
    """``biases`` and ``caps`` per stage. ``caps`` must not exceed the problem's.

    ``warmup[i]``: exact number of F before the first B; with ``at_least``, the minimum. With
    ``by_kind`` the urgency is the bias alone, without the tail.
    """

    biases: tuple[Bias, ...]
    caps: tuple[int, ...]
    warmup: tuple[int, ...] | None = None
    at_least: bool = False
    by_kind: bool = False


class Listing(NamedTuple):
    """Result of a run of the list scheduler. ``order`` is None if the run was aborted."""

    order: Order | None
    makespan: float
    ops_run: int


def list_schedule(costs: Costs, tail: Times, tuning: Tuning, bound: float = INF) -> Listing:
    """Schedule one iteration; abort once the makespan cannot stay below ``bound``.

    Also aborts on a deadlock, which needs a ``warmup`` above a cap or increasing along the stages.
    An event ``(time, stage)`` lets the stage choose its next op.
    """
    n, stages = costs.microbatches, costs.stage_count
    last = stages - 1
    caps, warmup = tuning.caps, tuning.warmup
    forward_time, backward_time = costs.forward, costs.backward_input
    weight_time, delay = costs.backward_weight, costs.delay
    queued = [bool(q or o) for q, o in zip(costs.queues, costs.outstanding, strict=True)]
    above = [[INF] * n for _ in range(stages)]
    below = [[INF] * n for _ in range(stages)]
    above[0] = [0.0] * n
    forwards, backwards, weights = [0] * stages, [0] * stages, [0] * stages
    left = [n * (forward_time[i] + backward_time[i] + weight_time[i]) for i in range(stages)]
    order: Order = [bytearray() for _ in range(stages)]
    # When each stage chooses next. A message may wake an idle stage earlier.
    wake = [0.0] * stages
    idle = [False] * stages
    events = [(0.0, i) for i in range(stages)]
    makespan = 0.0
    ops_run = 0
    weigh = 0.0 if tuning.by_kind else 1.0
    while events:
        now, i = heappop(events)
        if now != wake[i]:
            continue
        f, b, w = forwards[i], backwards[i], weights[i]
        forward_bias, backward_bias, weight_bias, patience = tuning.biases[i]
        forward_at = above[i][f] if f < n and f - w < caps[i] else INF
        backward_at = below[i][b] if b < f else INF
        if warmup is not None:
            if f < warmup[i]:
                backward_at = INF
            elif b == 0 and not tuning.at_least:
                forward_at = INF

        # Choose the most urgent ready op; at a tie B, then F, then W.
        kind, urgency, took, follows = None, -INF, 0.0, 0.0
        if backward_at <= now:
            kind, took, follows = BACKWARD, backward_time[i], tail.backward[i][b]
            urgency = weigh * follows + backward_bias
        if forward_at <= now and weigh * tail.forward[i][f] + forward_bias > urgency:
            kind, took, follows = FORWARD, forward_time[i], tail.forward[i][f]
            urgency = weigh * follows + forward_bias
        if w < b and weigh * tail.weight[i][w] + weight_bias > urgency:
            kind, took, follows = WEIGHT, weight_time[i], tail.weight[i][w]
            urgency = weigh * follows + weight_bias

        until = INF
        if kind is None:
            until = forward_at if forward_at < backward_at else backward_at
        elif patience:
            horizon = now + patience * took
            if (
                now < backward_at < horizon
                and weigh * tail.backward[i][b] + backward_bias > urgency
            ):
                until = backward_at
            if (
                now < forward_at < horizon
                and forward_at < until
                and weigh * tail.forward[i][f] + forward_bias > urgency
            ):
                until = forward_at
        if kind is None or until < INF:
            idle[i] = True
            wake[i] = until
            if until < INF:
                heappush(events, (until, i))
            continue

        if now + follows >= bound or now + left[i] >= bound:
            return Listing(None, INF, ops_run)
        ops_run += 1
        idle[i] = False
        left[i] -= took
        end = free = now + took
        makespan = max(makespan, end)
        order[i].append(kind)
        if kind == WEIGHT:
            weights[i] = w + 1
            receiver = -1
        else:
            if kind == FORWARD:
                forwards[i] = f + 1
                receiver, link, m = i + 1, i, f
                if i == last:
                    below[i][f] = end
                    receiver = -1
                else:
                    arrivals = above[receiver]
            else:
                backwards[i] = b + 1
                receiver = link = i - 1
                m = b
                arrivals = below[receiver]
            if receiver >= 0:
                if queued[link]:
                    free, arrival = send(costs, link, arrivals, m, end)
                else:
                    arrival = arrivals[m] = end + delay[link]
                if idle[receiver] and arrival < wake[receiver]:
                    wake[receiver] = arrival
                    heappush(events, (arrival, receiver))
        wake[i] = free
        heappush(events, (free, i))
    if ops_run < 3 * n * stages:
        return Listing(None, INF, ops_run)
    return Listing(order, makespan, ops_run)


def in_order(
    costs: Costs,
    caps: Sequence[int],
    warmup: tuple[int, ...] | None = None,
    *,
    at_least: bool = False,
) -> Tuning:
    """The paper's order: B, then F, then W, regardless of urgency."""
    biases = (Bias(forward=1.0, backward=2.0),) * costs.stage_count
    return Tuning(biases, tuple(caps), warmup, at_least=at_least, by_kind=True)


def uniform(
    costs: Costs,
    caps: Sequence[int],
    bias: Bias,
    warmup: tuple[int, ...] | None = None,
) -> Tuning:
    """The same bias on every stage, its three times in units of the mean op."""
    unit = mean_op(costs)
    scaled = Bias(bias.forward * unit, bias.backward * unit, bias.weight * unit, bias.patience)
    return Tuning((scaled,) * costs.stage_count, tuple(caps), warmup)


def mean_op(costs: Costs) -> float:
    """Mean duration of an op over kinds and stages."""
    total = _sum(costs.forward) + _sum(costs.backward_input) + _sum(costs.backward_weight)
    return total / (3 * costs.stage_count)


def _sum(times: Sequence[float]) -> float:
    """Sum from left to right: the rounding of :func:`sum` depends on Python's version."""
    total = 0.0
    for time in times:
        total += time
    return total
