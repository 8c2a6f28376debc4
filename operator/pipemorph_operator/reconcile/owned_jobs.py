"""Jobs of every PipeMorphJob, and its failed pods, from informers. Each change queues the owner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from pipemorph_operator.kube.object_facts import JobFacts
from pipemorph_operator.names import LABEL_ATTEMPT, LABEL_JOB, LABEL_REPLACED
from pipemorph_operator.reconcile.workqueue import WorkQueue

Key = tuple[str, str]


class OwnedJobs:
    """Facts of all Jobs, by owner."""

    def __init__(self, queue: WorkQueue[Key]) -> None:
        self._queue = queue
        self._facts: dict[Key, JobFacts] = {}
        self._owned: dict[Key, dict[str, JobFacts]] = {}
        """Facts by namespace and owner's UID, then by name."""

    def find_jobs(self, namespace: str, uid: str) -> Sequence[JobFacts]:
        """Jobs of the PipeMorphJob with that UID."""
        return list(self._owned.get((namespace, uid), {}).values())

    def process_change(self, key: Key, body: Mapping[str, Any] | None) -> None:
        """Process a change of a Job; None: it is gone."""
        namespace, name = key
        now = JobFacts.from_object(body) if body is not None else None
        before = self._facts.pop(key, None)
        if before is not None:
            siblings = self._owned[namespace, before.owner_uid]
            del siblings[name]
            if not siblings:
                del self._owned[namespace, before.owner_uid]
            self._queue.add((namespace, before.owner))
        if now is not None:
            self._facts[key] = now
            self._owned.setdefault((namespace, now.owner_uid), {})[name] = now
            self._queue.add((namespace, now.owner))


class FailedPods:
    """Counts pods that have failed and are not replaced, per attempt. The informer selects only
    those: a thousand jobs have too many pods."""

    LABELS = f"{LABEL_JOB},!{LABEL_REPLACED}"
    FIELDS = "status.phase=Failed"

    def __init__(self, queue: WorkQueue[Key]) -> None:
        self._queue = queue
        self._attempts: dict[Key, tuple[str, str, int]] = {}
        self._count: Counter[tuple[str, str, int]] = Counter()

    def has_failed_pods(self, namespace: str, job: str, attempt: int) -> bool:
        return self._count[namespace, job, attempt] > 0

    def process_change(self, key: Key, body: Mapping[str, Any] | None) -> None:
        """Process a failed pod; None: it is gone, or replaced."""
        before = self._attempts.pop(key, None)
        if before is not None:
            self._count -= Counter([before])
        if body is None:
            return
        labels = body["metadata"]["labels"]
        owner = key[0], labels[LABEL_JOB]
        self._attempts[key] = now = (*owner, int(labels.get(LABEL_ATTEMPT, "0")))
        self._count[now] += 1
        self._queue.add(owner)
