"""The search, compiled and plain: the same plans, op by op, and near the proven optimum."""

from __future__ import annotations

import json
import random
import statistics
import sys
from pathlib import Path

import pytest
from gate import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_strategies import problems

from pipemorph.planning import Problem, plan, predict, validate
from pipemorph.planning.search import backend
from pipemorph.planning.search import reference as plain
from pipemorph.planning.search.evaluate import Executor
from pipemorph.planning.search.order import from_schedule, to_schedule
from pipemorph.planning.simulation.costs import INF, Costs
from pipemorph.planning.simulation.lower_bound import hard_caps, tails
from pipemorph.planning.simulation.simulator import run_static

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))
from planner_problems import FACTS, digest, problem_set


@st.composite
def tasks(draw: st.DrawFn) -> tuple[Problem, plain.Task]:
    """Any problem, warm-up fixed or not, with little effort: enough for every phase."""
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
        for limit in problem.in_flight_limits():
            most = draw(st.integers(1, min(most, limit or most)))
            warmup.append(most)
        problem = problem.with_warmup(warmup)
    effort = draw(st.sampled_from((0, 500, 3000)))
    task = backend.task_for(problem)._replace(listing_effort=effort, shifting_effort=effort)
    return problem, task


def test_the_compiled_search_was_built() -> None:
    """Without it every plan is the same and takes some fifty times as long."""
    assert backend.compiled is not None, "pipemorph.planning._planner is missing: run make setup"


@given(task=tasks())
@settings(max_examples=examples(150), deadline=None)
def test_compiled_and_plain_find_the_same_order(task: tuple[Problem, plain.Task]) -> None:
    problem, what = task
    compiled = backend.search_task(what)
    assert compiled == plain.search(what)
    schedule = to_schedule(compiled.order, problem.microbatches)
    validate(schedule, problem.in_flight_limits())
    assert predict(schedule, problem) == compiled.makespan
    assert backend.lower_bound(problem) == backend.plain_lower_bound(problem) == compiled.bound


def test_without_the_compiled_search_the_plan_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """On problems where the local searches run to the end of their effort."""
    chosen = [case.problem for case in problem_set(8)]
    hard = [problem for problem in chosen if plan(problem).gap > 0]
    assert hard, "no hard problem left in the set: the test shows nothing"
    for problem in (*hard[:2], chosen[0]):
        expected = plan(problem)
        with monkeypatch.context() as patch:
            patch.setattr(backend, "compiled", None)
            assert plan(problem).schedule == expected.schedule


@given(problem=problems(max_stages=4), seed=st.integers(0, 2**32))
@settings(max_examples=examples(100), deadline=None)
def test_the_searchs_execution_is_the_simulators(problem: Problem, seed: int) -> None:
    costs, executor = Costs.of(problem), Executor(Costs.of(problem))
    schedule = plan(problem).schedule
    order = from_schedule(schedule)
    starts = run_static(schedule, costs)
    makespan = executor.run(order)
    assert makespan == predict(schedule, problem)
    assert executor.start == starts
    tail = tails(costs, hard_caps(problem))
    assert executor.run_independent(order, costs, tail, makespan * 1.001 + 1) == makespan
    assert executor.run_independent(order, costs, tail, makespan * 0.999) == INF
    rng = random.Random(seed)
    late = [delay + rng.randrange(40) / 2 for delay in costs.delay]
    assert executor.run(order, late) == predict(schedule, problem.with_delays(late))


def test_near_the_proven_optimum() -> None:
    """The figures of docs/benchmarks.md, from the optima kept in ``planner_facts.json``."""
    facts = json.loads(FACTS.read_text())["problems"]
    cases = problem_set()
    assert len(cases) >= 200
    gaps: dict[bool, list[float]] = {True: [], False: []}
    for case in cases:
        fact = facts[case.key]
        assert fact["digest"] == digest(case.problem), f"{case.key}: planner.py --prove was not run"
        assert fact["proven"], case.key
        planned = plan(case.problem)
        assert planned.lower_bound <= fact["optimum"] * (1 + 1e-9), case.key
        assert planned.makespan >= fact["optimum"] * (1 - 1e-9), case.key
        gaps[case.cap == "none"].append(planned.makespan / fact["optimum"] - 1)
    for free, mean, worst in ((True, 0.001, 0.005), (False, 0.005, 0.02)):
        assert statistics.mean(gaps[free]) <= mean
        assert max(gaps[free]) <= worst
