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
class NumaTopology:
    """NUMA topology. ``nodes``: processors of each node. ``processors``, ``memory_nodes``: usable
    by this process, the latter None if unknown. ``devices``: node of each RDMA device and GPU, or
    None."""

    nodes: Mapping[int, frozenset[int]]
    processors: frozenset[int]
    memory_nodes: frozenset[int] | None
    devices: Mapping[str, int | None] = field(default_factory=dict)

    @property
    def own_nodes(self) -> frozenset[int]:
        """Nodes that this process may run on."""
        return frozenset(n for n, there in self.nodes.items() if there & self.processors)

    def is_far_from(self, node: int) -> bool:
        """True if this process may not run on a node, or not allocate memory there."""
        no_memory = self.memory_nodes is not None and node not in self.memory_nodes
        return node not in self.own_nodes or no_memory


def read_numa_topology(
    devices: Mapping[str, int | None],
    *,
    nodes: Path = NODES,
    status: Path = Path("/proc/self/status"),
    processors: frozenset[int] | None = None,
) -> NumaTopology | None:
    """The NUMA topology of this host. None if the kernel reports no nodes."""
    found: dict[int, frozenset[int]] = {}
    for folder in nodes.glob("node[0-9]*"):
        number = folder.name.removeprefix("node")
        if number.isdecimal():
            found[int(number)] = parse_cpu_list(_read_text(folder / "cpulist") or "")
    if not found:
        return None
    return NumaTopology(
        nodes=dict(sorted(found.items())),
        processors=frozenset(os.sched_getaffinity(0)) if processors is None else processors,
        memory_nodes=_read_memory_nodes(status),
        devices=dict(devices),
    )


def read_numa_node(device: Path) -> int | None:
    """NUMA node of a device's folder in sysfs. None if it is not reported, or is the only node."""
    text = _read_text(device / "numa_node")
    return int(text) if text is not None and text.isdecimal() else None


def parse_cpu_list(text: str) -> frozenset[int]:
    """``"0-2,8"`` → {0, 1, 2, 8}. Empty if the text is not such a list."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            return frozenset()
        found.update(range(int(first), int(last if dash else first) + 1))
    return frozenset(found)


def _read_memory_nodes(status: Path) -> frozenset[int] | None:
    for line in (_read_text(status) or "").splitlines():
        if line.startswith("Mems_allowed_list:"):
            return parse_cpu_list(line.partition(":")[2])
    return None


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return None
