"""A cluster whose nodes run real pods, with a scheduler and DNS."""

import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from testbed import tools
from testbed.cluster import Cluster
from testbed.controlplane import ControlPlane, Settings, free_ports
from testbed.images import base_images
from testbed.machine import bridge_name, free_network, remove_leftovers
from testbed.node import START_DEADLINE, Node, Site
from testbed.node_config import DOMAIN
from testbed.processes import Process, output, run
from testbed.project_images import HostMount
from testbed.waiting import NotYet

# A node counts as lost after this many seconds without a report; it reports every two.
LOST_AFTER = 16


def scheduler(plane: ControlPlane, host: str) -> Process:
    """The scheduler of a control plane, not started yet."""
    config = plane.kubeconfig("scheduler", "system:kube-scheduler")
    return Process(
        "kube-scheduler",
        [
            tools.find("kube-scheduler"),
            f"--kubeconfig={config}",
            f"--authentication-kubeconfig={config}",
            f"--authorization-kubeconfig={config}",
            f"--bind-address={host}",
            f"--secure-port={free_ports(1, host)[0]}",
            "--leader-elect=false",
        ],
        plane.logs / "kube-scheduler.log",
    )


class NodeCluster(Cluster):
    """A cluster with a scheduler, DNS, and nodes that run pods."""

    def __init__(self, directory: Path, mounts: Sequence[HostMount] = ()) -> None:
        remove_leftovers()
        self.network = free_network()
        self.host = str(self.network.network_address + 1)
        self.bridge = bridge_name()
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
        super().__init__(directory, self.plane)
        self.archives = base_images(directory / "images")
        self._site = Site(
            directory, self.plane, self.network, self.host, self.bridge, mounts, self.archives
        )

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
        node = Node(self._numbered, self, self._site)
        try:
            node.start(self.nodes)
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
        # No kubelet remains to report the end of its pods.
        for pod in self.client.list("pods", fields=f"spec.nodeName={node.name}"):
            about = pod["metadata"]
            self.client.delete("pods", about["name"], about["namespace"], grace=0)

    def import_image(self, archive: Path) -> None:
        """Import an image, an OCI or docker archive, into every node, present and future."""
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
        """Start CoreDNS on the host: pods need its answers, not where it runs."""
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
            "coredns", [tools.find("coredns"), "-conf", corefile], self.plane.logs / "coredns.log"
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
