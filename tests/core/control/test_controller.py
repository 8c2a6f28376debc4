"""The loop closed in simulation: links go slow, plans change, iterations get short again."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from observing import report, trained
from plant_support import BASE, OP, Plant, settle, spec

from pipemorph.control import Health, JobController, decision, initial_plan
from pipemorph.control.decide.situation import Situation, find_link_change
from pipemorph.control.decision import FLAP_HOLDS, HOLD_ITERATIONS
from pipemorph.control.first_plan import build_initial_problem
from pipemorph.control.job_state.reports import ReplayedReport, ReportMismatch, WrongAttempt
from pipemorph.errors import InputError
from pipemorph.planning import Dispatch, Route, StageTimes, build_problem, plan
from pipemorph.protocol import LinkState, PlanMessage, StageProfile
from pipemorph.spec.job_spec import JobSpec


def test_version_0_is_the_same_everywhere_and_needs_nothing_measured() -> None:
    first, second = initial_plan(spec()), initial_plan(spec())
    assert first == second
    assert first.version == 0
    assert set(first.routes) == {Route.DIRECT}
    fixed = spec(transport={"route": "delegated"}, schedule={"warmup": [7, 5, 3, 1]})
    assert set(initial_plan(fixed).routes) == {Route.DELEGATED}
    assert initial_plan(fixed).warmup == (7, 5, 3, 1)
    bare = JobSpec.model_validate(
        {
            "parallelism": {"stages": 3},
            "schedule": {"microbatches": 4, "policy": "1f1b"},
            "trainer": {"module": "x", "iterations": 1},
        }
    )
    assert initial_plan(bare).warmup == (3, 2, 1)
    single = spec(stages=1, schedule={"stageTimes": [OP]})
    assert initial_plan(single).routes == ()


def test_an_undisturbed_job_keeps_its_plan() -> None:
    plant = Plant(spec())
    plant.run(60)
    assert plant.controller.records == []
    assert plant.controller.plan_version == 0
    assert plant.health() == [Health.HEALTHY] * 3


def test_guided_dispatch_takes_less_until_the_plan_changes() -> None:
    """The iteration in which a link becomes slow is shorter, and the next ones are as short."""
    took = {}
    for dispatch in ("static", "auto"):
        plant = Plant(spec(8, 24, schedule={"dispatch": dispatch}))
        plant.run(6)
        plant.delays[6] = 0.060
        plant.run(12)
        assert plant.only().applied_at_iteration == 7
        plant.delays[6] = 0.0
        plant.run(40)
        took[dispatch] = plant.seconds
        assert plant.plan.routes == (Route.DIRECT,) * 7
        assert plant.plan.dispatch is (Dispatch.STATIC if dispatch == "static" else Dispatch.GUIDED)
    assert took["auto"][5] == took["static"][5]
    assert took["auto"][6] < 0.95 * took["static"][6]
    assert took["auto"][7] <= took["static"][7] * 1.01
    assert took["auto"][-1] == pytest.approx(took["static"][-1])


@pytest.mark.parametrize(("stages", "link"), [(4, 0), (4, 2), (8, 6)])
def test_a_slow_link_is_planned_around_in_the_next_iteration_and_back(
    stages: int, link: int
) -> None:
    job = spec(stages, 24)
    plant = Plant(job)
    plant.run(6)
    undisturbed = plant.seconds[-1]
    lean = [plant.profile(i, op).peak_memory for i, op in enumerate(plant.ops)]
    plant.delays[link] = 0.060
    plant.run(12)
    disturbed = plant.seconds[6]
    assert disturbed > 1.5 * undisturbed
    record = plant.only()
    assert record.kind == "adapt"
    assert record.detectable_at == 6
    assert record.detected_at_iteration == 6
    assert record.applied_at_iteration == 7
    assert plant.seconds[7] <= 1.3 * undisturbed
    assert record.routes[link] is Route.DELEGATED
    assert record.iteration_seconds_before == pytest.approx(disturbed)
    assert record.iteration_seconds_after == pytest.approx(plant.seconds[7])
    assert record.predicted_seconds_before == pytest.approx(disturbed, rel=0.05)
    assert record.predicted_seconds_after == pytest.approx(plant.seconds[7], rel=0.05)
    assert record.bubble_before is not None
    assert record.bubble_after < record.bubble_before
    full = [plant.profile(i, op).peak_memory for i, op in enumerate(plant.ops)]
    assert (record.peak_memory_before, record.peak_memory_after) == (lean, full)
    assert sum(lean) < sum(full), "more in flight takes no more memory"
    assert [row.link for row in record.links] == [link]
    assert record.links[0].delay == pytest.approx(0.060, abs=0.003)
    assert f"link {link} is slow by" in record.reason
    assert "\n" not in record.reason

    plant.delays[link] = 0.0
    plant.run(12)
    back = plant.controller.records[-1]
    assert back.kind == "return"
    assert len(plant.controller.records) == 2
    assert back.detectable_at == 18
    assert back.warmup_after == list(initial_plan(job).warmup)
    assert set(back.routes) == {Route.DIRECT}
    assert plant.plan.schedule == initial_plan(job).schedule
    assert plant.seconds[-1] == pytest.approx(undisturbed)
    assert back.applied_at_iteration - 18 <= 1 + HOLD_ITERATIONS + 1
    plant.run(40)
    assert len(plant.controller.records) == 2


def test_the_first_plan_is_a_return_for_any_evidence_that_it_is_best_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Op times that changed with the link can be what is looked at first."""
    seen = decision.find_cause

    def cause(*given: Any) -> Any:
        found = seen(*given)
        return "profile" if found == "recovered" else found

    monkeypatch.setattr(decision, "find_cause", cause)
    plant = Plant(spec())
    plant.run(6)
    plant.delays[1] = 0.060
    plant.run(12)
    plant.delays[1] = 0.0
    plant.run(12)
    back = plant.controller.records[-1]
    assert "differ from the planned ones" in back.reason
    assert set(back.routes) == {Route.DIRECT}
    assert back.kind == "return"


@pytest.mark.parametrize(
    ("delay", "transfer", "expected"),
    [
        (0.060, 0.040, None),
        (0.074, 0.049, None),
        (0.040, 0.040, "eased"),
        (0.060, 0.020, "eased"),
        (0.080, 0.040, "worse"),
        (0.060, 0.060, "worse"),
    ],
)
def test_a_slow_link_is_decided_on_again_when_its_delay_or_its_bandwidth_changes(
    delay: float, transfer: float, expected: str | None
) -> None:
    """The link has a delay of 60 ms and 40 ms for the bytes; a quarter of the delay is material."""

    def slow(delay: float, transfer: float) -> Situation:
        return Situation(
            stages=build_initial_problem(spec()).stages, wire_times=(0.0, delay, 0.0),
            delays=(0.0, delay, 0.0), slow=(False, True, False), unknown=(False,) * 3,
            transfers=(0.0, transfer, 0.0),
        )  # fmt: skip

    assert find_link_change(slow(delay, transfer), slow(0.060, 0.040), 0.001) == expected


def test_a_delay_not_worth_a_change_is_reported_and_the_plan_stays() -> None:
    plant = Plant(spec(adaptation={"minGain": 0.6}))
    plant.run(5)
    plant.delays[1] = 0.060
    plant.run(10)
    assert plant.controller.records == []
    assert plant.health()[1] is Health.SLOW
    reasons = [d.reason for d in plant.controller.decisions if d.kind == "keep"]
    assert any("less than minGain 60.0%" in reason for reason in reasons)
    assert len(reasons) < 4


def test_a_change_that_cannot_pay_before_the_job_ends_is_not_made() -> None:
    """A new plan would run for the last 24 iterations, or for one."""
    for iterations, changes in ((30, 1), (7, 0)):
        plant = Plant(spec(trainer={"module": "x", "iterations": iterations}))
        plant.run(5)
        plant.delays[0] = 0.020
        plant.run(5)
        decided = [d for d in plant.controller.decisions if "remaining iterations" in d.reason]
        assert len(plant.controller.records) == changes, iterations
        assert {d.kind for d in decided} == ({"adapt"} if changes else {"keep"})
        assert all("a change is assumed to cost" in d.reason for d in decided), decided


def test_costs_of_changes_are_learned() -> None:
    plant = Plant(spec())
    plant.run(5)
    plant.delays[0] = 0.020
    plant.run(15)
    (record,) = plant.controller.records
    assert "is assumed to cost" in record.reason
    plant.delays[2] = 0.060
    plant.run(15)
    second = plant.controller.records[1]
    assert "a change has cost" in second.reason and "remaining iterations" in second.reason


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"adaptation": {"enabled": False}}, "adaptation is disabled"),
        ({"schedule": {"policy": "zero-bubble"}}, "policy zero-bubble keeps its schedule"),
        ({"schedule": {"policy": "1f1b"}}, "policy 1f1b keeps its schedule"),
    ],
)
def test_only_policy_pipemorph_adapts(fields: dict[str, Any], reason: str) -> None:
    plant = Plant(spec(**fields))
    plant.run(4)
    plant.delays[2] = 0.060
    plant.run(6)
    assert plant.controller.records == []
    assert plant.health()[2] is Health.SLOW
    (decision,) = plant.controller.decisions
    assert reason in decision.reason
    assert "link 2 is slow" in decision.reason


@pytest.mark.parametrize(
    "fields", [{"transport": {"route": "direct"}}, {"transport": {"route": "delegated"}}]
)
def test_routes_stay_where_the_spec_fixes_them(fields: dict[str, Any]) -> None:
    job = spec(**fields)
    plant = Plant(job)
    plant.run(4)
    plant.delays[0] = 0.030
    plant.run(20)
    for record in plant.controller.records:
        assert tuple(record.routes) == initial_plan(job).routes


def test_in_flight_limits_hold_in_every_plan() -> None:
    job = spec(8, 24, schedule={"inFlightLimit": 10})
    plant = Plant(job)
    plant.run(4)
    plant.delays[6] = 0.060
    plant.run(8)
    assert plant.controller.records[-1].routes[6] is Route.DELEGATED
    assert max(plant.plan.schedule.count_in_flight_peaks()) <= 10


def test_a_link_that_was_slow_from_the_start_is_found_by_its_peers() -> None:
    plant = Plant(spec())
    plant.delays[2] = 0.060
    plant.run(4)
    assert plant.health()[2] is Health.SLOW
    record = plant.only()
    assert record.links[0].delay == pytest.approx(0.060, abs=0.004)
    assert record.applied_at_iteration <= 3


def test_two_links_at_once_and_one_of_them_well_again() -> None:
    plant = Plant(spec(8, 24))
    plant.run(4)
    plant.delays[2] = plant.delays[5] = 0.040
    plant.run(10)
    assert [i for i, r in enumerate(plant.plan.routes) if r is Route.DELEGATED] == [2, 5]
    plant.delays[5] = 0.0
    plant.run(12)
    assert [i for i, r in enumerate(plant.plan.routes) if r is Route.DELEGATED] == [2]
    assert plant.health()[5] is Health.HEALTHY


def test_a_flapping_link_changes_the_plan_ever_less_often() -> None:
    plant = Plant(spec())
    plant.run(4)
    for _ in range(12):
        plant.delays[2] = 0.060
        plant.run(5)
        plant.delays[2] = 0.0
        plant.run(5)
    changed = [r.detected_at_iteration for r in plant.controller.records]
    early = sum(1 for i in changed if i < 60)
    late = sum(1 for i in changed if i >= 60)
    assert late < early
    assert len(changed) <= 10


FULL = pytest.mark.full


@pytest.mark.parametrize(
    "overhead", [pytest.param(0.0, marks=FULL), 0.010, pytest.param(0.025, marks=FULL)]
)
def test_a_fault_that_delegation_avoids_does_not_swing_to_and_fro(overhead: float) -> None:
    """Direct is slow, delegated is not: going back to direct brings the fault back."""
    plant = Plant(spec())
    plant.avoided, plant.overhead = True, overhead
    plant.run(4)
    plant.delays[2] = 0.060
    plant.run(200)
    assert len(plant.controller.records) <= 10
    late = [r for r in plant.controller.records if r.detected_at_iteration > 150]
    assert len(late) <= 2


@pytest.mark.parametrize("overhead", [0.0, 0.003, 0.010])
def test_recovery_is_seen_for_any_cost_of_delegation(overhead: float) -> None:
    """The delay varied before, so the base of the delegated route was only guessed."""
    plant = Plant(spec())
    plant.overhead = overhead
    plant.run(4)
    for _ in range(20):
        plant.delays[2] = max(0.010, plant.rng.gauss(0.050, 0.010))
        plant.run(1)
    plant.delays[2] = 0.0
    plant.run(60)
    assert plant.health()[2] is Health.HEALTHY
    assert set(plant.plan.routes) == {Route.DIRECT}
    assert plant.plan.schedule == initial_plan(plant.spec).schedule


def test_jitter_does_not_make_a_plan_of_every_draw() -> None:
    plant = Plant(spec(8, 24))
    plant.run(4)
    for _ in range(40):
        plant.delays[6] = max(0.0, plant.rng.gauss(0.030, 0.010))
        plant.run(1)
    assert plant.health()[6] is Health.SLOW
    assert 1 <= len(plant.controller.records) <= 4
    assert plant.plan.routes[6] is Route.DELEGATED


def test_uneven_stages_are_planned_for_after_warm_up_once() -> None:
    bare = JobSpec.model_validate(
        {
            "parallelism": {"stages": 4},
            "schedule": {"microbatches": 12, "policy": "pipemorph", "inFlightLimit": 5},
            "trainer": {"module": "x", "iterations": 100},
            "adaptation": {"minGain": 0.01},
        }
    )
    plant = Plant(bare)
    plant.ops = [
        StageTimes(forward=f, backward_input=f, backward_weight=w)
        for f, w in ((0.004, 0.002), (0.010, 0.012), (0.012, 0.010), (0.020, 0.030))
    ]
    plant.run(30)
    causes = [d for d in plant.controller.decisions if "differ from the planned ones" in d.reason]
    assert len(causes) == 1
    assert causes[0].iteration >= 3


def test_nothing_is_decided_before_op_times_are_known() -> None:
    bare = JobSpec.model_validate(
        {
            "parallelism": {"stages": 4},
            "schedule": {"microbatches": 12},
            "trainer": {"module": "x", "iterations": 100},
        }
    )
    plant = Plant(bare)
    plant.delays[2] = 0.060
    plant.step()
    keeps = [d.reason for d in plant.controller.decisions]
    assert any("no stage has reported op times" in reason for reason in keeps) or not keeps
    plant.run(6)
    assert plant.controller.records[0].applied_at_iteration is not None


def test_silence_turns_links_unknown_and_changes_nothing() -> None:
    plant = Plant(spec(adaptation={"staleAfterSeconds": 5}))
    plant.send(links=[plant.sample(0, "forward", BASE)])
    plant.controller.check_silence(plant.now)
    assert plant.controller.decisions == [], "a link that is still learned is not silent"
    plant.run(4)
    plant.delays[2] = 0.060
    plant.run(6)
    plan_version = plant.controller.plan_version
    plant.now += 6
    assert plant.health() == [Health.UNKNOWN] * 3
    plant.controller.check_silence(plant.now)
    plant.controller.check_silence(plant.now)
    plant.send()
    assert plant.controller.plan_version == plan_version
    silent = [d for d in plant.controller.decisions if "no samples for 5 s" in d.reason]
    assert len(silent) == 1
    plant.run(3)
    assert plant.health() == [Health.HEALTHY, Health.HEALTHY, Health.SLOW]
    assert plant.controller.plan_version == plan_version


def test_reports_that_do_not_belong_change_nothing() -> None:
    plant = Plant(spec())
    plant.run(3)
    before = plant.controller.take_snapshot()
    sequence = plant.sequence
    with pytest.raises(ReplayedReport, match="sequence"):
        plant.controller.process_report(report(sequence), plant.now)
    good = {"link": 0, "health": "slow", "replica": 0, "direction": "forward"}
    for field, bad in (("link", 3), ("replica", 1)):
        with pytest.raises(ReportMismatch, match=rf"directions\[0\].{field}: is"):
            plant.controller.process_report(
                report(10_000, directions=[good | {field: bad}]), plant.now
            )
    plant.controller.begin_attempt(1)
    plant.controller.attempt = 1
    with pytest.raises(WrongAttempt):
        plant.controller.process_report(report(10_000), plant.now)
    assert before["sequence"] == sequence


def test_a_new_attempt_starts_from_the_spec_and_plan_versions_go_on() -> None:
    plant = Plant(spec())
    plant.run(4)
    plant.delays[2] = 0.060
    plant.run(6)
    assert plant.controller.plan_version == 1
    plant.controller.begin_attempt(1)
    assert plant.controller.get_directive() is None
    assert plant.controller.wanted_plan == initial_plan(plant.spec)
    again = Plant(plant.spec, controller=plant.controller)
    again.run(4)
    again.delays[2] = 0.060
    again.run(6)
    assert [r.plan_version for r in plant.controller.records] == [1, 2]
    with pytest.raises(ValueError, match="is not after"):
        plant.controller.begin_attempt(1)


def test_a_restored_controller_goes_on_where_it_was() -> None:
    plant = Plant(spec())
    plant.run(4)
    plant.delays[2] = 0.060
    plant.run(6)
    since = plant.controller.get_link_states(plant.now)[2].since
    assert since is not None and since < plant.now
    saved = json.loads(json.dumps(plant.controller.take_snapshot()))
    restored = JobController.from_snapshot(plant.spec, saved)
    assert restored.plan_version == 1
    assert restored.get_directive() == plant.controller.get_directive()
    assert restored.wanted_plan == plant.controller.wanted_plan
    plant.controller = restored
    plant.run(6)
    assert restored.plan_version == 1, "the same link, still slow, is no news"
    assert plant.health()[2] is Health.SLOW
    assert restored.get_link_states(plant.now)[2].since == since
    plant.delays[2] = 0.0
    plant.run(12)
    assert [r.kind for r in restored.records] == ["adapt", "return"]
    assert restored.plan_version == 2


@pytest.mark.parametrize("barrier", [True, False])
def test_a_restored_controller_does_not_repeat_requests(barrier: bool) -> None:
    """A thousand jobs of a restarted host would send requests at the same time."""
    plant = Plant(spec(schedule={"stageTimes": None}))
    plant.barrier = plant.waits = barrier
    plant.ops[1] = StageTimes(forward=0.0123456, backward_input=0.02, backward_weight=0.01)
    plant.run(24)
    before = plant.controller
    assert before.last_profiled_iteration is not None, (
        "op times are assumed until they are measured"
    )
    saved = json.loads(json.dumps(before.take_snapshot()))
    assert max(len(str(value)) for value in saved["stages"][1].values()) <= 7
    plant.controller = JobController.from_snapshot(plant.spec, saved)
    assert plant.controller.take_snapshot() == before.take_snapshot() | {
        "footprints": saved["footprints"]
    }
    plant.decides = False
    plant.run(1)
    assert not decision.awaits_iterations(plant.controller._decision), (
        "it knows whether there is a barrier"
    )
    plant.run(23)
    assert plant.controller.pending_request is None
    plant.ops[1] = StageTimes(forward=0.05, backward_input=0.05, backward_weight=0.05)
    plant.run(60)
    request = plant.controller.pending_request
    assert request is not None and request.cause == "profile", "other op times are news"


@pytest.mark.parametrize(
    ("restart_at", "delay"),
    [
        pytest.param(at, delay, marks=pytest.mark.full if (at + odd) % 2 else ())
        for at in range(12)
        for odd, delay in enumerate((0.060, 0.012))
    ],
)
def test_a_link_without_reports_for_a_while_is_not_taken_for_well(
    restart_at: int, delay: float
) -> None:
    """The host is restarted with each of the reports of an iteration, the last one among them:
    that the iteration is done must not count as time in which the link was well."""

    class Restarted(Plant):
        reports_until_restart = -1

        def send(self, **fields: Any) -> None:
            if self.reports_until_restart == 0:
                saved = json.loads(json.dumps(self.controller.take_snapshot()))
                self.controller = JobController.from_snapshot(self.spec, saved)
            self.reports_until_restart -= 1
            super().send(**fields)

    plant = Restarted(spec())
    plant.run(4)
    plant.delays[1] = delay
    plant.run(8)
    assert [record.kind for record in plant.controller.records] == ["adapt"]
    plant.reports_until_restart = restart_at
    plant.run(6)
    assert plant.reports_until_restart < 0
    assert [record.kind for record in plant.controller.records] == ["adapt"]
    slow = plant.controller.get_link_states(plant.now)[1]
    assert slow.delay == pytest.approx(delay, rel=0.1)
    plant.delays[1] = 0.0
    plant.run(12)
    assert [record.kind for record in plant.controller.records] == ["adapt", "return"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda s: s.pop("plan_version"),
        lambda s: s.update(format=1),
        lambda s: s.update(plan_version=-1),
        lambda s: s["directive"]["plan"].update(routes=["direct"]),
    ],
)
def test_saved_state_that_is_damaged_is_refused(damage: Callable[[Any], object]) -> None:
    plant = Plant(spec())
    plant.run(4)
    plant.delays[2] = 0.060
    plant.run(4)
    saved = plant.controller.take_snapshot()
    damage(saved)
    with pytest.raises(InputError, match="saved state"):
        JobController.from_snapshot(plant.spec, saved)


@pytest.mark.parametrize("dies", ["slow", "recovered"])
def test_a_decision_that_was_under_way_when_the_host_died_is_made_again(dies: str) -> None:
    plant = Plant(spec())
    plant.decides = False

    def train_until(cause: str, *, most: int = 30) -> Any:
        """Settle decisions until one of this cause waits."""
        for _ in range(most):
            plant.step()
            request = plant.controller.pending_request
            if request is not None and request.cause == cause:
                return request
            settle(plant.controller, plant.now)
        raise AssertionError(f"no decision because of {cause}")

    plant.run(4)
    for cause, delay in (("slow", 0.06), ("recovered", 0.0)):
        plant.delays[1] = delay
        train_until(cause)
        if cause == dies:
            plant.controller = JobController.from_snapshot(spec(), plant.controller.take_snapshot())
            train_until(cause)
        settle(plant.controller, plant.now)
        plant.run(3)
    assert [record.kind for record in plant.controller.records][-1] == "return"


def test_a_controller_that_lost_its_state_takes_the_lead_again() -> None:
    """Ranks run plan v7 of a lost controller and return no snapshot: the next directive must be
    above it."""
    plant = Plant(spec())
    plant.observed = 7
    plant.plan = PlanMessage.from_plan(plant.plan).model_copy(update={"version": 7}).to_plan()
    plant.run(16)
    record = plant.only()
    assert record.plan_version == 8
    assert record.predicted_seconds_before is None
    assert plant.plan.version == 8
    assert plant.plan.schedule == initial_plan(plant.spec).schedule


def test_state_stays_bounded() -> None:
    plant = Plant(spec(adaptation={"minGain": 0.0}))
    for _ in range(20):
        plant.delays[0] = plant.rng.choice([0.0, 0.01, 0.03, 0.06])
        plant.run(8)
    assert len(plant.controller.decisions) <= 64
    assert len(json.dumps(plant.controller.take_snapshot())) < 200_000
    assert plant.controller.get_job_view(plant.now).iteration == 160


@pytest.mark.parametrize("iterations", [1, 3, 6])
def test_a_link_is_planned_for_at_once_while_the_return_for_another_one_waits(
    iterations: int,
) -> None:
    """Iterations between the two show neither state: they are no evidence against the second."""
    plant = Plant(spec())
    for delay, count in ((0.06, 3), (0.0, 4), (0.06, 4), (0.0, iterations)):
        plant.delays[2] = delay
        plant.run(count)
    plant.delays[0], began = 0.08, plant.iteration
    plant.run(4)
    record = next(each for each in plant.controller.records if each.detectable_at >= began)
    assert (record.kind, record.applied_at_iteration) == ("adapt", began + 1)


def test_another_link_that_becomes_slow_is_no_flap() -> None:
    """The plan of a link that flaps returns later each time."""
    state = JobController(spec())._decision

    def slow(at: int, link: int) -> int:
        """Flaps after a directive for ``link`` in iteration ``at``; it is well 5 later."""
        state.history.add_iterations(trained(at).iterations, list)
        decision.count_flaps(state, {link})
        state.returned_links[link] = at + 5
        return state.flap_count

    assert [slow(at, link) for at, link in ((10, 3), (30, 1), (50, 1), (70, 1))] == [0, 0, 1, 2]
    hold = decision.compute_hold_iterations(state)
    assert slow(75 + FLAP_HOLDS * hold + 1, 2) == 0, "it was long ago"
    assert hold > decision.compute_hold_iterations(state)


def test_when_the_plan_for_healthy_links_returns() -> None:
    state = JobController(spec())._decision
    slow = replace(state.last_decision.situation, slow=(True, False, False))

    def returns(finished: int, *, all_well: bool = True, varied: bool = False) -> bool:
        """Returns the change after the link has been well since iteration 9."""
        state.history.begin_attempt()
        state.history.add_iterations(trained(finished).iterations, list)
        state.last_decision.situation = (
            replace(slow, recent=((0.1, 0.2), (), ())) if varied else slow
        )
        well = LinkState(0, Health.HEALTHY, since_iteration=9)
        other = LinkState(1, Health.HEALTHY if all_well else Health.SLOW, since_iteration=1)
        return decision.may_restore_plan(state, (well, other, LinkState(2, Health.HEALTHY)))

    assert [returns(at) for at in (8, 9, 10)] == [False, False, True]
    assert [returns(at, varied=True) for at in (10, 16, 17)] == [False, False, True]
    state.returns_at_once = True
    assert returns(8)
    assert not returns(8, all_well=False), "another link is slow"
    state.flap_count = 1
    assert not returns(8), "it turned slow again before"


def test_a_delay_that_grows_gets_a_plan_of_its_own() -> None:
    """An emulated job of 8 stages: the plan for 30 ms takes 5% more under 60 ms than need be."""
    f, b, w = 0.010, 0.0105, 0.0055
    times = {"forward": 1e3 * f, "backwardInput": 1e3 * b, "backwardWeight": 1e3 * w}
    plant = Plant(spec(8, 24, schedule={"stageTimes": [times]}))
    plant.ops = [StageTimes(forward=f, backward_input=b, backward_weight=w)] * 8
    plant.run(6)
    for delay in (0.030, 0.060):
        plant.delays[6] = delay
        plant.run(8)
    wires = [BASE + delay for delay in plant.delays]
    best = plan(build_problem(24, plant.ops, wires, plant.plan.routes)).lower_bound
    assert plant.seconds[-1] <= 1.02 * best


@pytest.mark.parametrize("allowed", [False, True])
def test_a_job_with_more_ranks_than_processors_adapts_only_if_it_plays_faults(
    allowed: bool,
) -> None:
    class Crowded(Plant):
        def profile(self, stage: int, op: StageTimes) -> StageProfile:
            return super().profile(stage, op).model_copy(update={"crowding": 2.0})

    faults = [{"link": 0, "fromIteration": 10**6, "delayMs": 1}]
    plant = Crowded(spec(faults=faults if allowed else []))
    plant.run(6)
    plant.delays[1] = 0.060
    plant.run(10)
    assert len(plant.controller.records) == allowed
    lines = [decision.line for decision in plant.controller.decisions]
    said = [line for line in lines if "2 ranks per processor compute on a host, so" in line]
    assert len(said) == 1
    assert ("the plan may change" if allowed else "the plan stays") in said[0]
    links = plant.controller.get_link_states(plant.now)
    held = plant.controller.explain_held_change(links)
    assert (held is None) == allowed
    assert allowed or str(held).endswith("; 2 ranks per processor compute on a host")
