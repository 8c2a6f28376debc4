"""Ends jobs whose ranks have all finished while pods of a replica that was left out have not, and
cannot run: as one without a node or an image.

Such a pod ends with 0 if it comes after all, and the Job is complete. It has
:data:`LATE_POD_SECONDS` for that. Then the job is complete without it, and its Job, which would go
on waiting, is deleted.
"""

from __future__ import annotations

from datetime import timedelta

from pipemorph.api.running import Running
from pipemorph.api.spec import PipeMorphJob
from pipemorph_operator.cluster.facts import JobFacts
from pipemorph_operator.policy import restart
from pipemorph_operator.reconcile.decision import Draft

LATE_POD_SECONDS = 60
"""Time for a pod to start after the ranks of all others have finished."""


def never_ran(draft: Draft, job: PipeMorphJob, current: JobFacts) -> list[str]:
    """The pods of Job ``current`` that have not run, each with the reason if Kubernetes tells one,
    once the job has finished without them and they had their time; else nothing. May request the
    pods."""
    cut, saved = job.spec.parallelism, draft.recoveries
    # Those that are ready hear from the ingest that the job has finished.
    if saved is None or not saved.completed or current.ready > 0:
        return []
    running = Running(cut, tuple(saved.left_out), saved.moved)
    if not set(running.pods) <= current.completed:
        return []
    pods = draft.seen.pods
    if pods is None:
        draft.out.needs_pods = True
        return []
    finished = [p.finished_at for p in pods if p.finished_at is not None and running.has(p.index)]
    time = timedelta(seconds=LATE_POD_SECONDS)
    # Pods that are gone, with all that was known of them, ended long ago.
    left = max(finished, default=draft.now - time) + time - draft.now
    if left > timedelta():
        draft.requeue_within(left.total_seconds() + 0.1)
        return []
    stuck = {pod.index: pod.stuck for pod in pods if pod.index not in current.completed}
    late = sorted(set(range(cut.pods)) - current.completed)
    return [
        restart.ranks_of(pod, cut, draft.places) + (f": {why}" if (why := stuck.get(pod)) else "")
        for pod in late
    ]
