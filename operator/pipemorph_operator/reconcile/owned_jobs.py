"""PipeMorphJobs, their Jobs and their failed pods, as informers report them. Each change that a
decision may depend on queues the PipeMorphJob."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pipemorph_operator.cluster.facts import JobFacts
from pipemorph_operator.names import (
    INGEST_CONDITIONS,
    LABEL_ATTEMPT,
    LABEL_JOB,
    LABEL_REPLACED,
    LINKS_HEALTHY,
)
from pipemorph_operator.reconcile.workqueue import WorkQueue

Key = tuple[str, str]

_OTHERS = frozenset({"training", "control", "conditions", "attemptNodes"})


class _Known(NamedTuple):
    """A hash of a job's relevant fields, and its slow links (stage and replica) whose nodes are not
    noted."""

    fields: int
    unnoted: frozenset[tuple[int, int]]


class WatchedJobs:
    """The PipeMorphJobs that exist. They only queue reconciles, which read the job."""

    def __init__(self, queue: WorkQueue[Key]) -> None:
        self._queue = queue
        self._known: dict[Key, _Known] = {}

    def jobs(self) -> list[Key]:
        return [*self._known]

    def changed(self, key: Key, body: Mapping[str, Any] | None) -> None:
        """Process a change of a job; None: it is gone."""
        if body is None:
            del self._known[key]
            self._queue.add(key)
            return
        known = self._known.get(key)
        fields = hash(json.dumps(relevant_fields(body), sort_keys=True))
        self._known[key] = now = _Known(fields, _unnoted(body))
        if known is None or now.fields != known.fields or not now.unnoted <= known.unnoted:
            self._queue.add(key)


def relevant_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a job that a decision may depend on, without the ingest's figures and the nodes
    that are noted for slow links."""
    metadata, status = body["metadata"], body.get("status") or {}
    training, conditions = status.get("training") or {}, status.get("conditions") or ()
    return {
        "metadata": {k: metadata.get(k) for k in ("uid", "generation", "labels")},
        "deleting": "deletionTimestamp" in metadata,
        "status": {k: v for k, v in status.items() if k not in _OTHERS},
        "conditions": [c for c in conditions if c.get("type") not in INGEST_CONDITIONS],
        "training": {k: training.get(k) for k in ("attempt", "state")},
        "reports": [c.get("reason") for c in conditions if c.get("type") == LINKS_HEALTHY],
    }


def _unnoted(body: Mapping[str, Any]) -> frozenset[tuple[int, int]]:
    """The slow links whose nodes a reconcile has to note. That they are noted needs none."""
    status = body.get("status") or {}
    slow = (status.get("training") or {}).get("slowLinks") or ()
    noted = (status.get("attemptNodes") or {}).get("links") or ()
    return frozenset((at["link"], at["replica"]) for at in slow) - frozenset(
        (at["link"], at["replica"]) for at in noted
    )


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


class FailedPods:
    """Which jobs have pods that have failed and are not replaced. The API server tells of no other
    pods: a thousand jobs have too many."""

    LABELS = f"{LABEL_JOB},!{LABEL_REPLACED}"
    FIELDS = "status.phase=Failed"

    def __init__(self, queue: WorkQueue[Key]) -> None:
        self._queue = queue
        self._attempts: dict[Key, tuple[str, str, int]] = {}
        self._count: Counter[tuple[str, str, int]] = Counter()

    def any_of(self, namespace: str, job: str, attempt: int) -> bool:
        return self._count[namespace, job, attempt] > 0

    def changed(self, key: Key, body: Mapping[str, Any] | None) -> None:
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
