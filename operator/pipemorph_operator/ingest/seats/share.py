"""A replica's share of all jobs: what the informer finds is told to the store if it is its own.

Nothing is handed over when a job moves. The replica that loses it drops it. The one that gains it
reads it, and its agent tells it everything, and hands in the plan in force.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from functools import partial
from typing import Protocol

from pipemorph_operator import names
from pipemorph_operator.cluster.client import REQUEST_ERRORS, Cluster, Object, path, reason_of

log = logging.getLogger("pipemorph.seats")

MOST_READS = 16
"""Limit of concurrent reads of jobs that have been gained."""
READ_AGAIN_SECONDS = 0.5
"""Delay before such a job is read again after that failed."""
ARRIVAL_SECONDS = 4.0
"""How long a request waits for its job and its plan to be read: an agent waits for five seconds."""

Key = tuple[str, str]


class Jobs(Protocol):
    """What the share needs of the store."""

    def changed(self, key: Key, body: Object | None) -> None:
        """A job of this replica has changed; None: it is not this replica's, or gone."""

    def wants(self, key: Key, body: Object) -> bool:
        """Whether the replica whose job this is has anything to do with it."""

    async def arrival(self, namespace: str, job: str) -> None:
        """Wait a little for a job that may be known soon."""

    def may_come(self, namespace: str, job: str) -> bool:
        """Whether a job that is not known may still be."""


class Share:
    """``is_mine``: whether the job of a UID is this replica's. When that changes,
    :meth:`redeal` must be called."""

    def __init__(self, cluster: Cluster, jobs: Jobs, is_mine: Callable[[str], bool]) -> None:
        self._cluster = cluster
        self._jobs = jobs
        self._is_mine = is_mine
        self._mine: dict[Key, str] = {}
        self._elsewhere: dict[Key, str] = {}
        """UIDs of others' jobs with which they have something to do."""
        self._reading: dict[Key, asyncio.Task[None]] = {}
        self._reads = asyncio.Semaphore(MOST_READS)

    def elsewhere(self, namespace: str, job: str) -> str | None:
        """UID of a job that is another replica's."""
        return self._elsewhere.get((namespace, job))

    async def arrival(self, namespace: str, job: str) -> None:
        """Wait a little for a job that may be known soon."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ARRIVAL_SECONDS):
                if (reading := self._reading.get((namespace, job))) is not None:
                    await asyncio.wait((reading,))
                if (namespace, job) not in self._elsewhere:
                    await self._jobs.arrival(namespace, job)

    def may_come(self, namespace: str, job: str) -> bool:
        """Whether a job that is not known here may still be."""
        return (namespace, job) in self._reading or self._jobs.may_come(namespace, job)

    def changed(self, key: Key, body: Object | None) -> None:
        """Process a change of any job; None: it is gone."""
        reading = self._reading.pop(key, None)
        if reading is not None:
            reading.cancel()  # What it answers may be older: a job that is gone must stay so.
        self._changed(key, body)

    def _changed(self, key: Key, body: Object | None) -> None:
        if body is not None and self._is_mine(body["metadata"]["uid"]):
            self._elsewhere.pop(key, None)
            self._mine[key] = body["metadata"]["uid"]
            self._jobs.changed(key, body)
            return
        self._mine.pop(key, None)
        if body is not None and self._jobs.wants(key, body):
            self._elsewhere[key] = body["metadata"]["uid"]
        else:
            self._elsewhere.pop(key, None)
        self._jobs.changed(key, None)

    def redeal(self) -> None:
        """Drop the jobs that are not this replica's any more, at once, and begin to read those that
        have become its own."""
        for key, uid in list(self._mine.items()):
            if not self._is_mine(uid):
                del self._mine[key]
                self._elsewhere[key] = uid
                self._jobs.changed(key, None)
        for key, uid in list(self._elsewhere.items()):
            if self._is_mine(uid):
                del self._elsewhere[key]
                if key not in self._reading:
                    self._reading[key] = task = asyncio.create_task(self._read(key, uid))
                    task.add_done_callback(partial(self._read_ended, key))

    async def _read(self, key: Key, uid: str) -> None:
        while self._is_mine(uid):
            try:
                async with self._reads:
                    body = await self._cluster.get(path(names.KIND, *key))
            except REQUEST_ERRORS as error:
                log.warning("%s/%s could not be read: %s", *key, reason_of(error))
                await asyncio.sleep(READ_AGAIN_SECONDS)
                continue
            self._changed(key, body)
            return
        self._elsewhere[key] = uid

    def _read_ended(self, key: Key, task: asyncio.Task[None]) -> None:
        if self._reading.get(key) is task:
            del self._reading[key]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s/%s could not be taken over", *key, exc_info=error)
