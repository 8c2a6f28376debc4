"""Follows all objects of a kind, and reports each change to a handler.

A list gives the existing objects; a watch from the list's resource version gives the changes. A
watch that ends or breaks is resumed at its last version. The API server answers 410, as HTTP status
or as an event of the watch, if it has discarded the changes since then, as after a restart. Then
all objects are listed again, and known objects that are not listed are gone.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence

from pipemorph_operator.health_server import Heartbeat
from pipemorph_operator.kube.client import (
    REQUEST_ERRORS,
    KubeApiError,
    KubeClient,
    Object,
    build_path,
    describe_error,
)
from pipemorph_operator.metrics import LISTS, OBJECTS, WATCH_CONFIRMED, WATCH_REFUSED

log = logging.getLogger("pipemorph.watch")

PAGE_OBJECTS = 50
"""Objects per page of a list: some are half a MiB large."""
SILENT_SECONDS = 300.0
"""Silence after which the watch has failed: bookmarks arrive every minute, and a watch without them
is opened again after 90 s."""
FIRST_RETRY_SECONDS = 0.2
LAST_RETRY_SECONDS = 10.0
FORBIDDEN, NOT_FOUND, GONE = 403, 404, 410
REFUSALS = 4
"""Number of consecutive answers with other errors after which a namespace counts as refused."""

Key = tuple[str, str]
"""Namespace and name."""


class Informer:
    """Calls ``changed`` for each object of a kind in ``namespace``, or in all (None), that has
    ``label`` and matches the selector ``fields``: with the object when it is found or has changed,
    with None when it is gone.

    The informer stores only the UID and version of each object; ``changed`` extracts what its user
    needs. An object that was replaced by one of the same name is first reported as gone. Unchanged
    objects are not reported again.
    """

    def __init__(
        self,
        cluster: KubeClient,
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
        self._url = build_path(kind, namespace)
        self._label, self._fields = label, fields
        self._known: dict[Key, tuple[str, str]] = {}
        """UID and version of each object."""
        self._page = PAGE_OBJECTS
        self._metric = {"kind": kind, "job_namespace": namespace or ""}
        # Nothing is confirmed yet: the metric's age begins now, also for a refused namespace.
        WATCH_CONFIRMED.labels(**self._metric).set_to_current_time()
        self.synced = asyncio.Event()
        """Set once all objects have been listed."""
        self.settled = asyncio.Event()
        """Set once all objects have been listed, or the namespace is known to be refused."""
        self._failures, self._problem = 0, "not listed yet"
        self.heartbeat = Heartbeat(f"the watch of {kind}s", SILENT_SECONDS)
        """Check that the watch is not silent."""

    @property
    def problem(self) -> str:
        """Line with the reason why the objects are not followed; empty if they are."""
        return f"{self._what}: {self._problem}" if self._problem else ""

    async def run(self) -> None:
        """Follow the objects, forever."""
        retry, version = FIRST_RETRY_SECONDS, ""
        while True:
            try:
                if not version:
                    version = await self._list_objects()
                received = False
                async for kind, obj in self._cluster.watch(
                    self._url, version, labels=self._label, fields=self._fields
                ):
                    received, retry = True, FIRST_RETRY_SECONDS
                    if kind == "DELETED":
                        self._process_deletion(_read_key(obj))
                    elif kind != "BOOKMARK":
                        self._process_object(obj)
                    version = obj["metadata"]["resourceVersion"]
                    self._confirm_synced()
                if received:
                    continue  # The server ends each watch after some minutes: resume it.
                raise TimeoutError("the watch ended without an event")
            except (*REQUEST_ERRORS, ValueError) as error:
                forgotten = isinstance(error, KubeApiError) and error.status == GONE
                if forgotten or isinstance(error, TimeoutError):
                    # A watch is also silent if the API server has not reached the version, such as
                    # after a restore of etcd from a backup.
                    version = ""
                self.heartbeat.record_beat()  # This process is not at fault.
                self._record_failure(
                    error, answered=isinstance(error, KubeApiError) and not forgotten
                )
            await asyncio.sleep(retry * random.uniform(0.75, 1.25))
            retry = min(2 * retry, LAST_RETRY_SECONDS)

    def _record_failure(self, error: Exception, *, answered: bool) -> None:
        """Log why the objects cannot be followed. A refused namespace does not affect others."""
        reason = describe_error(error)
        status = error.status if isinstance(error, KubeApiError) else 0
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

    async def _list_objects(self) -> str:
        """Read all objects, and drop known ones that are not listed. Returns the version."""
        listed: set[Key] = set()
        version = ""
        try:
            async for page in self._cluster.list_pages(
                self._url, labels=self._label, fields=self._fields, limit=self._page
            ):
                for obj in page.get("items") or []:
                    listed.add(self._process_object(obj))
                # All pages have the same version: together they are one consistent snapshot.
                version = page["metadata"]["resourceVersion"]
                self.heartbeat.record_beat()
        except KubeApiError as refused:
            if refused.status == GONE:
                self._page *= 2  # The server discarded the snapshot before all pages were read.
            raise
        for key in self._known.keys() - listed:
            self._process_deletion(key)
        self._confirm_synced()
        LISTS.labels(**self._metric).inc()
        self.synced.set()
        self.settled.set()
        return version

    def _process_object(self, obj: Object) -> Key:
        metadata, key = obj["metadata"], _read_key(obj)
        uid, version = metadata["uid"], metadata["resourceVersion"]
        known = self._known.get(key)
        if known is not None and known[0] != uid:
            self._process_deletion(key)
        if known != (uid, version):
            # The next list retries a change whose handler failed.
            self._known[key] = uid, version if self._call_handler(key, obj) else ""
        return key

    def _process_deletion(self, key: Key) -> None:
        if self._known.pop(key, None) is not None:
            self._call_handler(key, None)

    def _call_handler(self, key: Key, obj: Object | None) -> bool:
        try:
            self._changed(key, obj)
        except Exception:
            # An unexpected error in one object must not stop the others.
            log.exception("%s %s/%s: a change could not be processed", self._kind, *key)
            return False
        return True

    def _confirm_synced(self) -> None:
        """Record that the known objects are those of the API server."""
        self.heartbeat.record_beat()
        self._failures, self._problem = 0, ""
        WATCH_REFUSED.labels(**self._metric).set(0)
        WATCH_CONFIRMED.labels(**self._metric).set_to_current_time()
        OBJECTS.labels(**self._metric).set(len(self._known))


class InformerGroup:
    """Informers of a process, for each of its kinds and namespaces."""

    def __init__(self, informers: Sequence[Informer]) -> None:
        self._all = informers

    async def wait_until_settled(self, stop: asyncio.Event) -> None:
        """Return once the process may lead, or ``stop`` is set: before everything is listed, there
        may be unknown objects. Refused namespaces are not served (:meth:`is_listed`)."""
        for each in self._all:
            await wait_for_first(each.settled, stop)

    def is_listed(self, namespace: str) -> bool:
        """True if all objects of a namespace have been listed."""
        return all(
            each.synced.is_set() for each in self._all if each.namespace in (None, namespace)
        )

    def list_problems(self) -> list[str]:
        """Problems of informers that do not follow their objects, one line each."""
        return [each.problem for each in self._all if each.problem]

    def explain_unready(self) -> str:
        """Reasons why no namespace can be served, one a line; empty if at least one can."""
        served = any(self.is_listed(each.namespace or "") for each in self._all)
        waiting = any(not each.settled.is_set() for each in self._all)
        return "\n".join(self.list_problems()) if waiting or not served else ""

    def list_heartbeats(self) -> list[Heartbeat]:
        """Checks that no watch is silent."""
        return [each.heartbeat for each in self._all]


async def wait_for_first(*events: asyncio.Event) -> None:
    """Return once any of the events is set."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for each in waits:
        each.cancel()


def _read_key(obj: Object) -> Key:
    return obj["metadata"]["namespace"], obj["metadata"]["name"]
