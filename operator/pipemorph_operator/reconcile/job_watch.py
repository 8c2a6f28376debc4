"""Watches PipeMorphJobs with kopf: every relevant change queues the job.

Only an event handler is registered, so that kopf adds no finalizers or annotations to objects.
A dead watch looks like a cluster without changes. So the listed versions are compared,
COMPARE_SECONDS later, with the versions that the watch has delivered by then.

If the API server refuses a watch, kopf ends. So each namespace has its own instance of kopf, which
is restarted after a while: an error of one namespace does not affect the others.
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

from pipemorph_operator.kube.client import (
    REQUEST_ERRORS,
    KubeApiError,
    KubeClient,
    build_path,
    describe_error,
)
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

RESTART_SECONDS = 2.0
"""Delay before the watch of a namespace is started again."""

INACTIVITY_SECONDS = 90.0
"""Longest silence of a live watch: bookmarks arrive every minute."""

COMPARE_SECONDS = 120.0
"""Time between two comparisons, and so the watch's time to deliver a change. kopf reconnects within
half a minute, then delivers missed changes."""

Key = tuple[str, str]
Changed = Callable[[Key, str | None, Mapping[str, Any]], object]

_IGNORED_STATUS_FIELDS = frozenset({"training", "control", "conditions", "attemptNodes"})


class _KnownJob(NamedTuple):
    """Version of a job, a hash of its relevant fields, and its slow links (stage and replica) whose
    nodes status lacks."""

    version: int
    fields: int
    unnoted_links: frozenset[tuple[int, int]]


class WatchedJobs:
    """Versions delivered by kopf's watch. They only queue jobs: a reconcile reads the job again."""

    def __init__(self) -> None:
        self._delivered: dict[Key, _KnownJob] = {}
        self._at_last_look: dict[Key, _KnownJob] = {}
        self._listed: dict[Key, int] = {}
        self._trouble = ""
        self.refused: dict[str, str] = {}
        """Namespaces whose watch could not be started, with the reason; empty name: all."""
        self.running: set[str] = set()
        """Namespaces whose watch has been started."""

    def list_jobs(self) -> list[Key]:
        """Jobs that the watch has delivered, perhaps including some that are gone."""
        return [*self._delivered]

    def describe_problem(self) -> str:
        """Problem of the watch, for ``/healthz``; empty if there is none."""
        return self._trouble

    def mark_started(self, namespace: str) -> None:
        """Record that the watch of a namespace has started."""
        self.refused.pop(namespace, None)
        self.running.add(namespace)

    def explain_unready(self) -> str:
        """Reasons why no namespace is watched, one a line; empty if at least one is."""
        if self.running:
            return ""
        return "\n".join(self.refused.values()) or f"the watch of {KIND}s has not started yet"

    def process_event(self, key: Key, kind: str | None, body: Mapping[str, Any]) -> bool:
        """Process an event of the watch. Returns True if it can change the decision. ``kind`` None:
        the job was listed."""
        if kind == "DELETED":
            self._delivered.pop(key, None)
            return True
        known = self._delivered.get(key)
        self._delivered[key] = now = _KnownJob(
            # Kubernetes guarantees that versions are increasing integers.
            int(body["metadata"]["resourceVersion"]),
            hash(json.dumps(select_relevant_fields(body), sort_keys=True)),
            _find_unnoted_links(body),
        )
        if kind != "MODIFIED" or known is None or now.fields != known.fields:
            return True
        return not now.unnoted_links <= known.unnoted_links

    def compare_with_list(
        self, listed: Iterable[Mapping[str, Any]], refused: Container[str] = ()
    ) -> set[Key]:
        """Compare with ``listed``, the metadata of all existing jobs except those in ``refused``
        namespaces. Returns jobs with a change that was listed at the last comparison and not
        delivered since, and jobs that are gone without an event: after a 410, kopf's watch does not
        report deletions."""
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
                f" {COMPARE_SECONDS:g} s, such as {'/'.join(min(behind))}"
            )
        return behind | gone


def select_relevant_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a job that may affect a decision, without figures and nodes of slow links."""
    metadata, status = body["metadata"], body.get("status") or {}
    training, conditions = status.get("training") or {}, status.get("conditions") or ()
    return {
        "metadata": {k: metadata.get(k) for k in ("uid", "generation", "labels")},
        "deleting": "deletionTimestamp" in metadata,
        "status": {k: v for k, v in status.items() if k not in _IGNORED_STATUS_FIELDS},
        "conditions": [c for c in conditions if c.get("type") not in INGEST_CONDITIONS],
        "reports": [c.get("reason") for c in conditions if c.get("type") == LINKS_HEALTHY],
        "training": {k: training.get(k) for k in ("attempt", "state")},
    }


def _find_unnoted_links(body: Mapping[str, Any]) -> frozenset[tuple[int, int]]:
    """Slow links whose nodes status lacks. Only additions to this set queue the job."""
    status = body.get("status") or {}
    slow = (status.get("training") or {}).get("slowLinks") or ()
    noted = (status.get("attemptNodes") or {}).get("links") or ()
    return frozenset((at["link"], at["replica"]) for at in slow) - frozenset(
        (at["link"], at["replica"]) for at in noted
    )


def build_registry(changed: Changed) -> kopf.OperatorRegistry:
    """Build the handlers, which call ``changed`` with the job, type of event and manifest."""
    made = kopf.OperatorRegistry()

    @kopf.on.startup(registry=made)
    async def configure_kopf(settings: kopf.OperatorSettings, **_: Any) -> None:
        settings.queueing.idle_timeout = 1.0
        settings.queueing.exit_timeout = 0.5
        settings.posting.enabled = False
        settings.scanning.disabled = True
        settings.watching.inactivity_timeout = INACTIVITY_SECONDS
        settings.networking.request_timeout = 60
        settings.networking.error_backoffs = (1.0, 2.0, 4.0)  # Then it ends; see watch().

    @kopf.on.login(registry=made)
    async def log_in(**kwargs: Any) -> kopf.ConnectionInfo | None:
        # The same credentials as kube.client.
        if "KUBECONFIG" not in os.environ and "KUBERNETES_SERVICE_HOST" in os.environ:
            return kopf.login_with_service_account(**kwargs)
        return kopf.login_with_kubeconfig(**kwargs)

    @kopf.on.event(API_GROUP, VERSION, PLURAL, registry=made)
    async def job_changed(
        namespace: str | None, name: str, type: str | None, body: kopf.Body, **_: Any
    ) -> None:
        changed((str(namespace), name), type, dict(body))

    return made


async def watch_jobs(
    namespace: str | None,
    queue: WorkQueue[Key],
    watched: WatchedJobs,
    cluster: KubeClient,
    stop: asyncio.Event,
) -> None:
    """Run kopf for a namespace, or for all (None), until ``stop`` is set; restart it if it ends."""
    name = namespace or ""
    what = f"{KIND}s of namespace {name}" if name else f"{KIND}s"
    refused = WATCH_REFUSED.labels(kind=KIND, job_namespace=name)
    while not stop.is_set():
        problem = await _explain_not_served(cluster)
        try:
            if not problem:
                # Check access first: kopf would retry a refused namespace for a long time.
                async for _ in cluster.list_pages(build_path(KIND, namespace), limit=1):
                    break
                refused.set(0)
                await _run_kopf(namespace, queue, watched, stop)
        except REQUEST_ERRORS as error:
            problem = describe_error(error)
            refused.set(isinstance(error, KubeApiError) and namespace is not None)
        except Exception as error:
            # kopf does not export its errors. The next list reports the problem.
            problem = describe_error(error)
            log.exception("the watch of %s has ended; restarting it", what)
        if problem and watched.refused.get(name) != f"{what}: {problem}":
            watched.refused[name] = f"{what}: {problem}"
            log.warning("the watch of %s", watched.refused[name])
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), RESTART_SECONDS)


async def _explain_not_served(cluster: KubeClient) -> str:
    """Reason why the kind is not served yet; empty if it is. kopf checks only when it starts, and
    never watches a missing kind; the API server lists a new CRD with a delay."""
    try:
        # kopf sends the same two requests: versions of the group, then kinds of our version.
        groups = (await cluster.get("/apis") or {}).get("groups") or ()
        kinds = (await cluster.get(f"/apis/{API_VERSION}") or {}).get("resources") or ()
    except REQUEST_ERRORS as error:
        return f"cannot list the API server's resources: {describe_error(error)}"
    versions = {version["groupVersion"] for group in groups for version in group["versions"]}
    if API_VERSION in versions and PLURAL in {kind["name"] for kind in kinds}:
        return ""
    return f"the API server does not list {PLURAL}.{API_GROUP}; is its CRD installed?"


async def _run_kopf(
    namespace: str | None, queue: WorkQueue[Key], watched: WatchedJobs, stop: asyncio.Event
) -> None:
    """Run kopf in a thread until it fails or ``stop`` is set. In a shared event loop, an ending
    kopf would cancel the tasks of the others, and kopf would handle signals."""
    loop, name, identity = asyncio.get_running_loop(), namespace or "", cast(Any, gethostname())

    def queue_if_relevant(key: Key, kind: str | None, body: Mapping[str, Any]) -> None:
        if watched.process_event(key, kind, body):
            queue.add(key)

    stopping: Future[None] = Future()
    ready: Future[None] = Future()
    ready.add_done_callback(lambda _: loop.call_soon_threadsafe(watched.mark_started, name))

    async def run_operator() -> None:
        await kopf.operator(
            registry=build_registry(
                lambda *change: loop.call_soon_threadsafe(queue_if_relevant, *change)
            ),
            # By default kopf uses the user name, which a container's user may lack.
            identity=identity,
            standalone=True,
            clusterwide=namespace is None,
            namespaces=[namespace] if namespace else [],
            # For other types than asyncio.Future, kopf starts a thread that it does not end.
            stop_flag=asyncio.wrap_future(stopping),
            ready_flag=ready,
        )

    pool = ThreadPoolExecutor(1, f"kopf-{name}")
    ended = asyncio.wrap_future(pool.submit(lambda: asyncio.run(run_operator())))
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((ended, stopped), return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopped.cancel()
        stopping.cancel()
        pool.shutdown(wait=False)
    await ended
