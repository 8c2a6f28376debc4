"""Rule-based schedules with one stage per rank. They use op times and caps, not delays."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from pipemorph.errors import InputError
from pipemorph.planning.ir import Op, OpKind, Schedule
from pipemorph.planning.problem import Problem
from pipemorph.planning.simulation.core import decode, online
from pipemorph.planning.simulation.costs import Costs
from pipemorph.planning.simulation.online import Rules


def gpipe(problem: Problem) -> Schedule:
    """GPipe: all F, then all (fused) backwards. Raises :class:`InputError` for a cap below N."""
    n = problem.microbatches
    for i, stage in enumerate(problem.stages):
        if stage.in_flight_limit is not None and stage.in_flight_limit < n:
            raise InputError(
                f"stages[{i}].in_flight_limit is {stage.in_flight_limit}; policy gpipe holds all"
                f" {n} microbatches in flight, use 1f1b, zero-bubble or pipemorph"
            )
    if problem.warmup is not None and any(x != n for x in problem.warmup):
        raise InputError(f"warmup is {list(problem.warmup)}; policy gpipe runs all {n} F first")
    order = [Op(OpKind.F, m) for m in range(n)] + [Op(OpKind.BW, m) for m in range(n)]
    return Schedule(n, (tuple(order),) * problem.stage_count)


def one_f_one_b(problem: Problem) -> Schedule:
    """1F1B (PipeDream-flush): ``S - i`` forwards, then (fused) backwards and forwards alternate."""
    n, count = problem.microbatches, problem.stage_count
    warmup = problem.warmup or fit_warmup([count - i for i in range(count)], problem)
    stages = []
    for x in warmup:
        order = [Op(OpKind.F, m) for m in range(x)]
        for m in range(n):
            order.append(Op(OpKind.BW, m))
            if m + x < n:
                order.append(Op(OpKind.F, m + x))
        stages.append(tuple(order))
    return Schedule(n, tuple(stages))


def zero_bubble(problem: Problem) -> Schedule:
    """Zero-bubble: enough warm-up that the last stage never idles; W fills gaps.

    Without delays, ``2 (S-i) - 1`` forwards cover the round trip of equal stages (ZB-H2, 7-5-3-1
    for S=4); a cap reduces the warm-up (ZB-H1 for ``K = S``). The order is a list schedule for
    links without delay, so delays are ignored.
    """
    warmup = problem.warmup or zero_bubble_warmup(problem)
    rules = Rules.of(problem, warmup, exact_warmup=True)
    return decode(online(Costs.of(problem).without_delay(), rules)[0], problem.microbatches)


def zero_bubble_warmup(problem: Problem) -> tuple[int, ...]:
    """Warm-up that covers the round trip of equal stages, within the caps."""
    count = problem.stage_count
    return fit_warmup([2 * (count - i) - 1 for i in range(count)], problem)


def fit_warmup(wanted: Sequence[int], problem: Problem) -> tuple[int, ...]:
    """``wanted`` reduced to valid counts: at least 1, at most N and all caps up to the stage,
    non-increasing."""
    most = problem.microbatches
    fitted = []
    for x, stage in zip(wanted, problem.stages, strict=True):
        if stage.in_flight_limit is not None:
            most = min(most, stage.in_flight_limit)
        most = max(1, min(most, x))
        fitted.append(most)
    return tuple(fitted)


def paper_warmup(problem: Problem) -> tuple[int, ...]:
    """The paper's warm-up: adapted counts if a link has a delay; else those of the initial plan, if
    memory limits are known."""
    undisturbed = not any(link.wire_time for link in problem.links)
    if undisturbed and problem.stages[0].in_flight_limit is not None:
        return initial_warmup(problem)
    return adapted_warmup(problem)


def adapted_warmup(problem: Problem) -> tuple[int, ...]:
    """Warm-up with enough slackness to absorb each link's delay, from ``x_{S-1} = 1`` backwards.

    ``Δ_i = max(2, ceil((tF_i + tB_i + 2 c_i) / (tF_{i+1} + tB_{i+1})))`` (paper,
    "adaptation"). The paper bounds Δ by ``N - 2S``, which is not positive for short
    pipelines; here counts are bounded by N and the in-flight caps instead.
    """
    stages, links = problem.stages, problem.links
    count = problem.stage_count
    warmup = [1] * count
    for i in range(count - 2, -1, -1):
        here = stages[i].forward + stages[i].backward_input + 2 * links[i].wire_time
        below = stages[i + 1].forward + stages[i + 1].backward_input
        # A rounding error in near-equal times must not add a microbatch.
        slack = ceil(here / below - 1e-9) if here < below * problem.microbatches else 10**6
        warmup[i] = warmup[i + 1] + max(2, slack)
    return fit_warmup(warmup, problem)


def initial_warmup(problem: Problem) -> tuple[int, ...]:
    """Warm-up with all slackness that memory allows, spread evenly (paper, "initial plan").

    ``x_0`` is the first stage's cap (or N), ``x_{S-1} = 1``, and the smallest Δ is as large as
    possible; the remainder goes to the last links, where a delay costs most.
    """
    count = problem.stage_count
    if count == 1:
        return fit_warmup([1], problem)
    limit = problem.stages[0].in_flight_limit
    most = problem.microbatches if limit is None else min(limit, problem.microbatches)
    each, more = divmod(max(0, most - 1), count - 1)
    warmup = [1] * count
    for i in range(count - 2, -1, -1):
        warmup[i] = warmup[i + 1] + each + (1 if i >= count - 1 - more else 0)
    return fit_warmup(warmup, problem)
