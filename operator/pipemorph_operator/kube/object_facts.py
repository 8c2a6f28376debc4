"""Facts that decisions need from Kubernetes Jobs, Pods and Events, as plain values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pipemorph.errors import one_line
from pipemorph.spec.sections.template import TRAINER_CONTAINER
from pipemorph_operator.names import (
    AUTHORITIES,
    COMPLETION_INDEX,
    JOB_FINALIZER,
    LABEL_ATTEMPT,
    LABEL_JOB,
    LABEL_JOB_UID,
    LABEL_REPLACED,
)

OWN_LIMITS = ("DeadlineExceeded", "Evicted")
"""Reasons of a failed pod that exceeded a limit of its own template. A pod that the node evicts for
its own needs also has the condition DisruptionTarget. With any other reason the node has rejected
the pod for lack of room or a device (``OutOfcpu``, ``UnexpectedAdmissionError``)."""
MESSAGE_LENGTH = 1024
"""Longest termination message of a rank in status."""


def parse_time(text: str | None) -> datetime | None:
    """Parse RFC 3339 as Kubernetes writes it; None for None."""
    return datetime.fromisoformat(text) if text else None


@dataclass(frozen=True)
class JobCondition:
    """Condition of a batch Job with status True."""

    reason: str
    message: str
    changed_at: datetime | None


@dataclass(frozen=True)
class JobFacts:
    """Facts of an attempt's batch/v1 Job."""

    name: str
    uid: str
    owner: str
    owner_uid: str
    attempt: int
    deleting: bool = False
    complete: bool = False
    failed: JobCondition | None = None
    failing: JobCondition | None = None
    """``FailureTarget``: the Job has failed, and its pods are being stopped."""
    suspended: bool = False
    active: int = 0
    ready: int = 0
    terminating: int = 0
    succeeded: int = 0
    completed_indexes: str = ""
    """Indices of pods that have succeeded, as Kubernetes writes them: ``0-2,5``."""
    failed_pods: int = 0
    wanted_pods: int = 0
    """Number of pods it should have (``parallelism``)."""
    replaces_pods: bool = False
    """True if it replaces lost pods."""
    started_at: datetime | None = None
    """Time of the last start or resumption."""
    ca_fingerprints: frozenset[str] = frozenset()
    """Fingerprints of the authorities that its ranks trust; empty if unknown."""

    @property
    def is_drained(self) -> bool:
        """True if none of its pods can still run."""
        return self.active == 0 and self.terminating == 0 and not self.deleting

    @property
    def missing_pods(self) -> int:
        """Number of pods it has not created yet."""
        created = self.active + self.terminating + self.succeeded + self.failed_pods
        return max(0, self.wanted_pods - created)

    @property
    def completed_pods(self) -> frozenset[int]:
        """Indices of its pods that have succeeded."""
        found: set[int] = set()
        for part in filter(None, self.completed_indexes.split(",")):
            first, _, last = part.partition("-")
            found.update(range(int(first), int(last or first) + 1))
        return frozenset(found)

    @staticmethod
    def from_object(body: Mapping[str, Any]) -> JobFacts:
        metadata, status = body["metadata"], body.get("status") or {}
        labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
        conditions = {
            c["type"]: JobCondition(
                c.get("reason", ""), c.get("message", ""), parse_time(c.get("lastTransitionTime"))
            )
            for c in status.get("conditions") or ()
            if c.get("status") == "True"
        }
        # Pods that have just succeeded are no longer ready; ``succeeded`` counts them later.
        uncounted = status.get("uncountedTerminatedPods") or {}
        return JobFacts(
            name=metadata["name"],
            uid=metadata["uid"],
            owner=labels.get(LABEL_JOB, ""),
            owner_uid=labels.get(LABEL_JOB_UID, ""),
            attempt=int(labels.get(LABEL_ATTEMPT, "0")),
            deleting="deletionTimestamp" in metadata,
            complete="Complete" in conditions,
            failed=conditions.get("Failed"),
            failing=conditions.get("FailureTarget"),
            suspended="Suspended" in conditions,
            active=status.get("active") or 0,
            ready=status.get("ready") or 0,
            terminating=status.get("terminating") or 0,
            succeeded=(status.get("succeeded") or 0) + len(uncounted.get("succeeded") or ()),
            completed_indexes=status.get("completedIndexes") or "",
            failed_pods=status.get("failed") or 0,
            wanted_pods=(body.get("spec") or {}).get("parallelism") or 0,
            replaces_pods="backoffLimitPerIndex" in (body.get("spec") or {}),
            started_at=parse_time(status.get("startTime")),
            ca_fingerprints=frozenset(filter(None, annotations.get(AUTHORITIES, "").split(","))),
        )


@dataclass(frozen=True)
class PodFacts:
    """Facts of a pod with ranks."""

    name: str
    index: int
    uid: str = ""
    node: str | None = None
    exit_code: int | None = None
    finished_at: datetime | None = None
    message: str = ""
    disrupted: bool = False
    deletion_deadline: datetime | None = None
    """End of its grace period, if it is being deleted."""
    ended: bool = False
    """True if all its containers have ended, as its node reported."""
    failed: bool = False
    """True if it has ended, and a container did not exit with code 0."""
    problem: str = ""
    """Description of its failure; empty if its trainer's exit code describes it."""
    rejected_by_node: bool = False
    """True if the node rejected it."""
    running_containers: tuple[str, ...] = ()
    """Containers that still run although its trainer has ended."""
    grace_seconds: float = 0.0
    """Seconds in which it may end, if it is being deleted."""
    ending_seconds: float = 0.0
    """Seconds since this process first saw that it is being deleted, or that its trainer has ended.
    Not from times in the pod: clocks of nodes and of the API server differ from this one."""
    has_job_finalizer: bool = True
    """True if the Job controller has not counted its end yet: it has the finalizer."""
    is_replaced: bool = False
    """True if the Job replaces it."""
    pending_reason: str = ""
    """Reason why it does not run, if Kubernetes reports one."""
    is_creating: bool = False
    """True if it has a node and does not run, without a reason: only its events may have one."""

    @property
    def is_unschedulable(self) -> bool:
        """True if the scheduler finds no node for it."""
        return self.pending_reason.startswith("Unschedulable")

    @staticmethod
    def from_object(body: Mapping[str, Any]) -> PodFacts:
        metadata, status = body["metadata"], body.get("status") or {}
        index = (metadata.get("annotations") or {}).get(COMPLETION_INDEX, "0")
        containers = status.get("containerStatuses") or []
        trainer: Mapping[str, Any] = next(
            (c for c in containers if c.get("name") == TRAINER_CONTAINER), {}
        )
        ended = _read_termination(trainer)
        problem, since = _describe_failure(body, ended.get("exitCode"))
        spec: Mapping[str, Any] = body.get("spec") or {}
        stuck, node = _describe_pending(status, spec), spec.get("nodeName")
        return PodFacts(
            name=metadata["name"],
            index=int(index),
            uid=metadata.get("uid", ""),
            node=node,
            exit_code=ended.get("exitCode"),
            finished_at=parse_time(ended.get("finishedAt") or since),
            message=" ".join((ended.get("message") or ended.get("reason") or "").split())[
                -MESSAGE_LENGTH:
            ],
            disrupted=any(
                c["type"] == "DisruptionTarget" and c["status"] == "True"
                for c in status.get("conditions") or ()
            ),
            deletion_deadline=parse_time(metadata.get("deletionTimestamp")),
            ended=status.get("phase") in ("Failed", "Succeeded"),
            failed=status.get("phase") == "Failed",
            problem=problem,
            rejected_by_node=bool(problem)
            and (status.get("reason") or OWN_LIMITS[0]) not in OWN_LIMITS,
            running_containers=tuple(
                c["name"] for c in containers if ended and "running" in (c.get("state") or {})
            ),
            grace_seconds=float(metadata.get("deletionGracePeriodSeconds") or 0),
            is_replaced=LABEL_REPLACED in (metadata.get("labels") or {}),
            has_job_finalizer=JOB_FINALIZER in (metadata.get("finalizers") or ()),
            pending_reason=stuck,
            is_creating=bool(node) and status.get("phase") == "Pending" and not stuck,
        )


def read_controller_uid(pod: Mapping[str, Any]) -> str | None:
    """UID of the Job that controls a pod; None without one."""
    for owner in pod["metadata"].get("ownerReferences") or ():
        if owner.get("controller") and owner.get("kind") == "Job":
            return str(owner.get("uid"))
    return None


def explain_missing_pod(events: Iterable[Mapping[str, Any]]) -> str:
    """Last error of the Job controller in creating a pod, from the Job's events; empty if none."""
    _, message = _find_newest_event(e for e in events if e.get("reason") == "FailedCreate")
    return message.removeprefix("Error creating: ")


def explain_pending_pod(events: Sequence[Mapping[str, Any]]) -> str:
    """State of a pod that does not run yet, from its events: the last warning, such as a volume
    that cannot be mounted, else the last event, such as an image that is being pulled; empty if
    there is none."""
    reason, message = _find_newest_event(e for e in events if e.get("type") == "Warning")
    if not reason:
        reason, message = _find_newest_event(events)
    return f"{reason}: {message}" if reason else ""


def _find_newest_event(events: Iterable[Mapping[str, Any]]) -> tuple[str, str]:
    """Reason and message of the newest event; empty if there is none."""
    newest = max(
        events, key=lambda e: e.get("lastTimestamp") or e.get("eventTime") or "", default={}
    )
    return newest.get("reason") or "", one_line(newest.get("message") or "", MESSAGE_LENGTH)


def _read_termination(container: Mapping[str, Any]) -> Mapping[str, Any]:
    """Termination state of a container; empty if it has not ended."""
    return (container.get("state") or {}).get("terminated") or {}


def _describe_failure(body: Mapping[str, Any], trainer_code: int | None) -> tuple[str, str | None]:
    """Failure of a pod and its time; empty if its trainer's exit code describes the failure."""
    status, spec = body.get("status") or {}, body.get("spec") or {}
    if status.get("phase") != "Failed":
        return "", None
    if reason := status.get("reason"):
        words = one_line(f"{reason}: {status.get('message') or ''}", MESSAGE_LENGTH)
        return words, status.get("startTime")
    if trainer_code:
        return "", None
    # Sidecars are stopped when the pod ends: their exit codes do not matter.
    sidecars = {c["name"] for c in spec.get("initContainers") or () if c.get("restartPolicy")}
    for group, what in (("initContainer", "init container"), ("container", "container")):
        for container in status.get(f"{group}Statuses") or ():
            ended = _read_termination(container)
            if container["name"] in sidecars or not ended.get("exitCode"):
                continue
            why = ended.get("message") or ended.get("reason") or ""
            after = " after the trainer had ended with 0" if trainer_code == 0 else ""
            words = f"{what} {container['name']} exited with code {ended['exitCode']}{after}: {why}"
            return one_line(words, MESSAGE_LENGTH), ended.get("finishedAt")
    return "the pod has failed, and Kubernetes reports no reason", status.get("startTime")


def _describe_pending(status: Mapping[str, Any], spec: Mapping[str, Any]) -> str:
    if status.get("phase", "Pending") != "Pending":
        return ""
    for group in ("initContainerStatuses", "containerStatuses"):
        for container in status.get(group) or ():
            waiting = (container.get("state") or {}).get("waiting") or {}
            reason = waiting.get("reason", "")
            if reason not in ("", "ContainerCreating", "PodInitializing"):
                return f"{container['name']}: {reason}: {waiting.get('message', '')}"[:300]
    for condition in status.get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return f"{condition.get('reason', '')}: {condition.get('message', '')}"[:300]
    if spec.get("schedulerName") and not spec.get("nodeName") and not status.get("conditions"):
        # A running scheduler reports at once if it finds no node.
        return f"no scheduler handles it; schedulerName is {spec['schedulerName']}"[:300]
    return ""
