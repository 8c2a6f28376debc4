"""Policy exact: proven optima, bounds where there is no proof, and no OR-tools."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import pytest
from gate import examples
from hypothesis import given, settings
from planning_reference import optimum
from planning_strategies import problems

from pipemorph.cli import main
from pipemorph.errors import InputError
from pipemorph.planning import Link, Policy, Problem, StageTimes, lower_bound, plan, validate
from pipemorph.planning.search import exact
from pipemorph.planning.search.exact import solve
from pipemorph.planning.search.search import search

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))
from planner_problems import large_problem, load_facts, problem_set

SECONDS = 600.0
"""For proofs that take a second or two: they run beside others, at low priority."""


@given(problem=problems(max_stages=3, max_microbatches=3, queues=False))
@settings(max_examples=examples(20), deadline=None)
def test_exact_is_the_optimum(problem: Problem) -> None:
    """Held to branch and bound over every order."""
    if problem.stage_count * problem.microbatches > 6:
        return
    solved = solve(problem, SECONDS, workers=1)
    assert solved.proven
    assert solved.makespan == solved.bound == optimum(problem)
    validate(solved.schedule, problem.in_flight_limits())


@given(problem=problems(max_stages=3, max_microbatches=4, half_duplex=True))
@settings(max_examples=examples(20), deadline=None)
def test_no_plan_beats_what_exact_proves(problem: Problem) -> None:
    """Bounded queues, blocking sends, shared queues; ops and messages that take no time."""
    solved = solve(problem, SECONDS, workers=1)
    validate(solved.schedule, problem.in_flight_limits())
    assert lower_bound(problem) <= solved.bound <= solved.makespan
    assert solved.makespan <= plan(problem).makespan
    if not any(link.half_duplex for link in problem.links):
        assert solved.proven
    for policy in (Policy.ONE_F_ONE_B, Policy.ZERO_BUBBLE):
        assert plan(problem, policy).makespan >= solved.bound - 1e-9


def test_a_few_of_the_kept_optima_are_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of each shape and cap, solved here and now; from a worse schedule than the search's too,
    which is hardly ever longer."""
    facts = load_facts()["problems"]
    cases = [case for case in problem_set() if facts[case.key]["seconds"] < 2]
    for case in cases[:: len(cases) // 12]:
        solved = solve(case.problem, SECONDS)
        assert solved.proven, case.key
        assert solved.makespan == pytest.approx(facts[case.key]["optimum"], rel=1e-9), case.key
    short = partial(search, listing_effort=0, shifting_effort=0)
    monkeypatch.setattr(exact, "search", short)
    hard = [case for case in cases if short(case.problem).objective > _kept(facts, case.key)]
    assert len(hard) > 3
    for case in hard[:3]:
        assert solve(case.problem, SECONDS).makespan <= _kept(facts, case.key)


def _kept(facts: dict[str, dict[str, float]], key: str) -> float:
    return facts[key]["optimum"] * (1 + 1e-6)


def test_times_that_are_no_decimal_numbers() -> None:
    """Measured times: rounding them for the solver must not move the bound above the truth."""
    third = 1 / 3
    stages = (StageTimes(forward=third, backward_input=third, backward_weight=third / 7),) * 3
    problem = Problem(microbatches=5, stages=stages, links=(Link(delay=third / 3),) * 2)
    solved = solve(problem, SECONDS)
    assert solved.proven
    assert solved.bound <= solved.makespan <= solved.bound * 1.001
    tight = problem.model_copy(
        update={"stages": tuple(s.model_copy(update={"in_flight_limit": 2}) for s in stages)}
    )
    assert solve(tight, SECONDS).makespan > solved.makespan


def test_fixed_warmup_and_caps_hold() -> None:
    stage = StageTimes(forward=3, backward_input=4, backward_weight=2, in_flight_limit=3)
    problem = Problem(microbatches=6, stages=(stage,) * 3, links=(Link(delay=5), Link()))
    free = solve(problem, SECONDS)
    fixed = solve(problem.with_warmup([2, 1, 1]), SECONDS)
    assert fixed.schedule.warmup() == (2, 1, 1)
    assert max(fixed.schedule.in_flight_peak()) <= 3
    assert fixed.proven and free.proven and fixed.makespan > free.makespan


def test_out_of_time_it_still_plans_and_says_how_far_off_it_may_be() -> None:
    problem = large_problem(16, "S", 0)
    solved = solve(problem, 0.02)
    validate(solved.schedule, problem.in_flight_limits())
    assert not solved.proven
    assert lower_bound(problem) <= solved.bound < solved.makespan


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan")])
def test_needs_some_time(limit: float) -> None:
    problem = problem_set(1)[0].problem
    with pytest.raises(InputError, match="needs a value above 0"):
        solve(problem, limit)


@pytest.fixture
def file(tmp_path: Path) -> str:
    stage = "{forward: 3, backward_input: 4, backward_weight: 2, in_flight_limit: 3}"
    path = tmp_path / "problem.yaml"
    path.write_text(
        f"microbatches: 6\nstages: [{stage}, {stage}, {stage}]\nlinks: [{{delay: 5}}, {{delay: 0}}]"
    )
    return str(path)


def test_command(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(("plan", file, "--policy", "exact", "--time-limit", str(SECONDS))) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["policy"] == "exact"
    assert found["makespan"] == found["lower_bound"]
    assert found["gap"] == 0


def test_without_the_extra_one_clear_line(
    file: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("ortools")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ortools", None)
    assert main(("plan", file, "--policy", "exact")) == 2
    found = capsys.readouterr()
    assert found.out == ""
    assert found.err.count("\n") == 1
    assert "pip install 'pipemorph[exact]'" in found.err
