"""As short, with fewer microbatches in flight, and not brittle.

Memory is what slackness costs, so a plan should not hold what it does not need. But a plan
that holds the least is the first to break when a message is late: a candidate is kept only
if it also stands every message being a little late, about as well as the plan it replaces.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from pipemorph.planning.adapt import paper_warmup
from pipemorph.planning.bounds import Times, hard_caps, tails
from pipemorph.planning.costs import Costs
from pipemorph.planning.ir import Schedule
from pipemorph.planning.listing import Bias, OpTable, Tuning, list_schedule, mean_op, scale, uniform
from pipemorph.planning.problem import Problem
from pipemorph.planning.simulator import makespan_of, run_static

# With every message late by LATE mean ops, at most LATE_COST more than the fatter plan.
LATE, LATE_COST = 0.5, 0.02
# What a makespan may differ by and still be the same: sums of times in another order.
SAME = 1e-9

# B, then F, then W, whatever is urgent: the paper's order.
IN_ORDER = Bias(forward=1e6, backward=2e6)


def slim(
    problem: Problem,
    schedule: Schedule,
    makespan: float,
    *,
    tuning: Tuning | None,
    tail: Times,
    table: OpTable,
) -> Schedule:
    """``schedule`` or a leaner one that is no longer.

    ``tuning`` is what made it, None for the paper's order; ``tail`` are the problem's tails.
    First the warm-up is held to the counts of the paper's rules, then the caps are lowered:
    halfway to the fewest worth trying, and from there one step on or back.
    """
    costs = Costs.of(problem)
    tuning = tuning or uniform(costs, hard_caps(problem), IN_ORDER, problem.warmup)
    by_urgency = tuning.biases[0].forward < scale(IN_ORDER, mean_op(costs)).forward
    late = costs._replace(delay=[delay + LATE * mean_op(costs) for delay in costs.delay])
    within = makespan * (1 + SAME)
    within_late = makespan_of(schedule, run_static(schedule, late), late) * (1 + LATE_COST)

    def attempt(candidate: Tuning) -> Schedule | None:
        # Lower caps make other ops urgent. Looser tails are still true, to give up by.
        known = tails(costs, candidate.caps) if by_urgency else tail
        found = list_schedule(costs, known, candidate, table, within).schedule
        if found is None or makespan_of(found, run_static(found, late), late) > within_late:
            return None
        # The list scheduler takes the directions of a link for independent.
        if any(costs.half_duplex) and makespan_of(found, run_static(found, costs), costs) > within:
            return None
        return found

    warmup = problem.warmup or paper_warmup(problem)
    held = replace(tuning, warmup=warmup, caps=tuple(map(max, tuning.caps, warmup)))
    if problem.warmup is None and (found := attempt(held)) is not None:
        schedule, tuning = found, held
    peaks = schedule.in_flight_peak()
    fewest = fewest_in_flight(costs, warmup, peaks)
    if fewest == peaks:
        return schedule

    def with_share(share: float) -> Schedule | None:
        caps = (low + ceil(share * (peak - low)) for low, peak in zip(fewest, peaks, strict=True))
        return attempt(replace(tuning, caps=tuple(caps)))

    half = with_share(0.5)
    if half is None:
        return with_share(0.75) or schedule
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
