"""Ends jobs whose ranks have all finished while their pods have not.

A pod ends with its last container: a sidecar that was injected and never ends would keep a finished
job, and one that fails would have it trained again. And a pod of a replica that was left out may
never run, as one without a node or an image; if it comes after all, it ends with 0. All of these
have :data:`LATE_POD_SECONDS`. Then the job is complete without them, and its Job is deleted.
"""

from __future__ import annotations

from pipemorph.api.running import Running
from pipemorph.api.spec import PipeMorphJob
from pipemorph_operator import names
from pipemorph_operator.cluster.facts import MESSAGE_LENGTH, JobFacts, PodFacts
from pipemorph_operator.policy import restart
from pipemorph_operator.reconcile.decision import Draft

LATE_POD_SECONDS = 60.0
"""Time for a pod to start or to end after the ranks of all others have finished."""


def finished(draft: Draft, current: JobFacts) -> frozenset[int]:
    """The pods of Job ``current`` whose ranks have finished: as far as pods are known, also those
    of which another container runs on or has failed."""
    ended = {pod.index for pod in draft.seen.pods or () if pod.exit_code == 0}
    return current.completed | ended


def look(draft: Draft, job: PipeMorphJob, current: JobFacts) -> list[str] | None:
    """None while ranks of the job have not finished, or pods have time to; else the pods of Job
    ``current`` that are not waited for, each with the reason. May request the pods."""
    cut, saved, pods = job.spec.parallelism, draft.recoveries, draft.seen.pods
    told = saved is not None and saved.completed
    # Those that are ready hear from the ingest that the job has finished.
    if current.ready > 0:
        return None
    if pods is None:
        draft.out.needs_pods = told
        return None
    running = Running(cut, tuple(saved.left_out)) if saved is not None and told else None
    needed = set(running.pods if running is not None else range(cut.pods))
    if not needed <= finished(draft, current):
        return None
    late = sorted(set(range(cut.pods)) - current.completed)
    by_index = {pod.index: pod for pod in sorted(pods, key=lambda pod: pod.exit_code == 0)}
    said = [
        restart.ranks_of(index, cut, draft.layout) + _why(by_index.get(index)) for index in late
    ]
    over = all(index in by_index and by_index[index].failed for index in late)
    sighted = min((pod.sighted for pod in pods if pod.exit_code == 0), default=LATE_POD_SECONDS)
    if over or current.failed or current.failing or sighted >= LATE_POD_SECONDS:
        return said
    draft.requeue_within(LATE_POD_SECONDS - sighted + 0.1)
    message = (
        f"all ranks have finished; {'; '.join(said)}; waited for at most {LATE_POD_SECONDS:g} s"
    )
    draft.mark(names.PODS_READY, "False", names.R_FINISHING, message[:MESSAGE_LENGTH])
    draft.mark(names.RUNNING, "True", names.R_FINISHING, message[:MESSAGE_LENGTH])
    return None


def _why(pod: PodFacts | None) -> str:
    if pod is None:
        return ""
    if pod.beside:
        which = "container" if len(pod.beside) == 1 else "containers"
        return f": {which} {', '.join(pod.beside)} still run{'s' if len(pod.beside) == 1 else ''}"
    return f": {why}" if (why := pod.problem or pod.stuck) else ""
