"""A lower bound of the makespan.

The longest path of the precedence graph is a weak bound, since a stage runs one op at a time. So
the compiled bound (``csrc/planner/lower_bound.cpp``) also counts the ops that must run on the same
rank, and takes for each rank the preemptive one-machine schedule of its ops between their heads
and tails (Jackson's rule, as Carlier and Pinson use it for job shops).

Under in-flight caps that is several percent below the optimum. A tighter bound, which takes longer
than a plan, refutes makespans instead (``csrc/planner/windows.cpp``).
"""

from __future__ import annotations

from collections.abc import Sequence

from pipemorph.planning import _planner
from pipemorph.planning.problem import Problem
from pipemorph.planning.simulation.costs import Costs

TIGHT_EFFORT = 60_000_000
"""How many states of stages the tight bound may visit: most of a second."""

# Relative tolerance of equal makespans: sums of the same times in different order.
SAME = 1e-9


def lower_bound(problem: Problem, placement: Sequence[int] = ()) -> float:
    """Lower bound of the problem's objective (makespan or period) for all schedules, in its unit.
    ``placement``: the rank of each stage; empty: as of the problem.

    Valid for split and fused backwards, with and without offload or recomputation, static and
    guided dispatch, and all link models: limits on sends only delay messages.
    """
    costs, less = _relaxed(problem, placement)
    return _planner.lower_bound(costs.packed(), _loosest_caps(problem)) - less


def tight_lower_bound(problem: Problem, objective: float, effort: int = TIGHT_EFFORT) -> float:
    """As :func:`lower_bound`, of one stage per rank, but larger where possible; at most
    ``objective``, the makespan or period of some plan. The closer that is to the optimum, the
    sooner the bound is found.

    Windows in which each op must start are narrowed by what each stage can run in one order, until
    there is no schedule below ``objective``, or bisection has found the least that is not refuted.
    The bound is that of :func:`lower_bound` if ``effort`` is too small to begin, as it is for 128
    stages.
    """
    costs, less = _relaxed(problem)
    found = _planner.tight_lower_bound(
        costs.packed(), _loosest_caps(problem), objective + less, effort
    )
    return found - less


def _relaxed(problem: Problem, placement: Sequence[int] = ()) -> tuple[Costs, float]:
    """The costs to bound, and how much more than the objective a makespan under them is."""
    costs = Costs.of(problem, placement).least()
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


def hard_caps(problem: Problem) -> tuple[int, ...]:
    """``K_i`` as a number: N for no cap."""
    n = problem.microbatches
    return tuple(n if k is None else min(k, n) for k in problem.in_flight_limits())
