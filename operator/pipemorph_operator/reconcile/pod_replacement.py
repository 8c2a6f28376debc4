"""Replaces lost pods within their Job, while the other pods wait for the new ones.

The Job controller replaces a lost pod by itself, but only 10 s, then 20 s after it has counted the
pod's end. It does not count a pod without its finalizer. So the operator removes the finalizer from
a pod that is being deleted, or has failed and is not counted yet. If that comes too late, the Job
controller waits, up to ``backoffLimitPerIndex`` times. It also waits for pods that never ran their
trainer (rejected by a node, a failed init container), and for a pod that was replaced
:data:`MAX_IMMEDIATE` times within a few minutes: its successor is likely to end in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipemorph.exits import EXIT_SAVED, EXIT_SIGTERM, POD_LOST_EXITS
from pipemorph.spec.job_spec import PipeMorphJob
from pipemorph.spec.job_status import MAX_REPLACEMENTS_KEPT
from pipemorph.spec.status_recoveries import PodReplacement
from pipemorph.views.status.conditions import MESSAGE_LENGTH, format_time
from pipemorph_operator import names
from pipemorph_operator.kube.object_facts import JobFacts, PodFacts, parse_time
from pipemorph_operator.policy import attempt_end
from pipemorph_operator.reconcile.decision import DecisionDraft

MAX_IMMEDIATE, WITHIN_SECONDS = 3, 300.0
"""Limit of replacements of a pod without a delay, within that time."""


def replace_lost_pods(draft: DecisionDraft, job: PipeMorphJob, current: JobFacts) -> None:
    """Replace lost pods of Job ``current``. May request the pods."""
    seen = draft.observed
    if not current.replaces_pods or not (seen.pod_failed or current.terminating or seen.pods):
        return
    if seen.pods is None:
        draft.decision.needs_pods = True
        return
    for pod in find_lost_pods(seen.pods):
        if _count_recent_replacements(draft, pod) < MAX_IMMEDIATE:
            _replace_pod(draft, job, pod)
    for pod in (*seen.departing_pods, *seen.pods):
        remaining = attempt_end.seconds_until_lost(pod)
        if remaining == 0.0:
            draft.decision.forget_pods.append(pod)
        elif remaining is not None:
            draft.requeue_within(remaining + 0.1)


def find_lost_pods(pods: Sequence[PodFacts]) -> list[PodFacts]:
    """Lost pods that the Job controller has not counted yet."""
    return [
        pod
        for pod in pods
        if pod.has_job_finalizer and (pod.deletion_deadline is not None or _ended_by_loss(pod))
    ]


def _ended_by_loss(pod: PodFacts) -> bool:
    return pod.failed and (pod.disrupted or (not pod.problem and pod.exit_code in POD_LOST_EXITS))


def _count_recent_replacements(draft: DecisionDraft, pod: PodFacts) -> int:
    since = draft.now.timestamp() - WITHIN_SECONDS
    return sum(
        (record.pod, record.attempt) == (pod.index, draft.status.attempt or 0)
        and record.uid != pod.uid
        and (parse_time(record.at) or draft.now).timestamp() > since
        for record in draft.status.replacements
    )


def _replace_pod(draft: DecisionDraft, job: PipeMorphJob, pod: PodFacts) -> None:
    cut, layout = job.spec.parallelism, draft.layout
    where = attempt_end.format_ranks(pod.index, cut, layout)
    on = f" on node {pod.node}" if pod.node else ""
    if pod.failed and pod.exit_code is not None and not pod.disrupted:
        cause = attempt_end.describe_failed_pod(pod, cut, layout)
    elif pod.disrupted:
        cause = f"{where}{on}: {pod.problem or 'evicted or preempted, or its node is lost'}"
    else:
        cause = f"{where}{on}: the pod is being deleted"
    by_cluster = pod.disrupted or pod.deletion_deadline is not None
    record = PodReplacement(
        attempt=draft.status.attempt or 0,
        pod=pod.index,
        uid=pod.uid,
        at=format_time(draft.now),
        gone_by=format_time(draft.now if pod.deletion_deadline is None else pod.deletion_deadline),
        cause=cause[:MESSAGE_LENGTH],
        counted=not by_cluster and pod.exit_code not in (EXIT_SAVED, EXIT_SIGTERM),
    )
    others = [each for each in draft.status.replacements if each.uid != pod.uid]
    draft.status.replacements = [*others, record][-MAX_REPLACEMENTS_KEPT:]
    draft.decision.replace_pods.append(pod)
    draft.emit_event("Warning", names.R_POD_REPLACED, f"{cause}; another pod takes its place")
