"""Reports the reasons why ranks of an attempt are not ready, after they had time to start."""

from __future__ import annotations

import re

from pipemorph.spec.job_spec import PipeMorphJob
from pipemorph.spec.sections.placement import PlacementSpec
from pipemorph.views.explanation.explanation_text import format_count
from pipemorph_operator import names
from pipemorph_operator.kube.object_facts import JobFacts, parse_time
from pipemorph_operator.policy import attempt_end
from pipemorph_operator.reconcile.decision import DecisionDraft

STUCK_SECONDS = 15.0
"""Time until the pods are read to find the reason why ranks are not ready."""
MISSING_SECONDS = 4.0
"""Time until the reason is searched for a Job without any pods."""
CHECK_AGAIN_SECONDS, LONGEST_SECONDS = 30.0, 300.0
"""Bounds of the time between two checks: a quarter of the attempt's waiting time. Else a thousand
jobs that wait in a full cluster would send most of the requests to the API server."""


def report_pending_pods(
    draft: DecisionDraft, job: PipeMorphJob, current: JobFacts, ready: int
) -> attempt_end.AttemptEndCause | None:
    """Report in status the reason why the ranks of Job ``current`` wait. May request the pods.

    Returns the cause of the attempt's end if a rank can never be ready, else None.
    """
    seen, ranks = draft.observed, job.spec.parallelism.world_size
    message = f"{ready} of {ranks} ranks are ready"
    age = (draft.now - (parse_time(draft.status.attempt_start_time) or draft.now)).total_seconds()
    no_pods = current.missing_pods == job.spec.parallelism.pods
    patience = MISSING_SECONDS if no_pods else STUCK_SECONDS
    if age < patience and not seen.pods:
        draft.requeue_within(patience - age + 0.1)
        draft.mark_waiting(message)
        return None
    if seen.pods is None:
        draft.decision.needs_pods = True
        return None
    # A Job that replaces pods handles lost ones itself.
    lost = None
    if not current.replaces_pods:
        lost = attempt_end.detect_lost_node(seen.pods, job.spec.parallelism)
    if lost is not None:
        return lost
    for pod in seen.pods:
        draft.requeue_within(attempt_end.seconds_until_lost(pod))
    draft.requeue_within(min(LONGEST_SECONDS, max(CHECK_AGAIN_SECONDS, age / 4)))
    if seen.missing_pod_reason:
        pods = format_count(current.missing_pods, "pod")
        problem = f"{pods} cannot be created: {seen.missing_pod_reason}"
        _report_refused_pods(draft, current, f"{message}; {problem}")
        return None
    stuck = [p for p in seen.pods if p.pending_reason]
    for pod in stuck:
        if found := re.search(rf'(\w+) "{current.name}(-page)?" not found', pod.pending_reason):
            # The engine's Secret is random and the other ranks use it: it cannot be restored.
            gone = f"{found[1]} {current.name}{found[2] or ''} of the attempt was deleted"
            return attempt_end.AttemptEndCause(names.R_OBJECT_LOST, gone, counted=False)
    replaced = {p.index for p in draft.decision.replace_pods}
    other = replaced | {p.index for p in seen.pods if not p.failed}
    failed = [p for p in seen.pods if p.failed and p.index not in other]
    if waiting := [*stuck, *failed]:
        first = min(waiting, key=lambda p: p.index)
        if first.pending_reason:
            where = attempt_end.format_ranks(first.index, job.spec.parallelism, draft.layout)
            message += f"; {where}: {first.pending_reason}"
        else:
            ended = attempt_end.describe_failed_pod(first, job.spec.parallelism, draft.layout)
            message += f"; {ended}; Kubernetes replaces the pod after a delay"
            draft.emit_new_event("Warning", names.R_POD_FAILED, message)
        if any(p.is_unschedulable for p in stuck):
            message += _advise_on_placement(job)
    draft.mark_waiting(message)
    return None


def _advise_on_placement(job: PipeMorphJob) -> str:
    """Advice for unschedulable ranks, if the job's own placement may be the cause; else empty."""
    placement = job.spec.placement or PlacementSpec()
    topology = placement.topology
    if topology is None or topology.mode != "pack" or not topology.required or placement.gang:
        return ""
    return (
        f"; placement.topology.required places all ranks in the first rank's domain of the label"
        f" {topology.key}: if that has no room, set placement.gang, whose scheduler finds a domain"
        " with room for all, or required: false; then suspend and resume the job"
    )


def _report_refused_pods(draft: DecisionDraft, current: JobFacts, message: str) -> None:
    """Report that the API server rejects the Job's pods (quota, LimitRange, policy or webhook)."""
    if "IPC_LOCK" in message:
        message += "; placement.rdma.ipcLock: false avoids this capability"
    known = any(c.reason == names.R_PODS_REFUSED for c in draft.status.conditions)
    draft.mark_not_running(names.R_PODS_REFUSED, message)
    if not known:
        draft.emit_event("Warning", names.R_PODS_REFUSED, f"Job {current.name}: {message}")
