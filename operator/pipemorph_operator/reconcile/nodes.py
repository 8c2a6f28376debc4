"""What the operator does with findings about nodes: where the next attempts should not run, and, if
it may, a condition, an event and a taint of the accused nodes.

Level-triggered: marks are compared with what is published, and the nodes with a mark are looked up
at the start and every few minutes, so that a restart loses none.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from pipemorph.fabric.findings import Finding, nodes
from pipemorph_operator import names
from pipemorph_operator.cluster.client import REQUEST_ERRORS, ApiRefused, Cluster, path, reason_of
from pipemorph_operator.cluster.events import Event, emit
from pipemorph_operator.cluster.fabric_map import Place, findings_of
from pipemorph_operator.cluster.facts import format_time
from pipemorph_operator.metrics import NODES_ACCUSED

log = logging.getLogger("pipemorph.fabric")

LOOK_SECONDS = 15.0
RELIST_LOOKS = 40
"""Looks between two lists of all nodes."""
EVENTS_NAMESPACE = "default"
"""Where events of objects without a namespace are."""
CONFLICT, GONE = 409, 404
UNMARKED = (False, False)

Object = dict[str, Any]


@dataclass
class NodeMarks:
    """``conditions``: whether accused nodes get the condition :data:`names.NODE_NETWORK_SLOW` and
    an event; ``taint``: effect of their taint, empty for none; ``most_tainted``: most nodes with
    the taint."""

    cluster: Cluster
    place: Place
    conditions: bool = False
    taint: str = ""
    most_tainted: int = 4
    suspects: tuple[str, ...] = ()
    """Nodes to avoid where that costs nothing."""
    _looks: int = 0
    _marked: dict[str, tuple[bool, bool]] = field(default_factory=dict)
    """Nodes with a mark: the condition, the taint."""

    async def run(self) -> None:
        """Follow the findings, until cancelled."""
        self._looks = 0  # Another leader may have marked nodes meanwhile.
        try:
            while True:
                try:
                    await self.look()
                except REQUEST_ERRORS as error:
                    log.warning("the findings about nodes: %s", reason_of(error))
                except Exception:
                    # An unexpected error must not end the process: jobs do not depend on this.
                    log.exception("the findings about nodes")
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            NODES_ACCUSED.set(0)  # The next leader counts them.

    async def look(self) -> None:
        """Read the findings and mark nodes accordingly. Raises :data:`REQUEST_ERRORS`."""
        body = await self.cluster.get(path("ConfigMap", self.place.namespace, self.place.name))
        found = findings_of(body or {})
        self.suspects = tuple(sorted(nodes(found, accused=False)))
        accused = nodes(found, accused=True)
        NODES_ACCUSED.set(len(accused))
        if not (self.conditions or self.taint):
            return
        if self._looks % RELIST_LOOKS == 0:
            listed = await self.cluster.list(path("Node", None))
            marks = {node["metadata"]["name"]: _marks(node) for node in listed}
            self._marked = {name: each for name, each in marks.items() if any(each)}
        self._looks += 1
        # Those with the taint first: it does not move from node to node with the confidence.
        by_taint = sorted(accused, key=lambda name: not self._marked.get(name, UNMARKED)[1])
        tainted = by_taint[: self.most_tainted] if self.taint else []
        for name in sorted({*accused, *self._marked}):
            wanted = (self.conditions and name in accused, name in tainted)
            if self._marked.get(name, UNMARKED) == wanted:
                continue
            try:
                await self._mark(name, accused.get(name), *wanted)
            except ApiRefused as refused:
                if refused.status == GONE:
                    self._marked.pop(name, None)
                elif refused.status != CONFLICT:  # Then somebody else wrote.
                    log.warning("node %s cannot be marked; will retry: %s", name, refused)

    async def _mark(self, name: str, finding: Finding | None, condition: bool, taint: bool) -> None:
        node = await self.cluster.get(path("Node", None, name))
        if node is None:
            raise ApiRefused(GONE, "NotFound", f"node {name} does not exist")
        is_marked, is_tainted = _marks(node)
        if is_tainted != taint:
            others = [t for t in _taints(node) if t.get("key") != names.NODE_TAINT]
            ours = [{"key": names.NODE_TAINT, "effect": self.taint}] if taint else []
            node["spec"]["taints"] = [*others, *ours]
            await self.cluster.replace(node)
        if is_marked != condition and self.conditions:
            await self._tell(node["metadata"], finding)
        if any((condition, taint)):
            self._marked[name] = (condition, taint)
        else:
            self._marked.pop(name, None)

    async def _tell(self, metadata: Mapping[str, Any], finding: Finding | None) -> None:
        """Write the condition and its event; None: the node is well again."""
        now = format_time(datetime.now(UTC))
        event = Event("Normal", names.R_NODE_WELL, "links of jobs through this node are well again")
        if finding is not None:
            event = Event("Warning", names.R_NODE_ACCUSED, finding.text)
        condition = {
            "type": names.NODE_NETWORK_SLOW,
            "status": "False" if finding is None else "True",
            "reason": event.reason,
            "message": event.message,
            "lastTransitionTime": now,
            "lastHeartbeatTime": now,
        }
        about = {"name": metadata["name"], "uid": metadata["uid"]}
        written = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": about,
            "status": {"conditions": [condition]},
        }
        await self.cluster.apply(written, names.OPERATOR_OWNER, subresource="status")
        log.info("node %s: %s", metadata["name"], event.message)
        where = about | {"namespace": EVENTS_NAMESPACE}
        await emit(self.cluster, where, event, names.OPERATOR_OWNER, kind="Node", api_version="v1")


def _marks(node: Mapping[str, Any]) -> tuple[bool, bool]:
    """Whether a node has the condition, as True, and the taint."""
    conditions = (node.get("status") or {}).get("conditions") or ()
    slow = any(
        c.get("type") == names.NODE_NETWORK_SLOW and c.get("status") == "True" for c in conditions
    )
    return slow, any(t.get("key") == names.NODE_TAINT for t in _taints(node))


def _taints(node: Mapping[str, Any]) -> list[Object]:
    return list((node.get("spec") or {}).get("taints") or ())
