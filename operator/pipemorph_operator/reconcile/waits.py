"""While not all ranks of an attempt are ready: which is not and why, once they had time."""

from __future__ import annotations

from pipemorph.api.placement import Placement
from pipemorph.api.spec import PipeMorphJob
from pipemorph_operator import names
from pipemorph_operator.cluster.facts import JobFacts, parse_time
from pipemorph_operator.policy import restart
from pipemorph_operator.reconcile.decision import Draft

STUCK_SECONDS = 15.0
"""Ranks that are not ready after this are looked at for a reason."""
MISSING_SECONDS = 4.0
"""A Job that has no pod at all after this is looked at for a reason."""
LOOK_AGAIN_SECONDS = 30.0


def look(draft: Draft, job: PipeMorphJob, current: JobFacts, ready: int) -> restart.Cause | None:
    """Say what the ranks of Job ``current`` wait for. May ask for the pods.

    Returns why the attempt is over if one of them will never be ready.
    """
    seen, ranks = draft.seen, job.spec.parallelism.world_size
    message = f"{ready} of {ranks} ranks are ready"
    age = (draft.now - (parse_time(draft.status.attempt_start_time) or draft.now)).total_seconds()
    patience = MISSING_SECONDS if current.missing == ranks else STUCK_SECONDS
    if age < patience:
        draft.soon(patience - age + 0.1)
        draft.waiting(message)
        return None
    if seen.pods is None:
        draft.out.needs_pods = True
        return None
    lost = restart.lost(seen.pods, draft.now, job.spec.parallelism.stages)
    if lost is not None:
        return lost
    leaving = any(p.gone_by is not None for p in seen.pods)
    draft.soon(restart.LOST_SECONDS if leaving else LOOK_AGAIN_SECONDS)
    if seen.no_pod:
        _refused(draft, current, f"{message}; {current.missing} pods cannot be made: {seen.no_pod}")
        return None
    stuck = [p for p in seen.pods if p.stuck]
    if stuck:
        first = min(stuck, key=lambda p: p.index)
        where = restart.rank(first.index, job.spec.parallelism.stages)
        message += f"; {where}: {first.stuck}"
        if any(p.unschedulable for p in stuck):
            message += _advice(job)
    draft.waiting(message)
    return None


def _advice(job: PipeMorphJob) -> str:
    """What to do about ranks that find no node, where the job's own wish may be why."""
    placement = job.spec.placement or Placement()
    topology = placement.topology
    if topology is None or topology.mode != "pack" or not topology.required or placement.gang:
        return ""
    return (
        f"; placement.topology.required holds all ranks where the first one landed, by the label"
        f" {topology.key}: if there is no room, give a placement.gang, which looks for a place with"
        " room for all, or required: false; the edit holds once the job was suspended and resumed"
    )


def _refused(draft: Draft, current: JobFacts, message: str) -> None:
    """A quota, a LimitRange, a policy or a webhook takes the Job but not its pods."""
    if "IPC_LOCK" in message:
        message += "; placement.rdma.ipcLock: false does without the capability"
    known = any(c.reason == names.R_PODS_REFUSED for c in draft.status.conditions)
    draft.not_running(names.R_PODS_REFUSED, message)
    if not known:
        draft.say("Warning", names.R_PODS_REFUSED, f"Job {current.name}: {message}")
