"""The tight bound: not above any schedule nor proven optimum, and larger than the quick one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from gate import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_reference import optimum, shortest_of_all_orders
from planning_strategies import problems, times

from pipemorph.planning import (
    Problem,
    compute_lower_bound,
    plan,
)
from pipemorph.planning.simulation.execution import RELATIVE_TOLERANCE, compute_tight_lower_bound

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))
from planner_problems import large_problem, load_facts, problem_set

ABOVE = (1.0, 1.03, 1.3)
"""Bisection begins at a plan's makespan, which may be that far above the optimum."""


def not_above(problem: Problem, shortest: float) -> None:
    for factor in ABOVE:
        bound = compute_tight_lower_bound(problem, shortest * factor)
        assert compute_lower_bound(problem) <= bound * (1 + RELATIVE_TOLERANCE)
        assert bound <= shortest * (1 + RELATIVE_TOLERANCE), f"from {factor} times the optimum"


@st.composite
def small_problems(draw: st.DrawFn) -> Problem:
    """Problems with every kind of link, caps, reductions, fused backwards, and both objectives."""
    problem = draw(problems(max_stages=2, max_microbatches=3, half_duplex=True))
    stages = tuple(
        stage.model_copy(
            update={
                "reduction": draw(st.none() | times),
                "fused_backward": draw(st.none() | times),
            }
        )
        for stage in problem.stages
    )
    objective = draw(st.sampled_from(("makespan", "period")))
    return problem.model_copy(update={"stages": stages, "objective": objective})


@given(problem=small_problems())
@settings(max_examples=examples(40), deadline=None)
def test_no_order_of_any_stage_is_below_it(problem: Problem) -> None:
    not_above(problem, shortest_of_all_orders(problem))


@given(problem=problems(max_stages=3, max_microbatches=4, queues=False))
@settings(max_examples=examples(150), deadline=None)
def test_not_above_the_optimum_under_caps(problem: Problem) -> None:
    if problem.stage_count * problem.microbatches <= 8:
        not_above(problem, optimum(problem))


def test_certifies_nearly_all_of_the_stored_optima() -> None:
    """The bound is never above a proven optimum."""
    facts = load_facts()["problems"]
    proven, cases = 0, problem_set()
    for case in cases:
        best = facts[case.key]["optimum"]
        not_above(case.problem, best)
        proven += compute_tight_lower_bound(case.problem, best) >= best * (1 - RELATIVE_TOLERANCE)
    assert proven >= 0.97 * len(cases)


@pytest.mark.parametrize("objective", ["makespan", "period"])
def test_tighter_on_large_problems_with_caps(objective: str) -> None:
    tighter = 0
    for k in range(3):
        problem = large_problem(16, "S+2", k).model_copy(update={"objective": objective})
        quick, tight = plan(problem), plan(problem, tight_bound=True)
        assert tight.schedule == quick.schedule
        assert tight.gap < 0.015
        if quick.gap > 0:
            assert tight.lower_bound > quick.lower_bound == compute_lower_bound(problem)
            tighter += 1
    assert tighter > 1


def test_without_effort_it_is_the_quick_bound() -> None:
    problem = large_problem(16, "S+2", 0)
    quick = compute_lower_bound(problem)
    assert compute_tight_lower_bound(problem, 2 * quick, 1000) == quick
    assert compute_tight_lower_bound(problem, 2 * quick) > quick
