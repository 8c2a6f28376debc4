"""The input and output of ``decide``, and the draft that builds the output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from pipemorph.api.layout import RankLayout
from pipemorph.api.spec import JobSpec
from pipemorph.api.status import MAX_ATTEMPTS_KEPT, AttemptRecord, ConditionStatus, JobStatus
from pipemorph.api.status_recoveries import Recoveries
from pipemorph.status.conditions import MESSAGE_LENGTH, format_time, updated
from pipemorph_operator import names
from pipemorph_operator.children import Attempt
from pipemorph_operator.cluster.events import Event, Kind
from pipemorph_operator.cluster.facts import JobFacts, PodFacts, parse_time
from pipemorph_operator.cluster.job import operator_part, read_status
from pipemorph_operator.policy import conditions
from pipemorph_operator.reconcile.plans import Plannable


@dataclass(frozen=True)
class Observed:
    """The input of a decision. ``current``: Job of the attempt in status, if it exists;
    ``others``: Jobs of other attempts; ``pods``: of the current attempt, None if not read;
    ``no_pod``: read with them, why the current Job could not create all of its pods."""

    body: Mapping[str, Any]
    now: datetime
    plan: Plannable | None = field(default=None, kw_only=True)
    """Whether the spec allows a plan; None if not requested."""
    current: JobFacts | None = None
    others: Sequence[JobFacts] = ()
    pods: Sequence[PodFacts] | None = None
    no_pod: str = ""
    leaving: Sequence[PodFacts] = ()
    """Read with them: pods that are replaced, and being deleted."""
    pod_failed: bool = False
    """Whether a pod of the attempt is known to have failed."""


@dataclass
class Decision:
    """What to change. ``status`` None: no change. ``needs_pods``: decide again with the pods;
    ``needs_plan``: decide again with ``Observed.plan`` for this spec."""

    status: JobStatus | None = None
    create: Attempt | None = None
    apply: list[dict[str, Any]] = field(default_factory=list)
    delete_jobs: list[str] = field(default_factory=list)
    delete_attempts: list[str] = field(default_factory=list)
    """Names of ended attempts, whose Secrets and ConfigMaps go. Deleting a ConfigMap also deletes
    the PodGroup that it owns."""
    replace_pods: list[PodFacts] = field(default_factory=list)
    """Lost pods that the Job controller must not count, so that it makes others at once."""
    forget_pods: list[PodFacts] = field(default_factory=list)
    """Of those, the ones whose node does not answer: nobody else removes them."""
    restore: list[dict[str, Any]] = field(default_factory=list)
    """Objects that a running attempt needs, and that somebody may have deleted."""
    delete_self: bool = False
    needs_pods: bool = False
    needs_plan: JobSpec | None = None
    events: list[Event] = field(default_factory=list)
    again_in: float | None = None
    counts: list[str] = field(default_factory=list)
    """Metrics to increment: ``created``, ``successful``, ``failed``, ``restarted``."""
    accused: dict[str, str] = field(default_factory=dict)
    """Nodes at which links are slow, with what was measured."""


class Draft:
    """Builds one decision: the new status, and the changes that go with it."""

    def __init__(self, seen: Observed) -> None:
        self.seen = seen
        self.now = seen.now
        self.metadata = seen.body["metadata"]
        self.generation: int | None = self.metadata.get("generation")
        self.status = operator_part(seen.body)
        self.seen_status = read_status(seen.body)
        """As it was read, with the ingest's part."""
        self.out = Decision()
        self.strangers = False
        """Whether ranks of the current Job trust no authority of the ingest."""
        self.passing = False
        """Whether what keeps the job from running is expected to pass by itself."""

    @property
    def recoveries(self) -> Recoveries | None:
        """Of the attempt in status, as the ingest has written them."""
        found = self.seen_status.recoveries
        if found is None or found.attempt != (self.status.attempt or 0):
            return None
        return found

    @property
    def layout(self) -> RankLayout:
        """The layout of the attempt in status, as the ingest has written it."""
        found = self.recoveries
        return found.layout if found is not None else RankLayout()

    def mark(self, kind: str, status: ConditionStatus, reason: str, message: str) -> None:
        """Set the condition of type ``kind``."""
        self.status.conditions = updated(
            self.status.conditions,
            kind,
            status,
            reason,
            message,
            generation=self.generation,
            now=self.now,
        )

    def emit(self, kind: Kind, reason: str, message: str) -> None:
        """Emit a Kubernetes event."""
        self.out.events.append(Event(kind, reason, message))

    def emit_new(self, kind: Kind, reason: str, message: str) -> None:
        """Emit an event, unless a condition has the message already."""
        if not any(c.message == message for c in self.status.conditions):
            self.emit(kind, reason, message)

    def created(self, number: int, name: str) -> None:
        """Emit the event of a created Job."""
        self.emit("Normal", names.R_CREATED, f"attempt {number}: Job {name} was created")

    def requeue_within(self, seconds: float | None) -> None:
        """Reconcile the job again within so many seconds; None: no limit."""
        if seconds is not None:
            now = self.out.again_in
            self.out.again_in = seconds if now is None else min(now, seconds)

    def waiting(self, message: str) -> None:
        """Mark that the Job exists and not all ranks are ready."""
        self.not_running(names.R_WAITING_FOR_PODS, message)

    def not_running(self, reason: str, message: str) -> None:
        """Set PodsReady and Running to False."""
        self.mark(names.PODS_READY, "False", reason, message)
        self.mark(names.RUNNING, "False", reason, message)

    def unheard(self, reason: str, message: str) -> None:
        """Mark that all pods run, and why it is not known that their ranks train."""
        if reason == names.R_OTHER_AUTHORITY:
            self.emit_new("Warning", reason, f"all pods run; {message}")
        self.mark(names.RUNNING, "True", reason, f"all pods run; {message}")

    def stop_clock(self) -> None:
        """Stop the clock of activeDeadlineSeconds until the job starts again."""
        began = parse_time(self.status.start_time)
        if began is not None:
            self.status.ran_seconds += max(0, round((self.now - began).total_seconds()))
        self.status.start_time = None

    def queued(self, current: JobFacts) -> None:
        """Mark that a queue, such as Kueue, holds the attempt's Job suspended."""
        self.stop_clock()
        self.status.attempt_start_time = None
        why = "if that is Kueue's, the Job's Workload says why"
        self.not_running(names.R_QUEUED, f"Job {current.name} is suspended by its queue; {why}")

    def jobs(self) -> list[JobFacts]:
        """Jobs of all attempts, the current one first."""
        current = self.seen.current
        return [*([current] if current is not None else []), *self.seen.others]

    def end_attempts(self) -> None:
        """Delete the Secrets and ConfigMaps of all attempts, also where the Job is gone."""
        current = (self.seen.body.get("status") or {}).get("jobName")
        found = {*(job.name for job in self.jobs()), *([current] if current else [])}
        self.out.delete_attempts += sorted(found)

    def record(self, reason: str, message: str, *, counted: bool) -> None:
        """Record the end of the attempt in status, and advance to the next attempt number."""
        number = self.status.attempt or 0
        record = AttemptRecord(
            attempt=number,
            started_at=self.status.attempt_start_time,
            ended_at=format_time(self.now),
            reason=reason,
            message=message[:MESSAGE_LENGTH],
            counted=counted,
        )
        self.status.attempts = [*self.status.attempts, record][-MAX_ATTEMPTS_KEPT:]
        self.status.attempt = number + 1
        self.status.job_name = self.status.job_uid = None
        self.status.job_start_time = self.status.attempt_start_time = None
        self.status.attempt_nodes = None

    def done(self, *, again: bool = False) -> Decision:
        """Finish the decision. ``again``: reconcile again at once, for the next step."""
        status = self.status
        status.observed_generation = self.generation
        status.state = conditions.job_state(status.conditions)
        status.conditions = conditions.for_kstatus(
            status.conditions, passing=self.passing, generation=self.generation, now=self.now
        )
        if status.pods is not None:
            done = min(status.pods.wanted, status.pods.ready + status.pods.succeeded)
            status.ready = f"{done}/{status.pods.wanted}"
        if again:
            self.requeue_within(0.0)
        self.out.status = status
        return self.out
