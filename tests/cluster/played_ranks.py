"""Fake ranks: a trainer in simulation, which reports to a real ingest over HTTPS as agents do."""

import json
import threading
import time
from contextlib import closing
from typing import Any

from observing import Agent
from operator_support import DEADLINE, Jobs, Object, condition
from testbed import NotYet, wait_for

from pipemorph.control import initial_plan
from pipemorph.http_client import FIRST_PAUSE
from pipemorph.planning import Plan, StageTimes, build_problem, simulate
from pipemorph.planning.offload import count_device_peak
from pipemorph.protocol import (
    Directive,
    DirectiveEnvelope,
    IterationSample,
    LinkHealthReport,
    LinkSample,
    SnapshotMessage,
    StageProfile,
    WireTime,
    compute_revision,
)
from pipemorph.spec.job_spec import JobSpec

REPORT_INTERVAL = 0.05
STEP = StageTimes(forward=0.01, backward_input=0.01, backward_weight=0.01)


class Ranks:
    """A trainer in simulation, reporting to the real ingest. ``delays``: the truth, seconds."""

    def __init__(self, jobs: Jobs, name: str, spec: JobSpec, token: str, attempt: int) -> None:
        self.jobs, self.name, self.spec, self.token = jobs, name, spec, token
        self.attempt = attempt
        self.delays = [0.0] * (spec.parallelism.stages - 1)
        self.plan: Plan = initial_plan(spec)
        self.newest: Directive | None = None
        self.next: Directive | None = None
        self.term: int | None = None
        self.snapshot = ""
        self.iteration = self.sequence = 0
        self.seconds: list[float] = []
        self.waits: list[float] = []
        """Seconds until each report was answered."""
        self.due = 0.0
        self.agent = Agent(spec, job=name, namespace=jobs.namespace, attempt=attempt)

    @classmethod
    def of(cls, jobs: Jobs, name: str, pod: Object, attempt: int = 0) -> "Ranks":
        """Ranks of a job's attempt, once the ingest tracks it: first reports may be refused."""
        spec, token = JobSpec.model_validate(jobs.get(name)["spec"]), jobs.token(name, pod)
        path = f"/v1/jobs/{jobs.namespace}/{name}/directive?attempt={attempt}&after=0&wait=0"

        def tracked() -> bool:
            status, answer = jobs.installation.request("GET", path, token=token)
            if status != 200:
                raise NotYet(f"it answered {status}: {answer}")
            return True

        wait_for(f"the ingest to hear of attempt {attempt} of {name}", tracked, DEADLINE)
        return cls(jobs, name, spec, token, attempt)

    def run(self, iterations: int) -> None:
        """Train; a directive takes effect at the next iteration."""
        for _ in range(iterations):
            self._iterate()

    def until(self, wanted: str, reason: str = "") -> Object:
        """Train until a condition has this status, for that reason if one is given."""
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
            self.plan, self.next = self.next.plan.to_plan(), None
        felt = [0.002 + delay for delay in self.delays]
        stages = self.spec.parallelism.stages
        problem = build_problem(
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
            count_device_peak(ops, limit) << 20
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
            "protocol": 7,
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
        """Post a report of telemetry, which must be accepted, and take up the answer."""
        self._pace()
        now = time.time()
        self.agent.observe(
            now, iteration=self.iteration, applied_plan_version=self.plan.version, **telemetry
        )
        self.deliver(now)

    def deliver(self, now: float) -> None:
        """Post the pending reports of the agent."""
        self.sequence += 1
        observer = self.agent.observer
        newest = self.newest
        report = observer.build_report(
            self.sequence, now, self.observed,
            plan_issued_at=newest.issued_at if newest is not None else None,
            term=self.term, snapshot=compute_revision(self.snapshot),
        )  # fmt: skip
        began = time.monotonic()
        status, answer = self.post(report.to_json())
        self.waits.append(time.monotonic() - began)
        assert status == 200, answer
        envelope = DirectiveEnvelope.model_validate(answer)
        observer.record_delivery(report, envelope)
        assert envelope.term >= (self.term or 0)
        self.term, directive = envelope.term, envelope.directive
        self.snapshot = envelope.snapshot or self.snapshot
        if directive is not None and directive.plan_version > self.observed:
            self.newest = self.next = directive
        if envelope.wants_snapshot and self.snapshot:
            handed = SnapshotMessage(
                job=self.name, namespace=self.jobs.namespace, attempt=self.attempt,
                snapshot=self.snapshot,
            )  # fmt: skip
            status, answer = self.post(handed.to_json(), path=f"{self.base}/snapshot")
            assert status == 200, answer

    def _pace(self) -> None:
        """Limit reports to 20 a second, as rank 0's agent does."""
        remaining = self.due - time.monotonic()
        if remaining > 0:
            time.sleep(remaining)
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

    def flood(self, body: bytes, stop: threading.Event) -> set[int]:
        """Post over one connection, as fast as possible, until it is stopped and a post was
        refused; return the answers' codes."""
        codes: set[int] = set()
        end = time.monotonic() + DEADLINE
        headers = {"Authorization": f"Bearer {self.token}"}
        with closing(self.jobs.installation.connection()) as connection:
            while time.monotonic() < end and not (stop.is_set() and 429 in codes):
                connection.request("POST", self.path, body=body, headers=headers)
                answer = connection.getresponse()
                answer.read()
                codes.add(answer.status)
        return codes


class Followers(Ranks):
    """Ranks whose agent connects to a replica until one does not serve it, and then to the next; it
    sends a refused report again, as another one. ``ports``: of all replicas."""

    def __init__(
        self, jobs: Jobs, name: str, ports: list[int], pod: Object, attempt: int = 0
    ) -> None:
        spec = JobSpec.model_validate(jobs.get(name)["spec"])
        super().__init__(jobs, name, spec, jobs.token(name, pod), attempt)
        self.ports = list(ports)
        self.plans: dict[int, Plan] = {}
        self.delivered: list[float] = []
        """Seconds until each report was answered, over all tries."""

    def deliver(self, now: float) -> None:
        began = time.monotonic()
        backoff, deadline = FIRST_PAUSE, began + DEADLINE
        while True:
            self.refused: Object = {}
            try:
                super().deliver(now)
                break
            except (OSError, AssertionError) as error:
                last = self.refused.get("last")
                if isinstance(error, AssertionError) and not self.refused:
                    raise
                if last is not None:
                    self.sequence = max(self.sequence, last)
                assert time.monotonic() < deadline, f"{self.name}: {error!r} {self.refused}"
            time.sleep(backoff)
            backoff = min(2 * backoff, 1.0)
        self.delivered.append(time.monotonic() - began)
        directive = self.newest
        if directive is not None:
            plan = directive.plan.to_plan()
            assert self.plans.setdefault(plan.version, plan) == plan, "a version is two plans"

    def post(
        self, body: bytes, token: str | None = None, path: str | None = None
    ) -> tuple[int, Object]:
        try:
            status, answer = self.jobs.installation.request(
                "POST", path or self.path, token=token or self.token, body=body, port=self.ports[0]
            )
        except OSError:
            self.ports.append(self.ports.pop(0))
            raise
        if status != 200:
            self.ports.append(self.ports.pop(0))
            self.refused = answer
        return status, answer
