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
from pipemorph.planning.ir import in_flight_peak
from pipemorph.planning.offload import host_limit, host_peak
from pipemorph.planning.simulation import core
from pipemorph.planning.simulation.core import (
    Costs,
    DelayAt,
    Ran,
    as_fast_guided,
    guide_of,
    planned_waits,
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
    costs = Costs.of(within)
    waits = planned_waits(schedule, within)
    peaks = schedule.in_flight_peak()
    assert waits == event_core.waits(costs, schedule.codes, peaks)
    guide = guide_of(schedule, within, rng.choice((None, ())))
    delay_at = drawn(rng, rng.choice((1.0, 20.0, 400.0)))
    ran = core.guided(costs, guide, delay_at)
    plain = event_core.guided(costs, guide, delay_at, None)
    for field in Ran._fields:
        assert list(getattr(ran, field)) == list(getattr(plain, field)), field
    at_once = core.guided(costs, guide)
    assert core.guided_makespan(costs, guide) == at_once.makespan(costs.after)
    late_by_nothing = core.guided(costs, guide, lambda link, _: costs.delay[link])
    assert at_once == late_by_nothing, "whether or not arrivals are known ahead"
    assert schedule.in_flight_peak() == tuple(map(in_flight_peak, schedule.stages))
    order = core.decode(ran.codes, problem.microbatches)
    validate(order, schedule.in_flight_peak(), within.device_limits())
    for found, wanted, peak, limit in zip(
        order.stages,
        schedule.stages,
        schedule.in_flight_peak(),
        within.device_limits(),
        strict=True,
    ):
        assert set(found) == set(wanted), "the same backwards are fused"
        assert host_peak(found, limit) <= host_limit(peak, limit, problem.microbatches)


@given(problem=offloading(half_duplex=True), most=st.floats(0.01, 30), draws=st.integers(1, 3))
@settings(max_examples=examples(30), deadline=None)
def test_jitter(problem: Problem, most: float, draws: int) -> None:
    """Compiled and in Python, to the bit."""
    planned = plan(problem, Policy.ZERO_BUBBLE)
    costs, guide = Costs.of(planned.problem), guide_of(planned.schedule, planned.problem)
    found = core.jittered(costs, guide, most, draws)
    assert found == event_core.jittered(costs, guide, most, draws)


@pytest.mark.parametrize(("limit", "suits"), [(None, True), (20, True), (16, False), (10, False)])
def test_where_it_costs_nothing_while_links_are_well(limit: int | None, suits: bool) -> None:
    """Under tight limits an op that is run before one that comes a moment later takes its room."""
    op = StageTimes(forward=10, backward_input=10.5, backward_weight=5.5, in_flight_limit=limit)
    direct = Link(delay=1, queues=1, outstanding=2)
    problem = Problem(microbatches=24, stages=(op,) * 8, links=(direct,) * 7)
    planned = plan(problem)
    assert as_fast_guided(planned.schedule, problem, planned.waits) is suits
    # A plan takes the same however fast its ops are.
    quick = op.model_copy(
        update={"forward": 0.01, "backward_input": 0.0105, "backward_weight": 0.0055}
    )
    links = (direct.model_copy(update={"delay": 0.001}),) * 7
    problem = Problem(microbatches=24, stages=(quick,) * 8, links=links)
    assert as_fast_guided(planned.schedule, problem, planned.waits) is suits


def test_a_late_message_holds_up_only_what_needs_it() -> None:
    """With no delay planned for, 40 ms on one direct link."""
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
def test_it_is_the_plan_while_nothing_is_late(problem: Problem, seed: int) -> None:
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
    assert guided.ran.free == static.ran.free
