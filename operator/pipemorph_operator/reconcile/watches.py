"""kopf's watch of PipeMorphJobs: every relevant change queues the job.

Only an event handler is registered, so that kopf adds no finalizers or annotations to objects.
A dead watch looks like a cluster in which nothing changes. So the versions that the API server
lists are compared, LOOK_SECONDS later, with those that the watch has delivered by then.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import kopf

from pipemorph_operator.names import API_GROUP, INGEST_CONDITIONS, PLURAL, VERSION
from pipemorph_operator.reconcile.workqueue import WorkQueue

INACTIVITY_SECONDS = 90.0
"""Bookmarks arrive every minute: a watch that is silent for longer is dead."""

LOOK_SECONDS = 120.0
"""Time between two looks, and so the time the watch has to deliver a change. kopf reconnects within
half a minute, then delivers what it missed."""

Key = tuple[str, str]

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

    def jobs(self) -> list[Key]:
        """All jobs that the watch has delivered, and perhaps some that are gone."""
        return [*self._delivered]

    def trouble(self) -> str:
        """The problem, for ``/healthz``; empty if there is none."""
        return self._trouble

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

    def look(self, listed: Iterable[Mapping[str, Any]]) -> set[Key]:
        """Compare with ``listed``, the metadata of all existing jobs. Returns the jobs with a
        change that was listed at the last look and not delivered since, and those that went without
        a word: after a 410, kopf's watch does not say which jobs are gone."""
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
            if key not in self._listed and self._delivered.get(key) == last
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


def _unnoted(body: Mapping[str, Any]) -> frozenset[tuple[int, int]]:
    """The slow links whose nodes a turn has to note. That they are noted asks for no turn."""
    status = body.get("status") or {}
    slow = (status.get("training") or {}).get("slowLinks") or ()
    noted = (status.get("attemptNodes") or {}).get("links") or ()
    return frozenset((at["link"], at["replica"]) for at in slow) - frozenset(
        (at["link"], at["replica"]) for at in noted
    )


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
        key = (str(namespace), name)
        if watched.delivered(key, type, body):
            queue.add(key)

    return made
