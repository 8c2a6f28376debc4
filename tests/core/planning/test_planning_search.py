"""The search: valid plans near the proven optimum."""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gate import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st
from planning_strategies import offloading, problems

from pipemorph.planning import (
    Dispatch,
    Link,
    Policy,
    Problem,
    Route,
    StageTimes,
    plan,
    predict,
    validate,
)
from pipemorph.planning.search.order_search import search_order
from pipemorph.planning.simulation import execution
from pipemorph.planning.simulation.execution import (
    RELATIVE_TOLERANCE,
    Costs,
    DispatchRules,
    choose_paper_warmup,
    compute_lower_bound,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))
from planner_problems import FACTS, hash_problem, problem_set

DRAWN = {case.key: case.problem for case in problem_set(3)}
"""Problems, some of whose plans once differed in another unit."""


@st.composite
def any_problem(draw: st.DrawFn) -> Problem:
    """Problem with a fixed warm-up or without."""
    if draw(st.booleans()):
        problem = draw(problems(half_duplex=True))
    else:
        # Times whose sums depend on the order of their terms.
        rng = random.Random(draw(st.integers(0, 2**32)))
        problem = draw(problems(max_stages=4, queues=False))
        stages = tuple(
            stage.model_copy(
                update={
                    name: rng.uniform(0.1, 9)
                    for name in ("forward", "backward_input", "backward_weight")
                }
            )
            for stage in problem.stages
        )
        problem = problem.model_copy(update={"stages": stages})
    if draw(st.integers(0, 4)) == 0:
        warmup: list[int] = []
        most = problem.microbatches
        for limit in problem.list_in_flight_limits():
            most = draw(st.integers(1, min(most, limit or most)))
            warmup.append(most)
        problem = problem.with_warmup(warmup)
    return problem


@given(problem=any_problem(), effort=st.sampled_from((0, 500, 3000)))
@settings(max_examples=examples(150), deadline=None)
def test_results_of_the_search(problem: Problem, effort: int) -> None:
    """Finds, with little effort too, which is enough for every phase, a valid schedule of the
    makespan it says, not above the order of the paper's algorithm and not below the bound."""
    found = search_order(problem, listing_effort=effort, shifting_effort=effort)
    validate(found.schedule, problem.list_in_flight_limits())
    if problem.warmup is not None:
        assert found.schedule.count_warmup() == problem.warmup
    assert predict(found.schedule, problem) == found.objective
    assert found == search_order(problem, listing_effort=effort, shifting_effort=effort)
    assert found.bound >= compute_lower_bound(problem)
    assert found.bound <= found.objective * (1 + RELATIVE_TOLERANCE)
    rules = DispatchRules.from_problem(
        problem,
        problem.warmup or choose_paper_warmup(problem),
        exact_warmup=problem.warmup is not None,
    )
    costs = Costs.from_problem(problem)
    # Run as a plan, it may take longer than in the search if directions share a queue.
    paper = execution.compute_makespan(costs, execution.schedule_online(costs, rules)[0])
    assert found.objective <= paper * (1 + RELATIVE_TOLERANCE)


@given(
    problem=any_problem() | offloading(),
    several=st.sampled_from([None, "v", "interleaved"]),
    factor=st.sampled_from([1e-6, 1e-3, 1e3, 1e6, 3, 7.3, 2.0**-20]),
)
@example(problem=DRAWN["uneven/2S/0"], several=None, factor=1e-3)
@example(problem=DRAWN["multi-link/S+2/2"], several=None, factor=1e-3)
@settings(max_examples=examples(30), deadline=None)
def test_times_in_any_unit_give_the_same_plan(
    problem: Problem, several: Any, factor: float
) -> None:
    if several and problem.stage_count % 2 == 0 and problem.warmup is None:
        ranks = problem.stage_count // 2
        problem = problem.model_copy(update={"ranks": ranks, "placement": several})

    def scaled(each: StageTimes | Link) -> Any:
        times = {name: time * factor for name, time in each if isinstance(time, float)}
        return each.model_copy(update=times)

    update = {name: tuple(map(scaled, getattr(problem, name))) for name in ("stages", "links")}
    other, routes = problem.model_copy(update=update), (Route.DIRECT,) * len(problem.links)
    policies = [Policy.PIPEMORPH] if problem.multi_stage else [Policy.PIPEMORPH, Policy.ZERO_BUBBLE]
    for policy in policies:
        found, its = plan(other, policy), plan(problem, policy)
        assert found.to_plan(1, routes, Dispatch.GUIDED) == its.to_plan(1, routes, Dispatch.GUIDED)
        assert found.objective == pytest.approx(its.objective * factor)
        assert found.lower_bound == pytest.approx(its.lower_bound * factor)


def test_the_search_stops_near_the_bound_by_request() -> None:
    stopped = 0
    for case in problem_set(2):
        full, near = search_order(case.problem), search_order(case.problem, near=0.05)
        validate(near.schedule, case.problem.list_in_flight_limits())
        most = max(full.objective, full.bound * 1.05)
        assert near.objective <= most * (1 + RELATIVE_TOLERANCE), case.key
        stopped += near.objective > full.objective * (1 + RELATIVE_TOLERANCE)
    assert stopped > 5, "it went on all the same"


def test_near_the_proven_optimum() -> None:
    """The figures of docs/benchmarks.md, from the optima in ``planner_facts.json``."""
    facts = json.loads(FACTS.read_text())["problems"]
    cases = problem_set()
    assert len(cases) >= 200
    gaps: dict[bool, list[float]] = {True: [], False: []}
    for case in cases:
        fact = facts[case.key]
        assert fact["digest"] == hash_problem(case.problem), f"{case.key} is another problem"
        assert fact["proven"], case.key
        planned = plan(case.problem)
        assert planned.lower_bound <= fact["optimum"] * (1 + 1e-9), case.key
        assert planned.makespan >= fact["optimum"] * (1 - 1e-9), case.key
        gaps[case.cap == "none"].append(planned.makespan / fact["optimum"] - 1)
    for free, mean, worst in ((True, 0.0001, 0.0005), (False, 0.0005, 0.01)):
        assert statistics.mean(gaps[free]) <= mean
        assert max(gaps[free]) <= worst


def test_threads_that_search_leave_the_exit_code_alone() -> None:
    code = """
import sys, threading, time
from pipemorph.planning import Problem
from pipemorph.planning.search.order_search import search_order

stage = {"forward": 1, "backward_input": 1.5, "backward_weight": 1, "in_flight_limit": 4}
problem = Problem(stages=[stage] * 4, microbatches=8, links=[{"delay": 0.1}] * 3)
effort = int(sys.argv[1])

def run():
    while True:
        search_order(problem, listing_effort=effort, shifting_effort=effort)

for _ in range(2):
    threading.Thread(target=run, daemon=True).start()
time.sleep(0.2)  # for both to be inside
sys.exit(3)
"""
    for effort in ("10", "1000", "100000"):
        command = [sys.executable, "-c", code, effort]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (3, "")
