"""Messages while a job cannot start, or not all of its ranks are there."""

from __future__ import annotations

from typing import Any

import pytest
from operator_objects import World, body, failed, job_facts, pod

from pipemorph_operator.config import OperatorConfig
from pipemorph_operator.kube.object_facts import JobFacts, explain_missing_pod
from pipemorph_operator.policy.attempt_end import LOST_SECONDS
from pipemorph_operator.reconcile.pending_pods import (
    CHECK_AGAIN_SECONDS,
    LONGEST_SECONDS,
    MISSING_SECONDS,
    STUCK_SECONDS,
)


def template(**trainer: Any) -> Any:
    return {"spec": {"containers": [{"name": "trainer"} | trainer]}}


def test_no_image_anywhere() -> None:
    world = World(body(), OperatorConfig(ingest_url="https://x"))
    world.settle()
    assert world.status["state"] == "Pending"
    assert world.condition("PodsReady") == ("False", "NoTrainerImage")
    world.turn()
    assert world.events == ["NoTrainerImage"], "it is reported at every turn"
    world.body["spec"]["template"] = template(image="i")
    world.settle()
    assert (world.status["state"], world.status["attempt"]) == ("Starting", 0)


def test_an_empty_field_of_a_template_starts_and_a_wrong_one_is_named_until_it_is_edited() -> None:
    def world(resources: object) -> World:
        rdma = {"rdma": {"resourceName": "rdma/hca"}}
        return World(body(template=template(image="i", resources=resources), placement=rdma))

    empty = world(None)
    empty.turn()
    assert empty.status["state"] == "Starting"
    wrong = world([])
    wrong.settle()
    assert wrong.condition("PodsReady") == ("False", "InvalidSpec")
    assert "spec.template.spec.containers[0].resources: is []" in wrong.message("PodsReady")
    wrong.body["spec"]["template"] = template(image="i")
    wrong.settle()
    assert wrong.status["state"] == "Starting"


def test_ranks_that_run_do_not_end_by_a_wrong_edit_of_the_template() -> None:
    world = World(body(failurePolicy={"maxRestarts": 1}))
    world.running()
    world.body["spec"]["template"] = template(image="i", env=[{"name": "RANK", "value": "1"}])
    world.settle()
    assert world.status["state"] == "Running"
    world.jobs[0] = job_facts(active=0, failed=failed())
    world.settle()
    assert world.condition("PodsReady") == ("False", "InvalidSpec")
    assert "env[0].name: is RANK, which is reserved" in world.message("PodsReady")


def test_an_edited_template_is_that_of_the_next_attempt() -> None:
    world = World(body(failurePolicy={"maxRestarts": 1}))
    world.running()
    world.body["spec"]["template"] = template(image="i:2")
    decision = world.turn()
    assert (decision.apply_objects, decision.delete_jobs) == ([], []), "an edit restarted the ranks"
    world.jobs[0] = job_facts(active=0, failed=failed())
    world.turn()
    (trainer,) = world.turn().apply_objects[-1]["spec"]["template"]["spec"]["containers"]
    assert trainer["image"] == "i:2"


def test_a_job_that_is_resumed_and_cannot_start_is_not_suspended() -> None:
    world = World(body(suspend=True))
    world.settle()
    assert world.status["state"] == "Suspended"
    world.body["spec"] |= {"suspend": False, "template": template()}
    world.config = OperatorConfig(ingest_url="https://x")
    world.settle()
    assert world.condition("Suspended") == ("False", "NotSuspended")
    assert world.status["state"] == "Pending"


def test_ranks_that_do_not_start_are_looked_at_and_named() -> None:
    world = World(body())
    world.turn()
    world.turn()
    assert world.looked == 0, "pods are listed before they had time"
    world.later(STUCK_SECONDS + 1)
    world.pods = [pod(1, pending_reason="trainer: ImagePullBackOff: no such image")]
    world.turn()
    assert "rank 1 (stage 1): trainer: ImagePullBackOff" in world.message("PodsReady")


def test_what_has_waited_long_is_looked_at_more_rarely() -> None:
    world, waited, found = World(body()), 0.0, []
    world.settle()
    for until in (STUCK_SECONDS + 1, 200.0, 7200.0):
        world.later(until - waited)
        waited = until
        world.pods = [pod(0), pod(1, pending_reason="trainer: ImagePullBackOff: no such image")]
        found.append(world.turn().requeue_seconds)
    assert found == [CHECK_AGAIN_SECONDS, 50.0, LONGEST_SECONDS]


def test_a_rank_whose_node_does_not_report_its_end_ends_the_attempt() -> None:
    world = World(body())
    world.running()
    world.jobs[0] = job_facts(active=1, ready=1, terminating=1)
    world.later(STUCK_SECONDS + 1)
    world.pods = [pod(0), pod(1, node="n1", deletion_deadline=world.now)]
    world.turn()
    assert world.status["attempt"] == 0, "its grace period is only just over"
    world.later(LOST_SECONDS)
    world.turn()
    assert (world.status["attempt"], world.status["disruptions"]) == (1, 1)
    record = world.status["attempts"][0]
    assert (record["reason"], record["counted"]) == ("Disrupted", False)
    assert record["message"] == "rank 1 (stage 1) on node n1: the node does not respond"


def test_a_rank_without_a_node_stays_with_the_control_plane() -> None:
    world = World(body())
    world.running()
    world.jobs[0] = job_facts(active=1, ready=1, terminating=1)
    world.pods = [pod(0), pod(1, node=None, deletion_deadline=world.now)]
    world.later(STUCK_SECONDS + LOST_SECONDS + 1)
    world.turn()
    assert (world.status["attempt"], world.status["disruptions"]) == (0, 0)


@pytest.mark.parametrize(
    ("placement", "advised"),
    [
        ({"topology": {"key": "rack", "required": True}}, True),
        ({"topology": {"key": "rack", "required": True}, "gang": {"volcano": {}}}, False),
        ({"topology": {"key": "rack", "required": True, "mode": "spread"}}, False),
        ({"topology": {"key": "rack"}}, False),
    ],
)
def test_ranks_that_find_no_room_near_the_first_get_advice(placement: Any, advised: bool) -> None:
    world = World(body(placement=placement))
    world.turn()
    world.later(STUCK_SECONDS + 1)
    world.pods = [pod(0), pod(1, pending_reason="Unschedulable: 0/9 nodes are available")]
    world.turn()
    said = world.message("PodsReady")
    assert "rank 1 (stage 1): Unschedulable: 0/9 nodes are available" in said
    assert ("placement.gang" in said) is advised
    assert ("label rack" in said) is advised


def test_a_job_without_any_pod_is_checked_early_and_reported_once() -> None:
    world = World(body())
    world.turn()
    world.jobs[0] = job_facts(active=0, wanted_pods=2)
    world.no_pod = 'pods "gpt-0-abc" is forbidden: violates PodSecurity "baseline:latest": IPC_LOCK'
    world.later(MISSING_SECONDS + 1)
    world.turn()
    assert world.condition("PodsReady") == ("False", "PodsRefused")
    assert world.status["state"] == "Starting"
    assert "0 of 2 ranks are ready; 2 pods cannot be created: pods" in world.message("PodsReady")
    assert "placement.rdma.ipcLock: false" in world.message("PodsReady")
    world.no_pod = world.no_pod.replace("abc", "def")
    world.turn()
    assert "gpt-0-def" in world.message("PodsReady")
    assert world.events == ["AttemptStarted", "PodsRefused"]
    world.running()
    assert world.status["state"] == "Running"


def test_a_job_that_lacks_some_pods_is_given_the_time_that_many_take() -> None:
    world = World(body())
    world.turn()
    world.jobs[0] = job_facts(active=1, wanted_pods=2)
    world.no_pod = "exceeded quota"
    world.later(MISSING_SECONDS + 1)
    world.turn()
    assert world.looked == 0
    world.later(STUCK_SECONDS)
    world.turn()
    assert "1 pod cannot be created: exceeded quota" in world.message("PodsReady")


def test_the_newest_answer_about_a_pod_is_the_one_that_counts() -> None:
    def event(at: str, message: str, reason: str = "FailedCreate") -> Any:
        return {"reason": reason, "lastTimestamp": at, "message": message}

    found = [
        event("2026-01-01T00:00:01Z", "Error creating: old"),
        event("2026-01-01T00:00:03Z", "Error creating: pods is forbidden:\n quota"),
        event("2026-01-01T00:00:04Z", "Created pod: a", "SuccessfulCreate"),
        {"reason": "FailedCreate", "eventTime": "2026-01-01T00:00:02Z", "message": "other"},
    ]
    assert explain_missing_pod(found) == "pods is forbidden: quota"
    assert explain_missing_pod([]) == ""


@pytest.mark.parametrize(
    ("status", "missing"),
    [
        ({}, 4),
        ({"active": 3}, 1),
        ({"active": 1, "succeeded": 1, "failed": 1, "terminating": 1}, 0),
    ],
)
def test_pods_that_a_job_still_has_to_make(status: Any, missing: int) -> None:
    job = {"metadata": {"name": "a", "uid": "u"}, "spec": {"parallelism": 4}, "status": status}
    assert JobFacts.from_object(job).missing_pods == missing
