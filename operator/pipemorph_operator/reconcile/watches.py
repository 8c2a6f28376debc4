"""The watches of PipeMorphJobs and of their Jobs. Every relevant change queues the PipeMorphJob.

kopf watches PipeMorphJobs. Only an event handler is registered, so that it adds no finalizers or
annotations to objects. :class:`OwnedJobs` watches their Jobs.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import kopf

from pipemorph_operator.cluster.client import Cluster, path, reason_of
from pipemorph_operator.cluster.facts import JobFacts
from pipemorph_operator.names import (
    API_GROUP,
    INGEST_CONDITIONS,
    KIND,
    LABEL_JOB,
    PLURAL,
    VERSION,
)
from pipemorph_operator.reconcile.workqueue import WorkQueue
from pipemorph_operator.watchdog import Watchdog

log = logging.getLogger("pipemorph.operator")

INACTIVITY_SECONDS = 90.0
"""Bookmarks arrive every minute: a watch that is silent for longer is dead."""

Key = tuple[str, str]

_OTHERS = frozenset({"training", "control", "conditions"})


class Watched:
    """Remembers the state of jobs for which a reconcile was queued."""

    def __init__(self) -> None:
        self._seen: dict[Key, int] = {}
        self.watchdog = Watchdog()

    def jobs(self) -> list[Key]:
        """All jobs that the watch has delivered, and perhaps some that are gone."""
        return [*self._seen]

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


class OwnedJobs:
    """A cache of the Jobs of every PipeMorphJob, with its own watch. ``namespaces``: those to
    watch; empty for all. ``watchdog`` records what the watches deliver.

    kopf's index drops an object only on a DELETED event: an object deleted while the watch is
    broken stays in it forever, and a Job that no longer exists would seem to have ranks.
    """

    def __init__(
        self,
        queue: WorkQueue[Key],
        namespaces: Sequence[str] = (),
        watchdog: Watchdog | None = None,
    ) -> None:
        self._queue = queue
        self._watchdog = watchdog or Watchdog()
        self._known: dict[Key, dict[str, JobFacts]] = {}
        """By namespace and the owner's UID, then by name."""
        self._owner: dict[Key, str] = {}
        """The owner's UID, by namespace and name of the Job."""
        self._listed: set[Key] = set()
        self.watches: tuple[str | None, ...] = tuple(namespaces) or (None,)
        self._unlisted = set(self.watches)
        self.synced = asyncio.Event()

    def jobs(self, namespace: str, uid: str) -> Sequence[JobFacts]:
        """The Jobs of the PipeMorphJob with that UID."""
        return list(self._known.get((namespace, uid), {}).values())

    async def follow(self, cluster: Cluster, namespace: str | None) -> None:
        """Watch the Jobs of a namespace, or of all (None), forever."""

        def lost(error: Exception) -> None:
            log.warning("the watch of Jobs failed: %s", reason_of(error))

        async for kind, body in cluster.watch(path("Job", namespace), lost, labels=LABEL_JOB):
            try:
                self.changed(kind, body, namespace)
            except Exception:
                # An unexpected error in one Job must not stop the others.
                log.exception("a change of a Job could not be processed")

    def changed(self, kind: str, body: Mapping[str, Any], watched: str | None = None) -> None:
        """Process one event of the watch of a namespace, or of all (None)."""
        if kind == "SYNCED":
            for key in [k for k in self._owner if watched in (None, k[0])]:
                if key not in self._listed:
                    self._drop(key)
            self._listed = {k for k in self._listed if watched not in (None, k[0])}
            self._unlisted.discard(watched)
            if not self._unlisted:
                self.synced.set()
            return
        key = (body["metadata"]["namespace"], body["metadata"]["name"])
        if kind == "LISTED":
            self._listed.add(key)
        if kind == "DELETED":
            self._drop(key)
            return
        self._watchdog.delivered("Job", body["metadata"])
        facts = JobFacts.of(body)
        if self._owner.setdefault(key, facts.owner_uid) != facts.owner_uid:
            self._forget(key)
            self._owner[key] = facts.owner_uid
        self._known.setdefault((key[0], facts.owner_uid), {})[facts.name] = facts
        self._queue.add((key[0], facts.owner))

    def _drop(self, key: Key) -> None:
        self._watchdog.delivered("Job", {"namespace": key[0], "name": key[1]}, deleted=True)
        self._forget(key)

    def _forget(self, key: Key) -> None:
        namespace, name = key
        owner = (namespace, self._owner.pop(key, ""))
        gone = self._known.get(owner, {}).pop(name, None)
        if not self._known.get(owner, True):
            del self._known[owner]
        if gone is not None:
            self._queue.add((namespace, gone.owner))
