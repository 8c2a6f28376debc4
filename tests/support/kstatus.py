"""Rules by which generic tools read the status of an object of a kind without rules of its own.

Source: documentation of kstatus (sigs.k8s.io/cli-utils, pkg/kstatus) and of ``kubectl wait``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ABNORMAL = {"Reconciling": "InProgress", "Stalled": "Failed"}


def kstatus(obj: Mapping[str, Any]) -> str:
    """InProgress, Current, Failed or Terminating."""
    metadata, status = obj["metadata"], obj.get("status") or {}
    if metadata.get("deletionTimestamp"):
        return "Terminating"
    if status.get("observedGeneration", metadata["generation"]) != metadata["generation"]:
        return "InProgress"
    found = status.get("conditions") or []
    for each in found:
        if each["type"] in ABNORMAL and each["status"] == "True":
            return ABNORMAL[each["type"]]
    ready = [each["status"] for each in found if each["type"] == "Ready"]
    return "InProgress" if ready and ready[0] != "True" else "Current"


def wait_ends(obj: Mapping[str, Any], kind: str = "Ready") -> bool:
    """True if ``kubectl wait --for=condition=KIND`` ends with this object."""
    status = obj.get("status") or {}
    for each in status.get("conditions") or []:
        if each["type"] == kind:
            seen = each.get("observedGeneration", status.get("observedGeneration"))
            old = seen is not None and seen < obj["metadata"]["generation"]
            return each["status"] == "True" and not old
    return False
