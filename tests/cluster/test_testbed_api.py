"""The API level of the testbed is a real Kubernetes: its rules hold, and its state lasts."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from testbed import ApiClient, ApiError, Cluster, TestbedError, wait_for
from testbed.api import Object
from testbed.kwok import fake_nodes

pytestmark = pytest.mark.cluster

AUDIENCE = "pipemorph.io/jobs/one"


# On a cluster with nodes, pods must stay ours to report on.
NOBODY = "nobody"


def indexed_job(name: str, completions: int, scheduler: str = NOBODY) -> Object:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {
            "completions": completions,
            "parallelism": completions,
            "completionMode": "Indexed",
            "template": {
                "spec": {
                    "restartPolicy": "Never",
                    "schedulerName": scheduler,
                    "containers": [{"name": "main", "image": "none.invalid/none"}],
                }
            },
        },
    }


def pods_of(cluster: Cluster, namespace: str, job: str, count: int) -> list[Object]:
    def look() -> list[Object] | None:
        found = cluster.client.list("pods", namespace, labels=f"job-name={job}")
        return found if len(found) == count else None

    return wait_for(f"{count} pods of job {job}", look, 120.0)


def pod(name: str) -> Object:
    containers = [{"name": "main", "image": "none.invalid/none"}]
    spec = {"schedulerName": NOBODY, "containers": containers}
    return {"metadata": {"name": name}, "spec": spec}


def test_says_a_version_that_charts_can_ask_for(cluster: Cluster) -> None:
    assert not cluster.version.startswith("v0.")
    assert cluster.version in cluster.kubectl("version")


def test_an_indexed_job_makes_its_pods_and_completes(cluster: Cluster, namespace: str) -> None:
    cluster.apply(indexed_job("four", 4), f"--namespace={namespace}")
    pods = pods_of(cluster, namespace, "four", 4)
    index = "batch.kubernetes.io/job-completion-index"
    assert {p["metadata"]["annotations"][index] for p in pods} == {"0", "1", "2", "3"}
    for each in pods:
        running = cluster.fake_pod_running(namespace, each["metadata"]["name"])
        assert running["status"]["phase"] == "Running"
    cluster.wait("jobs", "four", lambda job: job["status"].get("ready") == 4, namespace=namespace)
    for each in pods:
        cluster.fake_pod_succeeded(namespace, each["metadata"]["name"])
    job = cluster.wait("jobs", "four", "Complete", namespace=namespace)
    assert job["status"]["completedIndexes"] == "0-3"


def test_a_lost_pod_is_replaced_and_a_deleted_job_leaves_nothing(
    cluster: Cluster, namespace: str
) -> None:
    cluster.apply(indexed_job("two", 2), f"--namespace={namespace}")
    lost = pods_of(cluster, namespace, "two", 2)[0]["metadata"]
    cluster.fake_pod_running(namespace, lost["name"])
    cluster.client.delete("pods", lost["name"], namespace)
    cluster.wait("pods", lost["name"], "deleted", namespace=namespace)
    pods_of(cluster, namespace, "two", 2)
    cluster.client.delete("jobs", "two", namespace)
    cluster.wait("jobs", "two", "deleted", namespace=namespace)
    pods_of(cluster, namespace, "two", 0)


def test_a_pod_of_a_node_waits_for_its_kubelet(cluster: Cluster, namespace: str) -> None:
    node = f"node-of-{namespace}"
    cluster.fake_node(node)
    cluster.client.create("pods", pod("bound"), namespace)
    cluster.fake_pod_running(namespace, "bound", node=node)
    cluster.client.delete("pods", "bound", namespace)
    assert "deletionTimestamp" in cluster.client.get("pods", "bound", namespace)["metadata"]
    cluster.fake_pod_gone(namespace, "bound")
    cluster.wait("pods", "bound", "deleted", namespace=namespace)
    cluster.client.delete("nodes", node)


def test_a_user_has_only_the_rights_bound_to_it(cluster: Cluster, namespace: str) -> None:
    user = ApiClient(cluster.kubeconfig("jo@example.org", groups=["readers"]))
    with pytest.raises(ApiError, match='cannot list resource "pods"') as refused:
        user.list("pods", namespace)
    assert refused.value.code == 403
    arguments = ["--clusterrole=view", "--group=readers", f"--namespace={namespace}"]
    cluster.kubectl("create", "rolebinding", "readers", *arguments)
    # The authorizer sees a new binding when its watch delivers it.
    wait_for("the right to list pods", lambda: allowed(user, namespace), 120.0)
    with pytest.raises(ApiError) as refused:
        user.create("pods", pod("mine"), namespace)
    assert refused.value.code == 403


def allowed(user: ApiClient, namespace: str) -> bool:
    try:
        user.list("pods", namespace)
    except ApiError as error:
        if error.code == 403:
            return False
        raise
    return True


def test_a_token_is_good_for_its_audience_and_as_long_as_its_pod(
    cluster: Cluster, namespace: str
) -> None:
    made = cluster.client.create("pods", pod("rank-0"), namespace)
    token = cluster.service_account_token(namespace, "default", AUDIENCE, bound_pod="rank-0")

    status = cluster.token_review(token, [AUDIENCE])
    assert status["authenticated"] and status["audiences"] == [AUDIENCE]
    assert status["user"]["username"] == f"system:serviceaccount:{namespace}:default"
    pod_uid = status["user"]["extra"]["authentication.kubernetes.io/pod-uid"]
    assert pod_uid == [made["metadata"]["uid"]]

    other = cluster.token_review(token, ["pipemorph.io/jobs/two"])
    assert not other.get("authenticated") and "audience" in other["error"]
    # Nor is it good for the API server itself.
    assert not cluster.token_review(token).get("authenticated")

    cluster.client.delete("pods", "rank-0", namespace)
    wait_for(
        "the token of a deleted pod to be refused",
        lambda: not cluster.token_review(token, [AUDIENCE]).get("authenticated"),
        90.0,  # the API server remembers its answers for 10 s
    )


def test_a_token_is_refused_after_its_end(own_cluster: Cluster, namespace: str) -> None:
    token = own_cluster.service_account_token(namespace, "default", AUDIENCE)
    assert own_cluster.token_review(token, [AUDIENCE])["authenticated"]
    late = own_cluster.token_review(own_cluster.expired(token), [AUDIENCE])
    assert not late.get("authenticated") and "expired" in late["error"]


def test_a_service_account_signs_in_with_its_token(cluster: Cluster, namespace: str) -> None:
    token = cluster.service_account_token(namespace, "default")
    config = cluster.kubeconfig_of_token(token)
    name = cluster.kubectl("auth", "whoami", "-o", "name", kubeconfig=config)
    assert "selfsubjectreview" in name
    with pytest.raises(TestbedError, match=f"system:serviceaccount:{namespace}:default"):
        cluster.kubectl("get", "pods", f"--namespace={namespace}", kubeconfig=config)


@pytest.mark.parametrize("grace", [10.0, 0.0], ids=["politely", "by a crash"])
def test_what_was_written_survives_a_restart_of_the_api_server(
    own_cluster: Cluster, namespace: str, grace: float
) -> None:
    own_cluster.client.create(
        "configmaps", {"metadata": {"name": "kept"}, "data": {"epoch": "7"}}, namespace
    )
    own_cluster.stop_apiserver(grace=grace)
    with pytest.raises(OSError):
        own_cluster.client.get("configmaps", "kept", namespace)
    own_cluster.start_apiserver()
    assert own_cluster.client.get("configmaps", "kept", namespace)["data"] == {"epoch": "7"}
    # The controllers have found it again, too.
    own_cluster.apply(indexed_job("after", 1), f"--namespace={namespace}")
    pods_of(own_cluster, namespace, "after", 1)


def test_helm_installs_upgrades_and_removes_a_chart(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    chart = tmp_path / "chart"
    (chart / "templates").mkdir(parents=True)
    (chart / "Chart.yaml").write_text(
        "apiVersion: v2\nname: probe\nversion: 0.1.0\nkubeVersion: '>=1.20.0-0'\n"
    )
    (chart / "templates" / "map.yaml").write_text(
        textwrap.dedent(
            """
            apiVersion: v1
            kind: ConfigMap
            metadata: {name: "{{ .Release.Name }}"}
            data: {color: "{{ .Values.color }}"}
            """
        )
    )
    where = f"--namespace={namespace}"
    for verb, color in (("install", "red"), ("upgrade", "blue")):
        cluster.helm(verb, "probe", str(chart), where, f"--set=color={color}")
        assert cluster.client.get("configmaps", "probe", namespace)["data"] == {"color": color}
    cluster.helm("uninstall", "probe", where)
    cluster.wait("configmaps", "probe", "deleted", namespace=namespace)


def test_a_missed_deadline_says_what_was_found(cluster: Cluster, namespace: str) -> None:
    cluster.apply(indexed_job("never", 1), f"--namespace={namespace}")
    # What the message must tell, since each is written by itself: the pod, then these.
    cluster.wait("jobs", "never", lambda job: job["status"].get("active") == 1, namespace=namespace)
    wait_for(
        "the event of its pod",
        lambda: "SuccessfulCreate" in cluster.events("jobs", "never", namespace),
        60.0,
    )
    with pytest.raises(TestbedError) as missed:
        cluster.wait("jobs", "never", "Complete", 0.5, namespace=namespace)
    for part in ("Complete of jobs never", "last status", '"active": 1', "SuccessfulCreate"):
        assert part in str(missed.value)


@pytest.mark.usefixtures("own_cluster")  # only where there may be one
def test_nothing_outlives_a_test_run_that_is_killed(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import sys, time
        from pathlib import Path
        from testbed.controlplane import ControlPlane
        plane = ControlPlane(Path(sys.argv[1]))
        plane.start()
        print(*[process.pid for process in plane.processes], flush=True)
        time.sleep(600)
        """
    )
    here = Path(__file__).parent
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(here)},
        text=True,
    )
    assert child.stdout is not None
    with child, child.stdout:
        pids = [int(word) for word in child.stdout.readline().split()]
        assert len(pids) == 3
        child.send_signal(signal.SIGKILL)
    wait_for("the end of the control plane", lambda: not any(map(exists, pids)), 60.0)


def exists(pid: int) -> bool:
    """Whether a process runs: one that ended but that nobody has waited for does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):  # the latter: while it was read
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


@pytest.mark.kwok
def test_kwok_runs_the_pods_of_a_large_job(cluster: Cluster, namespace: str) -> None:
    with fake_nodes(cluster, 5, resources={"rdma/hca_shared_devices_a": "8"}):
        cluster.apply(indexed_job("large", 50, "default-scheduler"), f"--namespace={namespace}")
        done = cluster.wait(
            "jobs", "large", lambda job: job["status"].get("ready") == 50, namespace=namespace
        )
        assert done["status"]["active"] == 50
        cluster.client.delete("jobs", "large", namespace)
        pods_of(cluster, namespace, "large", 0)
