"""A PipeMorphJob in the queues of a real Kueue: admitted, preempted, and admitted again."""

from collections.abc import Iterator
from typing import Any

import pytest
from operator_support import DEADLINE, Jobs, condition, manifest
from testbed import Cluster, NotYet, wait_for
from testbed.kueue import GROUP, kueue

pytest_plugins = ("operator_fixtures",)
pytestmark = [pytest.mark.cluster, pytest.mark.kueue]

API = f"{GROUP}/v1beta2"
FLAVOR = {"pool": "spot"}
"""What Kueue puts into the pods of a job that it admits: where its quota is."""

Object = dict[str, Any]


@pytest.fixture(scope="module", autouse=True)
def real_kueue(cluster: Cluster) -> Iterator[None]:
    if cluster.control_plane is None:
        pytest.skip("Kueue runs beside a control plane of the testbed's own only")
    with kueue(cluster):
        flavor = {"apiVersion": API, "kind": "ResourceFlavor", "metadata": {"name": "spot"}}
        cluster.apply(flavor | {"spec": {"nodeLabels": FLAVOR}})
        for name, value in (("low", 1), ("high", 100)):
            about = {"apiVersion": API, "kind": "WorkloadPriorityClass", "value": value}
            cluster.apply(about | {"metadata": {"name": name}, "description": name})
        yield
        cluster.client.delete("resourceflavors", "spot")


@pytest.fixture
def queue(cluster: Cluster, jobs: Jobs) -> Iterator[str]:
    """A queue with room for two pods of one CPU each, where a higher priority preempts."""
    quota = {"name": "spot", "resources": [{"name": "cpu", "nominalQuota": "2"}]}
    of_all = {
        "apiVersion": API,
        "kind": "ClusterQueue",
        "metadata": {"name": jobs.namespace},
        "spec": {
            "namespaceSelector": {},
            "preemption": {"withinClusterQueue": "LowerPriority"},
            "resourceGroups": [{"coveredResources": ["cpu"], "flavors": [quota]}],
        },
    }
    local = {
        "apiVersion": API,
        "kind": "LocalQueue",
        "metadata": {"name": "training", "namespace": jobs.namespace},
        "spec": {"clusterQueue": jobs.namespace},
    }
    cluster.apply([of_all, local])
    yield "training"
    cluster.client.delete("clusterqueues", jobs.namespace)


def queued(name: str, queue: str, priority: str | None = None) -> Object:
    """Two ranks of one CPU each."""
    gang = {"queue": queue} | ({"priorityClass": priority} if priority else {})
    container = {
        "name": "trainer",
        "image": "none.invalid/trainer",
        "resources": {"requests": {"cpu": "1"}},
    }
    return manifest(
        name,
        stages=2,
        placement={"gang": {"kueue": gang}},
        template={"spec": {"schedulerName": "nobody", "containers": [container]}},
    )


def workload_of(jobs: Jobs, job: Object) -> Object:
    """Kueue's own object of a batch Job."""
    uid = job["metadata"]["uid"]

    def look() -> Object:
        found = jobs.cluster.client.list("workloads", jobs.namespace)
        for each in found:
            if any(owner["uid"] == uid for owner in each["metadata"].get("ownerReferences", ())):
                return each
        raise NotYet(f"workloads: {[each['metadata']['name'] for each in found]}")

    found: Object = wait_for(f"the Workload of {job['metadata']['name']}", look, DEADLINE)
    return found


def the_job(jobs: Jobs, name: str, attempt: int) -> Object:
    """The batch Job of an attempt, once it is the only one."""

    def look() -> Object:
        found = jobs.batch_jobs(name)
        numbers = [job["metadata"]["labels"]["pipemorph.io/attempt"] for job in found]
        if numbers != [str(attempt)]:
            raise NotYet(f"found Jobs of the attempts {numbers}, expected {attempt} alone")
        return found[0]

    made: Object = wait_for(f"the Job of attempt {attempt} of {name}", look, DEADLINE)
    return made


def test_the_next_job_is_admitted_when_there_is_room(jobs: Jobs, queue: str) -> None:
    jobs.apply(queued("first", queue))
    pods = jobs.run("first", 2)
    assert [pod["spec"]["nodeSelector"] for pod in pods] == [FLAVOR] * 2
    admitted = workload_of(jobs, the_job(jobs, "first", 0))
    assert condition(admitted, "Admitted")[0] == "True"
    assert admitted["spec"]["podSets"][0]["count"] == 2

    jobs.apply(queued("second", queue))
    waits = jobs.wait("second", "Queued")
    assert condition(waits, "PodsReady") == ("False", "WaitingForAdmission")
    assert "startTime" not in waits["status"], "the deadline runs while it waits in its queue"
    jobs.pods("second", 0)

    jobs.succeed(pods)
    jobs.wait("first", "Complete")
    jobs.succeed(jobs.run("second", 2))
    jobs.wait("second", "Complete")


def test_preempted_by_a_more_important_job_and_admitted_again(jobs: Jobs, queue: str) -> None:
    jobs.apply(queued("patient", queue, "low"))
    jobs.run("patient", 2)
    jobs.apply(queued("urgent", queue, "high"))
    important = jobs.run("urgent", 2)
    # Nothing was given back by the other one's ranks: they were stopped.
    jobs.wait("patient", "Queued")
    status = jobs.get("patient")["status"]
    assert [(a["reason"], a["counted"]) for a in status["attempts"]] == [("Evicted", False)]
    assert (status["disruptions"], status["restarts"]) == (1, 0)
    assert condition({"status": status}, "PodsReady") == ("False", "WaitingForAdmission")

    jobs.succeed(important)
    jobs.wait("urgent", "Complete")
    jobs.succeed(jobs.run("patient", 2, attempt=1))
    jobs.wait("patient", "Complete")


def test_a_queue_that_is_held_admits_nothing_and_a_suspended_job_gives_its_quota_back(
    jobs: Jobs, queue: str
) -> None:
    jobs.apply(queued("held", queue))
    jobs.run("held", 2)
    jobs.patch("held", {"suspend": True})
    jobs.wait("held", "Suspended")
    jobs.apply(queued("other", queue))
    pods = jobs.run("other", 2)
    jobs.patch("held", {"suspend": False})
    jobs.wait("held", "Queued")
    jobs.succeed(pods)
    jobs.wait("other", "Complete")
    jobs.succeed(jobs.run("held", 2, attempt=1))
    jobs.wait("held", "Complete")
    status = jobs.get("held")["status"]
    assert (status.get("disruptions", 0), status.get("restarts", 0)) == (0, 0)
