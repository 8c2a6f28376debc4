"""Memory as the controller sees it: bytes as hard limits, offload and fused backwards."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest
from gate import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from plant_support import OP, Plant, spec
from pydantic import ValidationError
from schedule_text import schedule_of

from pipemorph.control import JobController, decision, initial_plan
from pipemorph.control.decide.forecast import Forecast, PlanOption
from pipemorph.control.decide.plan_choice import DecisionRequest, decide
from pipemorph.control.decide.prediction_check import SituationEvidence
from pipemorph.control.decide.reasons import describe_insufficient_memory
from pipemorph.control.decide.situation import Situation
from pipemorph.control.job_state.stages import (
    MicrobatchFootprint,
    StageRoom,
    StageTable,
    find_excess,
)
from pipemorph.control.job_state.stages import compute_room as room_of
from pipemorph.detection.stage_monitor import StageMonitor, StageProfiles
from pipemorph.planning import Dispatch, OpKind, Plan, Policy, Route, StageTimes, validate
from pipemorph.planning.offload import count_device_peak, count_host_peak
from pipemorph.protocol import StageProfile
from pipemorph.protocol.states import StageState
from pipemorph.spec.job_spec import JobSpec

MIB = 1 << 20
STAGES, MICROBATCHES = 4, 16
ROOMY = 7 * MIB
"""Memory that suffices while links are well."""
QUICK = StageTimes(forward=0.01, backward_input=0.01, backward_weight=0.006)


def tight(*, memory: int | None = 4 * MIB, host: int | None = 8 * MIB, **fields: Any) -> JobSpec:
    """A job with room for 4 microbatches of 1 MiB on each device, and 8 in host memory."""
    adaptation: dict[str, Any] = {}
    if host is not None:
        adaptation = {"allowOffload": True, "hostMemory": host}
    schedule: dict[str, Any] = {"stageTimes": [OP | {"backwardWeight": 6.0}] * STAGES}
    if memory is not None:
        schedule["activationMemory"] = memory
    schedule |= fields.pop("schedule", {})
    return spec(
        STAGES,
        MICROBATCHES,
        schedule=schedule,
        adaptation=adaptation | fields.pop("adaptation", {}),
        **fields,
    )


def plant(job: Any, *, copy: float | None = 0.001, size: int | None = MIB) -> Watched:
    """Ranks that measure microbatches of ``size`` bytes and copies of ``copy`` seconds."""
    made = Watched(job)
    made.split = "deferred"
    made.activation_bytes = size
    made.ops = [QUICK.model_copy(update={"offload_copy": copy})] * STAGES
    return made


class Watched(Plant):
    """A plant that keeps every plan it was sent."""

    def __init__(self, job: Any, **kwargs: Any) -> None:
        super().__init__(job, **kwargs)
        self.plans: list[Plan] = []

    def send(self, **fields: Any) -> None:
        before = self.observed
        super().send(**fields)
        if self.observed > before:
            self.plans.append(self.prepared[1])


def held(plan: Plan) -> list[tuple[int, int]]:
    """Peak numbers of microbatches on the device and in host memory, per stage."""
    return [
        (count_device_peak(ops, limit), count_host_peak(ops, limit))
        for ops, limit in zip(plan.schedule.stages, plan.device_limits, strict=True)
    ]


def test_bytes_become_a_hard_limit_as_soon_as_they_are_measured() -> None:
    job = plant(tight(host=None))
    assert max(job.plan.schedule.count_in_flight_peaks()) > 4, "nothing to see here"
    job.run(6)
    (record,) = job.controller.records
    assert record.reason.startswith("the plan in effect exceeds a memory limit;")
    assert "stage 0 holds" in record.reason
    assert "activationMemory has room for 4" in record.reason
    assert max(job.plan.schedule.count_in_flight_peaks()) <= 4
    assert job.plan.in_flight_limits == (4,) * STAGES
    assert not job.plan.offloads
    job.delays[1] = 0.060
    job.run(10)
    job.delays[1] = 0.0
    job.run(20)
    assert len(job.plans) > 1
    for plan in job.plans:
        assert max(plan.schedule.count_in_flight_peaks()) <= 4


def test_a_slow_link_without_room_for_slackness_is_answered_by_offload_and_back() -> None:
    without, job = plant(tight(host=None, memory=ROOMY)), plant(tight(memory=ROOMY))
    for each in (without, job):
        each.run(8)
        each.delays[1] = 0.060
        each.run(10)
    assert job.plan.offloads
    assert job.seconds[-1] < 0.9 * without.seconds[-1]
    record = next(r for r in job.controller.records if any(r.offloaded))
    assert "offload on stages 0" in record.reason
    assert "costs 2.0 ms per copied microbatch and makes the best new plan" in record.reason
    assert "activationMemory has room for 7 microbatches" in record.reason
    assert record.device_limits_after[0] == 7
    assert record.offloaded[0] > 0
    view = job.controller.get_job_view(job.now)
    assert view.offloaded_microbatches[0] > 0
    for plan in job.plans:
        assert all(device <= 7 and host <= 8 for device, host in held(plan))
    job.delays[1] = 0.0
    job.run(30)
    assert not job.plan.offloads
    assert job.controller.records[-1].kind == "return"
    assert max(job.plan.schedule.count_in_flight_peaks()) <= 7


@pytest.mark.parametrize(
    ("job", "copy", "size"),
    [
        (tight(host=None), 0.001, MIB),
        (tight(), 0.3, MIB),
        (tight(), None, MIB),
        (tight(adaptation={"allowOffload": False}), 0.001, MIB),
        (tight(host=MIB // 2), 0.001, MIB),
        (tight(memory=None, schedule={"inFlightLimit": 4}), 0.001, None),
    ],
    ids=["no host memory", "dear", "copy not measured", "not allowed", "no room", "size unknown"],
)
def test_nothing_is_offloaded_where_it_must_not_or_does_not_pay(
    job: Any, copy: float | None, size: int | None
) -> None:
    ran = plant(job, copy=copy, size=size)
    ran.run(6)
    ran.delays[1] = 0.060
    ran.run(8)
    assert ran.plans
    for plan in ran.plans:
        assert not plan.offloads
        assert max(plan.schedule.count_in_flight_peaks()) <= 4
    if copy == 0.3:
        assert "offload on stage" in ran.controller.decisions[-1].reason
        assert "saves nothing" in ran.controller.decisions[-1].reason


def test_host_memory_is_a_hard_limit_too() -> None:
    job = plant(tight(host=2 * MIB))
    job.run(8)
    job.delays[0] = job.delays[1] = 0.060
    job.run(10)
    assert any(plan.offloads for plan in job.plans)
    for plan in job.plans:
        assert all(device <= 4 and host <= 2 for device, host in held(plan))


def test_in_flight_limits_count_microbatches_on_the_device_of_a_stage_that_offloads() -> None:
    job = plant(tight(memory=None, schedule={"inFlightLimit": 4}))
    job.run(8)
    job.delays[1] = 0.060
    job.run(8)
    assert job.plan.offloads
    assert all(device <= 4 and host <= 8 for device, host in held(job.plan))
    assert "activationMemory" not in job.controller.records[-1].reason


def test_guided_dispatch_is_held_to_its_caps() -> None:
    job = plant(tight(schedule={"dispatch": "guided"}))
    job.run(4)
    job.delays[1] = 0.060
    job.run(8)
    assert job.plans
    for plan in job.plans:
        for cap, limit in zip(plan.in_flight_limits, plan.device_limits, strict=True):
            assert cap is not None
            assert cap <= 4 if limit is None else limit <= 4
    assert "must be replaced" in job.controller.records[0].reason


def test_a_microbatch_that_does_not_fit_at_all_changes_nothing_and_is_reported() -> None:
    job = plant(tight(memory=MIB - 1))
    job.run(5)
    job.delays[1] = 0.060
    job.run(8)
    assert not job.plans
    (decision,) = job.controller.decisions
    assert decision.reason == (
        "a microbatch holds 1048576 bytes on stage 0, more than activationMemory, 1048575 bytes:"
        " no plan fits; the plan stays"
    )


def test_a_policy_that_does_not_adapt_reports_that_it_holds_too_much() -> None:
    job = plant(tight(host=None, memory=2 * MIB, schedule={"policy": "1f1b"}))
    job.run(5)
    assert not job.plans
    (decision,) = job.controller.decisions
    assert "stage 0 holds 4 microbatches, activationMemory has room for 2" in decision.reason
    assert "policy 1f1b keeps its schedule" in decision.reason


def test_limits_only_get_tighter_with_measurements() -> None:
    job = plant(tight(host=None))
    job.run(6)
    job.activation_bytes = 2 * MIB
    job.run(6)
    assert max(job.plan.schedule.count_in_flight_peaks()) <= 2
    job.activation_bytes = MIB // 2
    job.run(60)
    assert max(job.plan.schedule.count_in_flight_peaks()) <= 2


def drops(recompute: str = "auto", **fields: Any) -> Watched:
    """Ranks with room for 7 microbatches, whose inputs are a sixteenth of their activations."""
    job = tight(host=None, memory=ROOMY, schedule={"recompute": recompute}, **fields)
    made = plant(job, copy=None)
    made.input_bytes = MIB // 16
    return made


def needed(plan: Plan) -> list[float]:
    """Microbatches with their activations that would take as much memory, per stage."""
    return [device + (host / 16 if plan.recompute[i] else 0) for i, (device, host) in
            enumerate(held(plan))]  # fmt: skip


def test_a_slow_link_without_room_for_slackness_is_answered_by_recomputation_and_back() -> None:
    without, job = drops("never"), drops()
    for each in (without, job):
        each.run(8)
        each.delays[1] = 0.060
        each.run(10)
    assert not any(plan.recomputing_stages for plan in without.plans)
    assert job.plan.recomputing_stages
    assert not job.plan.offloads
    assert job.seconds[-1] < 0.93 * without.seconds[-1]
    record = next(r for r in job.controller.records if any(r.recomputed))
    assert "recomputation on stage" in record.reason
    assert "forwards again and makes the best new plan" in record.reason
    assert not any(record.offloaded)
    assert job.controller.get_job_view(job.now).recomputed_microbatches == tuple(record.recomputed)
    for plan in job.plans:
        assert max(needed(plan)) <= 7
        assert all(limit is None or limit < 7 for limit in plan.device_limits)
    job.delays[1] = 0.0
    job.run(30)
    assert not job.plan.recomputing_stages
    assert job.controller.records[-1].kind == "return"


def test_recomputation_needs_the_size_of_the_inputs_and_room_for_them() -> None:
    for size in (None, MIB, 2 * MIB):
        job = drops()
        job.input_bytes = size
        job.run(8)
        job.delays[1] = 0.060
        job.run(10)
        assert not any(plan.recomputing_stages for plan in job.plans), size


def test_more_in_flight_than_the_inputs_leave_room_for_is_too_much() -> None:
    job = drops()
    job.run(8)
    job.delays[1] = 0.060
    job.run(10)
    plan = job.plan
    stage = plan.recomputing_stages[0]
    limits = list(plan.device_limits)
    assert find_excess(plan, job.controller._job_state.stages.rooms) is None
    limits[stage] = 7
    wrong = replace(plan, device_limits=tuple(limits))
    found = find_excess(wrong, job.controller._job_state.stages.rooms)
    assert (found.stage, found.field) == (stage, "activationMemory")
    forbidden = [StageRoom(7, limited_by_memory=True)] * STAGES
    assert find_excess(plan, forbidden) is not None


def test_a_restored_controller_has_the_inputs() -> None:
    job = drops()
    job.run(8)
    job.delays[1] = 0.060
    job.run(8)
    saved = json.loads(json.dumps(job.controller.take_snapshot()))
    restored = JobController.from_snapshot(job.spec, saved)
    assert restored.wanted_plan == job.controller.wanted_plan
    assert restored.wanted_plan.recomputing_stages
    assert restored._job_state.stages.rooms == job.controller._job_state.stages.rooms


@given(st.integers(1, 30), st.integers(1, 1 << 20), st.integers(0, 1 << 20))
def test_the_inputs_fit_with_the_activations_of_one(fits: int, size: int, inputs: int) -> None:
    """Limits in bytes and in microbatches both hold; the smaller one counts."""
    for fields in (
        {"activationMemory": fits * size},
        {"inFlightLimit": fits},
        {"inFlightLimit": fits, "activationMemory": (fits + 3) * size},
        {"inFlightLimit": fits + 3, "activationMemory": fits * size},
    ):
        job = spec(2, 4, schedule=fields | {"recompute": "auto"})
        found = room_of(job, 0, size, None, inputs)
        assert found.device_microbatches == fits
        assert size + found.recomputed_microbatches * inputs <= fits * size
        assert not inputs or size + (found.recomputed_microbatches + 1) * inputs > fits * size
        assert (
            room_of(spec(2, 4, schedule=fields), 0, size, None, inputs).recomputed_microbatches == 0
        )


def test_another_attempt_has_the_bytes_of_a_microbatch() -> None:
    job = plant(tight(host=None))
    job.run(6)
    job.controller.begin_attempt(1)
    again = Watched(job.spec, controller=job.controller)
    again.ops, again.activation_bytes, again.split = job.ops, None, "deferred"
    again.run(1)
    assert again.plans
    assert max(again.plans[0].schedule.count_in_flight_peaks()) <= 4


def test_a_restored_controller_keeps_limits_and_offload() -> None:
    job = plant(tight(memory=ROOMY))
    job.run(8)
    job.delays[1] = 0.060
    job.run(8)
    assert job.plan.offloads
    saved = json.loads(json.dumps(job.controller.take_snapshot()))
    restored = JobController.from_snapshot(job.spec, saved)
    assert restored.wanted_plan == job.controller.wanted_plan
    assert restored.wanted_plan.offloads
    # Before anything is measured again, and back from the slow link.
    job.controller, job.activation_bytes = restored, None
    job.delays[1] = 0.0
    job.run(30)
    assert not job.plan.offloads
    assert max(job.plan.schedule.count_in_flight_peaks()) <= 7
    for plan in job.plans:
        assert all(device <= 7 and host <= 8 for device, host in held(plan))


def test_backwards_are_fused_where_that_is_measured_to_be_shorter_and_why() -> None:
    job = plant(tight(host=None, memory=None), size=None)
    dear = {"backward_input": 0.014, "backward_weight": 0.010, "fused_backward": 0.017}
    job.ops = [*job.ops[:2], QUICK.model_copy(update=dear), job.ops[3]]
    job.run(16)
    (record,) = job.controller.records
    assert record.fused_stages == [2]
    assert "a fused backward on stage 2 makes the best new plan" in record.reason
    forms = [{op.kind for op in ops} for ops in job.plan.schedule.stages]
    assert forms[2] >= {OpKind.F, OpKind.BW}
    assert forms[0] == {OpKind.F, OpKind.B, OpKind.W}
    assert job.seconds[-1] < 0.95 * job.seconds[0]
    # The profile no longer has the times of B and W; the earlier ones remain.
    job.run(120)
    assert len(job.plans) == 1


def test_a_planner_that_holds_too_much_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fresh(self: Forecast, routes: tuple[Route, ...], *_: float) -> list[PlanOption]:
        return [PlanOption(replace(first, routes=routes), 0.001)]

    job = plant(tight(host=None))
    first = job.plan
    monkeypatch.setattr(Forecast, "make_options", fresh)
    job.run(4)
    assert not job.plans
    assert "the new plan fails its check: stage 0 holds" in job.controller.decisions[0].reason


class Stages:
    """The profiles of ranks, and the op times that a plan is made with."""

    def __init__(self) -> None:
        self.book, self.table = StageMonitor(STAGES), StageTable(tight(host=None))
        self.ranks = [StageProfiles(stage, 0) for stage in range(STAGES)]

    def observe(self, profile: StageProfile) -> None:
        rank = self.ranks[profile.stage]
        rank.add_profile(profile)
        state = rank.build_state()
        assert state is not None
        self.book.update_state(state)

    def times(self) -> tuple[StageTimes, ...] | None:
        for stage in self.book.take_changed_stages():
            self.table.update_state(self.book.merge_columns(stage))
        return self.table.get_stage_times()


SPLIT: dict[str, Any] = {"forward": 1.0, "split": "deferred", "peak_memory": 1}


def split_stages() -> Stages:
    book = Stages()
    for stage in range(STAGES):
        book.observe(StageProfile(stage=stage, backward_input=2.0, backward_weight=1.5, **SPLIT))
    return book


def test_fused_profiles_leave_the_times_of_split_backwards_as_they_were() -> None:
    book = split_stages()
    for _ in range(20):
        book.observe(StageProfile(stage=1, backward_input=3.1, backward_weight=0.0, **SPLIT))
    times = book.times()
    assert (times[1].backward_input, times[1].backward_weight) == (2.0, 1.5)
    assert times[1].fused_backward == 3.1
    assert times[0].fused_backward is None
    # A plan that is shorter by less than the noise is no gain.
    for _ in range(20):
        book.observe(StageProfile(stage=1, backward_input=3.45, backward_weight=0.0, **SPLIT))
    times = book.times()
    assert times[1].fused_backward is None
    # A stage that cannot split has no parts to remember.
    whole = SPLIT | {"split": "fused"}
    for _ in range(20):
        book.observe(StageProfile(stage=2, backward_input=3.3, backward_weight=0.0, **whole))
    times = book.times()
    assert (times[2].backward_input, times[2].backward_weight) == (3.3, 0.0)
    assert times[2].fused_backward is None


def test_one_quick_or_slow_iteration_does_not_fuse_a_backward() -> None:
    book = split_stages()
    # B + W take 3.5; so does this stage's whole backward, but for the machine's moods.
    for whole in (3.5, 3.5, 2.0, 3.5, 3.6, 2.1, 3.5):
        book.observe(StageProfile(stage=1, backward_input=whole, backward_weight=0.0, **SPLIT))
        times = book.times()
        assert times[1].fused_backward is None, whole


def test_memory_of_a_plan_is_found_stage_by_stage() -> None:
    schedule = schedule_of(3, ["F0 F1 F2 B0 W0 B1 W1 B2 W2"])
    none = Plan(0, Policy.PIPEMORPH, schedule, (), (None,))
    two = replace(none, in_flight_limits=(3,), device_limits=(2,))
    assert find_excess(none, [StageRoom()]) is None
    assert find_excess(none, [StageRoom(3)]) is None
    assert find_excess(none, [StageRoom(2)]) == (0, 3, 2, "inFlightLimit")
    assert find_excess(two, [StageRoom(2, True, 2)]) is None
    assert find_excess(two, [StageRoom(2, True, 1)]) == (0, 2, 1, "hostMemory")
    assert find_excess(two, [StageRoom(1, True, 2)]) == (0, 2, 1, "activationMemory")
    assert find_excess(replace(two, dispatch=Dispatch.GUIDED), [StageRoom(2, True, 1)]) is not None


def test_no_plan_is_made_before_the_bytes_of_a_microbatch_are_known() -> None:
    """Restored from nothing while a link is slow: op times are stated, bytes are not measured."""
    job = plant(tight(host=None))
    job.run(8)
    job.delays[1] = 0.060
    job.run(8)
    issued = len(job.plans)
    job.controller = JobController.from_snapshot(
        job.spec, job.controller.take_snapshot() | {"footprints": []}
    )
    job.step()
    job.run(8)
    for plan in job.plans[issued:]:
        assert max(plan.schedule.count_in_flight_peaks()) <= 4
    fresh = plant(tight(host=None))
    fresh.delays[0] = 0.060
    fresh.send(links=[fresh.sample(0, "forward", 0.064)] * 40)
    assert not fresh.plans


def test_unmeasured_bytes_limit_nothing_and_that_is_reported_once() -> None:
    job = plant(tight(host=None), size=None)
    job.run(6)
    job.delays[1] = 0.060
    job.run(8)
    said = [d.reason for d in job.controller.decisions if "activationMemory" in d.reason]
    assert said == [
        "activationMemory cannot limit stages 0-3, where the size of a microbatch was not"
        " measured; set inFlightLimit"
    ]
    assert job.plans


@given(st.randoms(use_true_random=False), st.sampled_from(list(Dispatch)))
@settings(max_examples=examples(40), deadline=None)
def test_no_proposal_ever_exceeds_the_room(rng: random.Random, dispatch: Dispatch) -> None:
    """Whatever the rooms, times and delays, for any cause, and with a plan in effect that fits or
    does not."""
    count, n = rng.randint(1, 4), rng.randint(1, 10)
    job = spec(
        count,
        n,
        schedule={"dispatch": dispatch.value},
        adaptation={"allowOffload": True, "hostMemory": 1, "minGain": rng.choice([0, 0.05])},
    )
    rooms = [
        StageRoom(rng.choice([None, rng.randint(1, 6)]), rng.random() < 0.5, rng.randint(0, 4))
        for _ in range(count)
    ]
    stages = []
    for room in rooms:
        in_flight, device = room.get_plan_limits(n)
        stages.append(
            StageTimes(
                forward=rng.choice([0.01, 0.02]),
                backward_input=0.01,
                backward_weight=rng.choice([0.002, 0.01]),
                fused_backward=rng.choice([None, 0.011, 0.025]),
                offload_copy=rng.choice([0.0, 0.001, 0.02]),
                in_flight_limit=in_flight,
                device_limit=device,
            )
        )
    delays = tuple(rng.choice([0.0, 0.06]) for _ in range(count - 1))
    slow = tuple(delay > 0 for delay in delays)
    situation = Situation(
        tuple(stages), delays, delays, slow, (False,) * len(slow), rooms=tuple(rooms)
    )
    first = initial_plan(job)
    request = DecisionRequest(
        spec=job,
        cause=rng.choice(["slow", "steady", "recovered", "profile", "memory"]),
        situation=situation,
        current_plan=first,
        running_plan=first,
        baseline_plan=first,
        plan_unknown=rng.random() < 0.2,
        iterations_remaining=100,
        change_seconds=None,
        evidence=SituationEvidence(),
    )
    proposal = decide(request)
    fits = find_excess(first, rooms) is None
    if proposal.chosen is None:
        assert fits, proposal.findings
        return
    plan = proposal.chosen.plan
    validate(plan.schedule, plan.in_flight_limits, plan.device_limits)
    assert find_excess(plan, rooms) is None
    for ops, room, device in zip(plan.schedule.stages, rooms, plan.device_limits, strict=True):
        assert (
            room.device_microbatches is None
            or count_device_peak(ops, device) <= room.device_microbatches
        )
        assert count_host_peak(ops, device) <= room.host_microbatches


def test_the_newest_time_to_copy_activations_counts_and_its_absence_changes_nothing() -> None:
    found = MicrobatchFootprint()
    quick = {"stage": 0, "forward": 0.01, "backward_input": 0.01, "backward_weight": 0.01}

    def add(copy: float | None) -> tuple[bool, float | None]:
        changed = found.add_measurement(StageState.model_validate(quick | {"offload_copy": copy}))
        return changed, found.offload_copy

    assert add(None) == (False, None)
    assert add(0.2) == (True, 0.2), "the first one is news"
    assert add(0.1) == (False, 0.1)
    assert add(None) == (False, 0.1)
    assert add(0.0) == (False, 0.0)


def test_a_plan_that_fits_is_walked_again_only_for_other_limits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    walks = 0

    def walk(plan: Plan, rooms: tuple[StageRoom, ...]) -> Any:
        nonlocal walks
        walks += 1
        return find_excess(plan, rooms)

    monkeypatch.setattr(decision, "find_excess", walk)
    state = JobController(tight(memory=ROOMY))._decision

    def of(device: int) -> Situation:
        return replace(state.last_decision.situation, rooms=(StageRoom(device),) * STAGES)

    large, small = of(MICROBATCHES), of(1)
    for _ in range(3):
        assert decision.find_cause(state, large) is None
    assert walks == 1
    for _ in range(2):
        assert decision.find_cause(state, small) == "memory"
    state.plans.wanted_plan = replace(state.plans.wanted_plan)
    assert decision.find_cause(state, large) is None
    assert walks == 4, "other limits, and another plan"


def test_the_stages_of_a_rank_share_its_memory_out_where_activations_leave() -> None:
    parallelism = {"stages": STAGES, "stagesPerRank": 2}
    schedule = {"recompute": "auto", "stageTimes": None}
    alone = room_of(tight(schedule=schedule), 0, MIB, 0.01, MIB // 4)
    assert alone == StageRoom(4, True, 8, 12)
    several = tight(schedule=schedule, parallelism=parallelism)
    assert room_of(several, 0, MIB, 0.01, MIB // 4) == StageRoom(2, True, 4, 4)


def v_shaped(memory: int, dispatch: str = "static") -> JobSpec:
    """Problem of four ranks with two equal stages each."""
    times = {"forward": 10, "backwardInput": 10, "backwardWeight": 10}
    return spec(
        8,
        8,
        schedule={"activationMemory": memory, "dispatch": dispatch},
        parallelism={"stages": 8, "stagesPerRank": 2, "stagePlacement": "v"},
        emulation={"stageTimes": [times], "messageBytes": 1, "activationBytes": MIB},
    )


@pytest.mark.parametrize(
    ("dispatch", "seconds"), [("static", 0.53), ("auto", 0.53), ("guided", 0.55)]
)
def test_the_stages_of_a_rank_share_its_memory_by_the_moment(dispatch: str, seconds: float) -> None:
    """The limit is half of what 1F1B needs; out of turn each stage may hold its most at once."""
    job = v_shaped(6 * MIB + 1, dispatch)
    op = StageTimes(forward=0.01, backward_input=0.01, backward_weight=0.01, activation_bytes=MIB)
    rooms, none, well = StageTable(job).rooms, (0.0,) * 7, (False,) * 7
    forecast = Forecast(job, Situation((op,) * 8, none, none, well, well, rooms=rooms))
    found = forecast.make_options((Route.DIRECT,) * 7)
    assert all(forecast.find_excess(option.plan) is None for option in found)
    best, first = forecast.choose_best(found), initial_plan(job)
    assert [best.seconds, forecast.predict_option(first).seconds] == pytest.approx([seconds] * 2)
    assert find_excess(first, rooms) is None
    less = [space._replace(rank_memory=5 * MIB) for space in rooms]
    too_much = find_excess(best.plan, less)
    assert too_much is not None and too_much[1:] == (6 * MIB, 5 * MIB, "rank")


def test_a_rank_without_room_for_a_microbatch_on_all_its_stages() -> None:
    with pytest.raises(ValidationError, match="on each of the 2 stages of a rank"):
        v_shaped(2 * MIB - 1)
    known = [MicrobatchFootprint() for _ in range(8)]
    for each in known:
        each.activation_bytes = MIB + 1
    job = v_shaped(2 * MIB)
    rooms = StageTable(job.model_copy(update={"emulation": None}), known).rooms
    assert [space.device_microbatches for space in rooms] == [0] * 4 + [1] * 4
    situation = Situation((QUICK,) * 8, (), (), (), (), rooms=rooms)
    assert "2097152 bytes, on all stages of the rank of stage 0" in describe_insufficient_memory(
        situation, 2 * MIB
    )
