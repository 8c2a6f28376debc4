"""Checks that the watches still deliver changes.

A dead watch looks like a cluster in which nothing changes. So the resource versions that the API
server lists are compared, LOOK_SECONDS later, with those that the watches have delivered by then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pipemorph_operator.names import KIND, LABEL_JOB

Key = tuple[str, str]
Thing = tuple[str, str, str]
"""Kind, namespace and name of a PipeMorphJob or of one of its Jobs."""

LOOK_SECONDS = 120.0
"""Time between two checks, and so the time a watch has to deliver a change. kopf reconnects within
half a minute, then delivers what it missed."""


class Watchdog:
    """Tracks the newest version of each object that a watch has delivered."""

    def __init__(self) -> None:
        self._delivered: dict[Thing, int] = {}
        self._listed: dict[Thing, int] = {}
        self._trouble = ""

    def trouble(self) -> str:
        """The problem, for ``/healthz``; empty if there is none."""
        return self._trouble

    def delivered(self, kind: str, metadata: Mapping[str, Any], *, deleted: bool = False) -> None:
        """Record that a watch delivered an object."""
        thing = (kind, metadata["namespace"], metadata["name"])
        if deleted:
            self._delivered.pop(thing, None)
        else:
            # Kubernetes guarantees increasing integers.
            self._delivered[thing] = int(metadata["resourceVersion"])

    def look(self, listed: Iterable[tuple[str, Mapping[str, Any]]]) -> set[Key]:
        """Compare with ``listed``: kind and metadata of all existing objects. Returns the jobs
        with a change that was listed at the last check and not delivered since."""
        before, self._listed = self._listed, {}
        behind: dict[Thing, Key] = {}
        for kind, metadata in listed:
            namespace, name = metadata["namespace"], metadata["name"]
            thing = kind, namespace, name
            self._listed[thing] = int(metadata["resourceVersion"])
            if thing in before and self._delivered.get(thing, 0) < before[thing]:
                job = name if kind == KIND else metadata["labels"][LABEL_JOB]
                behind[thing] = namespace, job
        self._trouble = ""
        if behind:
            kind, namespace, name = min(behind)
            self._trouble = (
                f"the watches have not delivered changes of {len(behind)} objects for"
                f" {LOOK_SECONDS:g} s, such as {kind} {namespace}/{name}"
            )
        return set(behind.values())
