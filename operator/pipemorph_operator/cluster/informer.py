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
from collections.abc import Callable, Sequence

from pipemorph_operator.cluster.client import (
    REQUEST_ERRORS,
    ApiRefused,
    Cluster,
    Object,
    path,
    reason_of,
)
from pipemorph_operator.health_server import Heartbeat
from pipemorph_operator.metrics import LISTS, OBJECTS, WATCH_CONFIRMED, WATCH_REFUSED

log = logging.getLogger("pipemorph.watch")

PAGE = 50
"""Objects per page of a list: some are half a MiB large."""
SILENT_SECONDS = 300.0
"""A silence after which the watch has failed: bookmarks arrive every minute, and a watch without is
opened again after 90 s."""
FIRST_RETRY_SECONDS = 0.2
LAST_RETRY_SECONDS = 10.0
FORBIDDEN, NOT_FOUND, GONE = 403, 404, 410
REFUSALS = 4
"""Answers with another error, one after the other, after which a namespace counts as refused."""

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
        self.namespace = namespace
        self._what = f"{kind}s of namespace {namespace}" if namespace else f"{kind}s"
        self._url = path(kind, namespace)
        self._label, self._fields = label, fields
        self._known: dict[Key, tuple[str, str]] = {}
        """UID and version of each object."""
        self._page = PAGE
        self._metric = {"kind": kind, "job_namespace": namespace or ""}
        # Nothing is confirmed yet: how long that lasts, as for a namespace that is refused, is
        # counted from now on.
        WATCH_CONFIRMED.labels(**self._metric).set_to_current_time()
        self.synced = asyncio.Event()
        """Set once all objects have been listed."""
        self.settled = asyncio.Event()
        """Set once they have been listed, or it is known that this namespace is refused."""
        self._failures, self._problem = 0, "not listed yet"
        self.alive = Heartbeat(f"the watch of {kind}s", SILENT_SECONDS)
        """A check that the watch is not silent."""

    @property
    def problem(self) -> str:
        """Why the objects are not followed, in one line; empty if they are."""
        return f"{self._what}: {self._problem}" if self._problem else ""

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
                self._fail(error, answered=isinstance(error, ApiRefused) and not forgotten)
            await asyncio.sleep(retry * random.uniform(0.75, 1.25))
            retry = min(2 * retry, LAST_RETRY_SECONDS)

    def _fail(self, error: Exception, *, answered: bool) -> None:
        """Log why the objects cannot be followed. An answer that refuses one namespace is that
        namespace's problem: it keeps nobody from serving the others."""
        reason = reason_of(error)
        status = error.status if isinstance(error, ApiRefused) else 0
        if status == NOT_FOUND:
            reason += "; is the CRD installed?"
        self._failures += answered
        if answered or not self.synced.is_set():
            self._problem = reason
        log.warning("the watch of %s failed: %s", self._what, reason)
        if not answered or self.namespace is None or status == NOT_FOUND:
            return
        if status == FORBIDDEN or self._failures >= REFUSALS:
            WATCH_REFUSED.labels(**self._metric).set(1)
            self.settled.set()

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
        self.settled.set()
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
        self._failures, self._problem = 0, ""
        WATCH_REFUSED.labels(**self._metric).set(0)
        WATCH_CONFIRMED.labels(**self._metric).set_to_current_time()
        OBJECTS.labels(**self._metric).set(len(self._known))


class Informers:
    """The informers of a process: of each of its kinds in each of its namespaces."""

    def __init__(self, informers: Sequence[Informer]) -> None:
        self._all = informers

    async def settle(self, stop: asyncio.Event) -> None:
        """Return once the process may lead, or ``stop`` is set: until everything is listed, an
        unknown object may exist. Namespaces that are refused are not served (:meth:`listed`)."""
        for each in self._all:
            await first_of(each.settled, stop)

    def listed(self, namespace: str) -> bool:
        """Whether everything in a namespace has been listed."""
        return all(
            each.synced.is_set() for each in self._all if each.namespace in (None, namespace)
        )

    def problems(self) -> list[str]:
        """What is not followed now, one line each."""
        return [each.problem for each in self._all if each.problem]

    def unready(self) -> str:
        """Why no namespace can be served, one problem a line; empty if at least one can."""
        served = any(self.listed(each.namespace or "") for each in self._all)
        waiting = any(not each.settled.is_set() for each in self._all)
        return "\n".join(self.problems()) if waiting or not served else ""

    def checks(self) -> list[Heartbeat]:
        """Checks that no watch is silent."""
        return [each.alive for each in self._all]


async def first_of(*events: asyncio.Event) -> None:
    """Return once any of them is set."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for each in waits:
        each.cancel()


def _key(obj: Object) -> Key:
    return obj["metadata"]["namespace"], obj["metadata"]["name"]
