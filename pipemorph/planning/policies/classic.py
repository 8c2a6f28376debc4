"""Rule-based schedules with one stage per rank. They use op times and caps, not delays."""

from __future__ import annotations

from pipemorph.errors import InputError
from pipemorph.planning.ir import Op, OpKind, Schedule
from pipemorph.planning.problem import Problem
from pipemorph.planning.simulation.core import (
    Costs,
    Rules,
    decode,
    fit_warmup,
    online,
    zero_bubble_warmup,
)


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
