"""kopf: watches, credentials and the index of Jobs. Every change of a job or of one of its Jobs
asks for that job's turn; what the change was does not matter.

Only event handlers and an index: kopf adds no finalizer and no annotation to anybody's objects.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import kopf

from pipemorph_operator.crd import PLURAL, VERSION
from pipemorph_operator.facts import JobFacts
from pipemorph_operator.names import API_GROUP, INGEST_CONDITIONS, KIND, LABEL_JOB
from pipemorph_operator.watchdog import WatchDog
from pipemorph_operator.workqueue import WorkQueue

INACTIVITY_SECONDS = 90.0
"""Bookmarks come every minute: a watch that is silent for longer is dead."""

Key = tuple[str, str]

_OTHERS = frozenset({"training", "control", "conditions"})


class Watched:
    """What kopf keeps for us: the Jobs of every PipeMorphJob, by namespace and UID; and what of
    a job has been asked a turn for."""

    def __init__(self) -> None:
        self._index: kopf.Index[Key, JobFacts] | None = None
        self._seen: dict[Key, int] = {}
        self.dog = WatchDog()

    def use(self, index: kopf.Index[Key, JobFacts]) -> None:
        self._index = index

    def jobs(self, namespace: str, uid: str) -> Sequence[JobFacts]:
        if self._index is None:
            raise RuntimeError("a job was reconciled before the Jobs were listed")
        return list(self._index.get((namespace, uid), ()))

    def is_news(self, key: Key, kind: str | None, body: Mapping[str, Any]) -> bool:
        """Whether an event of a job can change what is decided. ``kind`` None: it was listed."""
        if kind == "DELETED":
            self._seen.pop(key, None)
            return True
        now = hash(json.dumps(what_matters(body), sort_keys=True))
        known = self._seen.get(key)
        self._seen[key] = now
        return kind != "MODIFIED" or now != known


def what_matters(body: Mapping[str, Any]) -> dict[str, Any]:
    """What of a job a decision may depend on: not the ingest's figures, which it writes every
    few seconds."""
    metadata, status = body["metadata"], body.get("status") or {}
    training = status.get("training") or {}
    return {
        "metadata": {k: metadata.get(k) for k in ("uid", "generation", "labels")},
        "deleting": "deletionTimestamp" in metadata,
        "status": {k: v for k, v in status.items() if k not in _OTHERS},
        "conditions": [
            c for c in status.get("conditions") or () if c.get("type") not in INGEST_CONDITIONS
        ],
        "training": {k: training.get(k) for k in ("attempt", "state")},
    }


def registry(queue: WorkQueue[Key], watched: Watched) -> kopf.OperatorRegistry:
    """The handlers."""
    made = kopf.OperatorRegistry()

    @kopf.on.startup(registry=made)
    async def configure(
        settings: kopf.OperatorSettings, owned: kopf.Index[Key, JobFacts] | Any = None, **_: Any
    ) -> None:
        watched.use(owned)
        settings.queueing.idle_timeout = 1.0
        settings.queueing.exit_timeout = 0.5
        settings.posting.enabled = False
        settings.scanning.disabled = True
        settings.watching.inactivity_timeout = INACTIVITY_SECONDS
        settings.watching.label_selectors["batch", "jobs"] = LABEL_JOB
        settings.networking.request_timeout = 60

    @kopf.on.login(registry=made)
    async def login(**kwargs: Any) -> kopf.ConnectionInfo | None:
        # As api.Cluster: KUBECONFIG, else the pod's service account.
        if "KUBECONFIG" not in os.environ and "KUBERNETES_SERVICE_HOST" in os.environ:
            return kopf.login_with_service_account(**kwargs)
        return kopf.login_with_kubeconfig(**kwargs)

    @kopf.index("batch", "v1", "jobs", labels={LABEL_JOB: kopf.PRESENT}, registry=made, id="owned")
    async def owned(body: kopf.Body, **_: Any) -> dict[Key, JobFacts]:
        facts = JobFacts.of(body)
        return {(str(body["metadata"]["namespace"]), facts.owner_uid): facts}

    @kopf.on.event(API_GROUP, VERSION, PLURAL, registry=made)
    async def job_changed(
        namespace: str | None, name: str, type: str | None, body: kopf.Body, **_: Any
    ) -> None:
        watched.dog.brought(KIND, body["metadata"], deleted=type == "DELETED")
        key = (str(namespace), name)
        if watched.is_news(key, type, body):
            queue.add(key)

    @kopf.on.event("batch", "v1", "jobs", labels={LABEL_JOB: kopf.PRESENT}, registry=made)
    async def child_changed(
        namespace: str | None, labels: kopf.Labels, type: str | None, body: kopf.Body, **_: Any
    ) -> None:
        watched.dog.brought("Job", body["metadata"], deleted=type == "DELETED")
        queue.add((str(namespace), labels[LABEL_JOB]))

    return made
