"""Whether kopf's watches still bring what changes.

A watch that is dead looks like a cluster in which nothing happens. So the versions that the API
server lists are compared, some time later, with those that the watches have brought since.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pipemorph_operator.names import KIND, LABEL_JOB

Key = tuple[str, str]
Thing = tuple[str, str, str]
"""Kind, namespace and name of a PipeMorphJob or of one of its Jobs."""

LOOK_SECONDS = 120.0
"""Between two looks: a watch has so long to bring a change. It takes kopf half a minute at most to
connect again, and a moment to hand over what it missed."""


class WatchDog:
    """Knows the newest version of each object that a watch has brought."""

    def __init__(self) -> None:
        self._brought: dict[Thing, int] = {}
        self._listed: dict[Thing, int] = {}
        self._trouble = ""

    def trouble(self) -> str:
        """What is wrong, for ``/healthz``; empty if nothing is."""
        return self._trouble

    def brought(self, kind: str, metadata: Mapping[str, Any], *, deleted: bool = False) -> None:
        """A watch brought an object."""
        thing = (kind, metadata["namespace"], metadata["name"])
        if deleted:
            self._brought.pop(thing, None)
        else:
            # Kubernetes promises numbers that grow.
            self._brought[thing] = int(metadata["resourceVersion"])

    def look(self, listed: Iterable[tuple[str, Mapping[str, Any]]]) -> set[Key]:
        """Compare with ``listed``, kind and metadata of all objects there are. Returns the jobs of
        which a watch owes a change since the last look."""
        before, self._listed = self._listed, {}
        behind: dict[Thing, Key] = {}
        for kind, metadata in listed:
            namespace, name = metadata["namespace"], metadata["name"]
            thing = kind, namespace, name
            self._listed[thing] = int(metadata["resourceVersion"])
            if thing in before and self._brought.get(thing, 0) < before[thing]:
                job = name if kind == KIND else metadata["labels"][LABEL_JOB]
                behind[thing] = namespace, job
        self._trouble = ""
        if behind:
            kind, namespace, name = min(behind)
            self._trouble = (
                f"the watches have not brought changes of {len(behind)} objects for"
                f" {LOOK_SECONDS:g} s, such as {kind} {namespace}/{name}"
            )
        return set(behind.values())
