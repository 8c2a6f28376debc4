"""Gradient reductions after the last op of a stage: simulated, bounded and planned for."""

from __future__ import annotations

import random

import event_core
import pytest
from planning_reference import shortest_of_all_orders

from pipemorph.planning import Link, Policy, Problem, StageTimes, plan, predict, simulate
from pipemorph.planning.simulation.execution import (
    Costs,
    compute_lower_bound,
    compute_tight_lower_bound,
)


def stage(reduction: float | None = None, **other: float) -> StageTimes:
    times = {"forward": 10, "backward_input": 10, "backward_weight": 10} | other
    return StageTimes.model_validate({**times, "reduction": reduction})


def problem_of(reductions: list[float | None], microbatches: int = 6, delay: float = 0) -> Problem:
    return Problem(
        microbatches=microbatches,
        stages=tuple(map(stage, reductions)),
        links=(Link(delay=delay),) * (len(reductions) - 1),
    )


def test_a_reduction_is_hidden_by_the_stages_that_end_later() -> None:
    """The last stage of a zero-bubble schedule begins last and ends when all do; of 1F1B it ends
    first, and its reduction is hidden by the backwards of the others."""
    reductions = [0.0, 0.0, 0.0, 25.0]
    problem = problem_of(list(reductions))
    today = simulate(plan(problem, Policy.ONE_F_ONE_B).schedule, problem)
    ends = [ops[-1].end for ops in today.stages]
    assert ends == sorted(ends, reverse=True)
    assert today.exposed_reduction == max(0.0, ends[3] + 25 - ends[0])
    last = problem_of([25.0, 0.0, 0.0, 0.0])
    slow = simulate(plan(last, Policy.ONE_F_ONE_B).schedule, last)
    assert slow.exposed_reduction == 25
    assert slow.makespan == today.makespan - today.exposed_reduction + 25
    assert slow.period == slow.makespan


def test_plans_know_the_reduction() -> None:
    """A plan for it is no longer than one for the same job without it, and its time is that of the
    simulator; no bound is above it."""
    rng = random.Random(5)
    for _ in range(12):
        reductions: list[float | None] = [None, 0.0, float(rng.randrange(10, 80)), None]
        rng.shuffle(reductions)
        problem = problem_of(reductions, rng.randrange(4, 9), rng.choice((0, 15)))
        planned = plan(problem)
        ran = simulate(planned.schedule, problem)
        assert planned.makespan == pytest.approx(ran.makespan)
        assert compute_lower_bound(problem) <= ran.makespan + 1e-9
        blind = plan(problem_of([None] * 4, problem.microbatches, problem.links[0].delay))
        assert planned.makespan <= predict(blind.schedule, problem) + 1e-9
        assert planned.lower_bound >= blind.lower_bound


@pytest.mark.parametrize("reductions", [[20.0, None], [None, 20.0], [23.0, 8.0]])
def test_the_search_finds_the_optimum(reductions: list[float | None]) -> None:
    problem = problem_of(reductions, 3, 1)
    shortest = shortest_of_all_orders(problem)
    assert compute_lower_bound(problem) <= shortest == plan(problem).makespan


def test_an_optimum_above_the_bound_is_found() -> None:
    """A constraint solver proved 136. The bound would be lower without the tail."""
    rows = [(2, 8, 8, 2, 23), (7, 7, 3, 3, None), (6, 3, 7, 3, None)]
    stages = tuple(
        StageTimes(
            forward=f, backward_input=b, backward_weight=w, in_flight_limit=k, reduction=tail
        )
        for f, b, w, k, tail in rows
    )
    problem = Problem(microbatches=4, stages=stages, links=(Link(delay=1),) * 2)
    assert compute_lower_bound(problem) == 131
    assert plan(problem).makespan == 136
    assert compute_tight_lower_bound(problem, 136) <= 136


def test_the_makespan_is_that_of_the_executed_iteration() -> None:
    problem = problem_of([5.0, None, 33.0], 4, 7)
    planned = plan(problem, Policy.ZERO_BUBBLE)
    costs, codes = Costs.from_problem(problem), planned.schedule.op_codes
    plain = event_core.execute_in_order(costs, codes)
    assert predict(planned.schedule, problem) == plain.compute_makespan(costs.rank_tails)
    assert simulate(planned.schedule, problem).makespan == plain.compute_makespan(costs.rank_tails)


def test_a_rank_with_several_stages_reduces_after_the_last_op_of_all() -> None:
    """The longest of its reductions, which fewer ops at its end can hide as well."""
    problem = problem_of([None] * 4).model_copy(update={"ranks": 2})
    ops = plan(problem)
    slow = problem.model_copy(
        update={"stages": (stage(1), stage(), stage(30.0), stage())},
    )
    ran = simulate(ops.schedule, slow)
    ends = [ops_of[-1].end for ops_of in ran.ranks]
    assert ran.makespan == max(ends[0] + 30, ends[1])
    assert ran.exposed_reduction == ran.makespan - max(ends)
    planned = plan(slow)
    assert planned.lower_bound <= planned.simulation.makespan <= ran.makespan
    assert ran.rank_tails == [30, 0]
