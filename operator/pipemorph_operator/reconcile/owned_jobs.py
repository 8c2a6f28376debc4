"""The Jobs of every PipeMorphJob, as an informer tells of them. Each change queues the owner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipemorph_operator.cluster.facts import JobFacts
from pipemorph_operator.reconcile.workqueue import WorkQueue

Key = tuple[str, str]


class OwnedJobs:
    """See the module. Keeps of each Job only its facts."""

    def __init__(self, queue: WorkQueue[Key]) -> None:
        self._queue = queue
        self._facts: dict[Key, JobFacts] = {}
        self._owned: dict[Key, dict[str, JobFacts]] = {}
        """By namespace and the owner's UID, then by name."""

    def jobs(self, namespace: str, uid: str) -> Sequence[JobFacts]:
        """The Jobs of the PipeMorphJob with that UID."""
        return list(self._owned.get((namespace, uid), {}).values())

    def changed(self, key: Key, body: Mapping[str, Any] | None) -> None:
        """Process a change of a Job; None: it is gone."""
        namespace, name = key
        now = JobFacts.of(body) if body is not None else None
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
