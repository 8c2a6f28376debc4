"""Plans of every policy: valid, within their caps, not below the bound."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from gate import examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from planning_reference import optimum
from planning_strategies import problems

from pipemorph.errors import InputError
from pipemorph.planning import (
    Dispatch,
    Link,
    OpKind,
    Policy,
    Problem,
    Route,
    StageTimes,
    TimedOp,
    build_link,
    build_problem,
    compute_lower_bound,
    plan,
    predict,
    simulate,
    validate,
)
from pipemorph.planning.simulation.execution import (
    Costs,
    DispatchRules,
    choose_paper_warmup,
    compute_adapted_warmup,
    compute_initial_warmup,
    decode_schedule,
    schedule_online,
)

TEN = StageTimes(forward=10, backward_input=10, backward_weight=10)
LLM_14B = StageTimes(forward=10, backward_input=10.5, backward_weight=5.5)
POLICIES = (Policy.GPIPE, Policy.ONE_F_ONE_B, Policy.ZERO_BUBBLE, Policy.PIPEMORPH)


def uniform(
    times: StageTimes, stages: int, microbatches: int, delays: dict[int, float], limit: int | None
) -> Problem:
    return Problem(
        microbatches=microbatches,
        stages=(times.model_copy(update={"in_flight_limit": limit}),) * stages,
        links=tuple(Link(delay=delays.get(i, 0.0)) for i in range(stages - 1)),
    )


@given(problem=problems(half_duplex=True))
@settings(max_examples=examples(50), deadline=None)
def test_every_plan_is_valid_and_not_below_the_bound(problem: Problem) -> None:
    limits = problem.list_in_flight_limits()
    for policy in POLICIES:
        if policy is Policy.GPIPE and any(k and k < problem.microbatches for k in limits):
            with pytest.raises(InputError, match="in_flight_limit is"):
                plan(problem, policy)
            continue
        planned = plan(problem, policy)
        validate(planned.schedule, limits)
        assert planned.makespan >= compute_lower_bound(problem)
        assert planned.lower_bound >= compute_lower_bound(problem)
        peaks = planned.schedule.count_in_flight_peaks()
        assert all(k is None or peak <= k for peak, k in zip(peaks, limits, strict=True))
        again = plan(problem, policy)
        assert again.schedule == planned.schedule, "planning must not depend on anything else"


@given(problem=problems(half_duplex=True), seed=st.integers(0, 2**32))
@settings(max_examples=examples(100), deadline=None)
def test_every_plan_runs_to_the_end_under_any_delay(problem: Problem, seed: int) -> None:
    """Plans are run in both kinds of dispatch, within the caps at every moment."""
    rng = random.Random(seed)
    delays = [rng.choice((0.0, rng.uniform(0, 5), rng.uniform(50, 500))) for _ in problem.links]
    disturbed = problem.with_delays(delays)
    for policy in POLICIES:
        limits = problem.list_in_flight_limits()
        if policy is Policy.GPIPE and any(k and k < problem.microbatches for k in limits):
            continue
        schedule = plan(problem, policy).schedule
        ran = [simulate(schedule, disturbed), simulate(schedule, disturbed, Dispatch.GUIDED)]
        for simulation in ran:
            assert simulation.makespan >= compute_lower_bound(disturbed) - 1e-9
            for ops, limit in zip(simulation.stages, limits, strict=True):
                assert most_in_flight(ops) <= (limit or problem.microbatches)


def most_in_flight(ops: Sequence[TimedOp]) -> int:
    """F start to W end, counted by the clock."""
    begins = sorted(op.start for op in ops if op.kind is OpKind.F)
    ends = sorted(op.end for op in ops if op.kind in (OpKind.W, OpKind.BW))
    return max(
        sum(begin <= now for begin in begins) - sum(end <= now for end in ends)
        for now in (*begins, *ends)
    )


@given(problem=problems(half_duplex=True))
@settings(max_examples=examples(50), deadline=None)
def test_pipemorph_is_never_worse_than_the_papers_algorithm(problem: Problem) -> None:
    """The paper's order is run as a plan is if both directions of a link share a queue. Its own
    simulation holds a forward back whose message would delay a gradient."""
    codes, makespan = schedule_online(
        Costs.from_problem(problem),
        DispatchRules.from_problem(problem, choose_paper_warmup(problem)),
    )
    if any(link.half_duplex for link in problem.links):
        makespan = simulate(decode_schedule(codes, problem.microbatches), problem).makespan
    assert plan(problem, Policy.PIPEMORPH).makespan <= makespan * (1 + 1e-9)


@given(problem=problems(max_stages=3, max_microbatches=3, queues=False))
@settings(max_examples=examples(150), deadline=None)
def test_bound_is_not_above_the_optimum(problem: Problem) -> None:
    assume(problem.stage_count * problem.microbatches <= 6)
    best = optimum(problem)
    assert compute_lower_bound(problem) <= best <= plan(problem).makespan


def test_bound_on_three_stages_and_microbatches() -> None:
    stages = tuple(
        StageTimes(forward=f, backward_input=b, backward_weight=w, in_flight_limit=k)
        for f, b, w, k in ((3, 4, 2, 2), (5, 3, 3, None), (2, 6, 1, 2))
    )
    problem = Problem(microbatches=3, stages=stages, links=(Link(delay=7), Link(delay=2)))
    best = optimum(problem)
    assert compute_lower_bound(problem) <= best == plan(problem).makespan


@given(problem=problems(), data=st.data())
@settings(max_examples=examples(30), deadline=None)
def test_a_fixed_warmup_stays(problem: Problem, data: st.DataObject) -> None:
    warmup: list[int] = []
    most = problem.microbatches
    for limit in problem.list_in_flight_limits():
        most = data.draw(st.integers(1, min(most, limit or most)))
        warmup.append(most)
    fixed = problem.with_warmup(warmup)
    for policy in (Policy.ONE_F_ONE_B, Policy.ZERO_BUBBLE, Policy.PIPEMORPH):
        assert plan(fixed, policy).schedule.count_warmup() == tuple(warmup)


def test_contract_example() -> None:
    for limit in (None, 8):
        planned = plan(uniform(TEN, 4, 12, {0: 20}, limit))
        assert planned.makespan == planned.lower_bound == 410
        assert planned.schedule.count_warmup() == (8, 5, 3, 1)
        assert planned.schedule.compute_slackness() == (3, 2, 2)
        assert planned.simulation.bubble_fraction == pytest.approx(0.122, abs=5e-4)


def test_in_flight_limits_that_matter() -> None:
    """Less memory, longer iteration; a limit of 1 is one microbatch after the other."""
    spans = [plan(uniform(TEN, 4, 12, {0: 20}, limit)).makespan for limit in (1, 2, 4, 6, 8)]
    assert spans == sorted(spans, reverse=True)
    assert spans[-1] == 410
    # F down and B up the pipeline with the link twice, and stage 0's W before its next F.
    assert spans[0] == 12 * (4 * 20 + 40 + 10)


def test_14b_profile() -> None:
    """Base of the figures of docs/benchmarks.md: 60 ms on the last of seven links."""

    def iteration(policy: Policy, route: Route, delay: float, *, half: bool = False) -> float:
        links = [
            *[build_link(route, 0.0, half_duplex=half)] * 6,
            build_link(route, delay, half_duplex=half),
        ]
        problem = Problem(microbatches=24, stages=(LLM_14B,) * 8, links=tuple(links))
        return plan(problem, policy).makespan

    adapted = iteration(Policy.PIPEMORPH, Route.DELEGATED, 60)
    assert adapted <= 1.15 * iteration(Policy.PIPEMORPH, Route.DIRECT, 0)
    assert 3 * adapted <= iteration(Policy.ZERO_BUBBLE, Route.DIRECT, 60, half=True)
    assert 2 * adapted <= iteration(Policy.ZERO_BUBBLE, Route.DIRECT, 60)


def test_certified_on_the_profiles_people_run() -> None:
    for delay in (0.0, 30.0, 60.0):
        for limit in (None, 16):
            planned = plan(uniform(LLM_14B, 8, 32, {3: delay}, limit))
            assert planned.makespan <= planned.lower_bound * 1.01, (delay, limit)


def test_adapted_warmup_absorbs_each_delay() -> None:
    """Absorbed iff tF + tB + 2c ≤ Δ (tF' + tB'); two where nothing is to be absorbed."""
    assert compute_adapted_warmup(uniform(TEN, 4, 12, {}, None)) == (7, 5, 3, 1)
    assert compute_adapted_warmup(uniform(TEN, 4, 12, {0: 20}, None)) == (8, 5, 3, 1)
    assert compute_adapted_warmup(uniform(TEN, 4, 12, {2: 60}, None)) == (12, 10, 8, 1)
    assert compute_adapted_warmup(uniform(TEN, 4, 12, {2: 60}, 6)) == (6, 6, 6, 1)
    assert compute_adapted_warmup(uniform(TEN, 4, 12, {2: 1e9}, None)) == (12, 12, 12, 1)
    idle = StageTimes(forward=0, backward_input=0, backward_weight=0)
    assert compute_adapted_warmup(uniform(idle, 2, 3, {}, None))[1] == 1


def test_initial_warmup_spreads_slackness() -> None:
    assert compute_initial_warmup(uniform(TEN, 4, 12, {}, 8)) == (8, 6, 4, 1)
    assert compute_initial_warmup(uniform(TEN, 4, 12, {}, 2)) == (2, 2, 2, 1)
    assert compute_initial_warmup(uniform(TEN, 1, 12, {}, 2)) == (1,)


def test_initial_plan_spends_the_memory_it_is_given() -> None:
    """Known memory and no slow link yet: slackness for whichever link will be."""
    planned = plan(uniform(TEN, 4, 16, {}, 12))
    assert planned.makespan == planned.lower_bound
    assert planned.schedule.count_warmup() == (12, 9, 5, 1)


def test_gpipe_refuses_a_warmup_that_is_not_its_own() -> None:
    with pytest.raises(InputError, match="gpipe runs all 3 F first"):
        plan(uniform(TEN, 2, 3, {}, None).with_warmup([2, 1]), Policy.GPIPE)


def test_a_problem_takes_any_unit_and_carries_over_to_a_plan() -> None:
    """Seconds in, seconds out; the same order as for milliseconds."""
    seconds = StageTimes(forward=0.010, backward_input=0.010, backward_weight=0.010)
    routes = (Route.DELEGATED, Route.DIRECT, Route.DIRECT)
    planned = plan(build_problem(12, [seconds] * 4, [0.02, 0, 0], routes))
    assert planned.makespan == pytest.approx(0.410)
    directive = planned.to_plan(7, routes)
    assert directive.version == 7
    assert directive.schedule is planned.schedule
    assert directive.dispatch is Dispatch.STATIC
    assert directive.in_flight_limits == (None,) * 4


@pytest.mark.parametrize("times", [TEN, LLM_14B])
@pytest.mark.parametrize("delay", [0.0, 30.0])
def test_plans_stand_messages_that_are_a_little_late(times: StageTimes, delay: float) -> None:
    """Holding fewer microbatches must not make a plan brittle."""
    problem = uniform(times, 8, 32, {6: delay}, None)
    late = problem.with_delays([link.delay + 4.0 for link in problem.links])
    codes, _ = schedule_online(
        Costs.from_problem(problem),
        DispatchRules.from_problem(problem, choose_paper_warmup(problem)),
    )
    fattest = decode_schedule(codes, 32)
    leaner = plan(problem).schedule
    assert sum(leaner.count_in_flight_peaks()) <= sum(fattest.count_in_flight_peaks())
    assert predict(leaner, late) <= 1.02 * predict(fattest, late)
