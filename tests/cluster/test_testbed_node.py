"""The node level of the testbed runs real pods: own addresses, names, devices, and losses."""

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from testbed import NotYet, TestbedError, wait_for
from testbed.api import Object
from testbed.images import BASE
from testbed.machine import CGROUP_PREFIX, cgroup_roots, remove_leftovers
from testbed.node import DEVICES, RESOURCE
from testbed.node_cluster import LOST_AFTER, NodeCluster

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


def test_a_pod_runs_with_an_address_of_its_own(
    node_cluster: NodeCluster, node_namespace: str
) -> None:
    command = ["sh", "-c", "echo hello from $(cat /etc/hostname); sleep 600"]
    (address,) = start(node_cluster, node_namespace, pod("one", command))
    assert address.rpartition(".")[0] == str(node_cluster.nodes[0].pods).rpartition(".")[0]
    assert address in in_pod(node_cluster, node_namespace, "one", "ip", "address")

    def logs() -> str:
        return node_cluster.kubectl("logs", f"--namespace={node_namespace}", "one")

    # Ready is who has been started, whether it has run since or not.
    assert wait_for("what the pod says", lambda: logs() or None, 60.0) == "hello from one\n"


def test_pods_reach_each_other_by_address_name_and_service(
    node_cluster: NodeCluster, node_namespace: str
) -> None:
    serve = "mkdir /tmp/w; echo served >/tmp/w/index.html; httpd -f -p 8080 -h /tmp/w"
    server = pod("server", ["sh", "-c", serve])
    server["spec"] |= {"hostname": "server", "subdomain": "peers"}
    address, _ = start(node_cluster, node_namespace, server, pod("client"))
    spec = {"selector": {"app": "server"}, "ports": [{"port": 8080}]}
    for name, kind in (("peers", {"clusterIP": "None"}), ("virtual", {})):
        service = {"metadata": {"name": name}, "spec": spec | kind}
        node_cluster.client.create("services", service, node_namespace)

    for host in (address, "server.peers", "virtual"):

        def fetched(host: str = host) -> bool:
            request = 'exec 3<>/dev/tcp/$0/8080; printf "GET / HTTP/1.0\\r\\n\\r\\n" >&3; cat <&3'
            try:
                # A connection that was begun before kube-proxy knew the Service is never answered:
                # what is sent again belongs to it, and goes nowhere as well. Another is.
                return "served" in in_pod(
                    node_cluster,
                    node_namespace,
                    "client",
                    *("timeout", "5", "bash", "-c", request, host),
                )
            except TestbedError as error:
                raise NotYet(str(error)) from None

        # A Service takes a moment to reach kube-proxy and the DNS server.
        wait_for(f"an answer from {host}", fetched, 60.0, interval=0.5)


def test_a_pod_reaches_the_api_server_as_its_service_account(
    node_cluster: NodeCluster, node_namespace: str
) -> None:
    start(node_cluster, node_namespace, pod("caller"))
    folder = "/var/run/secrets/kubernetes.io/serviceaccount"
    token = in_pod(node_cluster, node_namespace, "caller", "cat", f"{folder}/token")
    review = node_cluster.token_review(token)
    assert review["user"]["username"] == f"system:serviceaccount:{node_namespace}:default"
    connect = "exec 3<>/dev/tcp/kubernetes.default/443 && echo connected"
    assert in_pod(node_cluster, node_namespace, "caller", "bash", "-c", connect) == "connected\n"


def test_a_pod_gets_the_devices_it_asks_for_and_no_more_than_there_are(
    node_cluster: NodeCluster, node_namespace: str
) -> None:
    start(node_cluster, node_namespace, pod("some", devices=3))
    given = in_pod(node_cluster, node_namespace, "some", "env")
    found = re.search(r"^TESTBED_DEVICES=(.+)$", given, re.MULTILINE)
    assert found is not None and len(set(found.group(1).split(","))) == 3
    files = in_pod(node_cluster, node_namespace, "some", "ls", "/dev/infiniband")
    assert files.split() == ["rdma_cm", "uverbs0"]
    node_cluster.client.create("pods", pod("more", devices=DEVICES - 2), node_namespace)
    refused = "PodScheduled=False"
    more = node_cluster.wait("pods", "more", refused, namespace=node_namespace)
    # What its event says too, but that is sent later, by itself.
    (why,) = [c["message"] for c in more["status"]["conditions"] if c["type"] == "PodScheduled"]
    assert f"Insufficient {RESOURCE}" in why
    node_cluster.client.delete("pods", "some", node_namespace)
    node_cluster.wait("pods", "more", "Ready", namespace=node_namespace)


def test_a_sick_device_is_not_offered(node_cluster: NodeCluster) -> None:
    node = node_cluster.nodes[0]

    def offered(count: int) -> bool:
        status = node_cluster.client.get("nodes", node.name)["status"]
        if status["allocatable"][RESOURCE] != str(count):
            raise NotYet(f"found {status['allocatable'][RESOURCE]} devices, expected {count}")
        return True

    node.sick.write_text("device-0 device-5")
    wait_for("two sick devices to go", lambda: offered(DEVICES - 2), 120.0)
    node.sick.write_text("")
    wait_for("them to come back", lambda: offered(DEVICES), 120.0)


def test_a_link_of_one_pod_can_be_limited(node_cluster: NodeCluster, node_namespace: str) -> None:
    size = 250_000
    fill = f"mkdir /tmp/w; head -c {size} /dev/zero >/tmp/w/zeros; httpd -f -p 8080 -h /tmp/w"
    source = pod("source", ["bash", "-c", fill])
    probe = {"tcpSocket": {"port": 8080}, "periodSeconds": 1, "timeoutSeconds": 10}
    source["spec"]["containers"][0]["readinessProbe"] = probe
    address, _ = start(node_cluster, node_namespace, source, pod("slow"))

    def seconds() -> float:
        """By the pod's own clock: to get a command there takes up to seconds as well."""
        request = (
            "begin=$EPOCHREALTIME; "
            'exec 3<>/dev/tcp/$0/8080; printf "GET /zeros HTTP/1.0\\r\\n\\r\\n" >&3; wc -c <&3; '
            "echo $begin $EPOCHREALTIME"
        )
        said = in_pod(node_cluster, node_namespace, "slow", "bash", "-c", request, address)
        got, begin, end = said.split()
        assert int(got) > size
        return float(end) - float(begin)

    node = node_cluster.nodes[0]
    veth = node.veth_of(node_namespace, "slow")
    # 2 s for 2 Mbit, less what a burst may be. Without a limit a machine that stalls may take as
    # long, but not each time.
    least = 1.5
    wait_for("a transfer that nothing limits", lambda: seconds() < least, 60.0)
    limit = ["rate", "1mbit", "burst", "16kb", "latency", "50ms"]
    node.run("tc", "qdisc", "add", "dev", veth, "root", "tbf", *limit)
    assert seconds() > least
    node.run("tc", "qdisc", "delete", "dev", veth, "root")


def test_pods_and_devices_outlive_a_restart_of_the_kubelet(
    node_cluster: NodeCluster, node_namespace: str
) -> None:
    start(node_cluster, node_namespace, pod("before", devices=1))
    node_cluster.nodes[0].restart_kubelet()
    found = node_cluster.wait("pods", "before", "Ready", namespace=node_namespace)
    assert found["status"]["containerStatuses"][0]["restartCount"] == 0
    start(node_cluster, node_namespace, pod("after", devices=1))


def test_a_second_node_takes_pods_and_can_be_lost(
    node_cluster: NodeCluster, node_namespace: str
) -> None:
    second = node_cluster.add_node()
    far, near = pod("far"), pod("near")
    far["spec"]["nodeName"] = second.name
    near["spec"]["nodeName"] = node_cluster.nodes[0].name
    address, _ = start(node_cluster, node_namespace, far, near)

    def answered() -> bool:
        try:
            in_pod(node_cluster, node_namespace, "near", "ping", "-c1", "-W5", address)
        except TestbedError as error:
            raise NotYet(str(error)) from None
        return True

    wait_for("an answer from the pod of the other node", answered, 60.0)
    second.kill()
    # The node controller must be the one that notices.
    node_cluster.wait("nodes", second.name, "Ready=Unknown", LOST_AFTER + 120.0)
    node_cluster.remove_node(second)


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
