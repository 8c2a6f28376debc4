"""Any number of nodes that do not exist, whose pods are reported as running at once.

For tests and benchmarks of many pods: a scheduler binds them, and kwok plays every kubelet.
Neither runs a container.
"""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import yaml

from testbed import tools
from testbed.api import Object
from testbed.cluster import Cluster
from testbed.controlplane import ControlPlane, free_ports
from testbed.processes import Process

LABEL = "testbed.pipemorph.io/node=fake"

# Pods stay running until somebody says otherwise (`Cluster.fake_pod_succeeded`) or deletes them.
_RUNNING = """
{{ $now := Now | Quote }}
phase: Running
startTime: {{ $now }}
podIP: {{ PodIPWith .spec.nodeName false .metadata.uid .metadata.name .metadata.namespace | Quote }}
conditions:
{{ range $type := list "Initialized" "ContainersReady" "Ready" }}
- {type: {{ $type }}, status: "True", lastTransitionTime: {{ $now }}}
{{ end }}
containerStatuses:
{{ range .spec.containers }}
- name: {{ .name | Quote }}
  image: {{ .image | Quote }}
  ready: true
  restartCount: 0
  state: {running: {startedAt: {{ $now }}}}
{{ end }}
"""


def _stage(kind: str, name: str, matches: list[Object], then: Object) -> Object:
    return {
        "apiVersion": "kwok.x-k8s.io/v1alpha1",
        "kind": "Stage",
        "metadata": {"name": name},
        "spec": {
            "resourceRef": {"apiGroup": "v1", "kind": kind},
            "selector": {"matchExpressions": matches},
            "next": then,
        },
    }


def _stages() -> list[Object]:
    deletion = ".metadata.deletionTimestamp"
    alive = {"key": deletion, "operator": "DoesNotExist"}
    pending = {"key": ".status.phase", "operator": "In", "values": ["Pending"]}
    nobody = {"key": ".metadata.name", "operator": "In", "values": ["-"]}
    return [
        # The nodes are ready as they are, but kwok looks at none of them without a stage of one.
        _stage("Node", "none", [nobody], {"delete": True}),
        _stage("Pod", "run", [alive, pending], {"statusTemplate": _RUNNING}),
        _stage("Pod", "delete", [{"key": deletion, "operator": "Exists"}], {"delete": True}),
    ]


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


@contextmanager
def fake_nodes(
    cluster: Cluster,
    count: int,
    *,
    labels: Mapping[str, str] | None = None,
    resources: Mapping[str, str] | None = None,
) -> Iterator[list[str]]:
    """Ready nodes `fake-0` to `fake-<count-1>`, on which every pod that fits runs at once."""
    names = [f"fake-{number}" for number in range(count)]
    config = cluster.directory / "kwok.yaml"
    config.write_text(yaml.safe_dump_all(_stages()))
    programs = [
        Process(
            "kwok",
            [
                tools.find("kwok"),
                f"--config={config}",
                f"--kubeconfig={cluster.admin}",
                # No others: the cluster may be the user's.
                f"--manage-nodes-with-label-selector={LABEL}",
                # Nobody here gives up on a node that renews no lease.
                "--node-lease-duration-seconds=0",
            ],
            cluster.directory / "logs" / "kwok.log",
        )
    ]
    if cluster.control_plane is not None:
        plane = cluster.control_plane
        programs.append(scheduler(plane, plane.settings.host))

    def make(name: str) -> None:
        key, _, value = LABEL.partition("=")
        cluster.fake_node(name, {**(labels or {}), key: value}, resources)

    with ThreadPoolExecutor(8) as pool, ExitStack() as cleaning:
        cleaning.callback(
            lambda: list(pool.map(lambda n: cluster.client.delete("nodes", n), names))
        )
        list(pool.map(make, names))
        for program in programs:
            cleaning.callback(program.stop, 1.0)
            program.start()
        yield names
