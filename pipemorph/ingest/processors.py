"""How many planner processes a host may run: by its processors, and by its memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from math import ceil
from pathlib import Path

PLANNER_BYTES = 64 << 20
"""Memory of one planner process: 40 MB to begin with, and that of a large problem."""
MEMORY_SHARE = 0.5
"""Part of the memory limit that planner processes may take."""
CGROUPS = Path("/sys/fs/cgroup")
CGROUP = Path("/proc/self/cgroup")


def most_planners(root: Path = CGROUPS, own: Path = CGROUP) -> int:
    """As many as the processors that this process may use, by its affinity and the quota of its
    control group, within half of the group's memory limit; at least one."""
    most = float(len(os.sched_getaffinity(0)))
    for group in _groups(root, own):
        quota = _read(group / "cpu.max").split()
        if len(quota) == 2 and quota[0] != "max":
            most = min(most, ceil(int(quota[0]) / int(quota[1])))
        memory = _read(group / "memory.max").strip()
        if memory.isdigit():
            most = min(most, MEMORY_SHARE * int(memory) // PLANNER_BYTES)
    return max(1, int(most))


def _groups(root: Path, own: Path) -> Iterator[Path]:
    """The control group of this process and those above it (version 2)."""
    lines = _read(own).splitlines()
    path = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "/")
    group = root / path.strip("/")
    while group != root:
        yield group
        group = group.parent
    yield root


def _read(path: Path) -> str:
    """Text of a file of the kernel; empty if this kernel or group has none."""
    try:
        return path.read_text()
    except OSError:
        return ""
