"""NUMA nodes of devices, and those where this process may run and allocate memory.

Source: Documentation/ABI/stable/sysfs-devices-node and testing/sysfs-bus-pci of the Linux kernel.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

NODES = Path("/sys/devices/system/node")
PCI = Path("/sys/bus/pci/devices")


@dataclass(frozen=True)
class Placement:
    """NUMA topology. ``nodes``: processors of each node. ``processors``, ``memory_nodes``: those
    this process may use, the latter None if unknown. ``devices``: node of each RDMA device and GPU
    by name, None if unknown."""

    nodes: Mapping[int, frozenset[int]]
    processors: frozenset[int]
    memory_nodes: frozenset[int] | None
    devices: Mapping[str, int | None] = field(default_factory=dict)

    @property
    def own_nodes(self) -> frozenset[int]:
        """Nodes that this process may run on."""
        return frozenset(n for n, there in self.nodes.items() if there & self.processors)

    def far_from(self, node: int) -> bool:
        """Whether this process may not run on a node, or not allocate memory there."""
        no_memory = self.memory_nodes is not None and node not in self.memory_nodes
        return node not in self.own_nodes or no_memory


def placement(
    devices: Mapping[str, int | None],
    *,
    nodes: Path = NODES,
    status: Path = Path("/proc/self/status"),
    processors: frozenset[int] | None = None,
) -> Placement | None:
    """The NUMA topology of this host. None if the kernel reports no nodes."""
    found: dict[int, frozenset[int]] = {}
    for folder in nodes.glob("node[0-9]*"):
        number = folder.name.removeprefix("node")
        if number.isdecimal():
            found[int(number)] = parse_list(_text(folder / "cpulist") or "")
    if not found:
        return None
    return Placement(
        nodes=dict(sorted(found.items())),
        processors=frozenset(os.sched_getaffinity(0)) if processors is None else processors,
        memory_nodes=_memory_nodes(status),
        devices=dict(devices),
    )


def node_of(device: Path) -> int | None:
    """NUMA node of a device, by its folder in sysfs. None if the host has one node only, or the
    firmware does not report it."""
    text = _text(device / "numa_node")
    return int(text) if text is not None and text.isdecimal() else None


def parse_list(text: str) -> frozenset[int]:
    """``"0-2,8"`` → {0, 1, 2, 8}. Empty if the text is not such a list."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            return frozenset()
        found.update(range(int(first), int(last if dash else first) + 1))
    return frozenset(found)


def _memory_nodes(status: Path) -> frozenset[int] | None:
    for line in (_text(status) or "").splitlines():
        if line.startswith("Mems_allowed_list:"):
            return parse_list(line.partition(":")[2])
    return None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return None
