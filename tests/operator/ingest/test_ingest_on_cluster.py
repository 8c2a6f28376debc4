"""The ingest's own parts: saved state, summaries, writes, pacing. No cluster."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest
from observing import report, tell
from operator_objects import body
from operator_status import Shared, StatusWrites, known, spec_of
from plant_support import Plant
from prometheus_client import REGISTRY

from pipemorph.control import JobController
from pipemorph.planning import StageTimes
from pipemorph.protocol import StageProfile
from pipemorph.spec.job_spec import JobSpec
from pipemorph.spec.job_status import Condition, JobStatus, TrainingStatus
from pipemorph.spec.status_links import SlowLink
from pipemorph.views.status.summary import StatusInput, summarize_training, update_conditions
from pipemorph_operator.ingest.__main__ import count_decision
from pipemorph_operator.ingest.job_store import ClusterJobStore
from pipemorph_operator.ingest.status import status_writer, write_schedule
from pipemorph_operator.ingest.status.condition_events import ConditionEventFilter
from pipemorph_operator.ingest.status.status_fence import StatusOvertakenError
from pipemorph_operator.kube.client import KubeApiError
from pipemorph_operator.names import CONTROLLER

STALE = 30.0
"""Seconds without a report after which links are unknown."""


def test_conditions_before_with_and_after_reports() -> None:
    controller = JobController(spec_of())
    found = update_conditions(StatusInput(controller, None, 1), [], 1000.0)
    assert {c.type: (c.status, c.reason) for c in found} == {
        "LinksHealthy": ("Unknown", "NoReportsYet"),
        "ScheduleAdapted": ("False", "InitialPlan"),
        "LinksDelegated": ("False", "AllLinksDirect"),
        "RailsHealthy": ("Unknown", "NoReportsYet"),
        "StagesEven": ("Unknown", "NoReportsYet"),
    }
    controller.process_report(report(1), 1000.0)
    found = update_conditions(StatusInput(controller, 1000.0, 1), found, 1001.0)
    assert found[0].reason == "NoRecentSamples"
    found = update_conditions(StatusInput(controller, 1000.0, 1), found, 1060.0)
    assert (found[0].status, found[0].reason) == ("Unknown", "ReportsStale")


def test_links_with_recent_samples_are_healthy_and_without_them_unknown() -> None:
    plant = Plant(spec_of())
    plant.run(3)
    n = len(plant.controller.get_link_states(plant.now))
    for later, expected in [
        (0.0, ("True", "AllLinksHealthy", f"{n} links, all healthy")),
        (3600.0, ("Unknown", "NoRecentSamples", f"{n} of {n} links have no recent samples")),
    ]:
        now = plant.now + later
        found = update_conditions(StatusInput(plant.controller, now, 1), [], now)
        (links_healthy,) = [c for c in found if c.type == "LinksHealthy"]
        assert (links_healthy.status, links_healthy.reason, links_healthy.message) == expected


def test_a_change_that_is_held_back_is_a_reason_of_its_own() -> None:
    class Crowded(Plant):
        def profile(self, stage: int, op: StageTimes) -> StageProfile:
            return super().profile(stage, op).model_copy(update={"crowding": 2.0})

    def judge(**source: bool) -> tuple[str, str]:
        found = update_conditions(
            StatusInput(plant.controller, plant.now, 1, **source), [], plant.now
        )
        (adapted,) = [c for c in found if c.type == "ScheduleAdapted"]
        return adapted.reason, adapted.message

    plant = Crowded(spec_of())
    plant.run(4)
    assert judge()[0] == "InitialPlan"
    plant.delays[0] = 0.060
    plant.run(8)
    reason, message = judge()
    assert reason == "PlanHeldBack"
    assert "; a change is held back: link 0 is slow by 60" in message
    assert message.endswith("; 2 ranks per processor compute on a host")
    assert judge(is_over=True)[0] == "InitialPlan"


def test_a_slow_stage_is_named_with_what_another_split_would_give() -> None:
    job = body(stages=4)["spec"]
    job["parallelism"]["layers"] = 16
    controller = JobController(JobSpec.model_validate(job))
    now, sequence = 1000.0, 0

    def run(iterations: int, times: list[float]) -> tuple[TrainingStatus, dict[str, Condition]]:
        nonlocal now, sequence
        for _ in range(iterations):
            now, sequence = now + 1, sequence + 1
            stages = [
                StageProfile(
                    stage=i, forward=t, backward_input=t, backward_weight=t, split="deferred",
                    peak_memory=0,
                )
                for i, t in enumerate(times)
            ]  # fmt: skip
            tell(controller, now, iteration=sequence, stages=stages)
        source = StatusInput(controller, now, 1)
        return summarize_training(source, now), {
            c.type: c for c in update_conditions(source, [], now)
        }

    _, found = run(3, [0.01] * 4)
    assert (found["StagesEven"].status, found["StagesEven"].reason) == (
        "Unknown", "StagesNotMeasured",
    )  # fmt: skip
    _, found = run(10, [0.01] * 4)
    assert (found["StagesEven"].status, found["StagesEven"].reason) == ("True", "NoStageSlow")
    status, found = run(10, [0.01, 0.01, 0.02, 0.01])
    assert found["StagesEven"].status == "False"
    assert found["StagesEven"].message == (
        "stage 2 computes 2.0 times as long as before; with 5, 5, 2, 4 layers the slowest stage"
        " would take 38% less"
    )
    assert status.slow_stage_count == 1
    (slow,) = status.slow_stages
    assert (slow.stage, slow.replica, slow.microbatch_ms, slow.usual_ms) == (2, None, 60.0, 30.0)
    events = ConditionEventFilter([])
    assert [e.reason for e in events.select_events(found.values(), 0.0) if e.kind == "Warning"] == [
        "SlowStages"
    ]
    ended = summarize_training(StatusInput(controller, now, 1, is_over=True), now)
    assert (ended.slow_stage_count, ended.slow_stages) == (0, [])


def test_a_new_ingest_leaves_status_as_it_is_until_it_has_a_report() -> None:
    controller = JobController(spec_of(), attempt=1)
    last = TrainingStatus(attempt=1, state="training", iteration=70, link_fallbacks=3)
    assert summarize_training(StatusInput(controller, None, 3), 101.0, last=last) == last
    summary = summarize_training(StatusInput(controller, 100.0, 3), 101.0, last=last)
    assert (summary.iteration, summary.link_fallbacks) == (0, 3), "a total never falls"
    older = last.model_copy(update={"attempt": 0})
    summary = summarize_training(StatusInput(controller, None, 3), 101.0, last=older)
    assert (summary.iteration, summary.link_fallbacks) == (0, 0)


async def test_a_job_that_moves_is_not_said_to_be_unheard_of() -> None:
    """The other ingest's condition holds until the job's agent has had the time to come."""
    api = Shared()
    api.job["status"] |= {
        "training": {"attempt": 0, "iteration": 7, "lastReportTime": "1970-01-01T00:16:39Z"},
        "conditions": [
            {"type": kind, "status": "True", "reason": reason, "message": "as it was"}
            | {"lastTransitionTime": "1970-01-01T00:00:00Z"}
            for kind, reason in (
                ("LinksHealthy", "AllLinksHealthy"),
                ("ScheduleAdapted", "Adapted"),
            )
        ],
    }

    def reasons() -> dict[str, str]:
        return {c["type"]: c["reason"] for c in api.job["status"]["conditions"]}

    cluster: Any = api
    now = 1000.0
    store = ClusterJobStore(cluster, clock=lambda: now, monotonic=lambda: now)
    store.process_change(("team", "gpt"), copy.deepcopy(api.job))
    before, version = reasons(), api.job["metadata"]["resourceVersion"]
    now += STALE / 2
    await store.write_status_if_due(("team", "gpt"))
    assert (reasons(), api.job["metadata"]["resourceVersion"]) == (before, version)
    now += STALE
    await store.write_status_if_due(("team", "gpt"))
    assert reasons()["LinksHealthy"] == "ReportsStale"
    assert reasons()["ScheduleAdapted"] == "Adapted", "no report said otherwise"


def test_the_links_of_a_job_that_has_ended_are_neither_slow_nor_unknown() -> None:
    last = TrainingStatus(
        attempt=0,
        iteration=70,
        slow_link_count=1,
        slow_links=[
            SlowLink(
                link=1, replica=0, direction="forward", delay_ms=9, wire_time_ms=9, confidence=1
            )
        ],
        unknown_link_count=2,
    )
    ended = StatusInput(JobController(spec_of()), None, 1, is_over=True)
    summary = summarize_training(ended, 100.0, last=last)
    assert (summary.iteration, summary.slow_link_count, summary.unknown_link_count) == (70, 0, 0)
    assert summary.slow_links == []
    assert [
        (c.status, c.reason)
        for c in update_conditions(ended, [], 100.0)
        if c.type == "LinksHealthy"
    ] == [("Unknown", "JobFinished")]


def test_status_tells_since_when_each_link_is_slow_after_a_new_ingest_too() -> None:
    def slow(link: int) -> dict[str, Any]:
        return {
            "link": link,
            "health": "slow",
            "replica": 0,
            "direction": "forward",
            "delay": 0.01 * (link + 1),
        }

    controller = JobController(spec_of())
    controller.process_report(report(1, directions=[slow(2)]), 1000.0)
    controller.process_report(report(2, directions=[slow(1)]), 1060.0)
    later = JobController.from_snapshot(spec_of(), controller.take_snapshot())
    later.process_report(report(3, directions=[slow(1), slow(2)]), 1100.0)
    for each, now in ((controller, 1061.0), (later, 1101.0)):
        summary = summarize_training(StatusInput(each, now, 1), now)
        assert [(link.link, link.since) for link in summary.slow_links] == [
            (2, "1970-01-01T00:16:40Z"),
            (1, "1970-01-01T00:17:40Z"),
        ]


@pytest.mark.parametrize(
    ("manager", "served"),
    [(None, True), (CONTROLLER, True), ("kueue.x-k8s.io/multikueue", False)],
)
def test_a_job_that_another_controller_manages_is_not_served(
    manager: str | None, served: bool
) -> None:
    store = ClusterJobStore(StatusWrites())  # type: ignore[arg-type]
    job = body(stages=4)
    job["spec"]["managedBy"] = manager
    job["status"] = {"attempt": 0}
    store.process_change(("team", "gpt"), job)
    assert (store.find_job("team", "gpt") is not None) is served


@pytest.mark.parametrize("there", [True, False], ids=["seen", "while no ingest was there"])
async def test_the_end_of_a_job_is_written_once(there: bool) -> None:
    """The job may also have ended while no ingest was there."""
    api: Any = StatusWrites()
    slow = {"type": "LinksHealthy", "status": "False", "reason": "SlowLinks", "message": "m"}
    slow["lastTransitionTime"] = "2026-01-01T00:00:00Z"
    job = body(stages=4)
    job["status"] = {
        "attempt": 0,
        "conditions": [slow],
        "training": {"attempt": 0, "iteration": 7, "slowLinkCount": 1},
    }
    store = ClusterJobStore(api)
    if there:
        store.process_change(("team", "gpt"), job)
    job["status"]["conditions"].append(slow | {"type": "Complete", "status": "True"})
    store.process_change(("team", "gpt"), job)
    store.process_change(("team", "gpt"), job)
    for _ in range(5):
        await asyncio.sleep(0)
    job["status"] |= api.taken[0]
    job["status"]["conditions"].append(slow | {"type": "Complete", "status": "True"})
    store.process_change(("team", "gpt"), job)
    await asyncio.sleep(0)
    (written,) = api.taken
    assert (written["training"]["iteration"], written["training"]["slowLinkCount"]) == (7, 0)
    assert written["conditions"][0]["reason"] == "JobFinished"


@pytest.mark.parametrize(
    ("refusals", "written"),
    [
        (
            [KubeApiError(429, "TooManyRequests", "later"), ConnectionResetError(), TimeoutError()],
            1,
        ),
        ([KubeApiError(404, "NotFound", "no such job")], 0),
    ],
    ids=["for now", "for good"],
)
async def test_the_last_word_on_a_job_is_tried_again(
    refusals: list[Exception], written: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Links of the job would be slow for ever: an ended job is not looked at again."""
    monkeypatch.setattr(status_writer, "FINAL_WRITE_PAUSES", (0.0,) * 5)
    api: Any = StatusWrites(*refusals)
    job = body(stages=4)
    job["status"] = {"attempt": 0}
    ended = {"type": "Failed", "status": "True", "reason": "RankFailed", "message": "m"}
    ended["lastTransitionTime"] = "2026-01-01T00:00:00Z"
    jobs = ClusterJobStore(api)
    jobs.process_change(("team", "gpt"), job)
    job["status"]["conditions"] = [ended]
    jobs.process_change(("team", "gpt"), job)
    await asyncio.gather(*jobs._final_writes.values())
    assert (len(api.taken), api.refusals) == (written, [])


async def ingest_of(api: Shared) -> tuple[ClusterJobStore, JobController]:
    cluster: Any = api
    store = ClusterJobStore(cluster)
    await known(store, api.job)
    controller = store.find_job("team", "gpt")
    assert isinstance(controller, JobController)
    return store, controller


def version(api: Shared) -> int:
    """Plan version in status."""
    control = JobStatus.model_validate(api.job["status"]).control
    return control.plan_version


async def test_of_two_ingests_the_one_that_is_behind_loses(
    caplog: pytest.LogCaptureFixture,
) -> None:
    api = Shared()
    (one, first), (other, second) = await ingest_of(api), await ingest_of(api)
    first.process_report(report(1, observed_plan_version=5), 1000.0)
    second.process_report(report(1, observed_plan_version=4), 1000.0)
    await one.persist_status("team", "gpt")
    before = api.job["status"]["control"]
    with pytest.raises(StatusOvertakenError):
        await other.persist_status("team", "gpt")
    assert api.job["status"]["control"] == before
    await one.persist_status("team", "gpt")
    assert (
        "another ingest has written a plan or a recovery of this job; continuing from that status"
        in caplog.text
    )
    taken = other.find_job("team", "gpt")
    assert isinstance(taken, JobController) and taken is not second
    assert first.plan_version == version(api) == taken.plan_version == 5


@pytest.mark.parametrize("got_through", [False, True])
async def test_other_writers_than_an_ingest_are_written_after(got_through: bool) -> None:
    """The operator; and the ingest itself, of whose writes the answer may be lost."""
    api = Shared()
    store, controller = await ingest_of(api)
    for plan_version in (3, 5, 8):
        controller.process_report(report(plan_version, observed_plan_version=plan_version), 1000.0)
        if got_through:
            api.breaks = [TimeoutError()]
            with pytest.raises(TimeoutError):
                await store.persist_status("team", "gpt")
            controller.process_report(
                report(plan_version + 1, observed_plan_version=plan_version + 1), 1000.0
            )
        api.write({"state": "Running"})
        await store.persist_status("team", "gpt")
        assert version(api) == controller.plan_version
    assert store.find_job("team", "gpt") is controller


async def test_a_write_after_the_operators_is_one_request() -> None:
    api = Shared()
    store, controller = await ingest_of(api)
    api.requests.clear()
    for plan_version in (3, 5, 8):
        controller.process_report(report(plan_version, observed_plan_version=plan_version), 1000.0)
        await store.persist_status("team", "gpt")
        early = copy.deepcopy(api.job)
        api.write({"state": "Running"})
        store.process_change(("team", "gpt"), copy.deepcopy(api.job))
        store.process_change(("team", "gpt"), early)
    assert api.requests == ["apply"] * 3


async def test_a_plan_of_another_ingest_that_the_watch_shows_is_not_written_over() -> None:
    api = Shared()
    (one, first), (other, second) = await ingest_of(api), await ingest_of(api)
    for controller, newest in ((first, 5), (second, 4)):
        controller.process_report(report(1, observed_plan_version=newest), 1000.0)
    await one.persist_status("team", "gpt")
    other.process_change(("team", "gpt"), copy.deepcopy(api.job))
    with pytest.raises(StatusOvertakenError):
        await other.persist_status("team", "gpt")


async def test_a_job_created_again_under_the_name_is_not_written_to() -> None:
    api = Shared()
    store, _ = await ingest_of(api)
    api.job["metadata"] |= {"uid": "another", "resourceVersion": "9"}
    with pytest.raises(KubeApiError, match="409"):
        await store.persist_status("team", "gpt")
    assert "control" not in api.job["status"]


def test_a_summary_is_status_as_the_crd_has_it() -> None:
    controller = JobController(spec_of())
    controller.process_report(report(1, iteration=12), 1000.0)
    summary = summarize_training(StatusInput(controller, 1000.0, 1), 1000.0)
    dumped = JobStatus(training=summary).model_dump(mode="json", by_alias=True, exclude_none=True)
    training = dumped["training"]
    assert training["iteration"] == 12
    assert training["lastReportTime"] == "1970-01-01T00:16:40Z"
    assert training["routes"] == ["direct"] * 3
    assert len(training["warmup"]) == 4


def test_changes_are_written_soon_and_progress_seldom() -> None:
    floor, progress = write_schedule.FLOOR_SECONDS, write_schedule.PROGRESS_SECONDS
    assert write_schedule.is_write_due(True, floor)
    assert not write_schedule.is_write_due(True, floor - 1), "with what follows at once"
    assert write_schedule.is_write_due(False, progress)
    assert not write_schedule.is_write_due(False, progress - 1)
    assert write_schedule.compute_visit_interval(1) == write_schedule.VISIT_SECONDS


def test_decisions_are_counted_with_their_times() -> None:
    def value(name: str) -> float:
        return REGISTRY.get_sample_value(f"pipemorph_ingest_{name}") or 0.0

    before = value("plan_seconds_sum"), value("plan_wait_seconds_sum")
    count_decision(0.5, 0.25)
    assert value("plan_wait_seconds_sum") == before[1] + 0.5
    assert value("plan_seconds_sum") == before[0] + 0.25
