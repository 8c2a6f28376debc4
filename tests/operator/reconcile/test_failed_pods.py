"""Pods that end otherwise than by an exit code of their trainer: named, counted by their kind, made
again with delays, and not for ever. Bodies are as kubelets 1.31 to 1.37 write them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from operator_objects import CONFIG, RunningJob, World, body, failed, job_facts

from pipemorph_operator import names
from pipemorph_operator.kube.object_facts import PodFacts, explain_pending_pod
from pipemorph_operator.policy import attempt_end
from pipemorph_operator.reconcile.completion import LATE_POD_SECONDS
from pipemorph_operator.reconcile.pending_pods import STUCK_SECONDS
from pipemorph_operator.reconcile.reconciler import Reconciler
from pipemorph_operator.resources.attempt_objects import build_batch_job

GPU = "Allocate failed due to requested number of devices unavailable for nvidia.com/gpu"
RUNS: dict[str, Any] = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}


def ended(code: int, message: str = "") -> Any:
    return {
        "terminated": {"exitCode": code, "finishedAt": "2026-01-01T00:01:00Z", "message": message}
    }


def pod(
    index: int, phase: str = "Failed", *, copy: int = 0, spec: Any = None, **status: Any
) -> PodFacts:
    """A pod with ``status``; ``trainer``, ``sidecar`` and ``init`` are states of containers."""
    found = {name: status.pop(name) for name in ("init", "trainer", "sidecar") if name in status}
    groups = {"initContainerStatuses": ["init"], "containerStatuses": ["trainer", "sidecar"]}
    for group, members in groups.items():
        states = [{"name": name, "state": found[name]} for name in members if name in found]
        status |= {group: states} if states else {}
    metadata = {
        "name": f"p{index}-{copy}",
        "uid": f"u{index}-{copy}",
        "annotations": {names.COMPLETION_INDEX: str(index)},
        "finalizers": [names.JOB_FINALIZER],
    }
    about = {"metadata": metadata, "spec": {"nodeName": "n1"} | (spec or {})}
    return PodFacts.from_object(about | {"status": {"phase": phase} | status})


def rejected(reason: str = "UnexpectedAdmissionError", **more: Any) -> PodFacts:
    return pod(1, reason=reason, message=f"Pod was rejected: {GPU}", **more)


def running(**policy: Any) -> World:
    world = World(body(failurePolicy=policy))
    world.running()
    world.jobs[0] = replace(world.jobs[0], replaces_pods=bool(policy), ready=1)
    world.pods = [pod(0, "Running", trainer=RUNS)]
    return world


REJECTED = {"reason": "UnexpectedAdmissionError", "message": GPU}
FETCH = {"init": ended(1, "403 no such bucket")}
DEADLINE = {"reason": "DeadlineExceeded", "message": "active for long", "trainer": ended(143)}
USAGE = 'Usage of EmptyDir volume "x" exceeds the limit "1Gi"'
EVICTED = {"reason": "Evicted", "message": USAGE, "trainer": ended(137)}
FLUSH = {"trainer": ended(0), "sidecar": ended(1, "flush")}
NATIVE = {"initContainers": [{"name": "init", "restartPolicy": "Always"}]}
NODES = {"conditions": [{"type": "DisruptionTarget", "status": "True"}]}


@pytest.mark.parametrize(
    ("status", "reason", "counted", "words"),
    [
        (REJECTED, "PodRejected", False, GPU),
        ({"reason": "OutOfcpu", "message": "too little"}, "PodRejected", False, "OutOfcpu: too"),
        ({"reason": "NodeAffinity"}, "PodRejected", False, "NodeAffinity"),
        ({"reason": "TopologyAffinityError"}, "PodRejected", False, "TopologyAffinityError"),
        (FETCH, "RankFailed", True, "init container init exited with code 1: 403 no such bucket"),
        ({"init": ended(137)}, "RankFailed", True, "init container init exited with code 137"),
        (DEADLINE, "RankFailed", True, "DeadlineExceeded: active"),
        (EVICTED, "RankFailed", True, "Evicted: Usage of EmptyDir"),
        (EVICTED | NODES, "Disrupted", False, "rank 1 (stage 1) on node n1"),
        (FLUSH, "RankFailed", True, "container sidecar exited with code 1 after the trainer had"),
        ({}, "RankFailed", True, "Kubernetes reports no reason"),
        # A native sidecar is stopped with the pod: its code means nothing.
        ({"spec": NATIVE, "init": ended(143), "trainer": ended(3)}, "RankFailed", True, "code 3"),
    ],
)  # fmt: skip
def test_the_end_of_an_attempt_names_what_failed_and_counts_it_as_that(
    status: Any, reason: str, counted: bool, words: str
) -> None:
    world = World(body(failurePolicy={"maxRestarts": 0}))
    world.running()
    world.jobs[0] = job_facts(
        active=0, failed=failed("Job has reached the specified backoff limit")
    )
    world.pods = [pod(0, "Running", trainer=RUNS), pod(1, **status)]
    world.turn()
    (record,) = world.status["attempts"]
    assert (record["reason"], record["counted"]) == (reason, counted)
    assert words in record["message"] and "rank 1 (stage 1)" in record["message"]
    assert world.status["state"] == ("Failed" if counted else "Restarting")


@pytest.mark.parametrize("status", [REJECTED, FETCH, DEADLINE, EVICTED])
def test_a_pod_that_never_trained_stays_with_the_job_controller_and_is_named(status: Any) -> None:
    """The pod waits 10 s, then 20 s, and then the Job fails."""
    world = running(maxRestarts=2)
    world.pods.append(pod(1, **status))
    for _ in range(3):
        assert world.turn().replace_pods == []
    said = world.message("PodsReady")
    assert (
        "1 of 2 ranks are ready; rank 1 (stage 1) on node n1: " in said and "after a delay" in said
    )
    assert world.events.count("PodFailed") == 1 and "PodReplaced" not in world.events
    world.pods.append(pod(1, "Running", copy=1, trainer=RUNS))
    world.turn()
    assert "after a delay" not in world.message("PodsReady"), "another one runs in its place"


@pytest.mark.parametrize("status", [NODES, {"trainer": ended(137)}, EVICTED | NODES])
def test_a_pod_that_is_lost_again_and_again_is_not_replaced_without_end(status: Any) -> None:
    world, replaced = running(maxRestarts=2), 0
    for copy in range(12):
        world.pods = [world.pods[0], pod(1, copy=copy, **status)]
        replaced += len(world.turn().replace_pods)
        world.later(2.0)
    assert replaced == 3
    world.later(600.0)
    assert len(world.turn().replace_pods) == 1, "that was long ago"


def test_nodes_that_reject_every_pod_end_the_job_at_last() -> None:
    world, started, waited = World(body(failurePolicy={"maxRestarts": 0})), [], 0.0
    while world.status.get("state") != "Failed":
        world.settle()
        number = world.status["attempt"]
        if number not in world.jobs:
            world.later(1.0)
            waited += 1.0
            continue
        started.append(number)
        assert len(started) < 20, "it never ends"
        world.jobs[number] = job_facts(number, active=0, failed=failed())
        world.pods = [rejected(copy=number)]
        world.turn()
    assert started == list(range(attempt_end.MAX_REJECTED + 1)) and waited > 60.0
    assert world.condition("Failed") == ("True", "PodRejected")
    assert "the last 8 attempts ended likewise" in world.message("Failed") and GPU in world.message(
        "Failed"
    )
    assert (world.status["restarts"], world.status["disruptions"]) == (0, attempt_end.MAX_REJECTED)


# --- containers next to the trainer ---------------------------------------------------------------


@pytest.mark.parametrize("policy", [{}, {"maxRestarts": 2}])
def test_a_sidecar_that_never_ends_keeps_no_finished_job(policy: Any) -> None:
    world = running(**policy)
    world.jobs[0] = replace(world.jobs[0], ready=0)
    world.turn()
    assert world.status["state"] == "Starting", "too early to list the pods: not known yet"
    world.pods = [pod(i, "Running", trainer=ended(0), sidecar=RUNS) for i in range(2)]
    world.later(STUCK_SECONDS + 1)
    decision = world.turn()
    assert world.status["state"] == "Running", "all ranks have finished; nothing starts"
    assert "rank 0 (stage 0): container sidecar still runs" in world.message("PodsReady")
    assert 0 < (decision.requeue_seconds or 0) <= LATE_POD_SECONDS + 1
    world.later(LATE_POD_SECONDS)
    world.settle()
    assert world.condition("Complete") == ("True", "FinishedWithoutPods")
    assert "rank 1 (stage 1): container sidecar still runs" in world.message("Complete")
    assert world.jobs == {}, "its pods hold devices"


@pytest.mark.parametrize("policy", [{}, {"maxRestarts": 2}])
@pytest.mark.parametrize("job", [{}, {"failing": failed()}, {"active": 0, "failed": failed()}])
@pytest.mark.parametrize("other", [ended(1), ended(137), RUNS])
def test_the_code_of_a_sidecar_repeats_no_finished_training(
    policy: Any, job: Any, other: Any
) -> None:
    world = running(**policy)
    world.jobs[0] = replace(world.jobs[0], ready=0, **job)
    world.later(STUCK_SECONDS + 1)
    world.pods = [
        pod(0, trainer=ended(0), sidecar=ended(1)),
        pod(1, "Running" if other is RUNS else "Failed", trainer=ended(0), sidecar=other),
        # The Job controller has made the first one again.
        pod(0, "Pending", copy=1),
    ]
    world.settle()
    if other is RUNS and not job:
        assert world.status["state"] == "Running"
        return
    assert world.status["state"] == "Complete" and world.status["attempt"] == 0
    assert "container sidecar" in world.message("Complete")


def test_a_finished_rank_in_a_pod_with_one_that_trains_is_ready() -> None:
    world = running(maxRestarts=2)
    world.pods.append(pod(1, "Running", trainer=ended(0), sidecar=RUNS))
    world.later(STUCK_SECONDS + 1)
    world.turn()
    assert (world.status["state"], world.condition("PodsReady")[0]) == ("Running", "True")


def test_a_failing_sidecar_of_the_template_does_not_end_the_others() -> None:
    containers = [{"name": name, "image": "i"} for name in ("trainer", "log", "proxy")]
    given = {"template": {"spec": {"containers": containers}}}
    world = World(body(**given))
    made = world.turn().create_attempt
    assert made is not None
    rules = build_batch_job(made, world.config)["spec"]["podFailurePolicy"]["rules"]
    named = [(r["action"], r.get("onExitCodes", {}).get("containerName")) for r in rules]
    ignored = [("Ignore", "log"), ("Ignore", "proxy")]
    assert named == [("FailJob", None), ("FailJob", "trainer"), *ignored]


# --- pods that do not run yet ---------------------------------------------------------------------


def test_the_newest_warning_or_else_event_shows_what_the_kubelet_does() -> None:
    def event(at: str, kind: str, reason: str, message: str = "x") -> Any:
        return {"type": kind, "reason": reason, "lastTimestamp": at, "message": message}

    scheduled = event("2026-01-01T00:00:01Z", "Normal", "Scheduled")
    mount = event("2026-01-01T00:00:03Z", "Warning", "FailedMount", 'secret "a"\n not found')
    older = event("2026-01-01T00:00:02Z", "Warning", "FailedCreatePodSandBox")
    pulling = event("2026-01-01T00:00:09Z", "Normal", "Pulling", "Pulling image i")
    assert (
        explain_pending_pod([scheduled, mount, older, pulling])
        == 'FailedMount: secret "a" not found'
    )
    assert explain_pending_pod([scheduled, pulling]) == "Pulling: Pulling image i"
    assert explain_pending_pod([]) == ""
    waits = {"waiting": {"reason": "ContainerCreating"}}
    assert pod(0, "Pending", trainer=waits).is_creating
    assert not pod(0, "Pending", trainer={"waiting": {"reason": "ErrImagePull"}}).is_creating
    assert (
        not pod(0, "Pending", spec={"nodeName": None}).is_creating
        and not pod(0, "Running").is_creating
    )


@pytest.mark.parametrize(
    ("spec", "conditions", "words"),
    [
        (
            {"schedulerName": "volcanno"},
            [],
            "no scheduler handles it; schedulerName is volcanno",
        ),
        ({"schedulerName": "s", "nodeName": "n"}, [], ""),
        ({"schedulerName": "s"}, [{"type": "PodScheduled", "status": "True"}], ""),
        (
            {"schedulerName": "s"},
            [{"type": "PodScheduled", "status": "False", "reason": "R"}],
            "R: ",
        ),
    ],
)
def test_a_pod_that_no_scheduler_takes_up_is_named(spec: Any, conditions: Any, words: str) -> None:
    """The gang's scheduler is not installed, or its name is misspelt."""
    status = {"phase": "Pending", "conditions": conditions}
    found = PodFacts.from_object({"metadata": {"name": "p"}, "spec": spec, "status": status})
    assert found.pending_reason == words


@pytest.mark.parametrize("kind", ["secret", "configmap"])
@pytest.mark.parametrize("suffix", ["", "-page"])
def test_an_object_of_the_attempt_that_is_gone_ends_it_when_a_pod_needs_it(
    kind: str, suffix: str
) -> None:
    world = running(maxRestarts=2)
    name = f"{world.jobs[0].name}{suffix}"
    said = f'FailedMount: MountVolume.SetUp failed for volume "a" : {kind} "{name}" not found'
    world.pods.append(replace(pod(1, "Pending"), pending_reason=said.replace(name, "users-own")))
    world.later(STUCK_SECONDS + 1)
    world.turn()
    assert world.status["attempt"] == 0 and "users-own" in world.message("PodsReady")
    world.pods[1] = replace(world.pods[1], pending_reason=said)
    world.turn()
    (record,) = world.status["attempts"]
    assert (record["reason"], record["counted"]) == ("ObjectDeleted", False)
    assert record["message"] == f"{kind} {name} of the attempt was deleted"


def not_started(**metadata: Any) -> RunningJob:
    """The API server of a job whose second pod does not start, or is being deleted."""
    return RunningJob({"phase": "Pending"}, **metadata)


def test_a_pod_that_does_not_start_is_explained_by_its_events() -> None:
    api = not_started()
    asyncio.run(Reconciler(api, lambda: CONFIG, lambda *_: []).reconcile("team", "gpt"))
    assert api.field_selectors == ["involvedObject.uid=u1"]
    said = {each["type"]: each["message"] for each in api.status["conditions"]}
    assert "rank 1 (stage 1): FailedMount: no volume" in said["PodsReady"]


@pytest.mark.parametrize("deletion", ["2020-01-01T00:00:00Z", "2099-01-01T00:00:00Z"])
def test_grace_is_counted_from_first_sight_whatever_the_clocks_say(
    deletion: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = not_started(deletionTimestamp=deletion, deletionGracePeriodSeconds=30)
    reconciler, clock = Reconciler(api, lambda: CONFIG, lambda *_: []), [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    gone = []
    for clock[0] in (500.0, 529.0, 534.9, 535.0):
        asyncio.run(reconciler.reconcile("team", "gpt"))
        gone.append(list(api.removed))
    assert gone == [[], [], [], [("p1", 0)]], "at its own clock's 30 s, and 5 s for its node"
