"""Reduces microbatches in flight without lengthening the schedule.

Slackness costs memory, so a plan should not have more than it needs. But a plan without slackness
slows down when messages are late. So a candidate is accepted only if it tolerates slightly late
messages about as well as the plan it replaces.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from pipemorph.planning.search.evaluate import Executor
from pipemorph.planning.search.list_scheduler import Tuning, list_schedule, mean_op
from pipemorph.planning.search.order import Order, in_flight_peaks
from pipemorph.planning.simulation.costs import Costs
from pipemorph.planning.simulation.lower_bound import SAME, Times, tails

# With every message late by LATE mean ops, a candidate may cost at most LATE_COST more.
LATE, LATE_COST = 0.5, 0.02


def reduce_memory(
    costs: Costs,
    order: Order,
    makespan: float,
    *,
    tuning: Tuning,
    warmup: tuple[int, ...],
    free_warmup: bool,
    tail: Times,
    executor: Executor,
) -> Order:
    """``order``, or one with fewer microbatches in flight that is not longer.

    ``tuning``: the tuning that found it; ``warmup``: counts of the paper's rules, or fixed ones
    unless ``free_warmup``; ``tail``: the problem's tails. First limits the warm-up to ``warmup``,
    then lowers the caps: halfway to :func:`fewest_in_flight`, then all the way, or a quarter of the
    way if half is too much.
    """
    late = [delay + LATE * mean_op(costs) for delay in costs.delay]
    within = makespan * (1 + SAME)
    within_late = executor.run(order, late) * (1 + LATE_COST)

    def attempt(candidate: Tuning) -> Order | None:
        # Lower caps change urgency. The abort condition may still use the problem's tails: they
        # stay lower bounds.
        known = tail if candidate.by_kind else tails(costs, candidate.caps)
        found = list_schedule(costs, known, candidate, within).order
        if found is None or executor.run(found, late) > within_late:
            return None
        # The list scheduler models the directions of a link as independent.
        if any(costs.half_duplex) and executor.run(found) > within:
            return None
        return found

    if free_warmup:
        held = replace(tuning, warmup=warmup, caps=tuple(map(max, tuning.caps, warmup)))
        if (found := attempt(held)) is not None:
            order, tuning = found, held
    peaks = in_flight_peaks(order)
    fewest = fewest_in_flight(costs, warmup, peaks)
    if fewest == peaks:
        return order

    def with_share(share: float) -> Order | None:
        caps = (low + ceil(share * (peak - low)) for low, peak in zip(fewest, peaks, strict=True))
        return attempt(replace(tuning, caps=tuple(caps)))

    half = with_share(0.5)
    if half is None:
        return with_share(0.75) or order
    return with_share(0.0) or half


def fewest_in_flight(
    costs: Costs, warmup: tuple[int, ...], peaks: tuple[int, ...]
) -> tuple[int, ...]:
    """Lowest useful caps: the warm-up, and enough W to fill the time after the last B."""
    fewest = []
    up = 0.0  # from the end of a stage's last B to the end of the last op above it
    for i, peak in enumerate(peaks):
        if i:
            up += costs.delay[i - 1] + costs.backward_input[i - 1]
        weight = costs.backward_weight[i]
        idle = up + costs.backward_weight[0]
        fill = ceil(idle / weight - SAME) if idle < peak * weight else peak
        fewest.append(min(peak, max(warmup[i], fill)))
    return tuple(fewest)
