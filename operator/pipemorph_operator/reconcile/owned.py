"""A cache of the Jobs of every PipeMorphJob, with its own watch.

kopf's index drops an object only on a DELETED event: an object deleted while the watch is broken
stays in it forever, and a Job that no longer exists would seem to have ranks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from pipemorph_operator.cluster.client import Cluster, path, reason_of
from pipemorph_operator.cluster.facts import JobFacts
from pipemorph_operator.names import LABEL_JOB
from pipemorph_operator.reconcile.workqueue import WorkQueue
from pipemorph_operator.watchdog import Watchdog

log = logging.getLogger("pipemorph.operator")

Key = tuple[str, str]


class OwnedJobs:
    """The known Jobs. Every change of a Job queues its PipeMorphJob. ``namespaces``: those to
    watch; empty for all. ``watchdog`` records what the watches deliver."""

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
