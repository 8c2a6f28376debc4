"""Reports why ranks of an attempt are not ready, after they had time to start."""

from __future__ import annotations

import re

from pipemorph.api.sections.placement import Placement
from pipemorph.api.spec import PipeMorphJob
from pipemorph.explain.story import plural
from pipemorph_operator import names
from pipemorph_operator.cluster.facts import JobFacts, parse_time
from pipemorph_operator.policy import restart
from pipemorph_operator.reconcile.decision import Draft

STUCK_SECONDS = 15.0
"""Time until the pods are read to find out why ranks are not ready."""
MISSING_SECONDS = 4.0
"""The same for a Job without any pods."""
LOOK_AGAIN_SECONDS, LONGEST_SECONDS = 30.0, 300.0
"""Between two looks: a quarter of the time that an attempt has waited, within these. A thousand
jobs that wait in a full cluster would else ask the API server for more than all others."""


def look(draft: Draft, job: PipeMorphJob, current: JobFacts, ready: int) -> restart.Cause | None:
    """Report in status what the ranks of Job ``current`` wait for. May request the pods.

    Returns the cause of the attempt's end if a rank can never be ready, else None.
    """
    seen, ranks = draft.seen, job.spec.parallelism.world_size
    message = f"{ready} of {ranks} ranks are ready"
    age = (draft.now - (parse_time(draft.status.attempt_start_time) or draft.now)).total_seconds()
    nobody = current.missing == job.spec.parallelism.pods
    patience = MISSING_SECONDS if nobody else STUCK_SECONDS
    if age < patience and not seen.pods:
        draft.requeue_within(patience - age + 0.1)
        draft.waiting(message)
        return None
    if seen.pods is None:
        draft.out.needs_pods = True
        return None
    # A Job that replaces them has its own way.
    lost = None
    if not current.replaces:
        lost = restart.lost(seen.pods, job.spec.parallelism)
    if lost is not None:
        return lost
    for pod in seen.pods:
        draft.requeue_within(restart.seconds_until_lost(pod))
    draft.requeue_within(min(LONGEST_SECONDS, max(LOOK_AGAIN_SECONDS, age / 4)))
    if seen.no_pod:
        problem = f"{plural(current.missing, 'pod')} cannot be created: {seen.no_pod}"
        _refused(draft, current, f"{message}; {problem}")
        return None
    stuck = [p for p in seen.pods if p.stuck]
    for pod in stuck:
        if found := re.search(rf'(\w+) "{current.name}(-page)?" not found', pod.stuck):
            # The engine's Secret is random, and the other ranks have theirs: it cannot be restored.
            gone = f"{found[1]} {current.name}{found[2] or ''} of the attempt was deleted"
            return restart.Cause(names.R_OBJECT_LOST, gone, counted=False)
    replaced = {p.index for p in draft.out.replace_pods}
    other = replaced | {p.index for p in seen.pods if not p.failed}
    failed = [p for p in seen.pods if p.failed and p.index not in other]
    if waiting := [*stuck, *failed]:
        first = min(waiting, key=lambda p: p.index)
        if first.stuck:
            where = restart.ranks_of(first.index, job.spec.parallelism, draft.layout)
            message += f"; {where}: {first.stuck}"
        else:
            ended = restart.describe(first, job.spec.parallelism, draft.layout)
            message += f"; {ended}; Kubernetes makes another pod after a delay"
            draft.emit_new("Warning", names.R_POD_FAILED, message)
        if any(p.unschedulable for p in stuck):
            message += _advice(job)
    draft.waiting(message)
    return None


def _advice(job: PipeMorphJob) -> str:
    """Advice for unschedulable ranks, if the job's own placement may be the cause; else empty."""
    placement = job.spec.placement or Placement()
    topology = placement.topology
    if topology is None or topology.mode != "pack" or not topology.required or placement.gang:
        return ""
    return (
        f"; placement.topology.required keeps all ranks in the first rank's domain of the label"
        f" {topology.key}: if it has no room, set placement.gang, whose scheduler finds a domain"
        " with room for all, or required: false; then suspend and resume the job"
    )


def _refused(draft: Draft, current: JobFacts, message: str) -> None:
    """Report that the API server rejects the Job's pods (quota, LimitRange, policy or webhook)."""
    if "IPC_LOCK" in message:
        message += "; placement.rdma.ipcLock: false avoids this capability"
    known = any(c.reason == names.R_PODS_REFUSED for c in draft.status.conditions)
    draft.not_running(names.R_PODS_REFUSED, message)
    if not known:
        draft.emit("Warning", names.R_PODS_REFUSED, f"Job {current.name}: {message}")
