"""Guided dispatch: of the ready ops the first in the plan's order."""

from __future__ import annotations

import random

import event_core
import pytest
from gate import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_strategies import offloading

from pipemorph.planning import (
    Dispatch,
    Link,
    Policy,
    Problem,
    StageTimes,
    plan,
    predict_period,
    simulate,
    validate,
)
from pipemorph.planning.ir import count_in_flight_peak
from pipemorph.planning.offload import compute_host_limit, count_host_peak
from pipemorph.planning.simulation import execution
from pipemorph.planning.simulation.execution import (
    Costs,
    DelayAt,
    Execution,
    build_guide,
    find_planned_waits,
    is_guided_as_fast,
)

POLICIES = (Policy.ONE_F_ONE_B, Policy.ZERO_BUBBLE, Policy.PIPEMORPH)


def drawn(rng: random.Random, most: float) -> DelayAt:
    """Delays of messages that have nothing to do with each other."""
    seed = rng.random()
    return lambda link, sent: random.Random(f"{seed} {link} {sent!r}").choice(
        (0.0, most / 20, random.Random(f"{seed} {sent!r}").uniform(0, most))
    )


@given(problem=offloading(half_duplex=True), seed=st.integers(0, 2**32))
@settings(max_examples=examples(40), deadline=None)
def test_it_ends_within_the_limits_of_its_plan_whatever_comes_late(
    problem: Problem, seed: int
) -> None:
    """Compiled and in Python, to the bit: no stage waits for ever, holds more than its plan does,
    or runs a kind out of microbatch order."""
    rng = random.Random(seed)
    planned = plan(problem, rng.choice(POLICIES))
    schedule, within = planned.schedule, planned.problem
    costs = Costs.from_problem(within)
    waits = find_planned_waits(schedule, within)
    peaks = schedule.count_in_flight_peaks()
    assert waits == event_core.find_waits(costs, schedule.op_codes, peaks)
    guide = build_guide(schedule, within, rng.choice((None, ())))
    delay_at = drawn(rng, rng.choice((1.0, 20.0, 400.0)))
    ran = execution.execute_guided(costs, guide, delay_at)
    plain = event_core.execute_guided(costs, guide, delay_at, None)
    for field in Execution._fields:
        assert list(getattr(ran, field)) == list(getattr(plain, field)), field
    at_once = execution.execute_guided(costs, guide)
    assert execution.compute_guided_makespan(costs, guide) == at_once.compute_makespan(
        costs.rank_tails
    )
    late_by_nothing = execution.execute_guided(costs, guide, lambda link, _: costs.delay[link])
    assert at_once == late_by_nothing, "whether or not arrivals are known ahead"
    assert schedule.count_in_flight_peaks() == tuple(map(count_in_flight_peak, schedule.stages))
    order = execution.decode_schedule(ran.op_codes, problem.microbatches)
    validate(order, schedule.count_in_flight_peaks(), within.list_device_limits())
    for found, wanted, peak, limit in zip(
        order.stages,
        schedule.stages,
        schedule.count_in_flight_peaks(),
        within.list_device_limits(),
        strict=True,
    ):
        assert set(found) == set(wanted), "the same backwards are fused"
        assert count_host_peak(found, limit) <= compute_host_limit(
            peak, limit, problem.microbatches
        )


@given(problem=offloading(half_duplex=True), most=st.floats(0.01, 30), draws=st.integers(1, 3))
@settings(max_examples=examples(30), deadline=None)
def test_jitter(problem: Problem, most: float, draws: int) -> None:
    """Compiled and in Python, to the bit."""
    planned = plan(problem, Policy.ZERO_BUBBLE)
    costs, guide = (
        Costs.from_problem(planned.problem),
        build_guide(planned.schedule, planned.problem),
    )
    found = execution.compute_jittered_makespans(costs, guide, most, draws)
    assert found == event_core.compute_jittered_makespans(costs, guide, most, draws)


@pytest.mark.parametrize(("limit", "suits"), [(None, True), (20, True), (16, False), (10, False)])
def test_where_it_costs_nothing_while_links_are_well(limit: int | None, suits: bool) -> None:
    """Tight limits: an op that is run before one that comes a moment later takes its room."""
    op = StageTimes(forward=10, backward_input=10.5, backward_weight=5.5, in_flight_limit=limit)
    direct = Link(delay=1, queues=1, outstanding=2)
    problem = Problem(microbatches=24, stages=(op,) * 8, links=(direct,) * 7)
    planned = plan(problem)
    assert is_guided_as_fast(planned.schedule, problem, planned.waits) is suits
    # A plan takes the same however fast its ops are.
    quick = op.model_copy(
        update={"forward": 0.01, "backward_input": 0.0105, "backward_weight": 0.0055}
    )
    links = (direct.model_copy(update={"delay": 0.001}),) * 7
    problem = Problem(microbatches=24, stages=(quick,) * 8, links=links)
    assert is_guided_as_fast(planned.schedule, problem, planned.waits) is suits


def test_a_late_message_holds_up_only_ops_that_need_it() -> None:
    """The plan expects no delay; one direct link has 40 ms."""
    op = StageTimes(forward=10, backward_input=10.5, backward_weight=5.5)
    direct = Link(delay=1, queues=1, outstanding=2)
    problem = Problem(microbatches=24, stages=(op,) * 8, links=(direct,) * 7)
    planned = plan(problem)
    slow = problem.with_delays([1, 1, 1, 41, 1, 1, 1])
    took = {
        mode: simulate(planned.schedule, slow, mode, waits=planned.waits).makespan
        for mode in Dispatch
    }
    assert took[Dispatch.GUIDED] < 0.9 * took[Dispatch.STATIC]
    period = predict_period(planned.schedule, slow, Dispatch.GUIDED, planned.waits)
    assert period <= took[Dispatch.GUIDED]


@given(problem=offloading(half_duplex=True), seed=st.integers(0, 2**32))
@settings(max_examples=examples(40), deadline=None)
def test_it_is_the_plan_while_no_message_is_late(problem: Problem, seed: int) -> None:
    """F and B take time: a message that is sent and used in one moment, through an op without
    length, may come after a rank has looked for it in that moment."""
    stages = tuple(
        stage.model_copy(
            update={
                name: getattr(stage, name) or 0.5
                for name in ("forward", "backward_input", "fused_backward")
                if getattr(stage, name) is not None
            }
        )
        for stage in problem.stages
    )
    problem = problem.model_copy(update={"stages": stages})
    planned = plan(problem, random.Random(seed).choice(POLICIES))
    static = simulate(planned.schedule, planned.problem)
    guided = simulate(planned.schedule, planned.problem, Dispatch.GUIDED)
    assert guided.stages == static.stages
    assert guided.execution.free_at == static.execution.free_at
