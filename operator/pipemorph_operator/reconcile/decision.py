"""Input and output of ``decide``, and the draft that builds the output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from pipemorph.spec.job_spec import JobSpec
from pipemorph.spec.job_status import MAX_ATTEMPTS_KEPT, AttemptStatus, ConditionStatus, JobStatus
from pipemorph.spec.layout import RankLayout
from pipemorph.spec.status_recoveries import Recoveries
from pipemorph.views.status.conditions import MESSAGE_LENGTH, format_time, update_condition
from pipemorph_operator import names
from pipemorph_operator.kube.events import EventType, KubeEvent
from pipemorph_operator.kube.job_object import read_operator_status, read_status
from pipemorph_operator.kube.object_facts import JobFacts, PodFacts, parse_time
from pipemorph_operator.policy import conditions
from pipemorph_operator.reconcile.plan_checks import PlanCheck
from pipemorph_operator.resources import Attempt


@dataclass(frozen=True)
class ObservedJob:
    """Input of a decision. ``current_job``: Job of the attempt in status, if it exists;
    ``other_jobs``: Jobs of other attempts; ``pods``: those of the current attempt, None if not
    read; ``missing_pod_reason``: why the current Job could not create all pods, read with them."""

    body: Mapping[str, Any]
    now: datetime
    plan_check: PlanCheck | None = field(default=None, kw_only=True)
    """Result of the check that the spec allows a plan; None if not requested."""
    current_job: JobFacts | None = None
    other_jobs: Sequence[JobFacts] = ()
    pods: Sequence[PodFacts] | None = None
    missing_pod_reason: str = ""
    departing_pods: Sequence[PodFacts] = ()
    """Pods that are replaced and being deleted, read with the pods."""
    pod_failed: bool = False
    """True if a pod of the attempt is known to have failed."""


@dataclass
class ReconcileDecision:
    """Changes to make. ``status`` None: no change. ``needs_pods``: decide again with the pods;
    ``needs_plan``: decide again with ``ObservedJob.plan_check`` for this spec."""

    status: JobStatus | None = None
    create_attempt: Attempt | None = None
    apply_objects: list[dict[str, Any]] = field(default_factory=list)
    delete_jobs: list[str] = field(default_factory=list)
    delete_attempts: list[str] = field(default_factory=list)
    """Names of ended attempts, whose Secrets and ConfigMaps are deleted. Deleting a ConfigMap also
    deletes the PodGroup that it owns."""
    replace_pods: list[PodFacts] = field(default_factory=list)
    """Lost pods that the Job controller must not count, so that it replaces them at once."""
    forget_pods: list[PodFacts] = field(default_factory=list)
    """Pods to delete without grace: their node does not respond and cannot end them."""
    restore_objects: list[dict[str, Any]] = field(default_factory=list)
    """Objects that a running attempt needs, to be created again if they were deleted."""
    delete_job: bool = False
    needs_pods: bool = False
    needs_plan: JobSpec | None = None
    events: list[KubeEvent] = field(default_factory=list)
    requeue_seconds: float | None = None
    job_counters: list[str] = field(default_factory=list)
    """Metrics to increment: ``created``, ``successful``, ``failed``, ``restarted``."""
    accused_nodes: dict[str, str] = field(default_factory=dict)
    """Nodes at which links are slow, with the measured delay as text."""


class DecisionDraft:
    """Builds one decision: the new status, and the changes that go with it."""

    def __init__(self, seen: ObservedJob) -> None:
        self.observed = seen
        self.now = seen.now
        self.metadata = seen.body["metadata"]
        self.generation: int | None = self.metadata.get("generation")
        self.status = read_operator_status(seen.body)
        self.observed_status = read_status(seen.body)
        """Status as read, with the ingest's part."""
        self.decision = ReconcileDecision()
        self.distrusts_ingest = False
        """True if ranks of the current Job trust no authority of the ingest."""
        self.is_transient = False
        """True if the problem that stops the job is expected to pass by itself."""

    @property
    def recoveries(self) -> Recoveries | None:
        """Recoveries of the attempt in status, as written by the ingest."""
        found = self.observed_status.recoveries
        if found is None or found.attempt != (self.status.attempt or 0):
            return None
        return found

    @property
    def layout(self) -> RankLayout:
        """Layout of the attempt in status, as written by the ingest."""
        found = self.recoveries
        return found.layout if found is not None else RankLayout()

    def set_condition(self, kind: str, status: ConditionStatus, reason: str, message: str) -> None:
        """Set the condition of type ``kind``."""
        self.status.conditions = update_condition(
            self.status.conditions,
            kind,
            status,
            reason,
            message,
            generation=self.generation,
            now=self.now,
        )

    def emit_event(self, kind: EventType, reason: str, message: str) -> None:
        """Emit a Kubernetes event."""
        self.decision.events.append(KubeEvent(kind, reason, message))

    def emit_new_event(self, kind: EventType, reason: str, message: str) -> None:
        """Emit an event, unless a condition already has the message."""
        if not any(c.message == message for c in self.status.conditions):
            self.emit_event(kind, reason, message)

    def emit_created(self, number: int, name: str) -> None:
        """Emit the event of a created Job."""
        self.emit_event("Normal", names.R_CREATED, f"attempt {number}: Job {name} was created")

    def requeue_within(self, seconds: float | None) -> None:
        """Reconcile the job again within ``seconds``; None: no limit."""
        if seconds is not None:
            now = self.decision.requeue_seconds
            self.decision.requeue_seconds = seconds if now is None else min(now, seconds)

    def mark_waiting(self, message: str) -> None:
        """Mark that the Job exists and not all ranks are ready."""
        self.mark_not_running(names.R_WAITING_FOR_PODS, message)

    def mark_not_running(self, reason: str, message: str) -> None:
        """Set PodsReady and Running to False."""
        self.set_condition(names.PODS_READY, "False", reason, message)
        self.set_condition(names.RUNNING, "False", reason, message)

    def mark_without_reports(self, reason: str, message: str) -> None:
        """Mark that all pods run, with the reason why it is unknown that their ranks train."""
        if reason == names.R_OTHER_AUTHORITY:
            self.emit_new_event("Warning", reason, f"all pods run; {message}")
        self.set_condition(names.RUNNING, "True", reason, f"all pods run; {message}")

    def stop_clock(self) -> None:
        """Stop the clock of activeDeadlineSeconds until the job starts again."""
        began = parse_time(self.status.start_time)
        if began is not None:
            self.status.ran_seconds += max(0, round((self.now - began).total_seconds()))
        self.status.start_time = None

    def mark_queued(self, current: JobFacts) -> None:
        """Mark that a queue, such as Kueue, holds the attempt's Job suspended."""
        self.stop_clock()
        self.status.attempt_start_time = None
        advice = "if Kueue manages it, the Job's Workload has the reason"
        self.mark_not_running(
            names.R_QUEUED, f"Job {current.name} is suspended by its queue; {advice}"
        )

    def list_jobs(self) -> list[JobFacts]:
        """Jobs of all attempts, the current one first."""
        current = self.observed.current_job
        return [*([current] if current is not None else []), *self.observed.other_jobs]

    def delete_all_attempts(self) -> None:
        """Delete the Secrets and ConfigMaps of all attempts, also of those whose Job is gone."""
        current = (self.observed.body.get("status") or {}).get("jobName")
        found = {*(job.name for job in self.list_jobs()), *([current] if current else [])}
        self.decision.delete_attempts += sorted(found)

    def record_attempt(self, reason: str, message: str, *, counted: bool) -> None:
        """Record the end of the attempt in status, and advance to the next attempt number."""
        number = self.status.attempt or 0
        record = AttemptStatus(
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

    def finish_decision(self, *, again: bool = False) -> ReconcileDecision:
        """Finish the decision. ``again``: reconcile again at once, for the next step."""
        status = self.status
        status.observed_generation = self.generation
        status.state = conditions.derive_job_state(status.conditions)
        status.conditions = conditions.add_kstatus_conditions(
            status.conditions, passing=self.is_transient, generation=self.generation, now=self.now
        )
        if status.pods is not None:
            done = min(status.pods.wanted, status.pods.ready + status.pods.succeeded)
            status.ready = f"{done}/{status.pods.wanted}"
        if again:
            self.requeue_within(0.0)
        self.decision.status = status
        return self.decision
