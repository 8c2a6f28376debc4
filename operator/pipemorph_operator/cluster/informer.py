"""Follows all objects of a kind: which exist, and how each changes.

A list says what exists; a watch from the list's resource version says what changes. A watch that
ends or breaks is resumed where it was. The API server answers 410, as HTTP status or as an event
of the watch, if it has forgotten what happened since then, as after a restart. Then everything is
listed again, and what was known and is not listed is gone.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

from pipemorph_operator.cluster.client import (
    REQUEST_ERRORS,
    ApiRefused,
    Cluster,
    Object,
    path,
    reason_of,
)
from pipemorph_operator.health_server import Heartbeat
from pipemorph_operator.metrics import LISTS, OBJECTS, WATCH_CONFIRMED

log = logging.getLogger("pipemorph.watch")

PAGE = 50
"""Objects per page of a list: some are half a MiB large."""
SILENT_SECONDS = 300.0
"""A silence after which the watch has failed: bookmarks arrive every minute, and a watch without is
opened again after 90 s."""
FIRST_RETRY_SECONDS = 0.2
LAST_RETRY_SECONDS = 10.0
GONE = 410

Key = tuple[str, str]
"""Namespace and name."""


class Informer:
    """Tells ``changed`` of every object of a kind in ``namespace``, or in all (None), that has
    ``label`` and matches the selector ``fields``: with the object when it is found or has changed,
    with None when it is gone.

    ``changed`` builds from it what its side reads of the objects; the informer itself keeps of each
    only the UID and the version. An object that was replaced by one of the same name is told as
    gone first. What has not changed is not told again.
    """

    def __init__(
        self,
        cluster: Cluster,
        kind: str,
        changed: Callable[[Key, Object | None], None],
        *,
        namespace: str | None = None,
        label: str | None = None,
        fields: str | None = None,
    ) -> None:
        self._cluster = cluster
        self._kind = kind
        self._changed = changed
        self._url = path(kind, namespace)
        self._label, self._fields = label, fields
        self._known: dict[Key, tuple[str, str]] = {}
        """UID and version of each object."""
        self._page = PAGE
        self._metric = {"kind": kind, "job_namespace": namespace or ""}
        self.synced = asyncio.Event()
        """Set once all objects have been listed."""
        self.alive = Heartbeat(f"the watch of {kind}s", SILENT_SECONDS)
        """A check that the watch is not silent."""

    async def run(self) -> None:
        """Follow the objects, forever."""
        retry, version = FIRST_RETRY_SECONDS, ""
        while True:
            try:
                if not version:
                    version = await self._list()
                heard = False
                async for kind, obj in self._cluster.watch(
                    self._url, version, labels=self._label, fields=self._fields
                ):
                    heard, retry = True, FIRST_RETRY_SECONDS
                    if kind == "DELETED":
                        self._drop(_key(obj))
                    elif kind != "BOOKMARK":
                        self._take(obj)
                    version = obj["metadata"]["resourceVersion"]
                    self._confirm()
                if heard:
                    continue  # The server ends each watch after some minutes, and resumes it.
                raise TimeoutError("the watch ended without a word")
            except (*REQUEST_ERRORS, ValueError) as error:
                forgotten = isinstance(error, ApiRefused) and error.status == GONE
                if forgotten or isinstance(error, TimeoutError):
                    # A watch is also silent if the API server has not reached the version, as after
                    # etcd was restored from a backup.
                    version = ""
                self.alive.beat()  # An unreachable API server is no fault of this process.
                log.warning("the watch of %ss failed: %s", self._kind, reason_of(error))
            await asyncio.sleep(retry * random.uniform(0.75, 1.25))
            retry = min(2 * retry, LAST_RETRY_SECONDS)

    async def _list(self) -> str:
        """Read all objects; those known before and not listed are gone. Returns the version."""
        listed: set[Key] = set()
        version = ""
        try:
            async for page in self._cluster.pages(
                self._url, labels=self._label, fields=self._fields, limit=self._page
            ):
                for obj in page.get("items") or []:
                    listed.add(self._take(obj))
                # The same in all pages: together they are one consistent snapshot.
                version = page["metadata"]["resourceVersion"]
                self.alive.beat()
        except ApiRefused as refused:
            if refused.status == GONE:
                self._page *= 2  # Reading so many pages takes longer than the server remembers.
            raise
        for key in self._known.keys() - listed:
            self._drop(key)
        self._confirm()
        LISTS.labels(**self._metric).inc()
        self.synced.set()
        return version

    def _take(self, obj: Object) -> Key:
        metadata, key = obj["metadata"], _key(obj)
        uid, version = metadata["uid"], metadata["resourceVersion"]
        known = self._known.get(key)
        if known is not None and known[0] != uid:
            self._drop(key)
        if known != (uid, version):
            # What failed is tried again with the next list.
            self._known[key] = uid, version if self._tell(key, obj) else ""
        return key

    def _drop(self, key: Key) -> None:
        if self._known.pop(key, None) is not None:
            self._tell(key, None)

    def _tell(self, key: Key, obj: Object | None) -> bool:
        try:
            self._changed(key, obj)
        except Exception:
            # An unexpected error in one object must not stop the others.
            log.exception("%s %s/%s: a change could not be processed", self._kind, *key)
            return False
        return True

    def _confirm(self) -> None:
        """What is known is what the API server has."""
        self.alive.beat()
        WATCH_CONFIRMED.labels(**self._metric).set_to_current_time()
        OBJECTS.labels(**self._metric).set(len(self._known))


def _key(obj: Object) -> Key:
    return obj["metadata"]["namespace"], obj["metadata"]["name"]
