"""The operator and its ingest against a real API server: installed by the chart, run as processes.

`Installation` is the chart in the test cluster. There is no kubelet at the API level, so the two
processes run beside it, each with a token of its own service account: what the chart's roles do
not grant is refused. `Ranks` stands for the trainer, over HTTPS as rank 0's agent would.
"""

import base64
import http.client
import json
import socket
import ssl
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from observing import Agent
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from testbed import ApiError, Cluster, NotYet, TestbedError, wait_for
from testbed.controlplane import free_ports
from testbed.processes import Process

from pipemorph.api.spec import JobSpec
from pipemorph.control import initial_plan
from pipemorph.planning import Plan, Route, StageTimes, problem_for, simulate
from pipemorph.planning.offload import device_peak
from pipemorph.wire import (
    Directive,
    DirectiveEnvelope,
    HandIn,
    IterationSample,
    LinkHealthReport,
    LinkSample,
    StageProfile,
    WireTime,
)
from pipemorph_operator.children.attempt import audience

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts/pipemorph-operator"
RELEASE, SYSTEM = "pm", "pipemorph-system"
FULL_NAME = f"{RELEASE}-pipemorph-operator"
LEASE = f"{SYSTEM}/{FULL_NAME}"
FABRIC_MAP = f"{SYSTEM}/{FULL_NAME}-fabric"

Object = dict[str, Any]

OP = {"forward": 10.0, "backwardInput": 10.0, "backwardWeight": 10.0}
REPORT_INTERVAL = 0.05
DEADLINE = 120.0
"""For what comes within seconds on a machine that has nothing else to do. An API server that was
away may be asked again only half a minute later: so long its clients wait between two tries."""
STEP = StageTimes(forward=0.01, backward_input=0.01, backward_weight=0.01)


def manifest(name: str, stages: int = 4, **spec: Any) -> Object:
    """A PipeMorphJob. Nobody schedules its pods but the test."""
    container = {"name": "trainer", "image": "none.invalid/trainer"}
    return {
        "apiVersion": "pipemorph.io/v1alpha1",
        "kind": "PipeMorphJob",
        "metadata": {"name": name},
        "spec": {
            "parallelism": {"stages": stages},
            "schedule": {"microbatches": 12, "stageTimes": [OP] * stages},
            "trainer": {"module": "pipemorph_trainer.examples.emulated", "iterations": 100},
            "template": {"spec": {"schedulerName": "nobody", "containers": [container]}},
        }
        | spec,
    }


def free_port() -> int:
    return free_ports(1, "127.0.0.1")[0]


def wait_for_kind(cluster: Cluster, kind: str) -> None:
    """Until clients find a kind: a CRD is established some time before it is listed."""

    def listed() -> bool:
        try:
            return bool(cluster.client.path(kind))
        except (TestbedError, ApiError) as error:
            raise NotYet(str(error)) from None

    wait_for(f"{kind} to be listed by the API server", listed, 120.0)


class Program:
    """One of the two processes; it can be killed and started again."""

    def __init__(self, name: str, module: str, arguments: Sequence[str], folder: Path, kube: Path):
        self.metrics_port = free_port()
        command = [sys.executable, "-m", module, *arguments, "--host=127.0.0.1"]
        command.append(f"--metrics-port={self.metrics_port}")
        path = f"{ROOT / 'operator'}:{ROOT / 'trainer'}:{ROOT}"
        environment = {"KUBECONFIG": str(kube), "PYTHONPATH": path}
        self.process = Process(name, command, folder / f"{name}.log", environment=environment)

    def start(self) -> None:
        self.process.start()
        self.process.wait_until("it is ready", self._ready, 60.0)

    def kill(self) -> None:
        """As a node's end would: without a word."""
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
        """Everything Prometheus would scrape."""
        families = text_string_to_metric_families(self._get("/metrics")[1])
        return [sample for family in families for sample in family.samples]

    def says(self) -> str:
        """What it answers when it is asked whether it is ready."""
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

    def ingest_replica(
        self, identity: str, kube: Path | None = None, *, seats: int = 1
    ) -> tuple[Program, int]:
        """A replica of the ingest, and its port. One that starts again has its seat at once.
        ``kube``: its way to the API server, if not the usual one."""
        port = free_port()
        arguments = [
            f"--port={port}",
            f"--tls-cert={self.folder / 'tls.crt'}",
            f"--tls-key={self.folder / 'tls.key'}",
            f"--lease={LEASE}-ingest",
            f"--fabric-map={FABRIC_MAP}",
            f"--identity={identity}",
            f"--seats={seats}",
            "--address=127.0.0.1",
        ]
        kube = kube or self.account(f"{FULL_NAME}-ingest")
        return (
            Program(identity, "pipemorph_operator.ingest", arguments, self.folder, kube),
            port,
        )

    def replica(self, identity: str, kube: Path, *, lease_seconds: int = 6) -> Program:
        """A replica of the operator. One that starts again has its Lease at once."""
        arguments = [
            "--ingest-url=https://ingest:8443",
            f"--ingest-ca={self.folder / 'ca.crt'}",
            f"--lease={LEASE}",
            f"--lease-seconds={lease_seconds}",
            f"--identity={identity}",
            "--network-policies",
            f"--fabric-map={FABRIC_MAP}",
        ]
        return Program(identity, "pipemorph_operator", arguments, self.folder, kube)

    def account(self, name: str = FULL_NAME) -> Path:
        """A kubeconfig of the operator's service account, or of another."""
        token = self.cluster.service_account_token(SYSTEM, name, seconds=7200)
        return self.cluster.kubeconfig_of_token(token, name)

    def connection(self, port: int | None = None) -> http.client.HTTPSConnection:
        """To the ingest, over TLS that the chart's authority vouches for; ``port``: that of another
        replica."""
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
        """One request to the ingest, over a connection of its own."""
        connection = self.connection(port)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            connection.request(method, path, body=body, headers=headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read() or b"{}")
        finally:
            connection.close()


@contextmanager
def own_installation() -> Iterator[tuple[Cluster, Installation]]:
    """A cluster of its own with the chart installed and both processes running, for benchmarks."""
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as folder,
        Cluster.own(Path(folder) / "cluster") as cluster,
    ):
        cluster.helm("install", RELEASE, str(CHART), "--namespace", SYSTEM, "--create-namespace")
        cluster.wait("crds", "pipemorphjobs.pipemorph.io", "Established")
        (Path(folder) / "operator").mkdir()
        installation = Installation(cluster, Path(folder) / "operator")
        installation.operator.start()
        installation.ingest.start()
        try:
            yield cluster, installation
        finally:
            installation.operator.process.stop()
            installation.ingest.process.stop()


class _Tunnel(http.client.HTTPSConnection):
    """To this machine, by the name in the certificate."""

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
        """The attempt's pods, by rank, once there are so many. Not those of an earlier job of that
        name, which stay until they are collected."""
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

    def expect_none_left(self, name: str) -> None:
        """A Job goes after its last rank."""
        wait_for(
            f"no Job of {name} to be left",
            lambda: not self.batch_jobs(name),
            DEADLINE,
            details=lambda: json.dumps([job["metadata"] for job in self.batch_jobs(name)]),
        )

    def token(self, name: str, pod: Object, **more: Any) -> str:
        """A token as the kubelet projects it into a rank's pod."""
        uid = self.get(name)["metadata"]["uid"]
        wanted = {"audience": audience(self.namespace, name, uid)} | more
        return self.cluster.service_account_token(
            self.namespace, "default", bound_pod=pod["metadata"]["name"], **wanted
        )

    def ranks(self, name: str, pod: Object, attempt: int = 0) -> "Ranks":
        """The ranks of a job's attempt, once the ingest has heard of it: as an agent, whose first
        reports may be refused as well."""
        spec, token = JobSpec.model_validate(self.get(name)["spec"]), self.token(name, pod)
        path = f"/v1/jobs/{self.namespace}/{name}/directive?attempt={attempt}&after=0&wait=0"

        def heard_of() -> bool:
            status, answer = self.installation.request("GET", path, token=token)
            if status != 200:
                raise NotYet(f"it answered {status}: {answer}")
            return True

        wait_for(f"the ingest to hear of attempt {attempt} of {name}", heard_of, DEADLINE)
        return Ranks(self, name, spec, token, attempt)


STATES = frozenset(
    {"Pending", "Queued", "Starting", "Running", "Restarting", "Suspended", "Complete", "Failed"}
)


class History:
    """The states of a job from now on, one by one: however late they are looked at, none is
    missed."""

    def __init__(self, jobs: Jobs, name: str) -> None:
        self._jobs, self._name = jobs, name
        self._last = jobs.get(name)

    def wait(self, what: str, fits: Callable[[Object], object]) -> Object:
        """The first state that fits, of those after the one that was found last."""

        def look() -> Object | None:
            since = self._last["metadata"]["resourceVersion"]
            where = ("pipemorphjobs", self._name, self._jobs.namespace)
            try:
                for found in self._jobs.cluster.client.watch(*where, since=since, seconds=2):
                    self._last = found
                    if fits(found):
                        return found
            except OSError as error:
                raise NotYet(f"the watch broke off: {error!r}") from None
            return None

        def details() -> str:
            return f"last status: {json.dumps(self._last.get('status', {}), indent=1)}"

        return wait_for(f"{what} of {self._name}", look, DEADLINE, interval=0.0, details=details)


class Ranks:
    """A trainer in simulation, reporting to the real ingest. ``delays``: the truth, seconds."""

    def __init__(self, jobs: Jobs, name: str, spec: JobSpec, token: str, attempt: int) -> None:
        self.jobs, self.name, self.spec, self.token = jobs, name, spec, token
        self.attempt = attempt
        self.delays = [0.0] * (spec.parallelism.stages - 1)
        self.avoidable = False
        """Whether the delegated route knows nothing of the delays."""
        self.plan: Plan = initial_plan(spec)
        self.newest: Directive | None = None
        self.next: Directive | None = None
        self.iteration = self.sequence = 0
        self.seconds: list[float] = []
        self.waits: list[float] = []
        """Seconds until each report was answered."""
        self.due = 0.0
        self.agent = Agent(spec, job=name, namespace=jobs.namespace, attempt=attempt)

    def run(self, iterations: int) -> None:
        """Train; a directive takes effect at the next iteration."""
        for _ in range(iterations):
            self._iterate()

    def until(self, wanted: str, reason: str = "") -> Object:
        """Train until the job's status says so, for that reason if one is given."""
        kind, _, status = wanted.partition("=")

        def look() -> Object:
            self._iterate()
            found = self.jobs.get(self.name)
            said = condition(found, kind)
            if said != (status, reason or said[1]):
                raise NotYet(f"iteration {self.iteration}: {json.dumps(found['status'])}")
            return found

        return wait_for(f"{wanted} {reason} of {self.name}", look, DEADLINE, interval=0.0)

    def _iterate(self) -> None:
        if self.next is not None:
            self.plan, self.next = self.next.plan.plan(), None
        felt = [
            0.002 + (delay if route is Route.DIRECT or not self.avoidable else 0.0)
            for delay, route in zip(self.delays, self.plan.routes, strict=True)
        ]
        stages = self.spec.parallelism.stages
        problem = problem_for(
            self.spec.schedule.microbatches, [STEP] * stages, felt, self.plan.routes, queues=8
        )
        result = simulate(self.plan.schedule, problem)
        for _ in range(3):
            links = [
                self._sample(link, direction, wire)
                for link, wire in enumerate(felt)
                for direction in ("forward", "backward")
            ]
            self.send(links=links)
        self.seconds.append(result.makespan)
        self.iteration += 1
        self.send(
            stages=[
                StageProfile(
                    stage=i, forward=0.01, backward_input=0.01, backward_weight=0.01,
                    split="emulated", peak_memory=peak,
                )
                for i, peak in enumerate(self.peak_memory)
            ],
            iterations=[
                IterationSample(
                    index=self.iteration - 1, seconds=result.makespan, loss=1.0,
                    plan_version=self.plan.version, bubble_fraction=result.bubble_fraction,
                )
            ],
        )  # fmt: skip

    @property
    def peak_memory(self) -> list[int]:
        """Bytes per stage: 1 MiB for each microbatch in flight at a time under the plan."""
        plan = self.plan
        return [
            device_peak(ops, limit) << 20
            for ops, limit in zip(plan.schedule.stages, plan.device_limits, strict=True)
        ]

    def _sample(self, link: int, direction: Any, wire: float) -> LinkSample:
        times = dict.fromkeys(("min", "p50", "p99", "mean"), wire)
        return LinkSample(
            link=link, direction=direction, route=self.plan.routes[link], transport="gloo",
            iteration=self.iteration, bytes=1 << 20,
            wire=WireTime(count=2, exact=2, **times), queue_p50=0.0,
        )  # fmt: skip

    def report(self, **fields: Any) -> LinkHealthReport:
        values = {
            "protocol": 3,
            "job": self.name,
            "namespace": self.jobs.namespace,
            "attempt": self.attempt,
            "sequence": self.sequence,
            "sent_at": 1.0,
            "state": "training",
            "iteration": self.iteration,
            "observed_plan_version": self.observed,
            "applied_plan_version": self.plan.version,
        }
        return LinkHealthReport.model_validate(values | fields)

    def send(self, **telemetry: Any) -> None:
        """Post a report of telemetry, which must be taken, and take up what is answered."""
        self._pace()
        now = time.time()
        self.agent.observe(
            now,
            iteration=self.iteration,
            applied_plan_version=self.plan.version,
            **telemetry,
        )
        self.deliver(now)

    def deliver(self, now: float) -> None:
        """Post what the agent has to tell."""
        self.sequence += 1
        observer = self.agent.observer
        report = observer.report(self.sequence, now, self.observed)
        began = time.monotonic()
        status, answer = self.post(report.body())
        self.waits.append(time.monotonic() - began)
        assert status == 200, answer
        envelope = DirectiveEnvelope.model_validate(answer)
        observer.delivered(report, envelope, now)
        directive = envelope.directive
        if directive is not None:
            self.newest = self.next = directive
        if envelope.wants_plan and self.newest is not None:
            handed = HandIn(
                job=self.name, namespace=self.jobs.namespace, attempt=self.attempt,
                directive=self.newest,
            )  # fmt: skip
            status, answer = self.post(handed.body(), path=f"{self.base}/plan")
            assert status == 200, answer

    def _pace(self) -> None:
        """At most 20 reports a second, as rank 0's agent."""
        left = self.due - time.monotonic()
        if left > 0:
            time.sleep(left)
        self.due = time.monotonic() + REPORT_INTERVAL

    @property
    def observed(self) -> int:
        """The newest version that the ranks know."""
        return self.newest.plan_version if self.newest is not None else 0

    @property
    def base(self) -> str:
        return f"/v1/jobs/{self.jobs.namespace}/{self.name}"

    @property
    def path(self) -> str:
        return f"{self.base}/reports"

    def post(
        self, body: bytes, token: str | None = None, path: str | None = None
    ) -> tuple[int, Object]:
        token = self.token if token is None else token
        return self.jobs.installation.request("POST", path or self.path, token=token, body=body)

    def flood(self, body: bytes, count: int) -> set[int]:
        """Post so many times over one connection, as fast as it goes, and on until one is turned
        down; the answers' codes."""
        codes: set[int] = set()
        posted, end = 0, time.monotonic() + DEADLINE
        headers = {"Authorization": f"Bearer {self.token}"}
        with closing(self.jobs.installation.connection()) as connection:
            while posted < count or (429 not in codes and time.monotonic() < end):
                posted += 1
                connection.request("POST", self.path, body=body, headers=headers)
                answer = connection.getresponse()
                answer.read()
                codes.add(answer.status)
        return codes


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


def may(jobs: Jobs, account: str, asked: Object) -> bool:
    """Whether a service account of the release has a right."""
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {
            "user": f"system:serviceaccount:{SYSTEM}:{account}",
            "groups": ["system:serviceaccounts", "system:authenticated"],
            "resourceAttributes": asked,
        },
    }
    where = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
    return bool(jobs.cluster.client.request("POST", where, review)["status"]["allowed"])


__all__ = [
    "History",
    "Installation",
    "Jobs",
    "Program",
    "Ranks",
    "condition",
    "manifest",
    "may",
    "said",
]
