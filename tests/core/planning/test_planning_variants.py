"""Plans that offload activations or fuse backwards: exact times, and never too much memory."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from gate import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_reference import most_resident
from planning_strategies import offloading, random_order
from schedule_text import schedule_of

from pipemorph.errors import InputError
from pipemorph.planning import (
    Dispatch,
    Link,
    OpKind,
    Plan,
    Policy,
    Problem,
    Route,
    Schedule,
    ScheduleError,
    StageTimes,
    compute_lower_bound,
    plan,
    predict,
    simulate,
    validate,
)
from pipemorph.planning.offload import compute_device_room, compute_host_limit, count_host_peak
from pipemorph.planning.search.plan_variants import fit_on_device, has_variants, keep_on_device
from pipemorph.planning.simulation import execution
from pipemorph.planning.simulation.execution import INF, Costs
from pipemorph.planning.simulation.simulator import Simulation

TIGHT = Problem(
    microbatches=12,
    stages=(
        StageTimes(
            forward=10,
            backward_input=10,
            backward_weight=6,
            in_flight_limit=10,
            device_limit=4,
            offload_copy=1,
        ),
    )
    * 4,
    links=(Link(), Link(delay=60), Link()),
)
"""A slow link, and no room on the device for the slackness that takes."""


def stays_within(simulation: Simulation, problem: Problem) -> None:
    """Assert that a run keeps every limit, by what it ran."""
    for i, ops in enumerate(simulation.stages):
        limit = problem.stages[i].device_limit
        assert limit is None or most_resident(ops, limit) <= limit
    validate(simulation.schedule, problem.list_in_flight_limits(), problem.list_device_limits())


@given(problem=offloading(limits=False), seed=st.integers(0, 2**32))
@settings(max_examples=examples(100), deadline=None)
def test_any_order_fits_on_the_device_or_waits_for_ever(problem: Problem, seed: int) -> None:
    rng = random.Random(seed)
    n = min(4, problem.microbatches)
    problem = problem.model_copy(update={"microbatches": n})
    for _ in range(10):
        runs = []
        for stage in problem.stages:
            ops = random_order(rng, n, fused=rng.random() < 0.3)
            runs.append(
                ops if stage.device_limit is None else fit_on_device(ops, [stage.device_limit])
            )
        schedule = Schedule(n, tuple(runs))
        try:
            validate(schedule, None, problem.list_device_limits())
        except ScheduleError as error:
            assert "device" not in str(error)
            assert execution.compute_makespan(Costs.from_problem(problem), schedule.op_codes) == INF
            continue
        stays_within(simulate(schedule, problem), problem)


@given(problem=offloading(half_duplex=True), seed=st.integers(0, 2**32))
@settings(max_examples=examples(15), deadline=None)
def test_plans_keep_their_limits_under_any_delays(problem: Problem, seed: int) -> None:
    rng = random.Random(seed)
    planned = plan(problem)
    requested, planned_stages = problem.stages, planned.problem.stages
    for i, (before, after) in enumerate(zip(requested, planned_stages, strict=True)):
        assert after.device_limit in (before.device_limit, None)
        most = [before.in_flight_limit]
        if after.device_limit is None:
            most.append(before.device_limit)
        for limit in most:
            assert limit is None or (after.in_flight_limit or 0) in range(1, limit + 1)
        ops = planned.schedule.stages[i]
        cap = after.in_flight_limit
        assert count_host_peak(ops, after.device_limit) <= compute_host_limit(
            cap, after.device_limit, problem.microbatches
        )
    assert predict(planned.schedule, planned.problem) == planned.makespan
    assert planned.makespan >= compute_lower_bound(problem) * (1 - 1e-9)
    assert planned.makespan >= planned.lower_bound
    stays_within(planned.simulation, planned.problem)

    changed = planned.problem.with_delays([rng.choice([0, 3.5, 40]) for _ in problem.links])
    for mode in Dispatch:
        stays_within(simulate(planned.schedule, changed, mode), changed)
        jumping = simulate(
            planned.schedule, changed, mode,
            delay_at=lambda _link, _sent: rng.choice([0.0, 7.0, 30.0]),
        )  # fmt: skip
        stays_within(jumping, changed)


@given(problem=offloading(fused=False), seed=st.integers(0, 2**32))
@settings(max_examples=examples(30), deadline=None)
def test_offload_is_never_worse_than_none(problem: Problem, seed: int) -> None:
    assert plan(problem).makespan <= plan(keep_on_device(problem)).makespan


def test_a_slow_link_that_memory_has_no_room_for_is_what_offload_is_for() -> None:
    without, planned = plan(keep_on_device(TIGHT)), plan(TIGHT)
    assert planned.makespan < 0.8 * without.makespan
    made = planned.to_plan(1, [Route.DIRECT] * 3)
    # Caps are what the plan needs, not what there is room for.
    first = made.in_flight_limits[0]
    assert first is not None and planned.schedule.count_in_flight_peaks()[0] <= first < 10
    assert made.device_limits[0] == 4
    # The last stage needs no slackness, and so no offload.
    assert made.device_limits[-1] is None
    assert made.in_flight_limits[-1] == 4
    validate(made.schedule, made.in_flight_limits, made.device_limits)
    with pytest.raises(ScheduleError, match="in_flight_limit is 4"):
        validate(made.schedule, [4] * 4)


def test_offload_is_not_used_where_its_copies_cost_more_than_they_save() -> None:
    dear = TIGHT.model_copy(
        update={"stages": tuple(s.model_copy(update={"offload_copy": 500.0}) for s in TIGHT.stages)}
    )
    planned = plan(dear)
    assert planned.problem.list_device_limits() == (None,) * 4
    assert planned.makespan == plan(keep_on_device(dear)).makespan


def test_every_copy_is_in_the_makespan() -> None:
    """A stage with one microbatch more than fits: a copy out and a copy back."""
    stage = StageTimes(
        forward=10, backward_input=10, backward_weight=6, device_limit=2, offload_copy=3
    )
    problem = Problem(microbatches=2, stages=(stage,), links=())
    schedule = schedule_of(2, ["F0 F1 B0 W0 B1 W1"])
    ran = simulate(schedule, problem).stages[0]
    assert [op.end - op.start for op in ran] == [10, 13, 10, 6, 13, 6]
    assert predict(schedule, problem) == 58
    assert simulate(schedule, problem, Dispatch.GUIDED).makespan == 58


def test_backwards_are_fused_where_that_is_shorter_and_only_there() -> None:
    split = StageTimes(forward=10, backward_input=10, backward_weight=6)
    dear = StageTimes(forward=10, backward_input=14, backward_weight=8, fused_backward=17)
    problem = Problem(microbatches=16, stages=(split, split, dear, split), links=(Link(),) * 3)
    planned = plan(problem)
    forms = [{op.kind for op in ops} - {OpKind.F} for ops in planned.schedule.stages]
    apart = {OpKind.B, OpKind.W}
    assert [OpKind.BW in form for form in forms] == [False, False, True, False]
    assert forms[0] == forms[1] == forms[3] == apart
    longer = split.model_copy(update={"fused_backward": 17.0})
    assert not has_variants(problem.model_copy(update={"stages": (longer,) * 4}))


def test_splitting_stays_where_it_fills_bubbles() -> None:
    """A fused backward 2% shorter on a stage that waits most of the time is not worth it."""
    slow = StageTimes(forward=20, backward_input=20, backward_weight=12)
    quick = StageTimes(forward=5, backward_input=5, backward_weight=3, fused_backward=7.9)
    problem = Problem(microbatches=8, stages=(quick, quick, slow), links=(Link(), Link()))
    planned = plan(problem)
    assert (
        planned.makespan
        <= plan(
            problem.model_copy(
                update={
                    "stages": tuple(
                        s.model_copy(update={"fused_backward": None}) for s in problem.stages
                    )
                }
            )
        ).makespan
    )


@given(problem=offloading())
@settings(max_examples=examples(30), deadline=None)
def test_fused_is_never_worse_than_split_or_all_fused(problem: Problem) -> None:
    problem = keep_on_device(problem)
    planned = plan(problem)
    split = problem.model_copy(
        update={
            "stages": tuple(s.model_copy(update={"fused_backward": None}) for s in problem.stages)
        }
    )
    assert planned.makespan <= plan(split).makespan
    assert compute_lower_bound(problem) <= compute_lower_bound(split) * (1 + 1e-9)


@pytest.mark.parametrize("policy", [Policy.ONE_F_ONE_B, Policy.ZERO_BUBBLE])
def test_policies_made_by_hand_keep_a_device_limit(policy: Policy) -> None:
    planned = plan(TIGHT, policy)
    stays_within(planned.simulation, TIGHT)


def test_a_fixed_warmup_above_the_device_limit_needs_offload() -> None:
    fixed = TIGHT.with_warmup([8, 6, 3, 1])
    planned = plan(fixed)
    assert planned.schedule.count_warmup() == (8, 6, 3, 1)
    # Stage 2 has room; the search decides if it offloads too.
    limits = planned.problem.list_device_limits()
    assert (*limits[:2], limits[3]) == (4, 4, None)


def test_plans_run_as_each_other_whatever_their_versions_and_caps() -> None:
    schedule = schedule_of(2, ["F0 F1 B0 W0 B1 W1", "F0 BW0 F1 BW1"])
    first = Plan(0, Policy.PIPEMORPH, schedule, (Route.DIRECT,), (None, None))
    assert first.runs_same_as(replace(first, version=3, in_flight_limits=(2, 1)))
    assert not first.runs_same_as(replace(first, routes=(Route.DELEGATED,)))
    assert not first.runs_same_as(replace(first, device_limits=(1, None)))
    other = schedule_of(2, ["F0 B0 W0 F1 B1 W1", "F0 BW0 F1 BW1"])
    assert not first.runs_same_as(replace(first, schedule=other))
    assert (schedule.fused_stages, first.offloading_stages, first.delegated_links) == ((1,), (), ())
    moved = replace(first, routes=(Route.DELEGATED,), device_limits=(1, None))
    assert (moved.offloading_stages, moved.delegated_links) == ((0,), (0,))


# --- recomputation ------------------------------------------------------------------------

DROPS = TIGHT.model_copy(
    update={
        "stages": (
            StageTimes(
                forward=10,
                backward_input=10,
                backward_weight=6,
                in_flight_limit=4,
                recompute_limit=12,
            ),
        )
        * 4
    }
)
"""The same where activations may be computed again."""


def test_recomputation_pays_where_the_limit_binds() -> None:
    on_device = plan(keep_on_device(TIGHT))
    found = plan(DROPS)
    assert found.makespan < 0.95 * on_device.makespan
    again = [stage for stage in found.problem.stages if stage.recompute]
    assert again, "stages that recompute"
    for stage, peak in zip(
        found.problem.stages, found.schedule.count_in_flight_peaks(), strict=True
    ):
        if stage.recompute:
            assert stage.device_limit == compute_device_room(peak, 4, 12)
            assert stage.in_flight_limit == peak > 4
        else:
            assert (stage.device_limit, stage.in_flight_limit) == (None, 4)
    assert found.lower_bound <= found.makespan
    assert simulate(found.schedule, found.problem).makespan == pytest.approx(found.makespan)


def test_without_a_limit_that_binds_nothing_is_recomputed() -> None:
    wide = DROPS.model_copy(update={"links": (Link(), Link(), Link())})
    stages = tuple(
        stage.model_copy(update={"in_flight_limit": 10, "recompute_limit": 40})
        for stage in wide.stages
    )
    found = plan(wide.model_copy(update={"stages": stages}))
    assert not any(found.problem.list_recompute_flags())
    assert found.problem.list_device_limits() == (None,) * 4


def test_a_forward_that_runs_again_makes_its_backward_longer() -> None:
    stage = StageTimes(
        forward=3, backward_input=4, backward_weight=5, device_limit=2, recompute=True
    )
    schedule = schedule_of(3, ["F0 F1 F2 B0 W0 B1 W1 B2 W2"])
    problem = Problem(microbatches=3, stages=(stage,))
    ops = simulate(schedule, problem).stages[0]
    assert [op.end - op.start for op in ops] == [3, 3, 3, 4, 5, 7, 5, 7, 5]


@st.composite
def recomputing(draw: st.DrawFn) -> Problem:
    """Problem with a cap, some of whose stages may recompute."""
    problem = draw(offloading())
    stages = []
    for stage in problem.stages:
        cap = stage.in_flight_limit
        may = cap is not None and draw(st.booleans())
        most = (cap or 0) + draw(st.integers(0, 9)) if may else None
        stages.append(stage.model_copy(update={"recompute_limit": most}))
    return problem.model_copy(update={"stages": tuple(stages)})


@given(problem=recomputing())
@settings(max_examples=examples(40), deadline=None)
def test_plans_with_recomputation_fit_into_the_memory_of_the_limits(problem: Problem) -> None:
    found = plan(problem)
    assert found.objective >= found.lower_bound * (1 - 1e-9)
    peaks = found.schedule.count_in_flight_peaks()
    for requested, planned_stages, peak, ops in zip(
        problem.stages, found.problem.stages, peaks, found.schedule.stages, strict=True
    ):
        if not planned_stages.recompute or requested.recompute:
            continue
        limit = min(filter(None, (requested.in_flight_limit, requested.device_limit)))
        most = requested.recompute_limit
        assert most is not None
        assert planned_stages.device_limit is not None
        away = count_host_peak(ops, planned_stages.device_limit)
        # In units of activations: the inputs of `most` take the place of all but one.
        assert planned_stages.device_limit + away * (limit - 1) / most <= limit + 1e-9
        assert peak <= most


def test_a_plan_that_recomputes_is_read_back_for_its_problem() -> None:
    found = plan(DROPS)
    limits, again = found.problem.list_device_limits(), found.problem.list_recompute_flags()
    problem = DROPS.with_device_limits(limits, again)
    assert simulate(found.schedule, problem).makespan == pytest.approx(found.makespan)
    with pytest.raises(InputError, match=r"recomputes on stage 0, and stages\[0\].recompute_limit"):
        keep_on_device(TIGHT).with_device_limits((2,) * 4, (True,) * 4)
    with pytest.raises(InputError, match="recompute has 1 entry; 4 stages need 4"):
        DROPS.with_device_limits(limits, again[:1])
