"""What delegating takes of ops: learned from op times on both routes, and part of predictions."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipemorph.control.decide.situation import LEAST, LOOK_EVERY, SETTLED, RouteCost, RouteCosts
from pipemorph.planning import Link, Plan, Problem, Route, StageTimes, plan
from pipemorph.planning.problem import load_problem
from pipemorph.replay.contenders import Replay, replay
from pipemorph.replay.trace import parse_trace

PROBLEM = Path(__file__).resolve().parents[3] / "examples" / "traces" / "problem.yaml"
TIMES = StageTimes(forward=0.01, backward_input=0.012, backward_weight=0.006, fused_backward=0.017)
STAGES = (TIMES,) * 6
DIRECT = (Route.DIRECT,) * 5
AWAY = (Route.DIRECT, Route.DELEGATED, Route.DELEGATED, Route.DIRECT, Route.DIRECT)
"""Stages 1 and 3 have one delegated link, stage 2 has two."""


def plan_on(routes: tuple[Route, ...]) -> Plan:
    problem = Problem(microbatches=6, stages=STAGES, links=(Link(),) * 5)
    return plan(problem).to_plan(1, routes)


def learned(
    *, part: float = 0.0, drift: float = 1.0, routes: tuple[Route, ...] = AWAY
) -> tuple[RouteCosts, tuple[StageTimes, ...]]:
    """After op times on direct links, and then on ``routes``; and the latter."""
    costs = RouteCosts()
    costs.observe(STAGES, plan_on(DIRECT), iterations=SETTLED, last=SETTLED)
    longer = tuple(
        stage.model_copy(
            update={
                name: drift * getattr(stage, name)
                for name in ("forward", "backward_input", "backward_weight", "fused_backward")
            }
        )
        for stage in RouteCost(part, DIRECT).on(STAGES, routes)
    )
    costs.observe(longer, plan_on(routes), iterations=SETTLED, last=3 * SETTLED)
    return costs, longer


@pytest.mark.parametrize("drift", [1.0, 1.3])
def test_it_is_learned_whatever_else_makes_all_ops_longer(drift: float) -> None:
    costs, longer = learned(part=0.05, drift=drift)
    assert costs.now.part == pytest.approx(0.05)
    assert costs.now.measured_on == AWAY
    for stage, direct in zip(costs.now.on(longer, DIRECT), STAGES, strict=True):
        assert stage.forward == pytest.approx(drift * direct.forward)
        assert stage.backward_input == pytest.approx(drift * direct.backward_input)
        assert stage.backward_weight == pytest.approx(drift * direct.backward_weight)
        assert stage.fused_backward == pytest.approx(drift * 0.017)


def test_each_delegated_end_takes_its_part() -> None:
    found = RouteCost(0.1, DIRECT).on(STAGES, AWAY)
    assert [stage.forward for stage in found] == pytest.approx(
        [0.01, 0.011, 0.012, 0.011, 0.01, 0.01]
    )
    assert RouteCost(0.1, AWAY).on(STAGES, AWAY) is STAGES
    assert RouteCost(0.0, DIRECT).on(STAGES, AWAY) is STAGES


def test_less_than_the_error_of_op_times_is_nothing() -> None:
    assert learned(part=0.8 * LEAST)[0].now.part == 0.0


def test_without_a_stage_whose_links_stay_direct_nothing_is_learned() -> None:
    """Whatever made ops longer may have made all of them so."""
    everywhere = (Route.DELEGATED,) * 5
    assert learned(part=0.05, routes=everywhere)[0].now.part == 0.0


def test_op_times_count_once_they_are_those_under_the_plan() -> None:
    longer = RouteCost(0.05, DIRECT).on(STAGES, AWAY)
    costs, away = RouteCosts(), plan_on(AWAY)
    costs.observe(STAGES, plan_on(DIRECT), iterations=SETTLED, last=SETTLED)
    costs.observe(longer, away, iterations=2, last=SETTLED + 2)
    assert costs.now == RouteCost(0.0, DIRECT), "medians are still those on direct links"
    costs.observe(longer, away, iterations=SETTLED - 1, last=2 * SETTLED)
    assert costs.now == RouteCost(0.0, AWAY)
    costs.observe(longer, away, iterations=SETTLED, last=2 * SETTLED + 1)
    assert costs.now.part == pytest.approx(0.05)


def test_op_times_are_looked_at_every_few_iterations() -> None:
    costs = RouteCosts()
    assert [costs.due(last) for last in range(2 * LOOK_EVERY)] == [
        not last % LOOK_EVERY for last in range(2 * LOOK_EVERY)
    ]


@pytest.mark.parametrize("before", [0, 3 * SETTLED])
def test_a_stage_that_is_slow_for_another_reason_teaches_nothing(before: int) -> None:
    """At one end of a delegated link, from the change on or later."""
    costs, away = RouteCosts(), plan_on(AWAY)
    costs.observe(STAGES, plan_on(DIRECT), iterations=SETTLED, last=SETTLED)
    slow = tuple(
        stage.model_copy(update={"forward": 0.03}) if i == 2 else stage
        for i, stage in enumerate(STAGES)
    )
    for last in range(SETTLED + 1, 6 * SETTLED, LOOK_EVERY):
        ran = last - SETTLED
        costs.observe(slow if ran > before else STAGES, away, iterations=ran, last=last)
    assert costs.now == RouteCost(0.0, AWAY)


def test_op_times_from_long_before_a_change_are_not_compared() -> None:
    costs, longer = RouteCosts(), RouteCost(0.05, DIRECT).on(STAGES, AWAY)
    costs.observe(STAGES, plan_on(DIRECT), iterations=SETTLED, last=SETTLED)
    costs.observe(longer, plan_on(AWAY), iterations=SETTLED, last=5 * SETTLED)
    assert costs.now == RouteCost(0.0, AWAY)


def test_ops_that_take_no_time_teach_nothing() -> None:
    costs, none = (
        RouteCosts(),
        tuple(stage.model_copy(update={"forward": 0.0, "backward_input": 0.0}) for stage in STAGES),
    )
    costs.observe(none, plan_on(DIRECT), iterations=SETTLED, last=SETTLED)
    costs.observe(STAGES, plan_on(AWAY), iterations=SETTLED, last=2 * SETTLED + 1)
    assert costs.now == RouteCost(0.0, AWAY)


@pytest.mark.full
def test_what_one_fault_teaches_makes_the_plan_for_the_next_one_better(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the last link 20 ms are absorbed on the direct route, but not for nothing on the other."""
    problem = load_problem(str(PROBLEM))
    trace = parse_trace(
        '{"at_iteration": 12, "links": {"3": {"delay_ms": 20}}}\n'
        '{"at_iteration": 40, "links": {}}\n'
        '{"at_iteration": 60, "links": {"6": {"delay_ms": 20}}}',
        7,
    )

    def run(known: Replay | None = None) -> Replay:
        return replay(problem, trace, delegation=0.05, iterations=100, known=known)

    knows = run()
    monkeypatch.setattr(RouteCosts, "observe", lambda *_, **__: None)
    before, after = run(knows).seconds["adaptive"], knows.seconds["adaptive"]
    assert after < 0.995 * before
