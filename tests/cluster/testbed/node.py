"""Nodes that run real pods: containerd, a bridge network, kube-proxy, a kubelet, a device plugin.

Each node lives in mount, network and process namespaces of its own. Nothing of it can be seen or
stay on the host (sockets in /run, mounts of volumes, containers that outlive containerd, iptables
rules), there can be several, and one is lost by killing one process. What remains on the host is a
bridge and a cgroup, which the next run removes if this one could not.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from ipaddress import IPv4Network
from pathlib import Path

from testbed import node_config, tools
from testbed.api import ApiError, Object
from testbed.cluster import Cluster
from testbed.controlplane import SERVICE_IP_OF_API, ControlPlane
from testbed.errors import TestbedError
from testbed.machine import cgroup_name, cgroup_roots, remove_cgroup
from testbed.processes import Process, output, run
from testbed.project_images import HostMount
from testbed.waiting import NotYet

RESOURCE = "rdma/hca_shared_devices_a"
DEVICES = 8
START_DEADLINE = 90.0
POLICY_QUEUE = 100
"""Number of the kernel's queue with the packets that NetworkPolicies judge."""
_JUDGED = (
    # Established connections and their answers; and packets of the node itself, such as probes.
    ("-m", "conntrack", "--ctstate", "ESTABLISHED,RELATED", "-j", "RETURN"),
    ("-m", "owner", "--uid-owner", "0", "-j", "RETURN"),
    ("-j", "NFQUEUE", "--queue-num", str(POLICY_QUEUE)),
)
"""Rules for packets with the address of the pod behind a Service, and that of the pod they are of.
What is in the queue before anybody reads it is lost."""


@dataclass(frozen=True)
class Site:
    """Settings that the nodes of a cluster have in common.

    `network`: of the nodes and their pods; `host`: the host's address in it, where the cluster's
    DNS is too. `archives`: of the images that every node gets; more may come.
    """

    directory: Path
    plane: ControlPlane
    network: IPv4Network
    host: str
    bridge: str
    mounts: Sequence[HostMount]
    archives: Sequence[Path]


class Node:
    """Node and its programs."""

    def __init__(self, number: int, cluster: Cluster, site: Site) -> None:
        self.name = f"node-{number}"
        self.number = number
        self.cluster, self._site = cluster, site
        self.directory = site.directory / self.name
        network = site.network
        self.address = str(network.network_address + 10 + number)
        self.pods = IPv4Network((int(network.network_address) + (number << 8), 24))
        self.link = f"{site.bridge}n{number}"
        self.cgroup = cgroup_name(self.name)
        self.unhealthy = self.directory / "unhealthy-devices"
        self._holder = Process("the namespaces of " + self.name, [], self._log("namespaces"))
        self._started: list[Process] = []

    def _log(self, name: str) -> Path:
        return self._site.plane.logs / f"{self.name}-{name}.log"

    def run(self, *command: str | Path, deadline: float = 60.0) -> str:
        """Output of a program that runs on this node, such as `ip` or `tc`."""
        return output([*self._enter(), *command], deadline=deadline)

    def _enter(self) -> list[str]:
        inside = ["--mount", "--net", "--pid"]
        return ["nsenter", "--target", str(self._init), *inside, "--"]

    @property
    def _init(self) -> int:
        """The first process of the node's process namespace, as the host numbers it."""
        pid = self._holder.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if not children:
            raise TestbedError(f"{self.name} is gone; {self._holder.log_end()}")
        return int(children[0])

    def start(self, others: Sequence["Node"]) -> None:
        """Start it; return when it is ready for pods. `others`: nodes that are one hop away."""
        self.directory.mkdir(parents=True)
        self.unhealthy.write_text("")
        self._make_cgroup()
        self._make_namespaces()
        self._make_network(others)
        self._write_configuration()
        self.containerd = self._program("containerd", "containerd", "--config", self._containerd)
        self.containerd.start()
        self.containerd.wait_until("its socket", self._containerd_answers, START_DEADLINE)
        for archive in self._site.archives:
            self.import_image(archive)
        self.proxy = self._program(
            "kube-proxy", tools.find("kube-proxy"), f"--config={self._proxy_config}"
        )
        self.kubelet = self._program(
            "kubelet",
            tools.find("kubelet"),
            f"--config={self._kubelet_config}",
            f"--kubeconfig={self._kubelet_kubeconfig}",
            f"--hostname-override={self.name}",
            f"--node-ip={self.address}",
        )
        self.kubelet.start()
        self.kubelet.wait_until("its node to be registered", self._object, START_DEADLINE)
        # Not earlier: it waits a limited time for its node, and ends if that comes later.
        self.proxy.start()
        self.device_plugin = self._program(
            "device-plugin",
            tools.find("device-plugin"),
            f"-resource={RESOURCE}",
            f"-count={DEVICES}",
            f"-sick={self.unhealthy}",
            "-file=/dev/null:/dev/infiniband/uverbs0",
            "-file=/dev/null:/dev/infiniband/rdma_cm",
        )
        self.device_plugin.start()
        self.kubelet.wait_until("its node to be ready", self._ready, START_DEADLINE)
        # A node is ready without them, and what a pod sends before them is never answered.
        self.proxy.wait_until("its rules for the API server", self._reaches_the_api, START_DEADLINE)

    def _program(self, name: str, *command: str | Path) -> Process:
        process = Process(f"{name} of {self.name}", [*self._enter(), *command], self._log(name))
        self._started.append(process)
        return process

    def _make_cgroup(self) -> None:
        # One below which everything of this node's pods is, so that it can be found and removed.
        for root in cgroup_roots():
            folder = root / self.cgroup
            folder.mkdir(exist_ok=True)
            for name in ("cpuset.cpus", "cpuset.mems"):
                # In cgroup v1 a new cpuset is empty, and no process may enter it.
                if (folder / name).exists() and not (root / "cgroup.controllers").exists():
                    (folder / name).write_text((root / name).read_text())

    def _make_namespaces(self) -> None:
        for name in ("var-lib", "var-log"):
            (self.directory / name).mkdir()
        script = f"""
            set -eu
            mount -t proc proc /proc
            mount -t tmpfs tmpfs /run
            mkdir /run/lock
            mount --bind {self.directory}/var-lib /var/lib
            mount --bind {self.directory}/var-log /var/log
            mount --make-rshared /
            ip link set lo up
            sysctl -q -w net.ipv4.ip_forward=1
            # Without it, traffic between pods of one bridge passes kube-proxy's rules by.
            if [ -e /proc/sys/net/bridge/bridge-nf-call-iptables ]; then
                sysctl -q -w net.bridge.bridge-nf-call-iptables=1
            fi
            touch /run/ready
            sleep infinity &
            wait
        """
        unshare = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child=SIGKILL"]
        self._holder.command = [*unshare, "bash", "-c", script]
        self._holder.start()

        def ready() -> bool:
            try:
                # Seen through the process's own root: its /run is not the host's.
                return Path(f"/proc/{self._init}/root/run/ready").exists()
            except (TestbedError, FileNotFoundError) as error:
                raise NotYet(str(error)) from None

        self._holder.wait_until("its namespaces", ready, 60.0)

    def _make_network(self, others: Sequence["Node"]) -> None:
        pair = ["type", "veth", "peer", "name", "eth0", "netns", str(self._init)]
        output(["ip", "link", "add", self.link, *pair])
        output(["ip", "link", "set", self.link, "master", self._site.bridge, "up"])
        self.run("ip", "address", "add", f"{self.address}/24", "dev", "eth0")
        self.run("ip", "link", "set", "eth0", "up")
        self.run("ip", "route", "add", "default", "via", self._site.host)
        # From the host and between the nodes, each pod is one hop behind its node.
        output(["ip", "route", "add", str(self.pods), "via", self.address])
        for other in others:
            self.run("ip", "route", "add", str(other.pods), "via", other.address)
            other.run("ip", "route", "add", str(self.pods), "via", self.address)

    def _write(self, name: str, content: str) -> Path:
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        return path

    def _write_configuration(self) -> None:
        site, plane = self._site, self._site.plane
        network = self._write("cni/10-testbed.conflist", node_config.cni(self.pods))
        example = json.loads(self.run("ctr", "oci", "spec"))
        base = self._write("container.json", node_config.container(example, site.mounts))
        config = node_config.containerd(network.parent, base)
        self._containerd = self._write("containerd.toml", config)
        user = f"system:node:{self.name}"
        self._kubelet_kubeconfig = plane.kubeconfig(self.name, user, ["system:nodes"])
        serving = plane.authority.issue(
            f"{self.name}-serving", user, groups=["system:nodes"], hosts=[self.address]
        )
        authority = plane.authority.pair.certificate
        config = node_config.kubelet(authority, serving, site.host, self.cgroup)
        self._kubelet_config = self._write("kubelet.yaml", config)
        access = plane.kubeconfig(f"{self.name}-proxy", "system:kube-proxy")
        config = node_config.proxy(self.name, access, site.network)
        self._proxy_config = self._write("kube-proxy.yaml", config)

    def _containerd_answers(self) -> bool:
        done = run([*self._enter(), "ctr", "version"])
        if done.returncode != 0:
            raise NotYet(done.stderr.strip())
        return True

    def _object(self) -> Object:
        try:
            return self.cluster.client.get("nodes", self.name)
        except (ApiError, OSError) as error:
            raise NotYet(f"the kubelet has not registered its node: {error}") from None

    def _ready(self) -> bool:
        status = self._object()["status"]
        ready = [c for c in status.get("conditions", []) if c["type"] == "Ready"]
        if not ready or ready[0]["status"] != "True":
            raise NotYet(f"found the condition {ready}")
        devices = status.get("allocatable", {}).get(RESOURCE)
        if devices != str(DEVICES):
            raise NotYet(f"found {devices} of {RESOURCE}, expected {DEVICES}")
        return True

    def _reaches_the_api(self) -> bool:
        connect = f"exec 3<>/dev/tcp/{SERVICE_IP_OF_API}/443"
        done = run([*self._enter(), "timeout", "5", "bash", "-c", connect])
        if done.returncode != 0:
            said = done.stderr.strip() or f"exit status {done.returncode}"
            raise NotYet(f"no connection to {SERVICE_IP_OF_API}:443: {said}")
        return True

    def import_image(self, archive: Path) -> None:
        self.run("ctr", "--namespace=k8s.io", "images", "import", archive, deadline=300.0)

    def veth_of(self, namespace: str, pod: str) -> str:
        """The node's end of a pod's link, for `tc`."""
        index = self.cluster.kubectl(
            "exec", f"--namespace={namespace}", pod, "--", "cat", "/sys/class/net/eth0/iflink"
        )
        for link in json.loads(self.run("ip", "-j", "link")):
            if link["ifindex"] == int(index):
                name: str = link["ifname"]
                return name
        raise TestbedError(f"found no link {index.strip()} of pod {namespace}/{pod} on {self.name}")

    @contextmanager
    def enforcing(self) -> Iterator[None]:
        """Enforce NetworkPolicies on all pods of this node, as a CNI that can."""
        engine = self._program(
            "netpol",
            tools.find("netpol"),
            f"--kubeconfig={self.cluster.admin}",
            f"--node={self.name}",
            f"--queue={POLICY_QUEUE}",
        )

        def reads() -> bool:
            queues = self.run("cat", "/proc/net/netfilter/nfnetlink_queue").splitlines()
            return str(POLICY_QUEUE) in [line.split()[0] for line in queues]

        with ExitStack() as cleaning:
            cleaning.callback(engine.stop)
            engine.start()
            engine.wait_until("its queue", reads, START_DEADLINE)
            table = ("iptables", "--wait", "-t", "mangle")
            for rule in _JUDGED:
                self.run(*table, "-A", "POSTROUTING", *rule)
                cleaning.callback(self.run, *table, "-D", "POSTROUTING", *rule)
            yield

    def kill(self) -> None:
        """Lose the node, as by a power cut: every process of it is gone at once."""
        self._holder.stop(grace=0)
        for process in self._started:
            process.stop(grace=0)
        # Its connections, which no peer answers any more, would hold the link for minutes.
        run(["ip", "link", "delete", self.link])

    def stop(self) -> None:
        self.kill()
        for root in cgroup_roots():
            remove_cgroup(root / self.cgroup)

    @property
    def processes(self) -> list[Process]:
        return [self._holder, *self._started]
