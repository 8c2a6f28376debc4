"""Nodes that run real pods: containerd, a bridge network, kube-proxy, a kubelet, a device plugin.

Each node lives in mount, network and process namespaces of its own. Nothing of it can be seen or
left behind on the host (sockets in /run, mounts of volumes, containers that outlive containerd,
iptables rules), there can be several, and one is lost by killing one process. What remains on the
host is a bridge and a cgroup, which the next run removes if this one could not.
"""

import json
import os
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from ipaddress import IPv4Network, ip_network
from pathlib import Path

import yaml

from testbed import packages, tools
from testbed.api import Object
from testbed.cluster import Cluster
from testbed.controlplane import ControlPlane, Settings
from testbed.errors import TestbedError
from testbed.images import PAUSE, base_images
from testbed.kwok import scheduler
from testbed.processes import Process, output, run
from testbed.project_images import HostMount
from testbed.waiting import NotYet

RESOURCE = "rdma/hca_shared_devices_a"
DEVICES = 8
DOMAIN = "cluster.local"
BRIDGE_PREFIX = "pmtb"
CNI = Path("/usr/lib/cni")
CGROUPS = Path("/sys/fs/cgroup")
START_DEADLINE = 90.0
# A node is given up on after this many seconds without a word; it says something every two.
LOST_AFTER = 16

# A program the node level needs, and the Debian package that brings it.
_NEEDED = {
    "/usr/bin/containerd": "containerd",
    "/usr/bin/ctr": "containerd",
    "/usr/sbin/runc": "runc",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
    "/bin/busybox": "busybox-static",
    "/usr/sbin/iptables": "iptables",
    "/usr/sbin/conntrack": "conntrack",
    "/sbin/ip": "iproute2",
    "/usr/bin/nsenter": "util-linux",
    "/bin/mount": "mount",
    "/sbin/sysctl": "procps",
}


def missing_for_nodes(say: tools.Say, more: Mapping[str, str] | None = None) -> None:
    """Refuse a machine that cannot run pods; install what root on Debian can install.

    `more`: further programs and their packages.
    """
    if sys.platform != "linux":
        raise TestbedError(f"found {sys.platform}, and pods need Linux")
    if os.geteuid() != 0:
        raise TestbedError("found a user who is not root, and namespaces and cgroups need root")
    packages.need(_NEEDED | dict(more or {}), say)


def _free_network() -> IPv4Network:
    """A /16 that no route of this machine touches: nodes in its first /24, pods in the others."""
    routes = json.loads(output(["ip", "-j", "-4", "route", "show", "table", "all"]))
    taken = [
        ip_network(route["dst"], strict=False)
        for route in routes
        if re.match(r"^[\d.]+(/\d+)?$", route["dst"])
    ]
    for second in range(240, 200, -1):
        network = IPv4Network(f"10.{second}.0.0/16")
        if not any(network.overlaps(other) for other in taken):
            return network
    raise TestbedError("found a route into each of 10.201.0.0/16 to 10.240.0.0/16: free one")


def remove_leftovers() -> None:
    """What a run that was killed could not remove: its name holds the process that made it."""
    for link in json.loads(output(["ip", "-j", "link", "show"])):
        found = re.fullmatch(BRIDGE_PREFIX + r"(\d+)(n\d+)?", link["ifname"])
        if found and not Path(f"/proc/{found.group(1)}").exists():
            run(["ip", "link", "delete", link["ifname"]])
    for root in _cgroup_roots():
        for folder in root.glob("pipemorph-testbed-*"):
            if not Path(f"/proc/{folder.name.split('-')[2]}").exists():
                _remove_cgroup(folder)


def _cgroup_roots() -> list[Path]:
    if (CGROUPS / "cgroup.controllers").exists():
        return [CGROUPS]
    return [root for root in CGROUPS.iterdir() if root.is_dir() and not root.is_symlink()]


def _remove_cgroup(folder: Path) -> None:
    for child in sorted((p for p in folder.rglob("*") if p.is_dir()), reverse=True):
        _try_rmdir(child)
    _try_rmdir(folder)


def _try_rmdir(folder: Path) -> None:
    try:
        folder.rmdir()
    except FileNotFoundError:
        pass
    except OSError:
        # A process in it has been killed and is not gone yet; the next run tries again.
        pass


class Node:
    """One node and its programs."""

    def __init__(self, nodes: "NodeCluster", number: int) -> None:
        self.name = f"node-{number}"
        self.number = number
        self.cluster = nodes
        self.directory = nodes.directory / self.name
        network = nodes.network
        self.address = str(network.network_address + 10 + number)
        self.pods = IPv4Network((int(network.network_address) + (number << 8), 24))
        self.link = f"{nodes.bridge}n{number}"
        self.cgroup = f"pipemorph-testbed-{os.getpid()}-{self.name}"
        self.sick = self.directory / "sick-devices"
        self._holder = Process("the namespaces of " + self.name, [], self._log("namespaces"))
        self._started: list[Process] = []

    def _log(self, name: str) -> Path:
        return self.cluster.logs_folder / f"{self.name}-{name}.log"

    def run(self, *command: str | Path, deadline: float = 60.0) -> str:
        """What a program prints that runs on this node, such as `ip` or `tc`."""
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

    def start(self) -> None:
        self.directory.mkdir(parents=True)
        self.sick.write_text("")
        self._make_cgroup()
        self._make_namespaces()
        self._make_network()
        self._write_configuration()
        self.containerd = self._program("containerd", "containerd", "--config", self._containerd)
        self.containerd.start()
        self.containerd.wait_until("its socket", self._containerd_answers, START_DEADLINE)
        for archive in self.cluster.archives:
            self.import_image(archive)
        self.proxy = self._program(
            "kube-proxy", tools.find("kube-proxy"), f"--config={self._proxy_config}"
        )
        self.proxy.start()
        self.kubelet = self._program(
            "kubelet",
            tools.find("kubelet"),
            f"--config={self._kubelet_config}",
            f"--kubeconfig={self._kubelet_kubeconfig}",
            f"--hostname-override={self.name}",
            f"--node-ip={self.address}",
        )
        self.kubelet.start()
        self.device_plugin = self._program(
            "device-plugin",
            tools.find("device-plugin"),
            f"-resource={RESOURCE}",
            f"-count={DEVICES}",
            f"-sick={self.sick}",
            "-file=/dev/null:/dev/infiniband/uverbs0",
            "-file=/dev/null:/dev/infiniband/rdma_cm",
        )
        self.device_plugin.start()
        self.kubelet.wait_until("its node to be ready", self._ready, START_DEADLINE)

    def _program(self, name: str, *command: str | Path) -> Process:
        process = Process(f"{name} of {self.name}", [*self._enter(), *command], self._log(name))
        self._started.append(process)
        return process

    def _make_cgroup(self) -> None:
        # One below which everything of this node's pods is, so that it can be found and removed.
        for root in _cgroup_roots():
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

    def _make_network(self) -> None:
        bridge = self.cluster.bridge
        pair = ["type", "veth", "peer", "name", "eth0", "netns", str(self._init)]
        output(["ip", "link", "add", self.link, *pair])
        output(["ip", "link", "set", self.link, "master", bridge, "up"])
        self.run("ip", "address", "add", f"{self.address}/24", "dev", "eth0")
        self.run("ip", "link", "set", "eth0", "up")
        self.run("ip", "route", "add", "default", "via", self.cluster.host)
        # From the host and between the nodes, each pod is one hop behind its node.
        output(["ip", "route", "add", str(self.pods), "via", self.address])
        for other in self.cluster.nodes:
            self.run("ip", "route", "add", str(other.pods), "via", other.address)
            other.run("ip", "route", "add", str(self.pods), "via", self.address)

    def _write(self, name: str, content: str) -> Path:
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        return path

    def _write_configuration(self) -> None:
        plane, cluster = self.cluster.plane, self.cluster
        network = {
            "cniVersion": "0.4.0",
            "name": "testbed",
            "plugins": [
                {
                    "type": "bridge",
                    "bridge": "cni0",
                    "isGateway": True,
                    "hairpinMode": True,
                    "ipam": {
                        "type": "host-local",
                        "ranges": [[{"subnet": str(self.pods)}]],
                        "routes": [{"dst": "0.0.0.0/0"}],
                    },
                },
                {"type": "portmap", "capabilities": {"portMappings": True}},
            ],
        }
        folder = self._write("cni/10-testbed.conflist", json.dumps(network)).parent
        self._container_base = self._write("container.json", json.dumps(self._base_of_containers()))
        config = _containerd_config(folder, self._container_base)
        self._containerd = self._write("containerd.toml", config)
        node_name = f"system:node:{self.name}"
        self._kubelet_kubeconfig = plane.kubeconfig(self.name, node_name, ["system:nodes"])
        serving = plane.authority.issue(
            f"{self.name}-serving", node_name, groups=["system:nodes"], hosts=[self.address]
        )
        kubelet: Object = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(plane.authority.pair.certificate)},
            },
            "authorization": {"mode": "Webhook"},
            "tlsCertFile": str(serving.certificate),
            "tlsPrivateKeyFile": str(serving.key),
            "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
            "clusterDNS": [cluster.host],
            "clusterDomain": DOMAIN,
            "resolvConf": "",
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self.cgroup}",
            # Refused by default from 1.35 on, and all that some machines have.
            "failCgroupV1": False,
            "failSwapOn": False,
            # The kubelet shares the machine with a whole test run: it must reserve nothing, and
            # must not evict pods when the disk or the memory of that run is full.
            "enforceNodeAllocatable": [],
            "evictionHard": {
                "memory.available": "1Mi",
                "nodefs.available": "0%",
                "nodefs.inodesFree": "0%",
                "imagefs.available": "0%",
            },
            "imageGCHighThresholdPercent": 100,
            "localStorageCapacityIsolation": False,
            # Tests wait for what the kubelet reports.
            "nodeStatusUpdateFrequency": "2s",
            "nodeLeaseDurationSeconds": 8,
            "syncFrequency": "10s",
        }
        self._kubelet_config = self._write("kubelet.yaml", yaml.safe_dump(kubelet))
        proxy: Object = {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "clientConnection": {
                "kubeconfig": str(
                    plane.kubeconfig(f"{self.name}-proxy", "system:kube-proxy"),
                )
            },
            "hostnameOverride": self.name,
            "mode": "iptables",
            "clusterCIDR": str(cluster.network),
            # These are settings of the whole machine, which only its first namespace may change.
            "conntrack": {
                "maxPerCore": 0,
                "min": 0,
                "tcpEstablishedTimeout": "0s",
                "tcpCloseWaitTimeout": "0s",
            },
        }
        self._proxy_config = self._write("kube-proxy.yaml", yaml.safe_dump(proxy))

    def _base_of_containers(self) -> Object:
        """What every container starts from, before its pod has a say: the host's mounts."""
        base: Object = json.loads(self.run("ctr", "oci", "spec"))
        # The limit on open files would be that of an example, not this machine's.
        base["process"].pop("rlimits", None)
        base["mounts"] += [
            {
                "type": "bind",
                "source": str(mount.source),
                "destination": str(mount.target),
                "options": ["rbind", "ro"],
            }
            for mount in self.cluster.mounts
        ]
        return base

    def _containerd_answers(self) -> bool:
        done = run([*self._enter(), "ctr", "version"])
        if done.returncode != 0:
            raise NotYet(done.stderr.strip())
        return True

    def _ready(self) -> bool:
        found = [n for n in self.cluster.client.list("nodes") if n["metadata"]["name"] == self.name]
        if not found:
            raise NotYet("the kubelet has not registered its node")
        status = found[0]["status"]
        ready = [c for c in status.get("conditions", []) if c["type"] == "Ready"]
        if not ready or ready[0]["status"] != "True":
            raise NotYet(f"found the condition {ready}")
        devices = status.get("allocatable", {}).get(RESOURCE)
        if devices != str(DEVICES):
            raise NotYet(f"found {devices} of {RESOURCE}, expected {DEVICES}")
        if not self.proxy.running:
            raise TestbedError(f"kube-proxy ended; {self.proxy.log_end()}")
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

    def restart_kubelet(self) -> None:
        before = self._registrations()
        self.kubelet.stop()
        self.kubelet.start()
        # The node's status still is the last kubelet's, with devices that this one has not yet.
        self.kubelet.wait_until(
            "its devices to be registered", lambda: self._registrations() > before, START_DEADLINE
        )
        self.kubelet.wait_until("its node to be ready", self._ready, START_DEADLINE)

    def _registrations(self) -> int:
        return self.device_plugin.log.read_text().count(" registered ")

    def kill(self) -> None:
        """Lose the node, as by a power cut: every process of it is gone at once."""
        self._holder.stop(grace=0)
        for process in self._started:
            process.stop(grace=0)
        # Its connections that nobody answers any more would keep the link for minutes.
        run(["ip", "link", "delete", self.link])

    def stop(self) -> None:
        self.kill()
        for root in _cgroup_roots():
            _remove_cgroup(root / self.cgroup)

    @property
    def processes(self) -> list[Process]:
        return [self._holder, *self._started]


def _containerd_config(cni: Path, container_base: Path) -> str:
    return f"""
version = 2
oom_score = 0
[plugins."io.containerd.internal.v1.opt"]
  path = "/var/lib/containerd/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE}"
  # Lowering the score of a sandbox needs a capability that a virtual machine's root may lack.
  restrict_oom_score_adj = true
  enable_selinux = false
  disable_apparmor = true
[plugins."io.containerd.grpc.v1.cri".cni]
  bin_dir = "{CNI}"
  conf_dir = "{cni}"
[plugins."io.containerd.grpc.v1.cri".containerd]
  snapshotter = "{_snapshotter(cni)}"
  default_runtime_name = "runc"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
  base_runtime_spec = "{container_base}"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
  SystemdCgroup = false
"""


def _snapshotter(folder: Path) -> str:
    """overlayfs, or copies of whole images where the folder is itself on an overlay."""
    return (
        "native"
        if output(["stat", "-f", "-c", "%T", folder]).strip() == "overlayfs"
        else ("overlayfs")
    )


class NodeCluster(Cluster):
    """A cluster with a scheduler, DNS, and nodes that run pods."""

    def __init__(self, directory: Path, mounts: Sequence[HostMount] = ()) -> None:
        remove_leftovers()
        self.mounts = mounts
        self.network = _free_network()
        self.host = str(self.network.network_address + 1)
        self.bridge = f"{BRIDGE_PREFIX}{os.getpid()}"
        self.nodes: list[Node] = []
        self._numbered = 0
        self._others: list[Process] = []
        output(["ip", "link", "add", self.bridge, "type", "bridge"])
        try:
            output(["ip", "address", "add", f"{self.host}/24", "dev", self.bridge])
            output(["ip", "link", "set", self.bridge, "up"])
            settings = Settings(
                host=self.host,
                watch_nodes=True,
                controller_manager_args=[f"--node-monitor-grace-period={LOST_AFTER}s"],
            )
            self.plane = ControlPlane(directory, settings)
        except BaseException:
            run(["ip", "link", "delete", self.bridge])
            raise
        super().__init__(directory, self.plane.admin, self.plane)
        self.logs_folder = self.plane.logs
        self.archives = base_images(directory / "images")

    @classmethod
    @contextmanager
    def started(
        cls, directory: Path, nodes: int = 1, mounts: Sequence[HostMount] = ()
    ) -> Iterator["NodeCluster"]:
        made = cls(directory, mounts)
        try:
            made.start(nodes)
            yield made
        finally:
            made.stop()

    def start(self, nodes: int) -> None:
        self.plane.start()
        self._start_scheduler()
        self._start_dns()
        for _ in range(nodes):
            self.add_node()

    def add_node(self) -> Node:
        self._numbered += 1
        node = Node(self, self._numbered)
        try:
            node.start()
        except BaseException:
            node.stop()
            raise
        self.nodes.append(node)
        return node

    def remove_node(self, node: Node) -> None:
        """Take a node out of the cluster, with its pods."""
        self.client.delete("nodes", node.name)
        node.stop()
        self.nodes.remove(node)
        for other in self.nodes:
            other.run("ip", "route", "delete", str(node.pods))
        # Nobody is left to report the end of its pods.
        for pod in self.client.list("pods", fields=f"spec.nodeName={node.name}"):
            about = pod["metadata"]
            self.client.delete("pods", about["name"], about["namespace"], grace=0)

    def import_image(self, archive: Path) -> None:
        """Give an image, an OCI or docker archive, to every node: those here and those to come."""
        self.archives.append(archive)
        for node in self.nodes:
            node.import_image(archive)

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()
        for process in reversed(self._others):
            process.stop(grace=1.0)
        self.plane.stop()
        run(["ip", "link", "delete", self.bridge])

    def _start_scheduler(self) -> None:
        self.scheduler = scheduler(self.plane, self.host)
        self._others.append(self.scheduler)
        self.scheduler.start()

    def _start_dns(self) -> None:
        """CoreDNS beside the control plane: pods need its answers, not where it runs."""
        rules = [
            {"apiGroups": [""], "resources": ["services", "pods", "namespaces"]},
            {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"]},
        ]
        about = {"apiVersion": "rbac.authorization.k8s.io/v1", "metadata": {"name": "testbed:dns"}}
        reference = {"apiGroup": "rbac.authorization.k8s.io"}
        role = about | {
            "kind": "ClusterRole",
            "rules": [rule | {"verbs": ["list", "watch"]} for rule in rules],
        }
        binding = about | {
            "kind": "ClusterRoleBinding",
            "roleRef": reference | {"kind": "ClusterRole", "name": "testbed:dns"},
            "subjects": [reference | {"kind": "User", "name": "testbed:dns"}],
        }
        self.client.create("clusterroles", role)
        self.client.create("clusterrolebindings", binding)
        config = self.plane.kubeconfig("dns", "testbed:dns")
        corefile = self.directory / "Corefile"
        corefile.write_text(
            f".:53 {{\n  bind {self.host}\n  errors\n  ready {self.host}:8181\n"
            f"  kubernetes {DOMAIN} in-addr.arpa {{\n    kubeconfig {config}\n    ttl 1\n  }}\n}}\n"
        )
        self.dns = Process(
            "coredns", [tools.find("coredns"), "-conf", corefile], self.logs_folder / "coredns.log"
        )
        self._others.append(self.dns)
        self.dns.start()
        self.dns.wait_until("its first answer", self._dns_ready, START_DEADLINE)

    def _dns_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self.host}:8181/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError) as error:
            raise NotYet(str(error)) from None

    def logs(self, lines: int = 30) -> str:
        processes = [*self.plane.processes, *self._others]
        processes += [process for node in self.nodes for process in node.processes]
        return "\n".join(process.log_end(lines) for process in processes)
