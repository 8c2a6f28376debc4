"""A PipeMorphJob in the queues of a real Kueue: admitted, preempted, and admitted again; and by the
racks in which its pipelines fit."""

from collections.abc import Iterator
from typing import Any

import pytest
from operator_support import DEADLINE, Jobs, condition, manifest, said
from testbed import Cluster, NotYet, wait_for
from testbed.kueue import GROUP, kueue

pytest_plugins = ("operator_fixtures",)
pytestmark = [pytest.mark.cluster, pytest.mark.kueue]

API = f"{GROUP}/v1beta2"
FLAVOR = {"pool": "spot"}
"""Selector that Kueue puts into the pods of a job that it admits: where its quota is."""
RACK, HOST = "testbed.pipemorph.io/rack", "kubernetes.io/hostname"

Object = dict[str, Any]


@pytest.fixture(scope="module", autouse=True)
def real_kueue(cluster: Cluster) -> Iterator[None]:
    with kueue(cluster):
        flavor = {"apiVersion": API, "kind": "ResourceFlavor", "metadata": {"name": "spot"}}
        cluster.apply(flavor | {"spec": {"nodeLabels": FLAVOR}})
        for name, value in (("low", 1), ("high", 100)):
            about = {"apiVersion": API, "kind": "WorkloadPriorityClass", "value": value}
            cluster.apply(about | {"metadata": {"name": name}, "description": name})
        yield
        removed(cluster, "resourceflavors", "spot")


def removed(cluster: Cluster, kind: str, name: str) -> None:
    """Delete an object of Kueue's, and wait for Kueue to let go of it: while it is in use, it is
    held, and later there is no Kueue."""
    cluster.client.delete(kind, name)
    cluster.wait(kind, name, "deleted")


def in_queue(cluster: Cluster, namespace: str, flavor: str, cpus: int, **spec: Any) -> None:
    """A queue with a quota of CPUs of a flavor, which the namespace knows as ``training``."""
    quota = {"name": flavor, "resources": [{"name": "cpu", "nominalQuota": str(cpus)}]}
    groups = [{"coveredResources": ["cpu"], "flavors": [quota]}]
    of_all = {
        "apiVersion": API,
        "kind": "ClusterQueue",
        "metadata": {"name": namespace},
        "spec": {"namespaceSelector": {}, "resourceGroups": groups, **spec},
    }
    local = {
        "apiVersion": API,
        "kind": "LocalQueue",
        "metadata": {"name": "training", "namespace": namespace},
        "spec": {"clusterQueue": namespace},
    }
    cluster.apply([of_all, local])


@pytest.fixture
def queue(cluster: Cluster, jobs: Jobs) -> Iterator[str]:
    """A queue with room for two pods of one CPU each, where a higher priority preempts."""
    preempts = {"withinClusterQueue": "LowerPriority"}
    in_queue(cluster, jobs.namespace, "spot", 2, preemption=preempts)
    yield "training"
    removed(cluster, "clusterqueues", jobs.namespace)


class Racks:
    """Nodes of one CPU each in racks that Kueue knows; their names are ``RACK-NUMBER``, after that
    of the namespace."""

    def __init__(self, jobs: Jobs) -> None:
        self._cluster, self._namespace = jobs.cluster, jobs.namespace

    def add(self, rack: str, *numbers: int) -> None:
        for number in numbers:
            name = f"{self._namespace}-{rack}-{number}"
            labels = {"pool": self._namespace, RACK: rack, HOST: name}
            self._cluster.fake_node(name, labels, {"cpu": "1"})

    def of(self, pods: list[Object]) -> list[str]:
        """The racks of pods, which must be on a node each."""
        nodes = [pod["spec"]["nodeSelector"][HOST] for pod in pods]
        assert len(set(nodes)) == len(nodes), nodes
        return [node.removeprefix(f"{self._namespace}-").partition("-")[0] for node in nodes]


@pytest.fixture
def racks(cluster: Cluster, jobs: Jobs) -> Iterator[Racks]:
    """Racks: two of three nodes each, and a queue whose quota is all of them."""
    name = jobs.namespace
    levels = [{"nodeLabel": RACK}, {"nodeLabel": HOST}]
    topology = {"apiVersion": API, "kind": "Topology", "metadata": {"name": name}}
    flavor = {"apiVersion": API, "kind": "ResourceFlavor", "metadata": {"name": name}}
    of_pool = {"nodeLabels": {"pool": name}, "topologyName": name}
    made = Racks(jobs)
    made.add("a", 0, 1, 2)
    made.add("b", 0, 1, 2)
    cluster.apply([topology | {"spec": {"levels": levels}}, flavor | {"spec": of_pool}])
    in_queue(cluster, name, name, 6)
    yield made
    for kind in ("clusterqueues", "resourceflavors", "topologies"):
        removed(cluster, kind, name)


def queued(name: str, queue: str, priority: str | None = None, **spec: Any) -> Object:
    """Create a job of two ranks with one CPU each, unless ``spec`` says otherwise."""
    gang = {"queue": queue} | ({"priorityClass": priority} if priority else {})
    container = {
        "name": "trainer",
        "image": "none.invalid/trainer",
        "resources": {"requests": {"cpu": "1"}},
    }
    placement = {"gang": {"kueue": gang}} | spec.pop("placement", {})
    template = {"spec": {"schedulerName": "absent", "containers": [container]}}
    return manifest(name, spec.pop("stages", 2), placement=placement, template=template, **spec)


def of_pipelines(name: str, stages: int, replicas: int) -> Object:
    """A job that requires one rack for each of its pipelines."""
    cut = {"stages": stages, "replicas": replicas, "order": ["dp_replicate", "pp"]}
    topology = {"key": RACK, "per": "pipeline", "required": True}
    placement = {"topology": topology}
    return queued(name, "training", stages=stages, parallelism=cut, placement=placement)


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
    # The operator reconciles again, and does not change what Kueue has set.
    jobs.installation.operator.restart()
    jobs.patch("first", {"activeDeadlineSeconds": 7200})
    jobs.wait("first", lambda job: job["status"]["observedGeneration"] == 2)
    running = the_job(jobs, "first", 0)
    assert running["spec"]["suspend"] is False
    assert running["spec"]["template"]["spec"]["nodeSelector"] == FLAVOR
    admitted = workload_of(jobs, running)
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
    # Ranks of the other job gave nothing back: they were stopped.
    jobs.wait("patient", "Queued")
    status = jobs.get("patient")["status"]
    assert [(a["reason"], a["counted"]) for a in status["attempts"]] == [("Evicted", False)]
    assert (status["disruptions"], status["restarts"]) == (1, 0)
    assert condition({"status": status}, "PodsReady") == ("False", "WaitingForAdmission")

    jobs.succeed(important)
    jobs.wait("urgent", "Complete")
    jobs.succeed(jobs.run("patient", 2, attempt=1))
    jobs.wait("patient", "Complete")


def ungated(jobs: Jobs, name: str, count: int) -> list[Object]:
    """The pods of a job's first attempt, once Kueue has assigned a node to each of them."""

    def look() -> list[Object]:
        pods = jobs.pods(name, count)
        if waiting := [
            pod["metadata"]["name"] for pod in pods if pod["spec"].get("schedulingGates")
        ]:
            raise NotYet(f"{waiting} wait for their nodes")
        return pods

    found: list[Object] = wait_for(f"nodes for the pods of {name}", look, DEADLINE)
    return found


def test_each_pipeline_is_given_a_rack(jobs: Jobs, racks: Racks) -> None:
    """Racks are two of three nodes: four pods of which one rack is filled cut a pipeline in two."""
    jobs.apply(of_pipelines("near", stages=2, replicas=2))
    pods = ungated(jobs, "near", 4)
    first, second = racks.of(pods[:2]), racks.of(pods[2:])
    assert {*first} != {*second} and len({*first}) == len({*second}) == 1, (first, second)
    workload = workload_of(jobs, the_job(jobs, "near", 0))
    (pod_set,) = workload["spec"]["podSets"]
    slices = {"podSetSliceRequiredTopology": RACK, "podSetSliceSize": 2}
    assert slices.items() <= pod_set["topologyRequest"].items()
    jobs.succeed(jobs.run("near", 4))
    jobs.wait("near", "Complete")


def test_a_pipeline_that_fits_in_no_rack_waits_for_one(jobs: Jobs, racks: Racks) -> None:
    """The six nodes would hold its four pods, but no rack does."""
    jobs.apply(of_pipelines("wide", stages=4, replicas=1))
    waits = jobs.wait("wide", "Queued")
    assert condition(waits, "PodsReady") == ("False", "WaitingForAdmission")
    assert "Workload" in said(waits, "PodsReady"), "where is said why"
    job = the_job(jobs, "wide", 0)

    def why() -> str:
        found = workload_of(jobs, job)
        if condition(found, "QuotaReserved") != ("False", "Pending"):
            raise NotYet(f"its conditions are {found.get('status', {}).get('conditions')}")
        return said(found, "QuotaReserved")

    message = wait_for("why it waits", why, DEADLINE)
    assert f'topology "{jobs.namespace}"' in message and "any of 1 slice" in message, message
    jobs.pods("wide", 0)

    racks.add("b", 3)
    pods = ungated(jobs, "wide", 4)
    assert racks.of(pods) == ["b"] * 4
    jobs.succeed(jobs.run("wide", 4))
    jobs.wait("wide", "Complete")
