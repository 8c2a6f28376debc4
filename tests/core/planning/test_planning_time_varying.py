"""Delays that change within an iteration."""

from __future__ import annotations

import pytest
from gate import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_strategies import problems
from schedule_text import schedule_of

from pipemorph.planning import Dispatch, Link, Policy, Problem, StageTimes, plan, simulate


@given(problem=problems(half_duplex=True), mode=st.sampled_from(list(Dispatch)))
@settings(max_examples=examples(120), deadline=None)
def test_delays_that_do_not_change(problem: Problem, mode: Dispatch) -> None:
    schedule = plan(problem, Policy.ZERO_BUBBLE).schedule
    delays = [link.delay for link in problem.links]
    changing = simulate(schedule, problem, mode, delay_at=lambda link, _: delays[link])
    assert changing == simulate(schedule, problem, mode)


@pytest.mark.parametrize("mode", list(Dispatch))
def test_a_message_takes_the_delay_of_the_moment_it_is_sent(mode: Dispatch) -> None:
    one = StageTimes(forward=1, backward_input=1, backward_weight=1)
    problem = Problem(microbatches=2, stages=(one, one), links=(Link(delay=0),))
    schedule = schedule_of(2, ["F0 F1 B0 W0 B1 W1", "F0 F1 B0 B1 W0 W1"])

    def delay_at(link: int, sent: float) -> float:
        assert link == 0
        return 10.0 if sent < 1.5 else 3.0

    ran = simulate(schedule, problem, mode, delay_at=delay_at)
    starts = [op.start for op in ran.stages[1] if op.kind == "F"]
    # F0 leaves at 1 and takes 10; F1 leaves at 2, takes 3, and waits for its turn.
    assert starts == [11.0, 12.0]
    gradient = next(op for op in ran.stages[0] if op.kind == "B")
    assert gradient.start == ran.stages[1][2].end + 3
