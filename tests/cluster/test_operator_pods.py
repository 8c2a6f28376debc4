"""Pods that end, or do not start, otherwise than by their trainer's exit code, under the real Job
controller; output of `kubectl get` and `describe`, and events. The test plays the kubelet."""

import time
from typing import Any

import pytest
from operator_support import Jobs, Object, manifest

pytest_plugins = ("operator_fixtures",)
pytestmark = pytest.mark.cluster

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


@pytest.mark.parametrize("ended", ["rejected", "init"])
def test_pods_that_never_train_are_named_and_few(jobs: Jobs, ended: str) -> None:
    """Failing pods are few and have a reason; they were once made every second without one."""
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
