"""A lost pod is taken from the Job controller before that counts it; the attempt goes on."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from operator_objects import CONFIG, T0, RunningJob, World, attempt, body, job_facts, pod

from pipemorph_operator import names
from pipemorph_operator.policy.attempt_end import LOST_SECONDS
from pipemorph_operator.reconcile.decide import decide
from pipemorph_operator.reconcile.decision import ObservedJob
from pipemorph_operator.reconcile.owned_jobs import FailedPods
from pipemorph_operator.reconcile.reconciler import Reconciler
from pipemorph_operator.reconcile.workqueue import WorkQueue
from pipemorph_operator.resources.attempt_objects import build_batch_job


def running(**changes: Any) -> World:
    """A job with a Job that replaces pods, one of which is terminating."""
    world = World(body(failurePolicy={"maxRestarts": 2}))
    world.running()
    world.jobs[0] = job_facts(
        active=1, ready=1, terminating=1, **({"replaces_pods": True} | changes)
    )
    return world


@pytest.mark.parametrize(
    ("found", "counted", "cause"),
    [
        ({"failed": True, "exit_code": 137}, True, "exited with code 137"),
        ({"failed": True, "exit_code": 143}, False, "exited with code 143"),
        ({"failed": True, "exit_code": 137, "disrupted": True}, False, "evicted or preempted"),
        ({"failed": True, "disrupted": True}, False, "evicted or preempted"),
        ({"deletion_deadline": T0 + timedelta(seconds=30)}, False, "the pod is being deleted"),
    ],
)
def test_a_lost_pod_is_replaced_and_reported(
    found: dict[str, Any], counted: bool, cause: str
) -> None:
    world = running()
    world.pods = [pod(0), pod(1, uid="u1", node="n1", **found)]
    decision = world.turn()
    assert [each.uid for each in decision.replace_pods] == ["u1"]
    (record,) = world.status["replacements"]
    assert (record["pod"], record["uid"], record["counted"]) == (1, "u1", counted)
    assert "rank 1 (stage 1)" in record["cause"] and cause in record["cause"], record
    assert world.events[-1] == "PodReplaced"
    assert (world.status["attempt"], world.status["jobUid"]) == (0, "job-0")


def test_losses_are_named_by_the_places_of_the_newest_generation() -> None:
    world = World(body(stages=3, failurePolicy={"maxRestarts": 2}))
    world.running(ranks=3)
    world.jobs[0] = job_facts(stages=3, active=1, ready=1, terminating=2, replaces_pods=True)
    places = [0, 2, 1]
    moved = {"attempt": 0, "generation": 1, "places": places}
    world.body["status"]["recoveries"] = moved
    lost = {"failed": True, "exit_code": 137}
    world.pods = [pod(0), pod(1, uid="u1", **lost), pod(2, uid="u2", node="n2", **lost)]
    world.turn()
    assert [each["cause"] for each in world.status["replacements"]] == [
        "rank 2 (stage 2) in pod 1 exited with code 137",
        "rank 1 (stage 1) in pod 2 on node n2 exited with code 137",
    ]


def test_pods_that_the_job_controller_judges_are_not_touched() -> None:
    world = running()
    world.pods = [
        pod(0, uid="u0", failed=True, exit_code=70),  # The launcher starts no more.
        pod(1, uid="u1", failed=True, exit_code=137, has_job_finalizer=False),  # Counted before.
    ]
    assert world.turn().replace_pods == []
    assert world.status["replacements"] == []


def test_a_job_that_ends_with_a_pod_replaces_none() -> None:
    world = running(replaces_pods=False)
    world.pods = [pod(0), pod(1, uid="u1", failed=True, exit_code=137)]
    decision = world.turn()
    assert decision.replace_pods == [] and world.status["replacements"] == []


def test_a_pod_whose_node_does_not_answer_is_removed_once_its_time_is_over() -> None:
    world = running()
    leaving = pod(
        1, uid="u1", node="n1", is_replaced=True, has_job_finalizer=False,
        deletion_deadline=T0, grace_seconds=30.0,
    )  # fmt: skip

    def looked(sighted: float) -> list[str]:
        # Whatever the times in the pod and the operator's clock are.
        world.now = T0 + timedelta(days=1)
        late = replace(leaving, ending_seconds=sighted)
        seen: ObservedJob = replace(world.observe(), pods=[pod(0)], departing_pods=[late])
        return [each.uid for each in decide(seen, CONFIG).forget_pods]

    assert looked(0.0) == [] == looked(30.0 + LOST_SECONDS - 1)
    assert looked(30.0 + LOST_SECONDS) == ["u1"]


def test_the_job_bounds_what_its_controller_replaces_by_itself() -> None:
    spec = build_batch_job(attempt(failurePolicy={"maxRestarts": 1}), CONFIG)["spec"]
    assert "backoffLimit" not in spec, "the API server sets it with a limit per index"
    assert (spec["backoffLimitPerIndex"], spec["maxFailedIndexes"]) == (2, 0)
    disrupted, exits = spec["podFailurePolicy"]["rules"]
    assert disrupted["action"] == "Ignore" and disrupted["onPodConditions"]
    assert (exits["action"], exits["onExitCodes"]["operator"]) == ("FailJob", "NotIn")
    assert exits["onExitCodes"]["values"] == [0, 75, 137, 143]


def test_status_names_the_pod_before_its_finalizer_goes() -> None:
    """The ingest then knows which pod is to come, when the new pod joins."""
    ended = {"name": "trainer", "state": {"terminated": {"exitCode": 137}}}
    api = RunningJob(
        {"phase": "Failed", "containerStatuses": [ended]},
        terminating=0,
        finalizers=[names.JOB_FINALIZER, "example.com/other"],
    )
    seen: list[list[str]] = []

    async def arrives(verb: str, url: str) -> None:
        if verb == "patch":
            seen.append([each["uid"] for each in api.status["replacements"]])

    api.arrives = arrives  # type: ignore[method-assign]
    reconciler = Reconciler(
        api, lambda: CONFIG, lambda *_: [], failed=lambda *of: of == ("team", "gpt", 0)
    )
    asyncio.run(reconciler.reconcile("team", "gpt"))
    assert seen == [["u1"]]
    assert api.field_selectors == ["involvedObject.uid=job-0,reason=FailedCreate"], (
        "why it lacks a pod"
    )
    ((url, changed),) = api.patched
    assert url.endswith("/namespaces/team/pods/p1")
    assert changed == {
        "uid": "u1",
        "labels": {"pipemorph.io/replaced": "true"},
        "$deleteFromPrimitiveList/finalizers": ["batch.kubernetes.io/job-tracking"],
    }


async def test_failed_pods_are_known_by_attempt_until_they_are_replaced() -> None:
    def failed_pod(number: int) -> Any:
        labels = {"pipemorph.io/job-name": "gpt", "pipemorph.io/attempt": str(number)}
        return {"metadata": {"labels": labels}}

    queue: WorkQueue[tuple[str, str]] = WorkQueue()
    known = FailedPods(queue)
    known.process_change(("team", "a"), failed_pod(1))
    known.process_change(("team", "a"), failed_pod(1))
    assert await queue.get() == ("team", "gpt")
    assert known.has_failed_pods("team", "gpt", 1) and not known.has_failed_pods("team", "gpt", 0)
    known.process_change(("team", "a"), None)
    assert not known.has_failed_pods("team", "gpt", 1)
