"""The operator and its ingest against a real API server: installed by the chart, run as processes.

`Installation` is the chart in the test cluster. There is no kubelet at the API level, so the two
processes run on this machine, each with a token of its own service account: what the chart's roles
do not grant is refused.
"""

import base64
import http.client
import json
import re
import socket
import ssl
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from testbed import ApiError, Cluster, NotYet, TestbedError, wait_for
from testbed.controlplane import free_ports
from testbed.processes import Process

from pipemorph_operator.resources.attempt import build_token_audience

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts/pipemorph-operator"
RELEASE, SYSTEM = "pm", "pipemorph-system"
FULL_NAME = f"{RELEASE}-pipemorph-operator"
LEASE = f"{SYSTEM}/{FULL_NAME}"

Object = dict[str, Any]

OP = {"forward": 10.0, "backwardInput": 10.0, "backwardWeight": 10.0}
DEADLINE = 120.0
"""Limit for what takes seconds on a machine that has nothing else to do. An API server that was
away may get the next request only half a minute later: its clients wait that long."""


def manifest(name: str, stages: int = 4, **spec: Any) -> Object:
    """A PipeMorphJob. Only the test schedules its pods."""
    container = {"name": "trainer", "image": "none.invalid/trainer"}
    return {
        "apiVersion": "pipemorph.io/v1alpha1",
        "kind": "PipeMorphJob",
        "metadata": {"name": name},
        "spec": {
            "parallelism": {"stages": stages},
            "schedule": {"microbatches": 12, "stageTimes": [OP] * stages},
            "trainer": {"module": "pipemorph_trainer.examples.emulated", "iterations": 100},
            "template": {"spec": {"schedulerName": "absent", "containers": [container]}},
        }
        | spec,
    }


def free_port() -> int:
    return free_ports(1, "127.0.0.1")[0]


def wait_for_kind(cluster: Cluster, kind: str) -> None:
    """Wait until clients find a kind: a CRD is established some time before it is listed."""

    def listed() -> bool:
        try:
            return bool(cluster.client.path(kind))
        except (TestbedError, ApiError) as error:
            raise NotYet(str(error)) from None

    wait_for(f"{kind} to be listed by the API server", listed, 120.0)


class Program:
    """Process of the operator or the ingest; it can be killed and started again."""

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        folder: Path,
        kube: Path,
        *,
        sources: Path = ROOT,
    ) -> None:
        """``sources``: checkout of the version to run; another one has its own ``.venv``."""
        self.metrics_port = free_port()
        python = sys.executable if sources == ROOT else str(sources / ".venv/bin/python")
        command = [python, "-m", module, *arguments, "--host=127.0.0.1"]
        command.append(f"--metrics-port={self.metrics_port}")
        folders = (sources / "operator", sources / "trainer", sources, sources / "tests/cluster")
        path = ":".join(map(str, folders))
        # The present folder may have another version.
        environment = {"KUBECONFIG": str(kube), "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
        self.process = Process(name, command, folder / f"{name}.log", environment=environment)

    def start(self) -> None:
        self.process.start()
        self.process.wait_until("it is ready", self._ready, 60.0)

    def kill(self) -> None:
        """Kill it without notice, as a node's end would."""
        self.process.stop(grace=0)

    def restart(self) -> None:
        self.kill()
        self.start()

    def metric(self, name: str, /, **labels: str) -> float:
        """The sum of a metric's samples with these labels."""
        return sum(
            sample.value
            for sample in self.samples()
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def samples(self) -> list[Sample]:
        """Metrics that Prometheus would scrape."""
        families = text_string_to_metric_families(self._get("/metrics")[1])
        return [sample for family in families for sample in family.samples]

    def says(self) -> str:
        """Response of the readiness endpoint."""
        return self._get("/readyz")[1]

    def _ready(self) -> bool:
        try:
            return self._get("/readyz")[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def _get(self, path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.metrics_port, timeout=40)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()


class Installation:
    """The chart in a cluster, and its two programs outside of it."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        secret = cluster.client.get("secrets", f"{FULL_NAME}-ingest-tls", SYSTEM)["data"]
        for key, value in secret.items():
            (folder / key).write_bytes(base64.b64decode(value))
        self.trust = ssl.create_default_context(cafile=str(folder / "ca.crt"))
        self.operator = self.replica("operator", self.account())
        self.ingest, self.port = self.ingest_replica("ingest")

    def ingest_replica(self, identity: str, kube: Path | None = None) -> tuple[Program, int]:
        """A replica of the ingest, and its port. A leader that starts again leads at once.
        ``kube``: its way to the API server, if not the usual one."""
        port = free_port()
        arguments = [
            f"--port={port}",
            f"--tls-cert={self.folder / 'tls.crt'}",
            f"--tls-key={self.folder / 'tls.key'}",
            f"--lease={LEASE}-ingest",
            f"--identity={identity}",
        ]
        kube = kube or self.account(f"{FULL_NAME}-ingest")
        return Program(identity, "pipemorph_operator.ingest", arguments, self.folder, kube), port

    def replica(self, identity: str, kube: Path, *, lease_seconds: int = 6) -> Program:
        """A replica of the operator. One that starts again has its Lease at once."""
        arguments = [
            "--ingest-url=https://ingest:8443",
            f"--ingest-ca={self.folder / 'ca.crt'}",
            f"--lease={LEASE}",
            f"--lease-seconds={lease_seconds}",
            f"--identity={identity}",
            "--network-policies",
        ]
        return Program(identity, "pipemorph_operator", arguments, self.folder, kube)

    def account(self, name: str = FULL_NAME) -> Path:
        """A kubeconfig of the operator's service account, or of another."""
        token = self.cluster.service_account_token(SYSTEM, name, seconds=7200)
        return self.cluster.kubeconfig_of_token(token, name)

    def connection(self, port: int | None = None) -> http.client.HTTPSConnection:
        """Connection to the ingest, over TLS of the chart's authority; ``port``: of a replica."""
        return _Tunnel(
            f"{FULL_NAME}-ingest.{SYSTEM}.svc", port or self.port, context=self.trust, timeout=40
        )

    def request(
        self,
        method: str,
        path: str,
        *,
        token: str | None = None,
        body: bytes | None = None,
        port: int | None = None,
    ) -> tuple[int, Object]:
        """Send a request to the ingest, over a connection of its own."""
        connection = self.connection(port)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            connection.request(method, path, body=body, headers=headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read() or b"{}")
        finally:
            connection.close()


class _Tunnel(http.client.HTTPSConnection):
    """Connection to this machine, by the name in the certificate."""

    def connect(self) -> None:
        sock = socket.create_connection(("127.0.0.1", self.port), self.timeout)
        self.sock = self._context.wrap_socket(sock, server_hostname=self.host)  # type: ignore[attr-defined]


class Jobs:
    """Jobs of one namespace and their pods, whose kubelet the test is."""

    def __init__(self, installation: Installation, namespace: str) -> None:
        self.installation = installation
        self.cluster = installation.cluster
        self.namespace = namespace

    def apply(self, job: Object) -> None:
        self.cluster.apply(job, f"--namespace={self.namespace}")

    def patch(self, name: str, spec: Object) -> None:
        self.cluster.client.patch("pipemorphjobs", name, {"spec": spec}, self.namespace)

    def get(self, name: str) -> Object:
        return self.cluster.client.get("pipemorphjobs", name, self.namespace)

    def wait(self, name: str, condition: Any, deadline: float = DEADLINE) -> Object:
        if isinstance(condition, str) and condition in STATES:
            wanted = condition

            def condition(job: Object) -> bool:
                return bool(job.get("status", {}).get("state") == wanted)

        return self.cluster.wait(
            "pipemorphjobs", name, condition, deadline, namespace=self.namespace
        )

    def batch_jobs(self, name: str) -> list[Object]:
        return self.cluster.client.list(
            "jobs", self.namespace, labels=f"pipemorph.io/job-name={name}"
        )

    def pods(self, name: str, count: int, attempt: int = 0) -> list[Object]:
        """The attempt's pods, by rank, once all exist. Pods of an earlier job of that name, which
        stay until they are collected, are not among them."""
        uid = self.get(name)["metadata"]["uid"]
        labels = f"pipemorph.io/job-uid={uid},pipemorph.io/attempt={attempt}"

        def look() -> list[Object] | None:
            found = self.cluster.client.list("pods", self.namespace, labels=labels)
            alive = [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]
            return alive if len(alive) == count else None

        found = wait_for(
            f"{count} pods of attempt {attempt} of {name}",
            look,
            DEADLINE,
            details=lambda: (
                json.dumps(self.get(name).get("status", {}), indent=1)
                + self.installation.operator.process.log_end()
            ),
        )
        index = "batch.kubernetes.io/job-completion-index"
        return sorted(found, key=lambda pod: int(pod["metadata"]["annotations"][index]))

    def run(self, name: str, count: int, attempt: int = 0) -> list[Object]:
        """Report all pods of an attempt as running, and wait until the job is."""
        pods = self.pods(name, count, attempt)
        for pod in pods:
            self.cluster.fake_pod_running(self.namespace, pod["metadata"]["name"])
        self.wait(name, "Running")
        return pods

    def succeed(self, pods: Sequence[Object]) -> None:
        for pod in pods:
            self.cluster.fake_pod_succeeded(self.namespace, pod["metadata"]["name"])

    def expect_event(self, name: str, text: str) -> None:
        """Events follow status, so they are waited for."""
        wait_for(
            f"event {text} of {name}",
            lambda: text in self.cluster.events("pipemorphjobs", name, self.namespace),
            DEADLINE,
            details=lambda: self.cluster.events("pipemorphjobs", name, self.namespace),
        )

    def row(self, name: str) -> dict[str, str]:
        """Read what ``kubectl get`` prints of a job: each column's name and the text below it."""
        header, line = self.cluster.kubectl("get", "pmj", name, "-n", self.namespace).splitlines()
        starts = [found.start() for found in re.finditer(r"\S+", header)]
        ends = [*starts[1:], len(line)]
        return {
            header[start:end].strip(): line[start:end].strip()
            for start, end in zip(starts, ends, strict=True)
        }

    def expect_all_gone(self, name: str) -> None:
        """A Job goes after its last rank."""
        wait_for(
            f"all Jobs of {name} to go",
            lambda: not self.batch_jobs(name),
            DEADLINE,
            details=lambda: json.dumps([job["metadata"] for job in self.batch_jobs(name)]),
        )

    def token(self, name: str, pod: Object, **more: Any) -> str:
        """A token as the kubelet projects it into a rank's pod."""
        uid = self.get(name)["metadata"]["uid"]
        wanted = {"audience": build_token_audience(self.namespace, name, uid)} | more
        return self.cluster.service_account_token(
            self.namespace, "default", bound_pod=pod["metadata"]["name"], **wanted
        )


STATES = frozenset(
    {"Pending", "Queued", "Starting", "Running", "Restarting", "Suspended", "Complete", "Failed"}
)


UNSEEN = {"observedGeneration": 0}
"""Status of a job that no operator has looked at."""


def _condition(job: Object, kind: str) -> Object:
    found = job.get("status", {}).get("conditions", [])
    return next((c for c in found if c["type"] == kind), {"status": "", "reason": ""})


def condition(job: Object, kind: str) -> tuple[str, str]:
    """Status and reason."""
    found = _condition(job, kind)
    return found["status"], found["reason"]


def said(job: Object, kind: str) -> str:
    """The message of a condition that is there."""
    return str(_condition(job, kind)["message"])


def may(jobs: Jobs, account: str, request_fields: Object) -> bool:
    """True if a service account of the release has a right."""
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {
            "user": f"system:serviceaccount:{SYSTEM}:{account}",
            "groups": ["system:serviceaccounts", "system:authenticated"],
            "resourceAttributes": request_fields,
        },
    }
    where = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
    return bool(jobs.cluster.client.request("POST", where, review)["status"]["allowed"])


__all__ = ["Installation", "Jobs", "Program", "condition", "manifest", "may", "said"]
