"""Causes of idle stages: every bubble has its cause, and the causes add up."""

from __future__ import annotations

import pytest
from gate import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_strategies import problems
from schedule_text import schedule_of

from pipemorph.planning import (
    Dispatch,
    Link,
    OpKind,
    Policy,
    Problem,
    StageTimes,
    plan,
    simulate,
)
from pipemorph.planning.analysis.bubbles import Bubble, IdleCause, explain_idle_time
from pipemorph.planning.simulation.simulator import trace_messages

TEN = StageTimes(forward=10, backward_input=10, backward_weight=10)
POLICIES = st.sampled_from([Policy.ONE_F_ONE_B, Policy.ZERO_BUBBLE, Policy.PIPEMORPH])


@given(problem=problems(half_duplex=True), policy=POLICIES, guided=st.booleans())
@settings(max_examples=examples(150), deadline=None)
def test_bubbles_are_all_idle_time_and_nothing_else(
    problem: Problem, policy: Policy, guided: bool
) -> None:
    schedule = plan(problem, policy).schedule
    simulation = simulate(schedule, problem, Dispatch.GUIDED if guided else Dispatch.STATIC)
    bubbles, _ = explain_idle_time(simulation, problem)
    for ops, idle in zip(simulation.stages, bubbles, strict=True):
        pieces = sorted(
            [(op.start, op.end) for op in ops if op.end > op.start]
            + [(bubble.start, bubble.end) for bubble in idle]
        )
        assert all(bubble.end > bubble.start for bubble in idle)
        at = 0.0
        for start, end in pieces:
            assert start == at
            at = end
        assert at == simulation.makespan


@given(problem=problems(half_duplex=True), policy=POLICIES, guided=st.booleans())
@settings(max_examples=examples(150), deadline=None)
def test_no_op_runs_before_its_message_is_here(
    problem: Problem, policy: Policy, guided: bool
) -> None:
    """The replay of the sends agrees with the execution: an op that waited began on arrival."""
    schedule = plan(problem, policy).schedule
    simulation = simulate(schedule, problem, Dispatch.GUIDED if guided else Dispatch.STATIC)
    delivery = trace_messages(simulation)
    assert len(delivery.messages) == 2 * (problem.stage_count - 1) * problem.microbatches
    started = {
        (i, op.kind is OpKind.F, op.microbatch): op.start
        for i, ops in enumerate(simulation.stages)
        for op in ops
        if op.kind is not OpKind.W
    }
    for link, forward, m, sent, arrived in delivery.messages:
        assert arrived >= sent + problem.links[link].delay
        assert started[link + forward, forward, m] >= arrived


def causes(schedule: list[str], problem: Problem) -> list[list[Bubble]]:
    return explain_idle_time(
        simulate(schedule_of(problem.microbatches, schedule), problem), problem
    ).bubbles


def test_fill_link_and_drain() -> None:
    problem = Problem(microbatches=1, stages=(TEN,) * 2, links=(Link(delay=5),))
    first, second = causes(["F0 B0 W0", "F0 B0 W0"], problem)
    # Until 35 stage 1 has not made the gradient, from then on it is on its way.
    assert first == [Bubble(10, 35, IdleCause.DEPENDENCY), Bubble(35, 40, IdleCause.LINK)]
    assert second == [Bubble(0, 15, IdleCause.FILL), Bubble(45, 60, IdleCause.DRAIN)]


def test_a_cap_that_forbids_a_forward() -> None:
    capped = TEN.model_copy(update={"in_flight_limit": 1})
    problem = Problem(microbatches=2, stages=(capped, TEN), links=(Link(),))
    first, _ = causes(["F0 B0 W0 F1 B1 W1", "F0 B0 W0 F1 B1 W1"], problem)
    assert first[0] == Bubble(10, 30, IdleCause.CAP)
    # No third microbatch: the rest is waiting for the other stage.
    assert first[1].cause is IdleCause.DEPENDENCY
    free = problem.model_copy(update={"stages": (TEN, TEN)})
    assert (
        causes(["F0 B0 W0 F1 B1 W1", "F0 B0 W0 F1 B1 W1"], free)[0][0].cause is IdleCause.DEPENDENCY
    )


def test_an_order_that_holds_back_ready_ops() -> None:
    problem = Problem(microbatches=2, stages=(TEN,) * 2, links=(Link(delay=5),))
    first, _ = causes(["F0 F1 B0 B1 W0 W1", "F0 F1 B0 B1 W0 W1"], problem)
    # B0 arrives at 50 and ends at 60; B1 arrives at 60: no wait, so W0 delayed no op.
    assert [bubble.cause for bubble in first] == [IdleCause.DEPENDENCY, IdleCause.LINK]
    slow = StageTimes(forward=10, backward_input=30, backward_weight=10)
    problem = problem.model_copy(update={"stages": (TEN, slow)})
    first, _ = causes(["F0 F1 B0 B1 W0 W1", "F0 F1 B0 B1 W0 W1"], problem)
    assert first[-1] == Bubble(80, 100, IdleCause.ORDER)


def test_a_send_that_holds_up_compute() -> None:
    link = Link(delay=50, queues=1, outstanding=1)
    problem = Problem(microbatches=2, stages=(TEN,) * 2, links=(link,))
    first, _ = causes(["F0 F1 B0 W0 B1 W1", "F0 F1 B0 W0 B1 W1"], problem)
    # F1 ends at 20; F0 is on its way until 60, and holds the stage up to there.
    assert first[0] == Bubble(20, 60, IdleCause.LINK)


def test_idle_time_per_cause_adds_up_to_the_bubble() -> None:
    problem = Problem(microbatches=12, stages=(TEN,) * 4, links=(Link(delay=20), Link(), Link()))
    simulation = plan(problem, Policy.ZERO_BUBBLE).simulation
    by_cause = explain_idle_time(simulation, problem).sum_by_cause()
    assert sum(map(sum, by_cause.values())) == pytest.approx(
        simulation.bubble_fraction * 4 * simulation.makespan
    )
    assert sum(by_cause[IdleCause.LINK]) > 0
