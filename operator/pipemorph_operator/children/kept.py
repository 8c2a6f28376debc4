"""The volume in memory in which ranks leave their state for those that come after them in the pod.

What it holds counts as memory of the trainer container. So it may have half of what that container
may use: the copies must not be what ends the ranks. A rank for whose copies there is no room keeps
none and says so.
"""

from __future__ import annotations

from typing import Any

from kubernetes.utils.quantity import parse_quantity

VOLUME = "pipemorph-kept"
"""A template may have a volume of this name, such as one with another limit."""
FOLDER = "/run/pipemorph/kept"
SHARE = 2
"""The trainer's memory limit over the volume's."""

Object = dict[str, Any]


def mount(spec: Object, trainer: Object) -> None:
    """Add the volume to a pod's ``spec``, unless it has it, and mount it in its trainer."""
    volumes = spec.setdefault("volumes", [])
    if not any(volume.get("name") == VOLUME for volume in volumes):
        volumes.append({"name": VOLUME, "emptyDir": {"medium": "Memory"} | _size(trainer)})
    trainer["volumeMounts"].append({"name": VOLUME, "mountPath": FOLDER})


def _size(trainer: Object) -> Object:
    """The volume's limit; none, so that of the node, if the trainer has none."""
    limits = (trainer.get("resources") or {}).get("limits") or {}
    found = memory_bytes(str(limits.get("memory", "")))
    return {"sizeLimit": str(found // SHARE)} if found is not None else {}


def memory_bytes(quantity: str) -> int | None:
    """Bytes of a Kubernetes quantity; None for other text and for less than a byte, which the API
    server refuses."""
    try:
        size = int(parse_quantity(quantity))  # type: ignore[no-untyped-call]
    except ValueError:
        return None
    return size if size > 0 else None
