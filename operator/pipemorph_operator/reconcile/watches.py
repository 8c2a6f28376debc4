"""kopf's watch of PipeMorphJobs, and its credentials. Every relevant change queues the job.

Only an event handler is registered, so that kopf adds no finalizers or annotations to objects.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import kopf

from pipemorph_operator.names import API_GROUP, INGEST_CONDITIONS, KIND, PLURAL, VERSION
from pipemorph_operator.reconcile.workqueue import WorkQueue
from pipemorph_operator.watchdog import Watchdog

INACTIVITY_SECONDS = 90.0
"""Bookmarks arrive every minute: a watch that is silent for longer is dead."""

Key = tuple[str, str]

_OTHERS = frozenset({"training", "control", "conditions"})


class Watched:
    """Remembers the state of jobs for which a reconcile was queued."""

    def __init__(self) -> None:
        self._seen: dict[Key, int] = {}
        self.watchdog = Watchdog()

    def is_relevant(self, key: Key, kind: str | None, body: Mapping[str, Any]) -> bool:
        """Whether a watch event can change the decision. ``kind`` None: the job was listed."""
        if kind == "DELETED":
            self._seen.pop(key, None)
            return True
        now = hash(json.dumps(relevant_fields(body), sort_keys=True))
        known = self._seen.get(key)
        self._seen[key] = now
        return kind != "MODIFIED" or now != known


def relevant_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a job that a decision may depend on, without the ingest's figures, which
    change every few seconds."""
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
    async def configure(settings: kopf.OperatorSettings, **_: Any) -> None:
        settings.queueing.idle_timeout = 1.0
        settings.queueing.exit_timeout = 0.5
        settings.posting.enabled = False
        settings.scanning.disabled = True
        settings.watching.inactivity_timeout = INACTIVITY_SECONDS
        settings.networking.request_timeout = 60

    @kopf.on.login(registry=made)
    async def login(**kwargs: Any) -> kopf.ConnectionInfo | None:
        # The same credentials as cluster.client.
        if "KUBECONFIG" not in os.environ and "KUBERNETES_SERVICE_HOST" in os.environ:
            return kopf.login_with_service_account(**kwargs)
        return kopf.login_with_kubeconfig(**kwargs)

    @kopf.on.event(API_GROUP, VERSION, PLURAL, registry=made)
    async def job_changed(
        namespace: str | None, name: str, type: str | None, body: kopf.Body, **_: Any
    ) -> None:
        watched.watchdog.delivered(KIND, body["metadata"], deleted=type == "DELETED")
        key = (str(namespace), name)
        if watched.is_relevant(key, type, body):
            queue.add(key)

    return made
