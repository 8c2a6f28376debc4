"""The ConfigMap in which the ingest publishes what it knows of the network, for the operator, for
people, and for itself after a restart. Bounded by what its writers keep."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pipemorph.fabric.findings import Finding
from pipemorph.fabric.memory import FabricMemory

log = logging.getLogger("pipemorph.fabric")

FINDINGS, MEMORY = "findings", "memory"
"""Keys of the ConfigMap's data."""


@dataclass(frozen=True)
class Place:
    """Where the ConfigMap is."""

    namespace: str
    name: str

    @staticmethod
    def of(text: str) -> Place:
        """``NAMESPACE/NAME``, as an argument of a command."""
        namespace, slash, name = text.partition("/")
        if not (namespace and slash and name) or "/" in name:
            raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAMESPACE/NAME")
        return Place(namespace, name)


def config_map(
    place: Place, findings: Iterable[Finding], memory: FabricMemory, now: float
) -> dict[str, Any]:
    """The object to apply."""
    told = [finding.record() for finding in findings]
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": place.name, "namespace": place.namespace},
        "data": {
            FINDINGS: json.dumps(told, indent=1),
            MEMORY: json.dumps(memory.dump(now), separators=(",", ":")),
        },
    }


def findings_of(body: Mapping[str, Any]) -> list[Finding]:
    """The published findings; none, with a line in the log, if they cannot be read."""
    try:
        return [Finding.of(each) for each in json.loads(_data(body, FINDINGS) or "[]")]
    except (TypeError, ValueError) as error:
        log.error("%s cannot be read; ignoring it: %s", FINDINGS, error)
        return []


def memory_of(body: Mapping[str, Any]) -> FabricMemory:
    """The published memory; an empty one, with a line in the log, if it cannot be read."""
    text = _data(body, MEMORY)
    try:
        return FabricMemory.restore(json.loads(text)) if text else FabricMemory()
    except (TypeError, ValueError) as error:
        log.error("%s cannot be read; starting with none: %s", MEMORY, error)
        return FabricMemory()


def _data(body: Mapping[str, Any], key: str) -> str:
    return str((body.get("data") or {}).get(key) or "")
