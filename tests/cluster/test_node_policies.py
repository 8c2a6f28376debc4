"""Access under the NetworkPolicies of a job and of the chart: pods connect to each other on a node
whose network enforces them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest
from operator_support import RELEASE, manifest
from rendered_chart import rendered
from testbed import NotYet, wait_for
from testbed.api import Object
from testbed.controlplane import SERVICE_IP_OF_API
from testbed.images import BASE
from testbed.node_cluster import NodeCluster

from pipemorph_operator.config import OperatorConfig
from pipemorph_operator.kube.job_object import read_job
from pipemorph_operator.resources import Attempt
from pipemorph_operator.resources.attempt_objects import build_network_policy

pytestmark = pytest.mark.node

RENDEZVOUS, ENGINE, METRICS = 29500, 7000, 9400
"""Ports of a rank; the metrics of its pod's other rank are one above."""
HTTPS, INGEST_METRICS, OPERATOR_METRICS = 8443, 8081, 8080
DATA = 9000
DEADLINE = 120.0


class Door(NamedTuple):
    """Ports that may let a client in; ``at``: a pod, or an address."""

    at: str
    port: int


RANK = {Door("rank-1", port) for port in (RENDEZVOUS, ENGINE)}
RANK_METRICS = {Door("rank-1", METRICS), Door("rank-1", METRICS + 1)}
BEYOND = {Door("rank-1", METRICS + 2)}
"""Next to the ports of metrics."""
REPORTS = {Door("ingest", HTTPS)}
METRICS_OF_BOTH = {Door("ingest", INGEST_METRICS), Door("operator", OPERATOR_METRICS)}
ANYWHERE = {Door("data", DATA)}
DNS, API = Door("dns", 53), Door(SERVICE_IP_OF_API, 443)
CLUSTER = {DNS, API}
ALL = RANK | RANK_METRICS | BEYOND | REPORTS | METRICS_OF_BOTH | ANYWHERE | CLUSTER

MAY: dict[str, set[Door]] = {
    "rank-0": RANK | RANK_METRICS | BEYOND | REPORTS | ANYWHERE | CLUSTER,
    "other-job": REPORTS | ANYWHERE | CLUSTER,
    # The label lets it report, without a token in vain. Only the Job controller may give it, see
    # `test_operator_trust.py`.
    "labelled-elsewhere": REPORTS | ANYWHERE | CLUSTER,
    "stranger": ANYWHERE | CLUSTER,
    "prometheus": RANK_METRICS | METRICS_OF_BOTH | ANYWHERE | CLUSTER,
    "operator": CLUSTER,
    "ingest": CLUSTER,
    "helm-test": REPORTS | ANYWHERE | CLUSTER,
}
"""Doors that each pod reaches, without its own."""


@dataclass(frozen=True)
class Site:
    """Pods by name, with their namespaces and addresses."""

    nodes: NodeCluster
    namespaces: Mapping[str, str]
    addresses: Mapping[str, str]

    def reached(self, who: str) -> set[Door]:
        """The doors at which a pod is let in. All are tried at once: a dropped connection waits."""
        doors = sorted(door for door in ALL if door.at != who)
        tries = "".join(
            f"(timeout 3 bash -c 'exec 3<>/dev/tcp/{self.addresses.get(door.at, door.at)}"
            f"/{door.port}' 2>/dev/null && echo {number}) & "
            for number, door in enumerate(doors)
        )
        said = self.nodes.kubectl(
            "exec", f"--namespace={self.namespaces[who]}", who, "--", "bash", "-c", f"{tries} wait"
        )
        return {doors[int(number)] for number in said.split()}

    def expect(self, what: str, who: str, doors: set[Door]) -> None:
        """Wait until it is so: a policy takes a moment to be known."""
        wanted = {door for door in doors if door.at != who}

        def look() -> bool:
            found = self.reached(who)
            if found != wanted:
                raise NotYet(f"too many: {found - wanted or 'none'}; missing: {wanted - found}")
            return True

        wait_for(f"what {who} reaches {what}", look, DEADLINE)


def pod(name: str, node: str, labels: Mapping[str, str], ports: Mapping[int, str]) -> Object:
    """A pod that answers at ``ports``, whose names policies may use; empty: it has none."""
    serve = "".join(f"httpd -p {port} -h /tmp/w; " for port in ports)
    container = {
        "name": "main",
        "image": BASE,
        "imagePullPolicy": "Never",
        "command": ["sh", "-c", f"mkdir /tmp/w; {serve} sleep 600"],
        "ports": [{"name": named, "containerPort": port} for port, named in ports.items() if named],
    }
    spec = {"nodeName": node, "terminationGracePeriodSeconds": 0, "containers": [container]}
    return {"metadata": {"name": name, "labels": dict(labels)}, "spec": spec}


def attempt(namespace: str, name: str) -> Attempt:
    trainer = {
        "module": "pipemorph_trainer.examples.emulated", "iterations": 100, "metricsPort": METRICS,
    }  # fmt: skip
    job = manifest(name, stages=4, trainer=trainer)
    job["spec"]["parallelism"]["ranksPerPod"] = 2
    uid = f"uid-of-{name}"
    job["metadata"] |= {"namespace": namespace, "uid": uid, "generation": 1, "resourceVersion": "1"}
    return Attempt(read_job(job), uid, 0, ())


def of_chart(documents: Sequence[Object], component: str) -> tuple[Object, dict[int, str]]:
    """Labels of a component's pod, and its ports."""
    for each in documents:
        found = each["spec"]["template"] if each["kind"] == "Deployment" else each
        labels = found["metadata"].get("labels", {})
        if found.get("spec", {}).get("containers") and labels.get(
            "app.kubernetes.io/component"
        ) == component:  # fmt: skip
            listed = found["spec"]["containers"][0].get("ports", [])
            return labels, {port["containerPort"]: port["name"] for port in listed}
    raise AssertionError(f"the chart has no pod of {component}")


@pytest.fixture
def site(node_cluster: NodeCluster) -> Iterator[tuple[Site, list[Object]]]:
    """The pods, and the policies that are not in force yet."""
    nodes, node = node_cluster, node_cluster.nodes[0].name
    with ExitStack() as stack:
        names = ("training", "elsewhere", "system", "monitoring")
        training, elsewhere, system, monitoring = (
            stack.enter_context(nodes.namespace(name)) for name in names
        )
        scrapes = [
            {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": monitoring}}}
        ]
        made = rendered(
            release=RELEASE, namespace=system,
            **{
                "networkPolicy.enabled": True,
                "networkPolicy.metricsFrom": scrapes,
                # Behind the Service its port is another one.
                "networkPolicy.apiServerPorts": [443, urlsplit(nodes.server).port],
            },
        )  # fmt: skip
        one, other = attempt(training, "one"), attempt(training, "other")
        metrics = range(METRICS, METRICS + 3)
        rank_ports = dict.fromkeys((RENDEZVOUS, ENGINE, *metrics), "")
        pods = {
            "rank-0": (training, one.build_labels(), {}),
            "rank-1": (training, one.build_labels(), rank_ports),
            "other-job": (training, other.build_labels(), {}),
            "labelled-elsewhere": (elsewhere, one.build_labels(), {}),
            "stranger": (training, {}, {}),
            "data": (elsewhere, {}, {DATA: ""}),
            "prometheus": (monitoring, {}, {}),
            "operator": (system, *of_chart(made, "operator")),
            "ingest": (system, *of_chart(made, "ingest")),
            "helm-test": (system, of_chart(made, "test")[0], {}),
        }
        for name, (namespace, labels, ports) in pods.items():
            nodes.client.create("pods", pod(name, node, labels, ports), namespace)
        addresses = {"dns": nodes.host}
        for name, (namespace, *_) in pods.items():
            ready = nodes.wait("pods", name, "Ready", namespace=namespace)
            addresses[name] = ready["status"]["podIP"]
        config = OperatorConfig(
            ingest_url="https://ingest", network_policies=True, metrics_from=tuple(scrapes)
        )
        policies = [build_network_policy(each, config) for each in (one, other)]
        for policy in policies:
            del policy["metadata"]["ownerReferences"]  # Objects of a missing owner would go.
        policies += [each for each in made if each["kind"] == "NetworkPolicy"]
        namespaces = {name: namespace for name, (namespace, *_) in pods.items()}
        yield Site(nodes, namespaces, addresses), policies


def test_who_reaches_whom(site: tuple[Site, list[Object]]) -> None:
    at, policies = site
    with at.nodes.nodes[0].enforcing():
        for who in MAY:
            at.expect("without a policy", who, ALL)
        assert len(policies) == 4, "two jobs, the operator and the ingest"
        at.nodes.apply(policies)
        for who, doors in MAY.items():
            at.expect("under the policies", who, doors)
