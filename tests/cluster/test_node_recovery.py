"""Losses of a job whose ranks are real pods, and its recovery: ranks, pods, and a node."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime

import pytest
import yaml
from node_support import (
    LAUNCHER,
    ROOT,
    START,
    Jobs,
    Object,
    at_attempt,
    at_iteration,
    condition,
    final_status_written,
    kill_process,
    manifest,
    training_of,
    training_status,
)
from testbed import NotYet, wait_for
from testbed.kueue import GROUP, kueue
from testbed.node import Node
from testbed.node_cluster import NodeCluster
from testbed.waiting import patience

pytest_plugins = ("node_fixtures",)
pytestmark = [pytest.mark.node, pytest.mark.timeout(600)]

GONE = [
    {"key": f"node.kubernetes.io/{key}", "operator": "Exists", "effect": "NoExecute"}
    | {"tolerationSeconds": 1}
    for key in ("unreachable", "not-ready")
]
"""Pods of a node that is lost are deleted at once, and not after five minutes."""
SNAPSHOTS = 4


def test_a_node_is_lost_under_a_running_job(release: NodeCluster, node_jobs: Jobs) -> None:
    """The kubelet stops: its rank trains on for a while, and its end cannot be observed."""
    second = release.add_node()
    template = {
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "tolerations": GONE,
            "containers": [{"name": "trainer"}],
        }
    }
    spread = {"topology": {"key": "kubernetes.io/hostname", "mode": "spread"}}
    node_jobs.apply(
        manifest("lost", stages=2, iterations=100_000, template=template, placement=spread)
    )
    node_jobs.wait("lost", at_iteration(1), START)
    assert {pod["spec"]["nodeName"] for pod in node_jobs.pods("lost")} == {"node-1", second.name}
    second.kubelet.stop(grace=0)
    ended = node_jobs.wait("lost", at_attempt(1), 90.0)
    assert ended["status"]["restarts"] == 0, "the program did nothing wrong"
    assert ended["status"]["disruptions"] == 1
    assert second.name in ended["status"]["attempts"][0]["message"]
    # The cloud's controller does so with a machine that no longer exists.
    release.remove_node(second)

    def on_the_other(job: Object) -> bool:
        """Runs again, in whichever attempt: one may begin before the node is gone."""
        pods = node_jobs.pods("lost", job["status"]["attempt"])
        running = condition(job, "Running").get("status") == "True"
        return running and {pod["spec"].get("nodeName") for pod in pods} == {"node-1"}

    node_jobs.wait("lost", on_the_other, START)
    node_jobs.delete("lost")


@pytest.mark.soak
@pytest.mark.kueue
def test_the_pod_of_a_lost_node_is_replaced_in_its_job(
    release: NodeCluster, node_jobs: Jobs
) -> None:
    """The node stays listed, as after a power cut. One of two pods with a stage each is on it; the
    state of its rank is in the memory of the other one. The job is in a queue of a real Kueue."""
    well = _gpt_of_two_pods("node-well", restarts=0, ranks=1)
    lost = _gpt_of_two_pods("node-lost", restarts=1, ranks=1)
    for job in (well, lost):
        job["spec"]["trainer"]["iterations"] = 150
    lost["spec"]["recovery"] = {"neighbour": True, "snapshotIterations": SNAPSHOTS}
    lost["spec"]["placement"] = {"gang": {"kueue": {"queue": "training"}}}
    pod = lost["spec"]["template"]["spec"]
    (trainer,) = pod["containers"]
    trainer["resources"] = {"requests": {"cpu": "250m"}}
    pod |= {"tolerations": GONE, "terminationGracePeriodSeconds": 1}
    # The test binds pods to nodes.
    pod["schedulerName"] = "absent"

    node_jobs.apply(well)
    undisturbed = node_jobs.wait("node-well", final_status_written, 180.0)
    node_jobs.delete("node-well")

    first, second = release.nodes[0], release.add_node()
    with _in_a_queue(release, node_jobs.namespace):
        node_jobs.apply(lost)
        for index, node in enumerate((first, second)):
            _bind(node_jobs, "node-lost", index, node)
        before = node_jobs.wait("node-lost", at_iteration(5), START)
        batch = _batch_job(node_jobs, before)
        workload = _workload_of(node_jobs, batch)
        pods = node_jobs.pods("node-lost")

        second.kill()
        gone = release.wait("nodes", second.name, "Ready=Unknown", 60.0)
        _bind(node_jobs, "node-lost", 1, first, besides=pods[1]["metadata"]["uid"])
        after = node_jobs.wait("node-lost", _recovered(1), 120.0)
        record = after["status"]["recoveries"]["last"][-1]
        noticed = condition(gone, "Ready")["lastTransitionTime"]
        went_on = datetime.fromisoformat(record["lostAt"]).timestamp() + record["seconds"]
        seconds = went_on - datetime.fromisoformat(noticed).timestamp()
        print(
            f"from the loss to the next finished iteration: {record['seconds']} s; from when the"
            f" node's silence is noticed: {seconds:.1f} s; {record}"
        )
        assert record["replaced"] == [1], record
        assert record["state"] == "neighbour" and record["repeated"] <= SNAPSHOTS, record
        # For an otherwise idle machine. The node's time is in whole seconds.
        assert seconds < 30.0 * patience() + 1.0

        done = node_jobs.wait("node-lost", final_status_written, 180.0)
        for field in ("jobUid", "attempt", "restarts", "disruptions"):
            assert done["status"].get(field) == before["status"].get(field), training_status(done)
        assert _batch_job(node_jobs, done)["metadata"]["uid"] == batch["metadata"]["uid"]
        now = _workload_of(node_jobs, batch)
        assert now["metadata"]["uid"] == workload["metadata"]["uid"]
        assert condition(now, "Evicted") == {}, now["status"]
        assert training_of(done)["loss"] == training_of(undisturbed)["loss"], training_status(done)
        release.remove_node(second)
        node_jobs.delete("node-lost")


@contextmanager
def _in_a_queue(nodes: NodeCluster, namespace: str) -> Iterator[None]:
    """A real Kueue, and the queue ``training`` in the namespace."""
    api = f"{GROUP}/v1beta2"
    quota = {"name": namespace, "resources": [{"name": "cpu", "nominalQuota": "4"}]}
    groups = [{"coveredResources": ["cpu"], "flavors": [quota]}]
    about = {"metadata": {"name": namespace}, "apiVersion": api}
    local = {"name": "training", "namespace": namespace}
    with kueue(nodes):
        nodes.apply(
            [
                about | {"kind": "ResourceFlavor", "spec": {}},
                about
                | {
                    "kind": "ClusterQueue",
                    "spec": {"namespaceSelector": {}, "resourceGroups": groups},
                },
                {
                    "apiVersion": api,
                    "kind": "LocalQueue",
                    "metadata": local,
                    "spec": {"clusterQueue": namespace},
                },
            ]
        )
        yield
        for kind in ("clusterqueues", "resourceflavors"):
            nodes.client.delete(kind, namespace)
            nodes.wait(kind, namespace, "deleted")


def _bind(node_jobs: Jobs, name: str, index: int, node: Node, *, besides: str = "") -> None:
    """Bind the pod of this index to a node, once there is one ``besides`` the one of that UID."""
    client = node_jobs.nodes.client

    def pod() -> Object:
        for each in node_jobs.pods(name):
            number = each["metadata"]["annotations"]["batch.kubernetes.io/job-completion-index"]
            if number == str(index) and each["metadata"]["uid"] != besides:
                return each
        raise NotYet(f"found {[each['metadata']['name'] for each in node_jobs.pods(name)]}")

    found = wait_for(f"pod {index} of {name}", pod, 60.0)["metadata"]["name"]
    target = {"metadata": {"name": found}, "target": {"kind": "Node", "name": node.name}}
    client.request("POST", f"{client.path('pods', node_jobs.namespace, found)}/binding", target)


def _batch_job(node_jobs: Jobs, job: Object) -> Object:
    return node_jobs.nodes.client.get("jobs", job["status"]["jobName"], node_jobs.namespace)


def _workload_of(node_jobs: Jobs, batch: Object) -> Object:
    """Kueue's own object of a batch Job."""
    found = [
        each
        for each in node_jobs.nodes.client.list("workloads", node_jobs.namespace)
        for owner in each["metadata"].get("ownerReferences", ())
        if owner["uid"] == batch["metadata"]["uid"]
    ]
    (workload,) = found
    return workload


def test_killed_ranks_start_again_in_their_pods(node_jobs: Jobs) -> None:
    """Ranks of a pod with two are killed: job and pods stay, and the last loss is right."""
    well = _gpt_of_two_pods("well", restarts=0)
    lost = _gpt_of_two_pods("gpt-lost", restarts=1)
    node_jobs.apply(well)
    undisturbed = node_jobs.wait("well", final_status_written, 180.0)
    node_jobs.delete("well")

    node_jobs.apply(lost)
    before = node_jobs.wait("gpt-lost", at_iteration(5), START)
    pods = node_jobs.pods("gpt-lost")
    assert len(pods) == 2
    _kill_rank(node_jobs, pods[1], 3)
    recovered = node_jobs.wait("gpt-lost", _recovered(1), 90.0)
    (record,) = recovered["status"]["recoveries"]["last"]
    assert record["cause"] == "rank 3 (stage 1, replica 1) was killed by SIGKILL"
    assert (record["pod"], record["rank"], record["generation"]) == (1, 3, 1)
    assert (record["repeated"], record["state"]) == (0, "kept"), training_status(recovered)
    done = node_jobs.wait("gpt-lost", final_status_written, 180.0)
    print(f"from the loss to the next finished iteration: {record['seconds']} s")
    # A limit for a busy machine: on an idle one it takes a few seconds.
    assert record["seconds"] < 30.0 * patience()
    for field in ("jobUid", "attempt", "restarts", "disruptions"):
        assert done["status"][field] == before["status"][field], training_status(done)
    assert [pod["metadata"]["uid"] for pod in node_jobs.pods("gpt-lost")] == [
        pod["metadata"]["uid"] for pod in pods
    ]
    assert training_of(done)["loss"] == training_of(undisturbed)["loss"], training_status(done)
    reasons = _events(node_jobs, "gpt-lost")
    assert {"RanksRestarted", "Recovered"} <= reasons, reasons
    node_jobs.delete("gpt-lost")


def test_a_killed_and_a_deleted_pod_are_replaced_in_their_job(node_jobs: Jobs) -> None:
    """The launcher itself is killed, then a pod deleted: the Job makes one pod again each time."""
    well = _gpt_of_two_pods("pods-well", restarts=0)
    lost = _gpt_of_two_pods("pods-lost", restarts=1)
    for job in (well, lost):
        job["spec"]["trainer"]["iterations"] = 150
        # A replica in each pod: the other one has its state.
        job["spec"]["parallelism"]["order"] = ["dp_replicate", "pp"]
    node_jobs.apply(well)
    undisturbed = node_jobs.wait("pods-well", final_status_written, 240.0)
    node_jobs.delete("pods-well")

    node_jobs.apply(lost)
    before = node_jobs.wait("pods-lost", at_iteration(5), START)
    first = node_jobs.pods("pods-lost")
    job = node_jobs.nodes.client.get("jobs", before["status"]["jobName"], node_jobs.namespace)
    kill_process(node_jobs, first[1], LAUNCHER)
    after = node_jobs.wait("pods-lost", _recovered(1), 120.0)
    record = after["status"]["recoveries"]["last"][-1]
    assert (record["pod"], record["replaced"]) == (1, [1]), record
    assert "exited with code 137" in record["cause"], record
    assert (record["repeated"], record["state"]) == (0, "replica"), record
    second = _running_pods(node_jobs, "pods-lost")
    print(f"killed: {record['seconds']} s, {_since_running(second[1], record)} s after it ran")

    node_jobs.wait("pods-lost", at_iteration(record["wentOnWith"] + 5), START)
    node_jobs.nodes.client.delete("pods", second[0]["metadata"]["name"], node_jobs.namespace)
    after = node_jobs.wait("pods-lost", _recovered(2), 120.0)
    record = after["status"]["recoveries"]["last"][-1]
    assert record["replaced"] == [0], record
    third = _running_pods(node_jobs, "pods-lost")
    print(f"deleted: {record['seconds']} s, {_since_running(third[0], record)} s after it ran")
    assert (record["repeated"], record["state"]) == (0, "replica"), record

    done = node_jobs.wait("pods-lost", final_status_written, 240.0)
    for field in ("jobUid", "attempt", "restarts", "disruptions"):
        assert done["status"][field] == before["status"][field], training_status(done)
    uids = [[pod["metadata"]["uid"] for pod in pods] for pods in (first, second, third)]
    assert uids[0][0] == uids[1][0] and uids[1][1] == uids[2][1], "the other pod stays"
    assert len({uid for pods in uids for uid in pods}) == 4
    now = node_jobs.nodes.client.get("jobs", before["status"]["jobName"], node_jobs.namespace)
    assert now["metadata"]["uid"] == job["metadata"]["uid"]
    assert not now["status"].get("failed"), "the Job controller has counted none"
    assert training_of(done)["loss"] == training_of(undisturbed)["loss"], training_status(done)
    assert {"PodReplaced", "RanksRestarted", "Recovered"} <= _events(node_jobs, "pods-lost")
    node_jobs.delete("pods-lost")


def _running_pods(node_jobs: Jobs, name: str) -> list[Object]:
    return [pod for pod in node_jobs.pods(name) if pod["status"]["phase"] == "Running"]


def _since_running(pod: Object, record: Object) -> float:
    """Seconds from the start of a pod's container to the next finished iteration."""
    (container,) = pod["status"]["containerStatuses"]
    began = datetime.fromisoformat(container["state"]["running"]["startedAt"]).timestamp()
    lost = datetime.fromisoformat(record["lostAt"]).timestamp()
    return float(lost + record["seconds"] - began)


def _gpt_of_two_pods(name: str, *, restarts: int, ranks: int = 2) -> Object:
    """Job with as many replicas of two stages as a pod has ``ranks``."""
    job: Object = yaml.safe_load((ROOT / "examples/kubernetes/gpt.yaml").read_text())
    job["metadata"]["name"] = name
    job["spec"]["parallelism"] = {
        "stages": 2, "replicas": ranks, "layers": 4, "ranksPerPod": ranks,
    }  # fmt: skip
    job["spec"]["schedule"]["microbatches"] = 4
    job["spec"]["trainer"]["iterations"] = 40
    job["spec"]["failurePolicy"] = {"maxRestarts": restarts}
    (trainer,) = job["spec"]["template"]["spec"]["containers"]
    trainer["resources"]["limits"]["memory"] = f"{ranks}Gi"
    return job


def _kill_rank(node_jobs: Jobs, pod: Object, rank: int) -> None:
    # Data loaders would inherit the name.
    kill_process(node_jobs, pod, f"grep -qsx rank-{rank} $p/comm")


def _recovered(count: int) -> Callable[[Object], bool]:
    def found(job: Object) -> bool:
        recoveries = job.get("status", {}).get("recoveries") or {}
        last = recoveries.get("last") or [{}]
        return recoveries.get("count") == count and last[-1].get("seconds") is not None

    return found


def _events(node_jobs: Jobs, name: str) -> set[str]:
    """The reasons of a job's events."""
    found = node_jobs.nodes.client.list("events", node_jobs.namespace)
    return {event["reason"] for event in found if event["involvedObject"]["name"] == name}
