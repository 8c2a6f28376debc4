"""Pods that end, or do not start, otherwise than by their trainer's exit code, under the real Job
controller; what `kubectl get`, `describe` and events say of them. The test plays the kubelet."""

import time
from typing import Any

import pytest
from operator_support import Jobs, Object, condition, manifest, said
from testbed import wait_for

pytest_plugins = ("operator_fixtures",)
pytestmark = pytest.mark.cluster

DEADLINE = 120.0
GPU = "Pod was rejected: Allocate failed due to devices unavailable for nvidia.com/gpu"
REJECTED = {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": GPU}


def state(code: int | None, message: str = "") -> Object:
    """The state of a container: its end, or that it runs."""
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    if code is None:
        return {"running": {"startedAt": now}}
    ended = {"exitCode": code, "reason": "Error", "message": message}
    return {"terminated": ended | {"startedAt": now, "finishedAt": now}}


def containers(**states: Object) -> list[Object]:
    more: Object = {"image": "i", "imageID": "i", "ready": False, "restartCount": 0}
    return [{"name": name, "state": found} | more for name, found in states.items()]


def report(jobs: Jobs, pod: Object, **status: Any) -> None:
    name = pod["metadata"]["name"]
    jobs.cluster.client.patch(
        "pods", name, {"status": status}, jobs.namespace, subresource="status"
    )


def two_containers(name: str, **spec: Any) -> Object:
    job = manifest(name, stages=2, **spec)
    job["spec"]["template"]["spec"]["containers"].append(
        {"name": "side", "image": "none.invalid/s"}
    )
    return job


@pytest.mark.parametrize("ended", ["rejected", "init"])
def test_pods_that_never_train_are_named_and_few(jobs: Jobs, ended: str) -> None:
    """They were one a second, without a reason."""
    job = manifest("few", stages=2, failurePolicy={"maxRestarts": 2})
    init = {"name": "fetch", "image": "none.invalid/f"}
    job["spec"]["template"]["spec"]["initContainers"] = [init]
    jobs.apply(job)
    first = jobs.pods("few", 2)
    jobs.cluster.fake_pod_running(jobs.namespace, first[0]["metadata"]["name"])
    failed = {"phase": "Failed", "initContainerStatuses": containers(fetch=state(1, "403"))}
    status = REJECTED if ended == "rejected" else failed
    seen: set[str] = set()
    end = time.monotonic() + 30.0
    while time.monotonic() < end:
        for pod in jobs.cluster.client.list("pods", jobs.namespace):
            index = pod["metadata"]["annotations"]["batch.kubernetes.io/job-completion-index"]
            if index == "1" and pod["status"]["phase"] == "Pending":
                seen.add(pod["metadata"]["name"])
                report(jobs, pod, **status)
        time.sleep(0.3)
    assert len(seen) <= 3, "they come without a delay"
    words = GPU if ended == "rejected" else "init container fetch exited with code 1: 403"
    jobs.expect_event("few", words)
    assert "is being deleted" not in str(jobs.get("few")["status"])


def test_a_job_without_restarts_says_which_init_container_failed(jobs: Jobs) -> None:
    job = manifest("init", stages=2)
    job["spec"]["template"]["spec"]["initContainers"] = [
        {"name": "fetch", "image": "none.invalid/f"}
    ]
    jobs.apply(job)
    pods = jobs.pods("init", 2)
    failed = containers(fetch=state(1, "no such bucket"))
    report(jobs, pods[1], phase="Failed", initContainerStatuses=failed)
    found = jobs.wait("init", "Failed")
    assert condition(found, "Failed") == ("True", "RankFailed")
    assert "rank 1 (stage 1): init container fetch exited with code 1: no such bucket" in said(
        found, "Failed"
    )
    row = jobs.row("init")
    assert [row[c] for c in ("STATE", "READY", "REASON")] == ["Failed", "0/2", "RankFailed"]


@pytest.mark.parametrize("restarts", [0, 2])
def test_a_sidecar_that_fails_after_the_end_repeats_nothing(jobs: Jobs, restarts: int) -> None:
    jobs.apply(two_containers("side", failurePolicy={"maxRestarts": restarts}))
    pods = jobs.run("side", 2)
    for pod in pods:
        ended = containers(trainer=state(0), side=state(1))
        report(jobs, pod, phase="Failed", containerStatuses=ended, conditions=[])
    found = jobs.wait("side", "Complete")
    assert found["status"]["attempt"] == 0
    assert "container side exited with code 1" in said(found, "Complete")
    jobs.expect_none_left("side")


def test_a_sidecar_that_runs_on_is_named_and_not_waited_for(jobs: Jobs) -> None:
    jobs.apply(two_containers("mesh"))
    for pod in jobs.run("mesh", 2):
        running = containers(trainer=state(0), side=state(None))
        not_ready = {"type": "Ready", "status": "False"}
        report(jobs, pod, containerStatuses=running, conditions=[not_ready])
    late = "rank 0 (stage 0): container side still runs"
    found = jobs.wait("mesh", lambda job: late in said(job, "PodsReady"))
    assert found["status"]["state"] == "Running"
    found = jobs.wait("mesh", "Complete")
    assert late in said(found, "Complete")


def test_what_keeps_a_container_from_being_created_is_said(jobs: Jobs) -> None:
    jobs.cluster.fake_node(f"{jobs.namespace}-n")
    jobs.apply(manifest("creating", stages=1))
    (pod,) = jobs.pods("creating", 1)
    about = {"metadata": {"name": pod["metadata"]["name"]}}
    target = {"target": {"kind": "Node", "name": f"{jobs.namespace}-n"}}
    client = jobs.cluster.client
    where = client.path("pods", jobs.namespace, pod["metadata"]["name"])
    client.request("POST", f"{where}/binding", about | target)
    words = 'MountVolume.SetUp failed for volume "data" : secret "missing" not found'
    event = {
        "metadata": {"name": "mount"},
        "involvedObject": {"kind": "Pod", "uid": pod["metadata"]["uid"]}
        | {"name": pod["metadata"]["name"], "namespace": jobs.namespace},
        "type": "Warning",
        "reason": "FailedMount",
        "message": words,
        "lastTimestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    client.create("events", event, jobs.namespace)
    jobs.wait("creating", lambda job: f"rank 0 (stage 0): FailedMount: {words}" in str(job))


def test_a_service_and_a_policy_that_are_deleted_under_a_job_come_back(jobs: Jobs) -> None:
    jobs.apply(manifest("bare", stages=1))
    jobs.run("bare", 1)
    client = jobs.cluster.client
    for kind in ("services", "networkpolicies"):
        for each in client.list(kind, jobs.namespace):
            client.delete(kind, each["metadata"]["name"], jobs.namespace)

    def there() -> bool:
        # An edit asks for a turn; otherwise it comes within ten minutes.
        labels = {"metadata": {"labels": {"turn": str(int(time.monotonic()))}}}
        client.patch("pipemorphjobs", "bare", labels, jobs.namespace)
        return bool(
            client.list("services", jobs.namespace)
            and client.list("networkpolicies", jobs.namespace)
        )

    wait_for("both to be there again", there, DEADLINE, interval=5.0)
    jobs.expect_event("bare", "had been deleted; it is made again")


def test_a_child_that_somebody_deletes_is_no_failure_of_the_program(jobs: Jobs) -> None:
    jobs.apply(manifest("child", stages=1))
    jobs.run("child", 1)
    (job,) = jobs.batch_jobs("child")
    jobs.cluster.client.delete("jobs", job["metadata"]["name"], jobs.namespace)
    jobs.pods("child", 1, attempt=1)
    status = jobs.get("child")["status"]
    assert (status["restarts"], status["disruptions"]) == (0, 1)
