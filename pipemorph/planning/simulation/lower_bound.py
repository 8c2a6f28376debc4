"""A lower bound of the makespan, and the earliest start and least remaining time of each op.

The longest path of the precedence graph is a weak bound, since a stage runs one op at a time. So
the compiled bound (``csrc/planner/lower_bound.cpp``) also counts the ops that must run on the same
stage, and takes for each stage the preemptive one-machine schedule of its ops between their heads
and tails (Jackson's rule, as Carlier and Pinson use it for job shops).

Under in-flight caps that is several percent below the optimum. A tighter bound, which takes longer
than a plan, refutes makespans instead (``csrc/planner/windows.cpp``).
"""

from __future__ import annotations

from typing import NamedTuple

from pipemorph.planning.problem import Problem
from pipemorph.planning.simulation import core
from pipemorph.planning.simulation.costs import Costs

TIGHT_EFFORT = 60_000_000
"""How many states of stages the tight bound may visit: most of a second."""

# Relative tolerance of equal makespans: sums of the same times in different order.
SAME = 1e-9


class Windows(NamedTuple):
    """Per kind (F, B, W), stage and microbatch: ``head`` is the earliest start of the op, ``tail``
    the least time from its start to the end of the iteration."""

    head: list[list[list[float]]]
    tail: list[list[list[float]]]


def lower_bound(problem: Problem) -> float:
    """Lower bound of the problem's objective (makespan or period) for all schedules, in its unit.

    Valid for split and fused backwards, with and without offload or recomputation, static and
    online dispatch, and all link models: limits on sends only delay messages. Without the compiled
    planner it is a weaker one.
    """
    costs, less = _relaxed(problem)
    if core.compiled is not None:
        return core.compiled.lower_bound(costs.packed(), _loosest_caps(problem)) - less
    costs = Costs.of(problem).least()
    if problem.objective == "period":
        rows = zip(*costs[1:4], costs.after, strict=True)
        return max(sum(ops) * costs.microbatches + after for *ops, after in rows)
    return busiest_stage(costs)


def tight_lower_bound(problem: Problem, objective: float, effort: int = TIGHT_EFFORT) -> float:
    """As :func:`lower_bound`, but larger where possible; at most ``objective``, the makespan or
    period of some plan. The closer that is to the optimum, the sooner the bound is found.

    Windows in which each op must start are narrowed by what each stage can run in one order, until
    there is no schedule below ``objective``, or bisection has found the least that is not refuted.
    The bound is that of :func:`lower_bound` if ``effort`` is too small to begin, as it is for 128
    stages, or if the compiled planner is missing.
    """
    if core.compiled is None:
        return lower_bound(problem)
    costs, less = _relaxed(problem)
    found = core.compiled.tight_lower_bound(
        costs.packed(), _loosest_caps(problem), objective + less, effort
    )
    return found - less


def _relaxed(problem: Problem) -> tuple[Costs, float]:
    """The costs to bound, and how much more than the objective a makespan under them is."""
    costs = Costs.of(problem).least()
    if problem.objective == "period":
        return costs.for_period(), costs.last_start()
    return costs, 0.0


def _loosest_caps(problem: Problem) -> tuple[int, ...]:
    """The most microbatches in flight of any plan."""
    stages = zip(problem.stages, hard_caps(problem), strict=True)
    return tuple(
        min(stage.recompute_limit or cap, problem.microbatches) if stage.may_recompute else cap
        for stage, cap in stages
    )


def windows(problem: Problem) -> Windows:
    """The windows of split backwards. Without the compiled planner: no more than the work of the
    op itself."""
    costs = Costs.of(problem)
    if core.compiled is not None:
        return Windows(*core.compiled.windows(costs.packed(), hard_caps(problem)))
    n = costs.microbatches
    kinds = (costs.forward, costs.backward_input, costs.backward_weight)
    return Windows(
        [[[0.0] * n for _ in times] for times in kinds],
        [[[took] * n for took in times] for times in kinds],
    )


def busiest_stage(costs: Costs) -> float:
    """The bound that needs no search: a stage starts after the fill down to it, runs all its ops,
    and its last gradient still has to travel up."""
    best = down = up = 0.0
    for i in range(costs.stage_count):
        f, b, w = costs.forward[i], costs.backward_input[i], costs.backward_weight[i]
        after = up + costs.backward_weight[0] if i else w
        work = costs.microbatches * (f + b)
        weights = costs.microbatches * w
        best = max(best, down + work + max(weights + costs.after[i], after, weights))
        if i < costs.stage_count - 1:
            down += f + costs.transfer[i] + costs.delay[i]
            up += b + costs.transfer[i] + costs.delay[i]
    return best


def hard_caps(problem: Problem) -> tuple[int, ...]:
    """``K_i`` as a number: N for no cap."""
    n = problem.microbatches
    return tuple(n if k is None else min(k, n) for k in problem.in_flight_limits())
