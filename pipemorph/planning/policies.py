"""Hand-made schedules: they know the stages and the caps, not the delays."""

from __future__ import annotations

from collections.abc import Sequence

from pipemorph.errors import InputError
from pipemorph.planning.costs import Costs
from pipemorph.planning.dispatch import Rules, dispatch
from pipemorph.planning.ir import Op, OpKind, Schedule
from pipemorph.planning.problem import Problem


def gpipe(problem: Problem) -> Schedule:
    """All F, then all (fused) backwards. Holds every microbatch; refuses a cap below N."""
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
    """``S - i`` forwards, then a (fused) backward and a forward in turn (PipeDream-flush)."""
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
    """Zero-bubble: enough warm-up that the last stage never idles, W where there is a hole.

    Without a delay, ``2 (S-i) - 1`` forwards cover the round trip of equal stages (ZB-H2,
    7-5-3-1 at S=4); a cap takes warm-up away (ZB-H1 at ``K = S``). The order is a list
    schedule made for links that take no time, so a delay is not planned for.
    """
    warmup = problem.warmup or zero_bubble_warmup(problem)
    rules = Rules.of(problem, warmup, exact_warmup=True)
    return as_schedule(dispatch(Costs.of(problem).without_delay(), rules).runs, problem)


def zero_bubble_warmup(problem: Problem) -> tuple[int, ...]:
    """Forwards that cover the round trip of equal stages, as far as caps allow."""
    count = problem.stage_count
    return fit_warmup([2 * (count - i) - 1 for i in range(count)], problem)


def fit_warmup(wanted: Sequence[int], problem: Problem) -> tuple[int, ...]:
    """``wanted`` made runnable: at least 1, at most N and the caps so far, non-increasing."""
    most = problem.microbatches
    fitted = []
    for x, stage in zip(wanted, problem.stages, strict=True):
        if stage.in_flight_limit is not None:
            most = min(most, stage.in_flight_limit)
        most = max(1, min(most, x))
        fitted.append(most)
    return tuple(fitted)


def as_schedule(
    runs: Sequence[Sequence[tuple[OpKind, int, float, float]]], problem: Problem
) -> Schedule:
    """The order in which ops ran."""
    return Schedule(
        problem.microbatches, tuple(tuple(Op(run[0], run[1]) for run in stage) for stage in runs)
    )
