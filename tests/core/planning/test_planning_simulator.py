"""The simulator against an execution written another way, and the online list schedule."""

from __future__ import annotations

import random

import pytest
from gate import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_strategies import problems
from schedule_text import schedule_of

from pipemorph.errors import InputError
from pipemorph.planning import (
    Dispatch,
    Link,
    OpKind,
    Policy,
    Problem,
    ScheduleError,
    StageTimes,
    plan,
    predict,
    simulate,
    validate,
)
from pipemorph.planning.simulation.execution import (
    Costs,
    DispatchRules,
    decode_schedule,
    schedule_online,
)

TEN = StageTimes(forward=10, backward_input=10, backward_weight=10)


def test_the_third_send_blocks_compute_until_the_first_has_arrived() -> None:
    """F0, F1, F2 end at 1, 2, 3; F0 arrives at 11, so F3 starts at 11, not at 3."""
    stages = (
        StageTimes(forward=1, backward_input=0, backward_weight=0),
        StageTimes(forward=0, backward_input=0, backward_weight=0),
    )
    schedule = schedule_of(4, ["F0 F1 F2 F3 BW0 BW1 BW2 BW3", "F0 F1 F2 F3 BW0 BW1 BW2 BW3"])

    def forwards(link: Link) -> tuple[list[float], list[float]]:
        problem = Problem(microbatches=4, stages=stages, links=(link,))
        simulation = simulate(schedule, problem)
        return tuple(  # type: ignore[return-value]
            [op.start for op in ops if op.kind is OpKind.F] for ops in simulation.stages
        )

    assert forwards(Link(delay=10)) == ([0, 1, 2, 3], [11, 12, 13, 14])
    assert forwards(Link(delay=10, queues=1)) == ([0, 1, 2, 3], [11, 21, 31, 41])
    assert forwards(Link(delay=10, queues=1, outstanding=2)) == ([0, 1, 2, 11], [11, 21, 31, 41])
    assert forwards(Link(delay=10, queues=2)) == ([0, 1, 2, 3], [11, 12, 21, 22])


def test_figures_of_the_paper() -> None:
    """S=4, N=12: 390 at no delay; unchanged, 400 at 10 and 440 at 20 ms on link 0."""
    problem = Problem(microbatches=12, stages=(TEN,) * 4, links=(Link(),) * 3)
    planned = plan(problem.with_warmup([7, 5, 3, 1]), Policy.ZERO_BUBBLE)
    assert planned.schedule.count_warmup() == (7, 5, 3, 1)
    assert [
        simulate(planned.schedule, problem.with_delays([delay, 0, 0])).makespan
        for delay in (0, 10, 20)
    ] == [390, 400, 440]
    guided = simulate(
        planned.schedule, problem.with_delays([20, 0, 0]), Dispatch.GUIDED, waits=planned.waits
    )
    assert guided.makespan == 410


def test_bubble_fraction_is_idle_time_over_all_time() -> None:
    problem = Problem(microbatches=12, stages=(TEN,) * 4, links=(Link(),) * 3)
    simulation = plan(problem, Policy.ZERO_BUBBLE).simulation
    assert simulation.makespan == 390
    assert simulation.bubble_fraction == pytest.approx((390 - 360) / 390)
    nothing = StageTimes(forward=0, backward_input=0, backward_weight=0)
    still = Problem(microbatches=3, stages=(nothing,) * 2, links=(Link(),))
    assert plan(still).simulation.bubble_fraction == 0.0


@given(problem=problems(half_duplex=True), seed=st.integers(0, 2**32))
@settings(max_examples=examples(200), deadline=None)
def test_online_inside_the_condition_never_deadlocks(problem: Problem, seed: int) -> None:
    """Warm-up and caps at the edge of the condition, any delays, split and fused."""
    rng = random.Random(seed)
    caps = [k or problem.microbatches for k in problem.list_in_flight_limits()]
    warmup: list[int] = []
    for i in range(problem.stage_count):
        most = min(caps[: i + 1])
        warmup.append(rng.randint(1, min([most, *warmup[-1:]])))
    fused = [rng.random() < 0.3 for _ in problem.stages]
    rules = DispatchRules.from_problem(problem, warmup, fused=fused)
    costs = Costs.from_problem(problem)
    codes, makespan = schedule_online(costs, rules)
    schedule = decode_schedule(codes, problem.microbatches)
    validate(schedule, problem.list_in_flight_limits())
    reached = zip(schedule.count_warmup(), warmup, strict=True)
    assert all(x >= min(y, problem.microbatches) for x, y in reached)
    # The order it found, run as a plan, starts no op later: it never had to choose.
    if not any(costs.half_duplex):
        assert predict(schedule, problem) <= makespan


def test_online_outside_the_condition_can_deadlock() -> None:
    """Rising warm-up: stage 1 needs two forwards before stage 0 may send the second."""
    problem = Problem(microbatches=3, stages=(TEN,) * 2, links=(Link(),))
    with pytest.raises(InputError, match="waits forever"):
        schedule_online(
            Costs.from_problem(problem),
            DispatchRules(warmup=(1, 2), caps=(1, 3), fused=(False,) * 2),
        )
    with pytest.raises(ScheduleError):
        DispatchRules.from_problem(problem, [1, 2])


def test_a_plan_must_fit_the_problem() -> None:
    problem = Problem(microbatches=2, stages=(TEN,) * 2, links=(Link(),))
    schedule = plan(problem).schedule
    with pytest.raises(InputError, match="the plan has 2 stages, the problem 1"):
        simulate(schedule, Problem(microbatches=2, stages=(TEN,)))
    with pytest.raises(InputError, match="the plan has 2 microbatches, the problem 3"):
        simulate(schedule, problem.model_copy(update={"microbatches": 3}))
