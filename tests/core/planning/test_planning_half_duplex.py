"""Links whose directions share a queue, and the execution in order of time they need."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product

import pytest
from drawn_plans import random_problem
from gate import examples

from pipemorph.errors import InputError
from pipemorph.planning import (
    Link,
    Policy,
    Problem,
    Route,
    StageTimes,
    build_link,
    parse_problem,
)
from pipemorph.planning import plan as make_plan
from pipemorph.planning.simulation import execution
from pipemorph.planning.simulation.execution import (
    Costs,
    DispatchRules,
    compute_makespan,
    execute_in_order,
)
from pipemorph.planning.simulation.simulator import predict

POLICIES = (Policy.GPIPE, Policy.ONE_F_ONE_B, Policy.ZERO_BUBBLE, Policy.PIPEMORPH)


def test_both_executions_agree_where_directions_are_independent() -> None:
    """Ops run in order of time, as for shared queues, and as far as arrivals are known."""
    rng = random.Random(1)
    for _ in range(examples(100)):
        problem = random_problem(rng, limits=False)
        costs = Costs.from_problem(problem)
        for policy in POLICIES:
            schedule = make_plan(problem, policy).schedule
            in_time = execute_in_order(
                costs, schedule.op_codes, lambda link, _, costs=costs: costs.delay[link]
            )
            assert in_time == execute_in_order(costs, schedule.op_codes), (problem, policy)


def test_a_shared_queue_is_never_faster() -> None:
    rng = random.Random(2)
    slower = 0
    for _ in range(300):
        problem = random_problem(rng, limits=False)
        bounded = [link.model_copy(update={"queues": 1}) for link in problem.links]
        full = problem.model_copy(update={"links": tuple(bounded)})
        half = full.model_copy(
            update={"links": tuple(b.model_copy(update={"half_duplex": True}) for b in bounded)}
        )
        schedule = make_plan(full, Policy.ONE_F_ONE_B).schedule
        assert predict(schedule, half) >= predict(schedule, full) - 1e-9
        slower += predict(schedule, half) > predict(schedule, full) + 1e-9
    assert slower > 50, "sharing hardly ever mattered: the test shows nothing"


def test_two_stages_by_hand() -> None:
    """F0 travels 1…11, F1 waits for it on the shared queue and travels 11…21. B0 runs at
    12…13 and its gradient travels 21…31; on a queue of its own it would have departed at 13."""
    times = StageTimes(forward=1, backward_input=1, backward_weight=0)
    for half, end in ((True, 42.0), (False, 34.0)):
        link = Link(delay=10, queues=1, half_duplex=half)
        problem = Problem(microbatches=2, stages=(times, times), links=(link,))
        schedule = make_plan(problem, Policy.ONE_F_ONE_B).schedule
        assert predict(schedule, problem) == end


def test_zero_bubble_pays_both_directions_on_a_shared_stream() -> None:
    """The paper's 14B figures at 60 ms on the last link: 4.24× with the framework's sends."""
    times = StageTimes(forward=10, backward_input=10.5, backward_weight=5.5)

    def iteration(delay: float, *, half: bool) -> float:
        links = [Link()] * 6 + [build_link(Route.DIRECT, delay, half_duplex=half)]
        problem = Problem(microbatches=24, stages=(times,) * 8, links=tuple(links))
        return predict(make_plan(problem, Policy.ZERO_BUBBLE).schedule, problem)

    assert iteration(60, half=True) / iteration(0, half=True) == pytest.approx(4.24, rel=0.05)
    assert iteration(60, half=False) < 0.6 * iteration(60, half=True)


def test_sharing_needs_queues() -> None:
    text = """
microbatches: 2
stages:
  - {forward: 1, backward_input: 1, backward_weight: 1}
  - {forward: 1, backward_input: 1, backward_weight: 1}
links: [{delay: 1, half_duplex: true}]
"""
    with pytest.raises(InputError, match=r"links\[0\].*half_duplex without queues"):
        parse_problem(text)


@pytest.mark.parametrize("cases", [20, pytest.param(200, marks=pytest.mark.full)])
def test_no_order_of_ready_ops_is_shorter_than_the_plan(cases: int) -> None:
    """The warm-up is that of zero-bubble, whose order once beat the plan of three of these."""
    rng = random.Random(7)
    for _ in range(cases):
        count, n = rng.choice([2, 4, 6, 8]), rng.choice([8, 12, 16, 24])
        cap = rng.choice([None, None, 2 * count, count + 2])
        stages = tuple(
            StageTimes(
                forward=rng.uniform(7, 13),
                backward_input=rng.uniform(7, 13),
                backward_weight=rng.uniform(4, 10),
                in_flight_limit=cap,
            )
            for _ in range(count)
        )
        links = tuple(
            Link(delay=rng.choice([0, 2, 10, 30, 60]), queues=1, outstanding=2, half_duplex=True)
            for _ in range(count - 1)
        )
        problem = Problem(microbatches=n, stages=stages, links=links)
        costs, warmup = (
            Costs.from_problem(problem),
            make_plan(problem, Policy.ZERO_BUBBLE).schedule.count_warmup(),
        )
        order = execution.schedule_online(costs, DispatchRules.from_problem(problem, warmup))[0]
        assert make_plan(problem).makespan <= execution.compute_makespan(costs, order) * (1 + 1e-9)


def all_orders(microbatches: int, cap: int) -> Iterator[bytes]:
    """Orders of a stage's ops, as the core's codes: 0 F, 1 B, 2 W."""

    def extend(done: tuple[int, int, int], order: bytes) -> Iterator[bytes]:
        f, b, w = done
        if w == microbatches:
            yield order
        if f < microbatches and f - w < cap:
            yield from extend((f + 1, b, w), order + b"\0")
        if b < f:
            yield from extend((f, b + 1, w), order + b"\1")
        if w < b:
            yield from extend((f, b, w + 1), order + b"\2")

    return extend((0, 0, 0), b"")


@pytest.mark.parametrize("cases", [100, pytest.param(400, marks=pytest.mark.full)])
def test_the_search_finds_the_shortest_of_all_orders(cases: int) -> None:
    """The order of messages of both directions matters on a shared queue. The list scheduler does
    not see it: the steps of the local search have to."""
    rng = random.Random(7)

    def half() -> float:
        return rng.randint(0, 24) / 2

    for case in range(cases):
        count, n = rng.choice([(2, 3), (2, 2), (3, 2)])
        stages = tuple(
            StageTimes(
                forward=half(),
                backward_input=half(),
                backward_weight=half(),
                in_flight_limit=rng.choice([None, None, 1, 2]),
            )
            for _ in range(count)
        )
        links = tuple(
            Link(
                delay=rng.choice([0, half()]),
                transfer=rng.choice([0, half()]),
                queues=rng.randint(1, 3),
                outstanding=rng.choice([None, 1, 2]),
                half_duplex=True,
            )
            for _ in range(count - 1)
        )
        problem = Problem(microbatches=n, stages=stages, links=links)
        costs = Costs.from_problem(problem)
        orders = [all_orders(n, min(n, k or n)) for k in problem.list_in_flight_limits()]
        best = min(compute_makespan(costs, order) for order in product(*orders))
        assert make_plan(problem).makespan == pytest.approx(best, rel=1e-9), (case, problem)
