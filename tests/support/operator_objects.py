"""Jobs, Jobs' Jobs and pods as values, for tests of decisions and of what is made."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from fake_api import FakeCluster

from pipemorph_operator import names
from pipemorph_operator.config import OperatorConfig
from pipemorph_operator.kube.client import build_path
from pipemorph_operator.kube.job_object import dump_status, read_job
from pipemorph_operator.kube.object_facts import JobCondition, JobFacts, PodFacts
from pipemorph_operator.reconcile.decide import decide
from pipemorph_operator.reconcile.decision import ObservedJob, ReconcileDecision
from pipemorph_operator.resources import Attempt
from pipemorph_operator.resources.attempt_objects import build_batch_job
from pipemorph_operator.resources.object_names import build_attempt_name

T0 = datetime(2026, 1, 1, tzinfo=UTC)
UID = "0b7c9d2e-1111-2222-3333-444455556666"
CONFIG = OperatorConfig(ingest_url="https://ingest:8443", ca_pem="PEM", trainer_image="trainer:1")
OP = {"forward": 10.0, "backwardInput": 10.0, "backwardWeight": 5.0}

Object = dict[str, Any]

RDMA = {"rdma": {"resourceName": "rdma/hca"}}
SPREAD = {"topology": {"key": "zone", "mode": "spread"}}
PACK = {"topology": {"key": "zone"}}
NODE_TERMS = "requiredDuringSchedulingIgnoredDuringExecution"


def body(name: str = "gpt", stages: int = 2, **spec: Any) -> Object:
    """A PipeMorphJob as the API server gives it."""
    return {
        "apiVersion": "pipemorph.io/v1alpha1",
        "kind": "PipeMorphJob",
        "metadata": {
            "name": name,
            "namespace": "team",
            "uid": UID,
            "generation": 1,
            "resourceVersion": "7",
        },
        "spec": {
            "parallelism": {"stages": stages, "replicas": 1},
            "schedule": {"microbatches": 4, "stageTimes": [OP] * stages},
            "trainer": {"module": "a.b", "iterations": 3},
        }
        | spec,
        "status": {"observedGeneration": 0},
    }


def job_facts(attempt: int = 0, *, stages: int = 2, **changes: Any) -> JobFacts:
    values: dict[str, Any] = {
        "name": build_attempt_name("gpt", UID, attempt, stages),
        "uid": f"job-{attempt}",
        "owner": "gpt",
        "owner_uid": UID,
        "attempt": attempt,
        "active": stages,
        "started_at": T0,
    }
    return JobFacts(**(values | changes))


def failed(message: str = "", reason: str = "BackoffLimitExceeded") -> JobCondition:
    return JobCondition(reason, message, T0)


def pod(index: int, **changes: Any) -> PodFacts:
    values: dict[str, Any] = {"name": f"p{index}", "index": index}
    return PodFacts(**(values | changes))


def attempt(number: int = 0, excluded: tuple[str, ...] = (), **spec: Any) -> Attempt:
    job = body(**({"stages": 2} | spec))
    return Attempt(read_job(job), UID, number, excluded)


def template(made: Attempt, config: OperatorConfig = CONFIG) -> Object:
    return build_batch_job(made, config)["spec"]["template"]


def trainer(made: Attempt) -> Object:
    return template(made)["spec"]["containers"][0]


def given_with(where: str, value: Any) -> Object:
    """A good template with one field set; ``trainer.`` is its container."""
    container: Object = {"name": "trainer", "image": "i"}
    made: Object = {"spec": {"containers": [container]}}
    first, *way = where.split(".")
    node = container if first == "trainer" else made
    *way, last = way if first == "trainer" else [first, *way]
    for part in way:
        node = node.setdefault(part, {})
    node[last] = value
    return made


class World:
    """A job, its Jobs and the clock; carries decisions out as the reconciler would."""

    def __init__(self, job: Object, config: OperatorConfig = CONFIG) -> None:
        self.body = job
        self.config = config
        self.now = T0
        self.jobs: dict[int, JobFacts] = {}
        self.pods: list[PodFacts] = []
        self.no_pod = ""
        self.sighted: dict[str, datetime] = {}
        self.looked = 0
        self.events: list[str] = []
        self.counts: list[str] = []

    @property
    def status(self) -> Object:
        return self.body.get("status", {})

    def condition(self, kind: str) -> tuple[str, str]:
        for found in self.status.get("conditions", []):
            if found["type"] == kind:
                return found["status"], found["reason"]
        return "", ""

    def message(self, kind: str) -> str:
        return next(c["message"] for c in self.status["conditions"] if c["type"] == kind)

    def observe(self) -> ObservedJob:
        number = self.status.get("attempt", 0)
        return ObservedJob(
            self.body,
            self.now,
            self.jobs.get(number),
            [job for attempt, job in self.jobs.items() if attempt != number],
            pod_failed=any(p.failed for p in self.pods),
        )

    def seen_pods(self) -> list[PodFacts]:
        """The pods, with how long it is known that they end."""
        ending = [
            p for p in self.pods if p.deletion_deadline is not None or p.exit_code is not None
        ]
        self.sighted = {p.name: self.sighted.get(p.name, self.now) for p in ending}
        since = {name: (self.now - at).total_seconds() for name, at in self.sighted.items()}
        return [replace(p, ending_seconds=since.get(p.name, 0.0)) for p in self.pods]

    def turn(self, *, write_status: bool = True) -> ReconcileDecision:
        """Run a reconcile. Without ``write_status`` the operator dies before it."""
        seen = self.observe()
        decision = decide(seen, self.config)
        if decision.needs_pods:
            self.looked += 1
            seen = replace(seen, pods=self.seen_pods(), missing_pod_reason=self.no_pod)
            decision = decide(seen, self.config)
            assert not decision.needs_pods, "the pods were given and are requested again"
        if decision.create_attempt is not None:
            number = decision.create_attempt.number
            self.jobs.setdefault(number, job_facts(number, stages=decision.create_attempt.ranks))
            decision.status.job_uid = self.jobs[number].uid
        if not write_status:
            return decision
        if decision.status is not None:
            self.body["status"] = dump_status(decision.status) | {
                k: v for k, v in self.status.items() if k in ("training", "recoveries")
            }
        for name in decision.delete_jobs:
            self.jobs = {n: j for n, j in self.jobs.items() if j.name != name}
        self.events += [event.reason for event in decision.events]
        self.counts += decision.job_counters
        return decision

    def settle(self, most: int = 8) -> ReconcileDecision:
        """Turns until nothing is due at once."""
        for _ in range(most):
            decision = self.turn()
            if decision.requeue_seconds != 0.0:
                return decision
        raise AssertionError("it never settles")

    def later(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)

    def running(self, attempt: int = 0, ranks: int = 2) -> None:
        self.jobs[attempt] = job_facts(attempt, stages=ranks, ready=ranks)
        self.settle()


class RunningJob(FakeCluster):
    """API server of a job that runs, and of one pod of it, with its requests and changes."""

    def __init__(self, pod: Object, terminating: int = 1, **metadata: Any) -> None:
        world, started = World(body(failurePolicy={"maxRestarts": 2})), "2026-01-01T00:00:00Z"
        world.running()
        world.status["jobStartTime"] = started
        made = build_batch_job(attempt(failurePolicy={"maxRestarts": 2}), CONFIG)
        made["metadata"]["uid"] = "job-0"
        counts = {"active": 1, "ready": 1, "terminating": terminating, "startTime": started}
        metadata |= {
            "name": "p1",
            "namespace": "team",
            "uid": "u1",
            "annotations": {names.COMPLETION_INDEX: "1"},
            "labels": made["spec"]["template"]["metadata"]["labels"],
            "ownerReferences": [{"kind": "Job", "controller": True, "uid": "job-0"}],
        }
        about: Object = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata}
        super().__init__(
            world.body,
            made | {"status": counts},
            about | {"spec": {"nodeName": "n"}, "status": pod},
        )
        self.field_selectors: list[str] = []
        self.removed: list[tuple[str, int | None]] = []
        self.patched: list[tuple[str, Object]] = []

    @property
    def status(self) -> Object:
        found: Object = self.objects[build_path("PipeMorphJob", "team", "gpt")]["status"]
        return found

    async def list(
        self, url: str, *, labels: str | None = None, fields: str | None = None
    ) -> list[Object]:
        if not url.endswith("/events"):
            return await super().list(url, labels=labels)
        self.field_selectors.append(fields or "")
        said = {"type": "Warning", "reason": "FailedMount", "message": "no volume"}
        return [said | {"lastTimestamp": "2026-01-01T00:00:00Z"}]

    async def patch(self, url: str, changes: Object, owner: str, *, merge: bool = False) -> Object:
        self.patched.append((url, changes["metadata"]))
        return await super().patch(url, changes, owner, merge=merge)

    async def delete(
        self,
        url: str,
        *,
        uid: str | None = None,
        propagation: str = "Background",
        grace: int | None = None,
    ) -> None:
        self.removed.append((url.rsplit("/", 1)[-1], grace))
