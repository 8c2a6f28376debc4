"""Jobs as last read, for the process that leads next.

A standby follows all jobs and tracks none: the leader writes their status. When it leads, the store
gets the jobs from here, without another list. A body may be older than the last write of the leader
before: the first write is refused then, and the job is read again (:mod:`.status.fence`).
"""

from __future__ import annotations

import asyncio
import logging

from pipemorph_operator.cluster.client import Object
from pipemorph_operator.ingest.store import ClusterStore

log = logging.getLogger("pipemorph.ingest")

Key = tuple[str, str]


class JobCache:
    """Holds the jobs that ``store`` wants until this process leads, and passes changes on to it
    from then on."""

    def __init__(self, store: ClusterStore) -> None:
        self._store = store
        self._leads = False
        self._jobs: dict[Key, Object] = {}

    def changed(self, key: Key, body: Object | None) -> None:
        """Process a change of a job; None: it was deleted."""
        self._jobs.pop(key, None)
        if self._leads:
            self._store.changed(key, body)
        elif body is not None and self._store.wants(key, body):
            # Half of a small job's size, and read by nobody.
            body["metadata"].pop("managedFields", None)
            self._jobs[key] = body

    async def lead(self) -> None:
        """Pass all jobs on to the store, which is then complete."""
        self._leads = True
        while self._jobs:
            key, body = self._jobs.popitem()
            try:
                self._store.changed(key, body)
            except Exception:
                # An unexpected error in one job must not stop the others.
                log.exception("%s/%s could not be taken over", *key)
            await asyncio.sleep(0)  # A job takes milliseconds; requests wait for one at most.
        self._store.listed()
