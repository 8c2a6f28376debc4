"""The tight bound: not above any schedule nor proven optimum, and larger than the quick one."""

from __future__ import annotations

import sys
from contextlib import suppress
from functools import cache
from itertools import product
from pathlib import Path

import pytest
from gate import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_reference import optimum
from planning_strategies import problems, times

from pipemorph.planning import (
    Op,
    OpKind,
    Problem,
    Schedule,
    lower_bound,
    plan,
    simulate,
    validate,
)
from pipemorph.planning.search import exact
from pipemorph.planning.simulation.costs import Costs
from pipemorph.planning.simulation.lower_bound import SAME, tight_lower_bound
from pipemorph.planning.simulation.simulator import makespan_of
from pipemorph.planning.validator import ScheduleError

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))
from planner_problems import large_problem, load_facts, problem_set

ABOVE = (1.0, 1.03, 1.3)
"""Bisection begins at a plan's makespan, which may be that far above the optimum."""


def not_above(problem: Problem, shortest: float) -> None:
    for factor in ABOVE:
        bound = tight_lower_bound(problem, shortest * factor)
        assert lower_bound(problem) <= bound * (1 + SAME)
        assert bound <= shortest * (1 + SAME), f"from {factor} times the optimum"


@cache
def orders(microbatches: int, fused: bool) -> list[tuple[Op, ...]]:
    """All orders of the ops of a stage, with a split backward or a fused one."""
    kinds = (OpKind.F, OpKind.BW) if fused else (OpKind.F, OpKind.B, OpKind.W)
    found: list[tuple[Op, ...]] = []

    def extend(done: tuple[int, ...], ops: tuple[Op, ...]) -> None:
        if min(done) == microbatches:
            found.append(ops)
        for k, count in enumerate(done):
            if count < (done[k - 1] if k else microbatches):
                extend((*done[:k], count + 1, *done[k + 1 :]), (*ops, Op(kinds[k], count)))

    extend((0,) * len(kinds), ())
    return found


@st.composite
def small_problems(draw: st.DrawFn) -> Problem:
    """Every kind of link, caps, reductions, fused backwards, and both objectives."""
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
    choices = [
        orders(problem.microbatches, fused=False)
        + (orders(problem.microbatches, fused=True) if stage.fused_backward is not None else [])
        for stage in problem.stages
    ]
    limits, shortest = problem.in_flight_limits(), float("inf")
    for each in product(*choices):
        # Some orders exceed a limit, or wait for each other for ever.
        with suppress(ScheduleError):
            schedule = Schedule(problem.microbatches, each)
            validate(schedule, limits)
            if problem.objective == "period":
                shortest = min(shortest, simulate(schedule, problem).period)
            else:
                shortest = min(shortest, makespan_of(schedule, Costs.of(problem)))
    not_above(problem, shortest)


@given(problem=problems(max_stages=3, max_microbatches=4, queues=False))
@settings(max_examples=examples(150), deadline=None)
def test_not_above_the_optimum_under_caps(problem: Problem) -> None:
    if problem.stage_count * problem.microbatches <= 8:
        not_above(problem, optimum(problem))


@given(problem=problems(max_stages=4, max_microbatches=7, half_duplex=True))
@settings(max_examples=examples(40), deadline=None)
def test_not_above_what_the_solver_finds(problem: Problem) -> None:
    """Held to the solver alone, which must not begin from a bound of ours."""
    cp = pytest.importorskip("ortools.sat.python.cp_model")
    made = plan(problem)
    model = exact._Model(cp, problem, Costs.of(problem), made.schedule, made.makespan)
    found, _ = model.solve(5.0, 1)
    shortest = made.makespan
    if found is not None:
        shortest = min(shortest, makespan_of(found, Costs.of(problem)))
    assert made.lower_bound <= shortest * (1 + SAME)
    not_above(problem, shortest)


def test_certifies_nearly_all_of_the_kept_optima() -> None:
    """And none beside them: each is proven, so nothing below it may be refuted wrongly."""
    facts = load_facts()["problems"]
    proven, cases = 0, problem_set()
    for case in cases:
        best = facts[case.key]["optimum"]
        not_above(case.problem, best)
        proven += tight_lower_bound(case.problem, best) >= best * (1 - SAME)
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
            assert tight.lower_bound > quick.lower_bound == lower_bound(problem)
            tighter += 1
    assert tighter > 1


def test_without_effort_it_is_the_quick_bound() -> None:
    problem = large_problem(16, "S+2", 0)
    quick = lower_bound(problem)
    assert tight_lower_bound(problem, 2 * quick, 1000) == quick
    assert tight_lower_bound(problem, 2 * quick) > quick
