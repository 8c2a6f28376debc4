"""The choice among plans that take equally long, and under delays that vary."""

from __future__ import annotations

from dataclasses import replace
from statistics import mean
from typing import Any

import pytest
from plant_support import spec

from pipemorph.control.decide import forecast as module
from pipemorph.control.decide.forecast import EQUAL_WITHIN, Forecast, PlanOption, find_plan_error
from pipemorph.control.decide.plan_choice import DecisionRequest, decide
from pipemorph.control.decide.prediction_check import SituationEvidence
from pipemorph.control.decide.situation import Situation
from pipemorph.control.decide.varying_delays import MOST_CELLS, MOST_DRAWS, VaryingDelays
from pipemorph.control.first_plan import initial_plan, select_planning_fields
from pipemorph.control.job_state.stages import compute_room
from pipemorph.planning import (
    Dispatch,
    Plan,
    PlannedSchedule,
    Policy,
    Problem,
    Route,
    Simulation,
    StageTimes,
    build_link,
    build_problem,
    plan,
    simulate,
)
from pipemorph.planning.simulation.simulator import compute_next_starts
from pipemorph.protocol import PlanMessage

STAGES, SLOW, LIMIT = 8, 6, 16
DIRECT = (Route.DIRECT,) * (STAGES - 1)
DELEGATED = tuple(Route.DELEGATED if link == SLOW else Route.DIRECT for link in range(STAGES - 1))


def dispatches(routes: tuple[Route, ...], **fields: Any) -> list[Dispatch]:
    return [option.plan.dispatch for option in new_plans(routes, **fields)]


def new_plans(
    routes: tuple[Route, ...],
    *,
    dispatch: str = "auto",
    delay: float = 0.03,
    limit: int = 10,
    fused: float | None = None,
    **fields: Any,
) -> list[PlanOption]:
    """Plans for a slow link. ``fused``: seconds of a backward that is not split."""
    delays = tuple(delay * (link == SLOW) for link in range(STAGES - 1))
    op = StageTimes(
        forward=0.01,
        backward_input=0.01,
        backward_weight=0.01,
        in_flight_limit=limit,
        fused_backward=fused,
    )
    job = spec(
        microbatches=24,
        stages=STAGES,
        schedule={"dispatch": dispatch, "inFlightLimit": limit},
        **fields,
    )
    situation = Situation(
        (op,) * STAGES,
        delays,
        delays,
        tuple(map(bool, delays)),
        (False,) * (STAGES - 1),
        rooms=tuple(compute_room(job, stage, None, None) for stage in range(STAGES)),
    )
    return Forecast(job, situation).make_options(routes)


def test_ranks_with_several_stages_are_planned_with_work_after_their_last_op() -> None:
    """A rank reduces the gradients of all its stages at once."""
    op = StageTimes(forward=0.01, backward_input=0.01, backward_weight=0.01, reduction=0.02)
    delays = (0.0, 0.03, 0.0)
    job = spec(
        stages=4,
        microbatches=8,
        parallelism={
            "stages": 4,
            "stagesPerRank": 2,
            "stagePlacement": "interleaved",
            "replicas": 2,
        },
        schedule={"dispatch": "static"},
    )
    situation = Situation((op,) * 4, delays, delays, (False, True, False), (False,) * 3)
    routes = (Route.DIRECT, Route.DELEGATED, Route.DIRECT)
    (option,) = Forecast(job, situation).make_options(routes)
    without = replace(situation, stages=(op.model_copy(update={"reduction": None}),) * 4)
    ops = Forecast(job, without).predict_option(option.plan).seconds
    assert 0.06 * 8 < ops < option.seconds <= ops + 0.02


def of_ranks(
    limit: int | None = None, *, placement: str = "interleaved", tensor: int = 1, **fields: Any
) -> Forecast:
    """Problem of two ranks with two stages each; link 0 is slow."""
    delays = (0.06, 0.0, 0.0)
    op = StageTimes(
        forward=0.01, backward_input=0.0105, backward_weight=0.0055, in_flight_limit=limit
    )
    job = spec(
        stages=4,
        microbatches=24,
        parallelism={
            "stages": 4, "stagesPerRank": 2, "stagePlacement": placement, "tensor": tensor,
        },
        schedule={"dispatch": "auto", **({"inFlightLimit": limit} if limit else {})},
    )  # fmt: skip
    situation = Situation(
        (op,) * 4, delays, delays, (True, False, False), (False,) * 3,
        rooms=tuple(compute_room(job, stage, None, None) for stage in range(4)),
    )  # fmt: skip
    return Forecast(job, replace(situation, **fields))


BY_ENGINE = (Route.DELEGATED, Route.DIRECT, Route.DIRECT)


def test_of_delays_that_vary_ranks_with_several_stages_take_the_mean() -> None:
    runs = ((0.12,) * 4 + (0.0,) * 4) * 5
    forecast = of_ranks(recent=(runs, (), ()))
    found = forecast.make_options(BY_ENGINE)
    assert {option.plan.dispatch for option in found} == set(Dispatch)
    steady = of_ranks()
    for option in found:
        steps = []
        for start in range(0, len(runs), len(runs) // MOST_DRAWS):

            def delay_at(link: int, sent: float, start: int = start) -> float:
                return 0.0 if link else runs[(start + int(sent / 0.05)) % len(runs)]

            made = option.plan
            problem = forecast.get_problem(made.routes).with_plan_limits(made)
            ran = simulate(
                made.schedule, problem, made.dispatch, waits=made.waits, delay_at=delay_at
            )
            steps.append(ran.makespan)
        assert option.seconds == pytest.approx(mean(steps), rel=1e-9)
    static = [each for each in found if each.plan.dispatch is Dispatch.STATIC]
    best = forecast.choose_best(found)
    assert best.plan.dispatch is Dispatch.GUIDED
    assert best.seconds < 0.98 * forecast.choose_best(static).seconds
    # The mean of the delays alone would make them equal.
    assert (
        steady.predict_option(static[0].plan).seconds
        < 1.01 * steady.predict_option(best.plan).seconds
    )


@pytest.mark.parametrize("how", ["offload", "recompute"])
def test_ranks_with_several_stages_are_planned_without_a_barrier_and_with_less_on_the_device(
    how: str,
) -> None:
    limits: dict[str, Any] = {"in_flight_limit": 8, "device_limit": 2, "offload_copy": 0.001}
    if how == "recompute":
        limits = {"in_flight_limit": 2, "recompute_limit": 8}
    op = StageTimes(forward=0.01, backward_input=0.01, backward_weight=0.01, **limits)
    delays = (0.0, 0.0, 0.08)
    job = spec(
        stages=4,
        microbatches=8,
        parallelism={"stages": 4, "stagesPerRank": 2},
        schedule={"objective": "period", "recompute": "auto" if how == "recompute" else "never"},
    )
    routes = (Route.DIRECT, Route.DIRECT, Route.DELEGATED)
    found = {}
    for barrier in (True, False):
        situation = Situation(
            (op,) * 4, delays, delays, (False, False, True), (False,) * 3, barrier=barrier
        )
        option = min(Forecast(job, situation).make_options(routes), key=lambda each: each.seconds)
        assert option.plan.offloading_stages if how == "offload" else option.plan.recomputing_stages
        problem = Forecast(job, situation).get_problem(routes).with_plan_limits(option.plan)
        ran = simulate(option.plan.schedule, problem)
        if barrier:
            assert option.seconds == ran.makespan
        else:
            assert option.seconds <= ran.period
        assert find_plan_error(option.plan) is None
        found[barrier] = option.seconds
        assert problem.objective == ("makespan" if barrier else "period")
    assert found[False] <= found[True]


@pytest.mark.parametrize(("delay", "route"), [(0.012, Route.DIRECT), (0.020, Route.DELEGATED)])
def test_of_equal_plans_one_that_stands_a_longer_delay_is_chosen(
    delay: float, route: Route
) -> None:
    """A direct route has room for exactly the delay that was measured, which may be too short."""
    slow = tuple(link == SLOW for link in range(STAGES - 1))
    delays = tuple(delay * each for each in slow)
    op = StageTimes(forward=0.01, backward_input=0.01, backward_weight=0.01, in_flight_limit=LIMIT)
    forecast = Forecast(
        spec(
            stages=STAGES,
            microbatches=24,
            schedule={"inFlightLimit": LIMIT, "dispatch": "static"},
        ),
        Situation(
            (op,) * STAGES, tuple(0.002 + each for each in delays), delays, slow,
            (False,) * (STAGES - 1),
        ),
    )  # fmt: skip
    routes = tuple(Route.DELEGATED if each else Route.DIRECT for each in slow)
    (direct,), (delegated,) = (
        forecast.make_options((Route.DIRECT,) * 7),
        forecast.make_options(routes),
    )
    assert direct.seconds == pytest.approx(delegated.seconds, rel=EQUAL_WITHIN)
    chosen = forecast.choose_best([direct, delegated])
    assert chosen.plan.routes[SLOW] is route
    assert forecast.is_as_fast(direct, delegated) is (route is Route.DIRECT)


RUNS = ((0.06,) * 4 + (0.0,) * 6) * 4
"""Windows of congestion in runs of 0.2 s, with pauses."""
MEAN = sum(RUNS) / len(RUNS)


def congested(
    recent: tuple[float, ...] = RUNS, *, dispatch: str = "auto", objective: str = "makespan"
) -> Forecast:
    """Forecast of a job whose last but one link is congested."""
    delays = tuple(MEAN * (link == SLOW) for link in range(STAGES - 1))
    op = StageTimes(forward=0.01, backward_input=0.0105, backward_weight=0.0055)
    job = spec(
        stages=STAGES, microbatches=24, schedule={"dispatch": dispatch, "objective": objective}
    )
    # Work after the last op makes its stage begin the next iteration later, without a barrier.
    last = op.model_copy(update={"reduction": 0.2})
    situation = Situation(
        (*(op,) * (STAGES - 1), op if objective == "makespan" else last),
        tuple(0.001 + delay for delay in delays),
        delays,
        tuple(map(bool, delays)),
        (False,) * (STAGES - 1),
        barrier=objective == "makespan",
        recent=tuple(recent if link == SLOW else () for link in range(STAGES - 1)),
    )
    return Forecast(job, situation)


STARTS = range(0, len(RUNS), len(RUNS) // MOST_DRAWS)


def replayed(
    forecast: Forecast, option: PlanOption, start: int, before: list[float] | None = None
) -> Simulation:
    """An iteration of a plan that begins in a window of the congestion."""

    def delay_at(link: int, sent: float) -> float:
        return 0.001 + (RUNS[(start + int(sent / 0.05)) % len(RUNS)] if link == SLOW else 0.0)

    links = [build_link(route, 0.001) for route in option.plan.routes]
    problem = forecast.get_problem(option.plan.routes).model_copy(update={"links": tuple(links)})
    made = option.plan
    return simulate(
        made.schedule, problem, made.dispatch, delay_at=delay_at, before=before, waits=made.waits
    )


def test_a_plan_takes_the_mean_of_iterations_under_the_delays_that_were() -> None:
    forecast = congested()
    for option in forecast.make_options(DELEGATED):
        expected = mean(replayed(forecast, option, start).makespan for start in STARTS)
        assert option.seconds == pytest.approx(expected, rel=1e-9)


def test_under_delays_that_vary_the_plan_for_their_mean_is_not_the_best() -> None:
    steady, varying = congested((), dispatch="static"), congested(dispatch="static")
    (for_mean,) = steady.make_options(DELEGATED)
    best = varying.choose_best(varying.make_options(DELEGATED))
    took = [
        mean(replayed(varying, option, start).makespan for start in range(len(RUNS)))
        for option in (for_mean, best)
    ]
    assert took[1] < 0.98 * took[0]
    assert for_mean.seconds < 0.98 * varying.predict_option(for_mean.plan).seconds, (
        "it promised too much"
    )
    auto = congested()
    assert auto.choose_best(auto.make_options(DELEGATED)).seconds <= best.seconds


def test_of_a_narrow_link_that_varies_the_rate_does() -> None:
    """Messages are sent one at a time, some of them longer: a delay would hold up none."""
    delayed = congested(dispatch="static")
    situation = replace(
        delayed._situation, transfers=tuple(MEAN * (link == SLOW) for link in range(STAGES - 1))
    )
    narrow = delayed.for_situation(situation)
    for option in narrow.make_options(DELEGATED):
        expected = []
        for start in STARTS:

            def transfer_at(link: int, sent: float, start: int = start) -> float:
                return RUNS[(start + int(sent / 0.05)) % len(RUNS)] if link == SLOW else 0.0

            problem = narrow.get_problem(option.plan.routes)
            ran = simulate(
                option.plan.schedule, problem, delay_at=lambda *_: 0.001, transfer_at=transfer_at
            )
            expected.append(ran.makespan)
        assert option.seconds == pytest.approx(mean(expected), rel=1e-9)
        assert option.seconds > 1.05 * delayed.predict_option(option.plan).seconds


def test_delays_that_are_all_equal_are_one_delay() -> None:
    (steady,), equal = (
        congested((), dispatch="static").make_options(DELEGATED),
        congested((MEAN,) * 40),
    )
    assert equal.predict_option(steady.plan).seconds == pytest.approx(steady.seconds, rel=1e-9)


def test_without_a_barrier_iterations_under_varying_delays_follow_each_other() -> None:
    forecast = congested(dispatch="static", objective="period")
    for option in forecast.make_options(DELEGATED):
        before, steps = None, []
        for start in STARTS:
            ran = replayed(forecast, option, start, before)
            took, before = compute_next_starts(ran.execution.free_at, ran.rank_tails)
            steps.append(took)
        assert option.seconds == pytest.approx(mean(steps), rel=1e-9)


def test_delays_of_links_at_one_time_stay_together() -> None:
    """Holds also if one has been slow for longer: the newest windows are the last of both."""
    recent = ((0.0, 0.0, 0.05, 0.0, 0.0, 0.06, 0.0, 0.0), (0.0, 0.0, 0.01, 0.0, 0.0))
    op = StageTimes(forward=0.01, backward_input=0.01, backward_weight=0.01)
    varying = VaryingDelays.from_recent(recent, (0.0, 0.0), (op,) * 3, cells=3)
    for delay_at, transfer_at in varying._draw_delays(build_problem(1, (op,) * 3, (0.0, 0.0))):
        assert transfer_at is None
        windows = [0.05 * (k + 0.5) for k in range(len(recent[0]))]
        both = {delay_at(0, at): delay_at(1, at) for at in windows if delay_at(0, at)}
        assert both == {0.05: 0.0, 0.06: 0.01}


def test_a_large_job_is_planned_for_the_mean() -> None:
    """Simulating each plan under several draws would take too long."""
    op = StageTimes(forward=0.01, backward_input=0.01, backward_weight=0.01)
    above, means = ((0.01, 0.02),), (0.015,)
    assert VaryingDelays.from_recent(above, means, (op,) * 2, cells=MOST_CELLS) is not None
    found = VaryingDelays.from_recent(above, means, (op,) * 2, cells=2 * MOST_CELLS)
    assert found.draw_count == MOST_DRAWS // 2
    assert VaryingDelays.from_recent(above, means, (op,) * 2, cells=4 * MOST_CELLS) is None
    assert VaryingDelays.from_recent(((),), means, (op,) * 2, cells=1) is None


def test_the_controller_searches_longer_than_plan_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """A longer search is not made where it cannot pay: the usual plan is near the bound, or the
    problem is so large that it would take long."""
    efforts = []

    def recorded(problem: Problem, policy: Policy, **fields: Any) -> PlannedSchedule:
        efforts.append(fields.get("effort", 1))
        return plan(problem, policy, **fields)

    def searched() -> list[int]:
        efforts.clear()
        forecast = congested((), dispatch="static")
        (usual,) = forecast.make_options(DIRECT)
        forecast.search_longer(usual)
        return efforts

    monkeypatch.setattr(module, "plan", recorded)
    assert searched() == [1], "near the bound"
    monkeypatch.setattr(module, "NEAR_BOUND", -1.0)
    assert searched() == [1, module.SEARCH_EFFORT]
    monkeypatch.setattr(module, "NEAR_BOUND", 0.0)
    assert searched() == [1, module.SEARCH_EFFORT]
    monkeypatch.setattr(module, "compute_tight_lower_bound", lambda _, seconds, effort: seconds)
    assert searched() == [1], "a proof says that nothing is shorter"
    monkeypatch.setattr(module, "NEAR_BOUND", -1.0)
    monkeypatch.setattr(module, "THOROUGH_CELLS", STAGES * 24 - 1)
    assert searched() == [1]


def test_no_plan_is_made_for_routes_on_which_all_take_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "plan", None)
    assert congested((), dispatch="static").make_options(DIRECT, within=0.5) == []


def slow(delay: float, limit: int | None, dispatch: str = "static") -> DecisionRequest:
    """Request for a decision on a link that has become slow."""
    delays = tuple(delay * (link == SLOW) for link in range(STAGES - 1))
    op = StageTimes(
        forward=0.01, backward_input=0.0105, backward_weight=0.0055, in_flight_limit=limit
    )
    fields = {"dispatch": dispatch} | ({"inFlightLimit": limit} if limit else {})
    job = spec(microbatches=24, stages=STAGES, schedule=fields)
    first = initial_plan(job)
    return DecisionRequest(
        spec=select_planning_fields(job),
        cause="slow",
        situation=Situation(
            (op,) * STAGES, delays, delays, tuple(map(bool, delays)), (False,) * (STAGES - 1)
        ),
        current_plan=first,
        running_plan=first,
        baseline_plan=first,
        plan_unknown=False,
        iterations_remaining=1000,
        change_seconds=None,
        evidence=SituationEvidence(),
    )


@pytest.mark.parametrize("limit", [None, 10, 16])
@pytest.mark.parametrize("delay", [0.012, 0.02, 0.06])
def test_plans_that_are_not_searched_for_would_not_have_been_chosen(
    delay: float, limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = slow(delay, limit)
    chosen = decide(request).chosen
    monkeypatch.setattr(module, "compute_lower_bound", lambda _: 0.0)
    of_all = decide(request).chosen
    assert chosen is not None and of_all is not None
    assert chosen.plan.routes == of_all.plan.routes
    assert chosen.seconds <= of_all.seconds * (1 + EQUAL_WITHIN)


@pytest.mark.parametrize(
    ("schedule", "parallelism", "expected"),
    [
        ({}, {}, Dispatch.GUIDED),
        ({"inFlightLimit": 10}, {}, Dispatch.STATIC),
        ({"policy": "zero-bubble"}, {}, Dispatch.STATIC),
        ({"dispatch": "static"}, {}, Dispatch.STATIC),
        ({"dispatch": "guided", "inFlightLimit": 10}, {}, Dispatch.GUIDED),
        ({}, {"tensor": 2}, Dispatch.STATIC),
        ({}, {"stagesPerRank": 2}, Dispatch.GUIDED),
        ({}, {"stagesPerRank": 2, "stagePlacement": "v"}, Dispatch.GUIDED),
        ({"inFlightLimit": 6}, {"stagesPerRank": 2}, Dispatch.STATIC),
        ({"policy": "1f1b-interleaved"}, {"stagesPerRank": 2}, Dispatch.STATIC),
        ({}, {"stagesPerRank": 2, "tensor": 2}, Dispatch.STATIC),
    ],
)
def test_a_job_begins_guided_where_that_takes_no_longer(
    schedule: dict[str, Any], parallelism: dict[str, Any], expected: Dispatch
) -> None:
    job = spec(
        microbatches=24,
        stages=STAGES,
        schedule={"dispatch": "auto"} | schedule,
        parallelism={"stages": STAGES} | parallelism,
    )
    first = initial_plan(job)
    assert first.dispatch is expected
    assert PlanMessage.from_plan(first).to_plan() == first
    assert module.find_plan_error(first) is None
    assert initial_plan(job) == first


def test_the_plans_of_a_guided_job_are_guided() -> None:
    request = slow(0.06, None, "auto")
    chosen = decide(request).chosen
    assert chosen is not None and chosen.plan.dispatch is Dispatch.GUIDED
    assert chosen.plan.routes == DELEGATED
    assert module.find_plan_error(chosen.plan) is None
    # Without later messages than planned it is the plan: so it is predicted to take as long.
    static = decide(slow(0.06, None, "static")).chosen
    assert static is not None and chosen.seconds == pytest.approx(static.seconds)
    # Late messages hold up less than in the plan's own order.
    held = decide(slow(0.06, None, "static")).current
    current = decide(request).current
    assert held is not None and current is not None and current.seconds < 0.95 * held.seconds


def test_a_guided_job_whose_memory_turns_out_to_be_tight_keeps_the_order() -> None:
    request = slow(0.06, None, "auto")
    tight = tuple(
        each.model_copy(update={"in_flight_limit": 10}) for each in request.situation.stages
    )
    situation = replace(request.situation, stages=tight)
    forecast = Forecast(request.spec, situation, Dispatch.GUIDED)
    found = [option.plan.dispatch for option in forecast.make_options(DELEGATED)]
    assert found == [Dispatch.STATIC]


def test_where_delays_vary_guided_dispatch_is_a_choice_under_any_limit() -> None:
    found = {option.plan.dispatch for option in congested().make_options(DELEGATED)}
    assert found == set(Dispatch)


def test_the_plan_of_a_longer_search_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans so near to each other count as equal otherwise."""

    def found(_: Forecast, best: PlanOption) -> list[PlanOption]:
        return [PlanOption(replace(best.plan, version=99), best.seconds * (1 - EQUAL_WITHIN / 2))]

    monkeypatch.setattr(Forecast, "search_longer", found)
    chosen = decide(slow(0.06, 16)).chosen
    assert chosen is not None and chosen.plan.version == 99


def test_a_decision_predicts_each_plan_once_per_situation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prediction walks over all ops, and many steps request the same one."""
    evaluated: list[tuple[Situation, Plan]] = []
    of, predicted = Forecast.predict_option, Forecast._predict_seconds
    wanted = 0

    def counted(self: Forecast, plan: Plan) -> PlanOption:
        nonlocal wanted
        wanted += 1
        return of(self, plan)

    def recorded(self: Forecast, plan: Plan) -> float:
        evaluated.append((self._situation, replace(plan, version=0)))
        return predicted(self, plan)

    monkeypatch.setattr(Forecast, "predict_option", counted)
    monkeypatch.setattr(Forecast, "_predict_seconds", recorded)
    assert decide(slow(0.06, None, "auto")).chosen is not None
    assert len(set(evaluated)) == len(evaluated) < wanted
