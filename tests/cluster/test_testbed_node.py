"""What other tests on nodes do not show of the testbed: its devices, and what it leaves behind."""

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from testbed import NotYet, wait_for
from testbed.api import Object
from testbed.images import BASE
from testbed.machine import CGROUP_PREFIX, cgroup_roots, remove_leftovers
from testbed.node import DEVICES, RESOURCE
from testbed.node_cluster import NodeCluster

pytestmark = pytest.mark.node


def pod(name: str, command: Sequence[str] = ("sleep", "600"), devices: int = 0) -> Object:
    container: Object = {
        "name": "main",
        "image": BASE,
        "imagePullPolicy": "Never",
        "command": list(command),
    }
    if devices:
        limits = {RESOURCE: str(devices)}
        container["resources"] = {"limits": limits, "requests": limits}
    return {
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {"terminationGracePeriodSeconds": 0, "containers": [container]},
    }


def start(nodes: NodeCluster, namespace: str, *pods: Object) -> list[str]:
    """Create pods, wait until each is ready, and return their addresses."""
    for each in pods:
        nodes.client.create("pods", each, namespace)
    names = [each["metadata"]["name"] for each in pods]
    ready = [nodes.wait("pods", name, "Ready", namespace=namespace) for name in names]
    return [each["status"]["podIP"] for each in ready]


def in_pod(nodes: NodeCluster, namespace: str, pod: str, *command: str) -> str:
    return nodes.kubectl("exec", f"--namespace={namespace}", pod, "--", *command)


def test_devices_are_given_out_as_asked_and_outlive_the_kubelet(
    node_cluster: NodeCluster, node_namespace: str
) -> None:
    node = node_cluster.nodes[0]
    start(node_cluster, node_namespace, pod("some", devices=3))
    given = in_pod(node_cluster, node_namespace, "some", "env")
    found = re.search(r"^TESTBED_DEVICES=(.+)$", given, re.MULTILINE)
    assert found is not None and len(set(found.group(1).split(","))) == 3
    files = in_pod(node_cluster, node_namespace, "some", "ls", "/dev/infiniband")
    assert files.split() == ["rdma_cm", "uverbs0"]

    node.sick.write_text("device-0 device-5")
    wait_for("two sick devices to go", lambda: offered(node_cluster, DEVICES - 2), 120.0)
    node.sick.write_text("")
    wait_for("them to come back", lambda: offered(node_cluster, DEVICES), 120.0)

    node.restart_kubelet()
    some = node_cluster.wait("pods", "some", "Ready", namespace=node_namespace)
    assert some["status"]["containerStatuses"][0]["restartCount"] == 0
    node_cluster.client.create("pods", pod("more", devices=DEVICES - 2), node_namespace)
    more = node_cluster.wait("pods", "more", "PodScheduled=False", namespace=node_namespace)
    # What its event says too, but that is sent later, by itself.
    (why,) = [c["message"] for c in more["status"]["conditions"] if c["type"] == "PodScheduled"]
    assert f"Insufficient {RESOURCE}" in why
    node_cluster.client.delete("pods", "some", node_namespace)
    node_cluster.wait("pods", "more", "Ready", namespace=node_namespace)


def offered(nodes: NodeCluster, count: int) -> bool:
    status = nodes.client.get("nodes", nodes.nodes[0].name)["status"]
    if status["allocatable"][RESOURCE] != str(count):
        raise NotYet(f"found {status['allocatable'][RESOURCE]} devices, expected {count}")
    return True


@pytest.mark.usefixtures("node_cluster")  # only where there may be one
def test_what_a_killed_run_leaves_is_removed_by_the_next(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import sys, time
        from pathlib import Path
        from testbed.node_cluster import NodeCluster
        with NodeCluster.started(Path(sys.argv[1])) as nodes:
            print(nodes.bridge, flush=True)
            time.sleep(600)
        """
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)},
        text=True,
    )
    assert child.stdout is not None
    with child, child.stdout:
        bridge = child.stdout.readline().strip()
        assert mentioning(tmp_path) and Path("/sys/class/net", bridge).exists()
        child.kill()
    wait_for(
        "the end of the node's programs",
        lambda: not mentioning(tmp_path),
        60.0,
        details=lambda: f"found {mentioning(tmp_path)}",
    )
    assert str(tmp_path) not in Path("/proc/self/mounts").read_text()
    remove_leftovers()
    assert not [*Path("/sys/class/net").glob(f"{bridge}*")]
    # Not below them: other cgroups of the machine come and go while they are walked through.
    ours = f"{CGROUP_PREFIX}{child.pid}-*"
    assert not [folder for root in cgroup_roots() for folder in root.glob(ours)]


def mentioning(folder: Path) -> list[str]:
    """The processes that were started with something in a folder."""
    found = []
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        with suppress(OSError):  # it has just ended
            command = (process / "cmdline").read_text(errors="replace")
            if str(folder) in command:
                found.append(command)
    return found
