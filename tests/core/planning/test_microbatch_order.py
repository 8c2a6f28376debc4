"""Orders of microbatches that differ in cost, for a plan."""

from __future__ import annotations

import random
from itertools import permutations
from math import exp

import pytest

from pipemorph.errors import InputError
from pipemorph.planning import (
    Dispatch,
    Link,
    Plan,
    Policy,
    Problem,
    Route,
    StageTimes,
    plan,
    predict,
)
from pipemorph.planning.search.microbatch_order import (
    order_microbatches,
    predict_reordering_gain,
    with_microbatch_costs,
)


def make_problem(stages: int, microbatches: int, delay: float = 0.0) -> Problem:
    """Equal stages with the memory of 1F1B."""
    times = tuple(
        StageTimes(forward=2, backward_input=2, backward_weight=2, in_flight_limit=stages - i)
        for i in range(stages)
    )
    return Problem(
        microbatches=microbatches, stages=times, links=(Link(delay=delay),) * (stages - 1)
    )


def make_plan(problem: Problem, dispatch: Dispatch) -> Plan:
    routes = [Route.DIRECT] * len(problem.links)
    return plan(problem).to_plan(0, routes, dispatch)


def draw_costs(count: int, seed: int) -> list[float]:
    rng = random.Random(seed)
    return [exp(rng.gauss(0, 0.4)) for _ in range(count)]


def predict_ordered(
    problem: Problem, planned: Plan, costs: list[float], order: tuple[int, ...]
) -> float:
    varied = with_microbatch_costs(problem, costs).with_microbatch_order(order)
    return predict(planned.schedule, varied, planned.dispatch, planned.waits)


@pytest.mark.parametrize("dispatch", Dispatch)
def test_best_of_all_orders_of_few_microbatches(dispatch: Dispatch) -> None:
    problem = make_problem(3, 5, delay=1)
    planned = make_plan(problem, dispatch)
    for seed in range(4):
        costs = draw_costs(5, seed)
        order = order_microbatches(problem, planned, costs)
        best = min(
            predict_ordered(problem, planned, costs, each) for each in permutations(range(5))
        )
        assert predict_ordered(problem, planned, costs, order) == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("dispatch", Dispatch)
def test_order_of_many_microbatches_is_shorter_and_the_same_again(dispatch: Dispatch) -> None:
    problem = make_problem(4, 32)
    planned = make_plan(problem, dispatch)
    for seed in range(3):
        costs = draw_costs(32, seed)
        order = order_microbatches(problem, planned, costs)
        assert sorted(order) == list(range(32))
        assert order == order_microbatches(problem, planned, costs)
        before = predict_ordered(problem, planned, costs, ())
        assert predict_ordered(problem, planned, costs, order) < 0.95 * before


def test_best_of_all_orders_of_fused_backwards() -> None:
    """Fused backwards that are shorter than their parts."""
    problem = make_problem(3, 5)
    stages = tuple(stage.model_copy(update={"fused_backward": 2.5}) for stage in problem.stages)
    problem = problem.model_copy(update={"stages": stages})
    planned = plan(problem, Policy.ONE_F_ONE_B).to_plan(0, [Route.DIRECT] * 2)
    for seed in range(4):
        costs = draw_costs(5, seed)
        order = order_microbatches(problem, planned, costs)
        every = permutations(range(5))
        best = min(predict_ordered(problem, planned, costs, each) for each in every)
        assert predict_ordered(problem, planned, costs, order) == pytest.approx(best, rel=1e-9)


def test_equal_costs_change_nothing() -> None:
    problem = make_problem(4, 8)
    assert order_microbatches(problem, make_plan(problem, Dispatch.STATIC), [1.0] * 8) == (
        *range(8),
    )


def test_costs_per_stage() -> None:
    """A stage on which another microbatch is the long one."""
    problem = make_problem(2, 4)
    planned = make_plan(problem, Dispatch.STATIC)
    rows = [[1.0, 1.0, 3.0, 1.0], [1.0, 3.0, 1.0, 1.0]]
    order = order_microbatches(problem, planned, rows)
    times = {
        each: predict(
            planned.schedule, with_microbatch_costs(problem, rows).with_microbatch_order(each)
        )
        for each in permutations(range(4))
    }
    assert times[order] == min(times.values()) < times[0, 1, 2, 3]


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ([1.0] * 7, "microbatch_costs has 7 entries; microbatches is 8"),
        ([[1.0] * 8] * 3, "microbatch_costs has 3 rows; expected one for all stages, or one for"),
        ([[1.0] * 8] * 3 + [[1.0]], r"microbatch_costs\[3\] has 1 entry; microbatches is 8"),
        ([1.0] * 7 + [-1.0], r"has -1.0 at \[7\]; expected a number from 0 to 1e\+06"),
        ([[1.0] * 7 + [float("nan")]], r"has nan at \[0\]\[7\]; expected a number"),
        ([1.0] * 7 + ["1"], r"has '1' at \[7\]"),
        ([1.0] * 7 + [[1.0]], r"has 1.0 at \[0\]; expected a list of numbers"),
        ([], "is not a list of numbers, or of one such list per stage"),
        ("many", "is not a list of numbers"),
    ],
)
def test_costs_that_do_not_fit_are_refused(costs: list[float], message: str) -> None:
    problem = make_problem(4, 8)
    planned = make_plan(problem, Dispatch.STATIC)
    with pytest.raises(InputError, match=message) as caught:
        order_microbatches(problem, planned, costs)
    assert "\n" not in str(caught.value)


def test_plan_of_another_shape_is_refused() -> None:
    planned = make_plan(make_problem(4, 8), Dispatch.STATIC)
    with pytest.raises(InputError, match="the plan has 8 microbatches, the problem 6"):
        order_microbatches(make_problem(4, 6), planned, [1.0] * 6)


def test_order_that_is_none_is_refused() -> None:
    problem = with_microbatch_costs(make_problem(2, 3), [1.0, 2.0, 3.0])
    with pytest.raises(InputError, match="expected each microbatch from 0 to 2 once"):
        problem.with_microbatch_order((0, 1, 1))


def test_the_gain_of_an_order_grows_with_the_spread() -> None:
    problem = make_problem(4, 8)
    made = make_plan(problem, Dispatch.STATIC)
    gains = [predict_reordering_gain(problem, made, spread) for spread in (0.0, 0.2, 0.6)]
    assert gains[0] == 0
    assert 0.01 < gains[1] < gains[2] < 0.5
    assert gains[2] == predict_reordering_gain(problem, made, 0.6)
