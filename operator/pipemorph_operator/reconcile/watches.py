"""kopf's watches of PipeMorphJobs: every relevant change queues the job.

Only an event handler is registered, so that kopf adds no finalizers or annotations to objects.
A dead watch looks like a cluster in which nothing changes. So the versions that the API server
lists are compared, LOOK_SECONDS later, with those that the watch has delivered by then.

A watch that the API server refuses ends kopf. So each namespace has a kopf of its own, which is
started again after a while: an error of one namespace is no other one's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import Callable, Container, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from socket import gethostname
from typing import Any, NamedTuple, cast

import kopf

from pipemorph_operator.cluster.client import REQUEST_ERRORS, ApiRefused, Cluster, path, reason_of
from pipemorph_operator.metrics import WATCH_REFUSED
from pipemorph_operator.names import (
    API_GROUP,
    API_VERSION,
    INGEST_CONDITIONS,
    KIND,
    LINKS_HEALTHY,
    PLURAL,
    VERSION,
)
from pipemorph_operator.reconcile.workqueue import WorkQueue

log = logging.getLogger("pipemorph.watch")

AGAIN_SECONDS = 2.0
"""Delay before the watch of a namespace is started again."""

INACTIVITY_SECONDS = 90.0
"""Bookmarks arrive every minute: a watch that is silent for longer is dead."""

LOOK_SECONDS = 120.0
"""Time between two looks, and so the time the watch has to deliver a change. kopf reconnects within
half a minute, then delivers what it missed."""

Key = tuple[str, str]
Changed = Callable[[Key, str | None, Mapping[str, Any]], object]

_OTHERS = frozenset({"training", "control", "conditions", "attemptNodes"})


class _Known(NamedTuple):
    """Version of a job, a hash of its relevant fields, and its slow links (stage and replica) whose
    nodes are not noted."""

    version: int
    fields: int
    unnoted: frozenset[tuple[int, int]]


class Watched:
    """What kopf's watch has delivered. It serves only to ask for turns: decisions read the job."""

    def __init__(self) -> None:
        self._delivered: dict[Key, _Known] = {}
        self._at_last_look: dict[Key, _Known] = {}
        self._listed: dict[Key, int] = {}
        self._trouble = ""
        self.refused: dict[str, str] = {}
        """Namespaces whose watch could not be started, and why; empty name: the cluster's."""
        self.running: set[str] = set()
        """Namespaces whose watch has been started."""

    def jobs(self) -> list[Key]:
        """All jobs that the watch has delivered, and perhaps some that are gone."""
        return [*self._delivered]

    def trouble(self) -> str:
        """The problem, for ``/healthz``; empty if there is none."""
        return self._trouble

    def starts(self, namespace: str) -> None:
        """Note that the watch of a namespace has been started."""
        self.refused.pop(namespace, None)
        self.running.add(namespace)

    def unready(self) -> str:
        """Why no namespace is watched, one problem a line; empty if at least one is."""
        if self.running:
            return ""
        return "\n".join(self.refused.values()) or f"the watch of {KIND}s has not started yet"

    def delivered(self, key: Key, kind: str | None, body: Mapping[str, Any]) -> bool:
        """Process an event of the watch. Returns whether it can change the decision. ``kind`` None:
        the job was listed."""
        if kind == "DELETED":
            self._delivered.pop(key, None)
            return True
        known = self._delivered.get(key)
        self._delivered[key] = now = _Known(
            # Kubernetes guarantees that versions are increasing integers.
            int(body["metadata"]["resourceVersion"]),
            hash(json.dumps(relevant_fields(body), sort_keys=True)),
            _unnoted(body),
        )
        if kind != "MODIFIED" or known is None or now.fields != known.fields:
            return True
        return not now.unnoted <= known.unnoted

    def look(self, listed: Iterable[Mapping[str, Any]], refused: Container[str] = ()) -> set[Key]:
        """Compare with ``listed``, the metadata of all existing jobs but those in namespaces that
        are ``refused``. Returns the jobs with a change that was listed at the last look and not
        delivered since, and those that went without a word: after a 410, kopf's watch does not say
        which jobs are gone."""
        before, at_last_look = self._listed, self._at_last_look
        self._listed = {(m["namespace"], m["name"]): int(m["resourceVersion"]) for m in listed}
        behind = {
            key
            for key in self._listed.keys() & before.keys()
            if key not in self._delivered or self._delivered[key].version < before[key]
        }
        gone = {
            key
            for key, last in at_last_look.items()
            if key not in self._listed
            and key[0] not in refused
            and self._delivered.get(key) == last
        }
        for key in gone:
            del self._delivered[key]
        self._at_last_look = dict(self._delivered)
        self._trouble = ""
        if behind:
            self._trouble = (
                f"the watch has not delivered changes of {len(behind)} jobs for"
                f" {LOOK_SECONDS:g} s, such as {'/'.join(min(behind))}"
            )
        return behind | gone


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
        "reports": [c.get("reason") for c in conditions if c.get("type") == LINKS_HEALTHY],
        "training": {k: training.get(k) for k in ("attempt", "state")},
    }


def _unnoted(body: Mapping[str, Any]) -> frozenset[tuple[int, int]]:
    """The slow links whose nodes a turn has to note. That they are noted asks for no turn."""
    status = body.get("status") or {}
    slow = (status.get("training") or {}).get("slowLinks") or ()
    noted = (status.get("attemptNodes") or {}).get("links") or ()
    return frozenset((at["link"], at["replica"]) for at in slow) - frozenset(
        (at["link"], at["replica"]) for at in noted
    )


def registry(changed: Changed) -> kopf.OperatorRegistry:
    """The handlers. They call ``changed`` with the job, the type of the event and the manifest."""
    made = kopf.OperatorRegistry()

    @kopf.on.startup(registry=made)
    async def configure(settings: kopf.OperatorSettings, **_: Any) -> None:
        settings.queueing.idle_timeout = 1.0
        settings.queueing.exit_timeout = 0.5
        settings.posting.enabled = False
        settings.scanning.disabled = True
        settings.watching.inactivity_timeout = INACTIVITY_SECONDS
        settings.networking.request_timeout = 60
        settings.networking.error_backoffs = (1.0, 2.0, 4.0)  # Then it ends; see watch().

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
        changed((str(namespace), name), type, dict(body))

    return made


async def watch(
    namespace: str | None,
    queue: WorkQueue[Key],
    watched: Watched,
    cluster: Cluster,
    stop: asyncio.Event,
) -> None:
    """Run kopf for a namespace, or for all (None), until ``stop`` is set; again when it ends."""
    name = namespace or ""
    what = f"{KIND}s of namespace {name}" if name else f"{KIND}s"
    refused = WATCH_REFUSED.labels(kind=KIND, job_namespace=name)
    while not stop.is_set():
        problem = await _not_served(cluster)
        try:
            if not problem:
                # kopf would try for long if the namespace is refused.
                async for _ in cluster.pages(path(KIND, namespace), limit=1):
                    break
                refused.set(0)
                await _run_kopf(namespace, queue, watched, stop)
        except REQUEST_ERRORS as error:
            problem = reason_of(error)
            refused.set(isinstance(error, ApiRefused) and namespace is not None)
        except Exception as error:
            # kopf does not export its errors. The next list says what is wrong.
            problem = reason_of(error)
            log.exception("the watch of %s has ended; it is started again", what)
        if problem and watched.refused.get(name) != f"{what}: {problem}":
            watched.refused[name] = f"{what}: {problem}"
            log.warning("the watch of %s", watched.refused[name])
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), AGAIN_SECONDS)


async def _not_served(cluster: Cluster) -> str:
    """Why the kind is not served yet; empty if it is. kopf looks once, when it starts, and never
    watches a kind that is not there; the API server lists a new CRD with a delay."""
    try:
        # The same two requests as kopf's: versions of the group, then kinds of our version.
        groups = (await cluster.get("/apis") or {}).get("groups") or ()
        kinds = (await cluster.get(f"/apis/{API_VERSION}") or {}).get("resources") or ()
    except REQUEST_ERRORS as error:
        return f"cannot list the API server's resources: {reason_of(error)}"
    versions = {version["groupVersion"] for group in groups for version in group["versions"]}
    if API_VERSION in versions and PLURAL in {kind["name"] for kind in kinds}:
        return ""
    return f"the API server does not list {PLURAL}.{API_GROUP}; is its CRD installed?"


async def _run_kopf(
    namespace: str | None, queue: WorkQueue[Key], watched: Watched, stop: asyncio.Event
) -> None:
    """Run kopf in a thread, until it fails or ``stop`` is set. In one event loop, a kopf that ends
    would cancel the tasks of the others, and it takes over signals."""
    loop, name, identity = asyncio.get_running_loop(), namespace or "", cast(Any, gethostname())

    def changed(key: Key, kind: str | None, body: Mapping[str, Any]) -> None:
        if watched.delivered(key, kind, body):
            queue.add(key)

    stopping: Future[None] = Future()
    ready: Future[None] = Future()
    ready.add_done_callback(lambda _: loop.call_soon_threadsafe(watched.starts, name))

    async def operator() -> None:
        await kopf.operator(
            registry=registry(lambda *change: loop.call_soon_threadsafe(changed, *change)),
            # By default kopf looks up the user name, which a container's user may not have.
            identity=identity,
            standalone=True,
            clusterwide=namespace is None,
            namespaces=[namespace] if namespace else [],
            # As an asyncio.Future: for others kopf starts a thread that it does not end.
            stop_flag=asyncio.wrap_future(stopping),
            ready_flag=ready,
        )

    pool = ThreadPoolExecutor(1, f"kopf-{name}")
    ended = asyncio.wrap_future(pool.submit(lambda: asyncio.run(operator())))
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((ended, stopped), return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopped.cancel()
        stopping.cancel()
        pool.shutdown(wait=False)
    await ended
