"""As short, with fewer microbatches in flight, and not brittle.

Memory is what slackness costs, so a plan should not hold what it does not need. But a plan
that holds the least is the first to break when a message is late: a candidate is kept only
if it also stands every message being a little late, about as well as the plan it replaces.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from pipemorph.planning.search.evaluate import Executor
from pipemorph.planning.search.list_scheduler import Tuning, list_schedule, mean_op
from pipemorph.planning.search.order import Order, in_flight_peaks
from pipemorph.planning.simulation.costs import Costs
from pipemorph.planning.simulation.lower_bound import SAME, Times, tails

# With every message late by LATE mean ops, at most LATE_COST more than the fatter plan.
LATE, LATE_COST = 0.5, 0.02


def slim(
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
    """``order`` or a leaner one that is no longer.

    ``tuning`` is what made it; ``warmup`` are the counts of the paper's rules, or fixed ones
    where not ``free_warmup``; ``tail`` are the problem's tails. First the warm-up is held to
    ``warmup``, then the caps are lowered: half-way to :func:`fewest_in_flight`, then to it, or
    a quarter of the way if half is too far.
    """
    late = [delay + LATE * mean_op(costs) for delay in costs.delay]
    within = makespan * (1 + SAME)
    within_late = executor.run(order, late) * (1 + LATE_COST)

    def attempt(candidate: Tuning) -> Order | None:
        # Lower caps make other ops urgent. Looser tails are still true, to give up by.
        known = tail if candidate.by_kind else tails(costs, candidate.caps)
        found = list_schedule(costs, known, candidate, within).order
        if found is None or executor.run(found, late) > within_late:
            return None
        # The list scheduler takes the directions of a link for independent.
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
    """Caps not worth going below: the warm-up, and enough W to fill the time after the last B."""
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
