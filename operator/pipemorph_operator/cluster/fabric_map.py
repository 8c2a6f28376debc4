"""The ConfigMap in which the ingest publishes what it knows of the network, for the operator, for
people, and for itself after a restart. Bounded by what its writers keep."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pipemorph.fabric.findings import MOST_PORTS, MOST_TOLD, Finding
from pipemorph.fabric.memory import FabricMemory

log = logging.getLogger("pipemorph.fabric")

FINDINGS, MEMORY, PORTS = "findings", "memory", "ports"
"""Keys of the ConfigMap's data; ``ports`` in that of a part."""


@dataclass(frozen=True)
class Place:
    """Where the ConfigMap is."""

    namespace: str
    name: str

    def part(self, number: str) -> Place:
        """Where the replica of the ingest with this number of a seat tells what it knows."""
        return Place(self.namespace, f"{self.name}-{number}")

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
    dumped = json.dumps(memory.dump(now), separators=(",", ":"))
    return _body(place, {FINDINGS: json.dumps(told, indent=1), MEMORY: dumped})


def part_map(
    place: Place, dumped: Mapping[str, Any], ports: Mapping[str, Iterable[str]]
) -> dict[str, Any]:
    """The object with what one replica knows of the links of its jobs: a dump of its memory, and
    the ports of each node that report errors."""
    told = {node: sorted(found)[:MOST_PORTS] for node, found in sorted(ports.items())}
    data = {
        MEMORY: json.dumps(dumped, separators=(",", ":")),
        PORTS: json.dumps({"at": dumped["at"], "nodes": dict(list(told.items())[:MOST_TOLD])}),
    }
    return _body(place, data)


def _body(place: Place, data: Mapping[str, str]) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": place.name, "namespace": place.namespace},
        "data": dict(data),
    }


def ports_of(body: Mapping[str, Any], since: float) -> dict[str, list[str]]:
    """The published ports, by node; none if they are older than ``since``, or, with a line in the
    log, if they cannot be read."""
    try:
        found = json.loads(_data(body, PORTS) or "{}")
        if not found or float(found["at"]) < since:
            return {}
        return {str(node): [str(port) for port in ports] for node, ports in found["nodes"].items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        log.error("%s cannot be read; ignoring it: %s", PORTS, error)
        return {}


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
