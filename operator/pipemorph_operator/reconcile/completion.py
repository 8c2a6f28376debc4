"""Completes jobs whose ranks have all finished while some pods have not.

A pod ends with its last container: an injected sidecar that never ends would block a finished job,
and one that fails would have it trained again. A pod of an excluded replica may never run, for lack
of a node or an image; if it starts after all, it ends with 0. Such pods have
:data:`LATE_POD_SECONDS` to end. Then the job is complete without them, and its Job is deleted.
"""

from __future__ import annotations

from pipemorph.spec.job_spec import PipeMorphJob
from pipemorph.spec.running_subset import RunningSubset
from pipemorph_operator import names
from pipemorph_operator.kube.object_facts import MESSAGE_LENGTH, JobFacts, PodFacts
from pipemorph_operator.policy import attempt_end
from pipemorph_operator.reconcile.decision import DecisionDraft

LATE_POD_SECONDS = 60.0
"""Time for a pod to start or end after the ranks of all other pods have finished."""


def find_finished_pods(draft: DecisionDraft, current: JobFacts) -> frozenset[int]:
    """Indices of pods of Job ``current`` whose ranks have finished. If the pods were read, includes
    those with another container that still runs or has failed."""
    ended = {pod.index for pod in draft.observed.pods or () if pod.exit_code == 0}
    return current.completed_pods | ended


def describe_late_pods(
    draft: DecisionDraft, job: PipeMorphJob, current: JobFacts
) -> list[str] | None:
    """Text on each pod of Job ``current`` that is not waited for; None while ranks of the job have
    not finished, or their pods still have time to end. May request the pods."""
    cut, saved, pods = job.spec.parallelism, draft.recoveries, draft.observed.pods
    completed = saved is not None and saved.completed
    # The ingest informs pods that are ready that the job has finished.
    if current.ready > 0:
        return None
    if pods is None:
        draft.decision.needs_pods = completed
        return None
    running = (
        RunningSubset(cut, tuple(saved.excluded_replicas))
        if saved is not None and completed
        else None
    )
    needed = set(running.active_pods if running is not None else range(cut.pods))
    if not needed <= find_finished_pods(draft, current):
        return None
    late = sorted(set(range(cut.pods)) - current.completed_pods)
    by_index = {pod.index: pod for pod in sorted(pods, key=lambda pod: pod.exit_code == 0)}
    texts = [
        attempt_end.format_ranks(index, cut, draft.layout) + _explain_late_pod(by_index.get(index))
        for index in late
    ]
    over = all(index in by_index and by_index[index].failed for index in late)
    sighted = min(
        (pod.ending_seconds for pod in pods if pod.exit_code == 0), default=LATE_POD_SECONDS
    )
    if over or current.failed or current.failing or sighted >= LATE_POD_SECONDS:
        return texts
    draft.requeue_within(LATE_POD_SECONDS - sighted + 0.1)
    message = (
        f"all ranks have finished; {'; '.join(texts)}; waiting for at most {LATE_POD_SECONDS:g} s"
    )
    draft.set_condition(names.PODS_READY, "False", names.R_FINISHING, message[:MESSAGE_LENGTH])
    draft.set_condition(names.RUNNING, "True", names.R_FINISHING, message[:MESSAGE_LENGTH])
    return None


def _explain_late_pod(pod: PodFacts | None) -> str:
    if pod is None:
        return ""
    if pod.running_containers:
        running = ", ".join(pod.running_containers)
        if len(pod.running_containers) == 1:
            return f": container {running} still runs"
        return f": containers {running} still run"
    return f": {why}" if (why := pod.problem or pod.pending_reason) else ""
