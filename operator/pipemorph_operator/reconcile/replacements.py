"""Lost pods that are replaced within their Job, while the others wait for the new ones.

The Job controller makes a lost index again by itself, but waits 10 s, then 20 s, once it has
counted the end of a pod. It does not count a pod without its finalizer. So the operator takes that
off a pod that is being deleted, or has failed and is not counted yet. Where it comes too late, the
Job controller waits, as often as the Job's ``backoffLimitPerIndex`` says. So it does for pods that
never ran their trainer (rejected by a node, a failed init container), and for one that was replaced
:data:`AT_ONCE` times within a few minutes: what ends it ends the next one, too.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipemorph.api.spec import PipeMorphJob
from pipemorph.api.status import MAX_REPLACEMENTS_KEPT
from pipemorph.api.status_recoveries import PodReplacement
from pipemorph.exits import EXIT_SAVED, EXIT_SIGTERM, EXITS_LOST
from pipemorph.status.conditions import MESSAGE_LENGTH, format_time
from pipemorph_operator import names
from pipemorph_operator.cluster.facts import JobFacts, PodFacts, parse_time
from pipemorph_operator.policy import restart
from pipemorph_operator.reconcile.decision import Draft

AT_ONCE, WITHIN_SECONDS = 3, 300.0
"""Most replacements of one pod without a delay, within that time."""


def look(draft: Draft, job: PipeMorphJob, current: JobFacts) -> None:
    """Replace lost pods of Job ``current``. May request the pods."""
    seen = draft.seen
    if not current.replaces or not (seen.pod_failed or current.terminating or seen.pods):
        return
    if seen.pods is None:
        draft.out.needs_pods = True
        return
    for pod in lost(seen.pods):
        if _replaced_lately(draft, pod) < AT_ONCE:
            _replace(draft, job, pod)
    for pod in (*seen.leaving, *seen.pods):
        left = restart.seconds_until_lost(pod)
        if left == 0.0:
            draft.out.forget_pods.append(pod)
        elif left is not None:
            draft.requeue_within(left + 0.1)


def lost(pods: Sequence[PodFacts]) -> list[PodFacts]:
    """Those that are lost, one by one, and not yet counted by the Job controller."""
    return [pod for pod in pods if pod.counts and (pod.gone_by is not None or _died(pod))]


def _died(pod: PodFacts) -> bool:
    return pod.failed and (pod.disrupted or (not pod.problem and pod.exit_code in EXITS_LOST))


def _replaced_lately(draft: Draft, pod: PodFacts) -> int:
    since = draft.now.timestamp() - WITHIN_SECONDS
    return sum(
        (record.pod, record.attempt) == (pod.index, draft.status.attempt or 0)
        and record.uid != pod.uid
        and (parse_time(record.at) or draft.now).timestamp() > since
        for record in draft.status.replacements
    )


def _replace(draft: Draft, job: PipeMorphJob, pod: PodFacts) -> None:
    cut, layout = job.spec.parallelism, draft.layout
    where = restart.ranks_of(pod.index, cut, layout)
    on = f" on node {pod.node}" if pod.node else ""
    if pod.failed and pod.exit_code is not None and not pod.disrupted:
        cause = restart.describe(pod, cut, layout)
    elif pod.disrupted:
        cause = f"{where}{on}: {pod.problem or 'evicted or preempted, or its node is lost'}"
    else:
        cause = f"{where}{on}: the pod is being deleted"
    by_cluster = pod.disrupted or pod.gone_by is not None
    record = PodReplacement(
        attempt=draft.status.attempt or 0,
        pod=pod.index,
        uid=pod.uid,
        at=format_time(draft.now),
        gone_by=format_time(draft.now if pod.gone_by is None else pod.gone_by),
        cause=cause[:MESSAGE_LENGTH],
        counted=not by_cluster and pod.exit_code not in (EXIT_SAVED, EXIT_SIGTERM),
    )
    kept = [each for each in draft.status.replacements if each.uid != pod.uid]
    draft.status.replacements = [*kept, record][-MAX_REPLACEMENTS_KEPT:]
    draft.out.replace_pods.append(pod)
    draft.emit("Warning", names.R_POD_REPLACED, f"{cause}; another pod takes its place")
