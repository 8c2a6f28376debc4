"""Search of the pipemorph policy for an order of ops, and of microbatches that differ in cost.

The order of the microbatches matters more than that of the ops. So a plan for the mean times comes
first; then orders of the microbatches for the ops of a plan, and plans for an order, take turns as
long as they shorten the iteration. A problem gives the same plan on every machine.
"""

from __future__ import annotations

from dataclasses import replace

from pipemorph.planning.problem import Problem, copy_times
from pipemorph.planning.search.microbatch_order import search_microbatch_order
from pipemorph.planning.search.plan_variants import PlanVariant, has_variants, plan_in_order
from pipemorph.planning.simulation.execution import (
    INF,
    RELATIVE_TOLERANCE,
    compute_lower_bound,
)
from pipemorph.planning.simulation.simulator import predict

ROUNDS, ROUNDS_OF_VARIANTS = 4, 1
"""Most turns of both searches, without and with variants of offload and fused backwards."""
ORDER_EFFORT, FEWEST_ORDERS = 2_000_000, 100
"""Ops that a search for an order of the microbatches may execute, and orders for which it has
enough effort in any case."""


def find_best_reordered(problem: Problem, *, effort: int, near: float) -> tuple[PlanVariant, float]:
    """Best plan found with the microbatches in any order, and a lower bound of all orders."""
    bound = compute_lower_bound(problem)
    enough = bound * (1 + max(near, RELATIVE_TOLERANCE))
    best, _ = plan_in_order(problem.with_microbatch_order(()), effort=effort, near=near)
    if best.makespan <= enough:
        return best, bound
    planned, _ = plan_in_order(problem.with_mean_costs(), effort=effort, near=near)
    order = tuple(range(problem.microbatches))
    before = INF
    for _ in range(ROUNDS_OF_VARIANTS if has_variants(problem) else ROUNDS):
        planned = _reorder_plan(planned, problem, order, enough, effort)
        order = planned.microbatch_order
        other, _ = plan_in_order(problem.with_microbatch_order(order), effort=effort, near=near)
        if other.makespan < planned.makespan:
            planned = replace(other, microbatch_order=order)
        if planned.makespan < best.makespan:
            best = planned
        if best.makespan <= enough or planned.makespan >= before * (1 - RELATIVE_TOLERANCE):
            break
        before = planned.makespan
    return best, bound


def _reorder_plan(
    planned: PlanVariant, problem: Problem, order: tuple[int, ...], enough: float, effort: int
) -> PlanVariant:
    """Plan with the same ops, and its microbatches in the best order found, from ``order``."""
    schedule = planned.schedule
    ops = 3 * problem.microbatches * problem.stage_count
    change = search_microbatch_order(
        copy_times(planned.problem, problem.with_microbatch_order(order)),
        schedule,
        enough=enough,
        effort=max(effort * ORDER_EFFORT, FEWEST_ORDERS * ops),
    )
    order = tuple(order[place] for place in change)
    ordered = copy_times(planned.problem, problem.with_microbatch_order(order))
    return PlanVariant(ordered, schedule, predict(schedule, ordered), microbatch_order=order)
