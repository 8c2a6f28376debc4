"""Cost of delegating in ops: learned from op times on both routes, and part of predictions."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipemorph.control.decide.situation import (
    CHECK_ITERATIONS,
    LEAST_ROUTE_COST,
    SETTLED_ITERATIONS,
    RouteCost,
    RouteCostEstimator,
)
from pipemorph.planning import Link, Plan, Problem, Route, StageTimes, plan
from pipemorph.planning.problem import load_problem
from pipemorph.replay.baselines import ReplayResult, replay_trace
from pipemorph.replay.link_trace import parse_trace

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
) -> tuple[RouteCostEstimator, tuple[StageTimes, ...]]:
    """Costs after op times on direct links and then on ``routes``, and the latter op times."""
    costs = RouteCostEstimator()
    costs.observe_op_times(
        STAGES, plan_on(DIRECT), iterations=SETTLED_ITERATIONS, last=SETTLED_ITERATIONS
    )
    longer = tuple(
        stage.model_copy(
            update={
                name: drift * getattr(stage, name)
                for name in ("forward", "backward_input", "backward_weight", "fused_backward")
            }
        )
        for stage in RouteCost(part, DIRECT).convert_op_times(STAGES, routes)
    )
    costs.observe_op_times(
        longer, plan_on(routes), iterations=SETTLED_ITERATIONS, last=3 * SETTLED_ITERATIONS
    )
    return costs, longer


@pytest.mark.parametrize("drift", [1.0, 1.3])
def test_it_is_learned_whatever_else_makes_all_ops_longer(drift: float) -> None:
    costs, longer = learned(part=0.05, drift=drift)
    assert costs.current_cost.op_fraction == pytest.approx(0.05)
    assert costs.current_cost.measured_routes == AWAY
    for stage, direct in zip(
        costs.current_cost.convert_op_times(longer, DIRECT), STAGES, strict=True
    ):
        assert stage.forward == pytest.approx(drift * direct.forward)
        assert stage.backward_input == pytest.approx(drift * direct.backward_input)
        assert stage.backward_weight == pytest.approx(drift * direct.backward_weight)
        assert stage.fused_backward == pytest.approx(drift * 0.017)


def test_each_delegated_end_takes_its_part() -> None:
    found = RouteCost(0.1, DIRECT).convert_op_times(STAGES, AWAY)
    assert [stage.forward for stage in found] == pytest.approx(
        [0.01, 0.011, 0.012, 0.011, 0.01, 0.01]
    )
    assert RouteCost(0.1, AWAY).convert_op_times(STAGES, AWAY) is STAGES
    assert RouteCost(0.0, DIRECT).convert_op_times(STAGES, AWAY) is STAGES


def test_less_than_the_error_of_op_times_is_nothing() -> None:
    assert learned(part=0.8 * LEAST_ROUTE_COST)[0].current_cost.op_fraction == 0.0


def test_without_a_stage_whose_links_stay_direct_nothing_is_learned() -> None:
    """Whatever made ops longer may have made all of them so."""
    everywhere = (Route.DELEGATED,) * 5
    assert learned(part=0.05, routes=everywhere)[0].current_cost.op_fraction == 0.0


def test_op_times_count_once_they_are_those_under_the_plan() -> None:
    longer = RouteCost(0.05, DIRECT).convert_op_times(STAGES, AWAY)
    costs, away = RouteCostEstimator(), plan_on(AWAY)
    costs.observe_op_times(
        STAGES, plan_on(DIRECT), iterations=SETTLED_ITERATIONS, last=SETTLED_ITERATIONS
    )
    costs.observe_op_times(longer, away, iterations=2, last=SETTLED_ITERATIONS + 2)
    assert costs.current_cost == RouteCost(0.0, DIRECT), "medians are still those on direct links"
    costs.observe_op_times(
        longer, away, iterations=SETTLED_ITERATIONS - 1, last=2 * SETTLED_ITERATIONS
    )
    assert costs.current_cost == RouteCost(0.0, AWAY)
    costs.observe_op_times(
        longer, away, iterations=SETTLED_ITERATIONS, last=2 * SETTLED_ITERATIONS + 1
    )
    assert costs.current_cost.op_fraction == pytest.approx(0.05)


def test_op_times_are_read_every_few_iterations() -> None:
    costs = RouteCostEstimator()
    assert [costs.is_update_due(last) for last in range(2 * CHECK_ITERATIONS)] == [
        not last % CHECK_ITERATIONS for last in range(2 * CHECK_ITERATIONS)
    ]


@pytest.mark.parametrize("before", [0, 3 * SETTLED_ITERATIONS])
def test_a_stage_that_is_slow_for_another_reason_gives_no_cost(before: int) -> None:
    """The stage is at one end of a delegated link, from the change on or later."""
    costs, away = RouteCostEstimator(), plan_on(AWAY)
    costs.observe_op_times(
        STAGES, plan_on(DIRECT), iterations=SETTLED_ITERATIONS, last=SETTLED_ITERATIONS
    )
    slow = tuple(
        stage.model_copy(update={"forward": 0.03}) if i == 2 else stage
        for i, stage in enumerate(STAGES)
    )
    for last in range(SETTLED_ITERATIONS + 1, 6 * SETTLED_ITERATIONS, CHECK_ITERATIONS):
        ran = last - SETTLED_ITERATIONS
        costs.observe_op_times(slow if ran > before else STAGES, away, iterations=ran, last=last)
    assert costs.current_cost == RouteCost(0.0, AWAY)


def test_op_times_from_long_before_a_change_are_not_compared() -> None:
    costs, longer = RouteCostEstimator(), RouteCost(0.05, DIRECT).convert_op_times(STAGES, AWAY)
    costs.observe_op_times(
        STAGES, plan_on(DIRECT), iterations=SETTLED_ITERATIONS, last=SETTLED_ITERATIONS
    )
    costs.observe_op_times(
        longer, plan_on(AWAY), iterations=SETTLED_ITERATIONS, last=5 * SETTLED_ITERATIONS
    )
    assert costs.current_cost == RouteCost(0.0, AWAY)


def test_ops_that_take_no_time_give_no_cost() -> None:
    costs, none = (
        RouteCostEstimator(),
        tuple(stage.model_copy(update={"forward": 0.0, "backward_input": 0.0}) for stage in STAGES),
    )
    costs.observe_op_times(
        none, plan_on(DIRECT), iterations=SETTLED_ITERATIONS, last=SETTLED_ITERATIONS
    )
    costs.observe_op_times(
        STAGES, plan_on(AWAY), iterations=SETTLED_ITERATIONS, last=2 * SETTLED_ITERATIONS + 1
    )
    assert costs.current_cost == RouteCost(0.0, AWAY)


@pytest.mark.full
def test_costs_learned_in_a_fault_make_the_next_plan_better(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The direct route absorbs 20 ms on the last link, but the other one not for nothing."""
    problem = load_problem(str(PROBLEM))
    trace = parse_trace(
        '{"at_iteration": 12, "links": {"3": {"delay_ms": 20}}}\n'
        '{"at_iteration": 40, "links": {}}\n'
        '{"at_iteration": 60, "links": {"6": {"delay_ms": 20}}}',
        7,
    )

    def run(known: ReplayResult | None = None) -> ReplayResult:
        return replay_trace(problem, trace, delegation=0.05, iterations=100, known=known)

    knows = run()
    monkeypatch.setattr(RouteCostEstimator, "observe_op_times", lambda *_, **__: None)
    before, after = run(knows).seconds["adaptive"], knows.seconds["adaptive"]
    assert after < 0.995 * before
