"""Processor and memory limits of this process's control group (version 2) and its ancestors.

A pod sees its container's group as the root: its limits are the container's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
CGROUP = Path("/proc/self/cgroup")


def count_processors(root: Path = CGROUPS, own: Path = CGROUP) -> float:
    """Processors that this process may use, maybe a fraction: its affinity, limited by the CPU
    quotas of its groups (a container's CPU limit)."""
    most = float(len(os.sched_getaffinity(0)))
    for group in _iterate_groups(root, own):
        quota = _read_kernel_file(group / "cpu.max").split()
        if len(quota) == 2 and quota[0] != "max":
            most = min(most, int(quota[0]) / int(quota[1]))
    return most


def read_memory_headroom(root: Path = CGROUPS, own: Path = CGROUP) -> int | None:
    """Bytes that this process can still allocate before a group reaches its limit, with the file
    cache that the kernel can drop; None if there is no limit."""
    rooms = []
    for group in _iterate_groups(root, own):
        limit, used = (
            _read_kernel_file(group / f"memory.{name}").strip() for name in ("max", "current")
        )
        if limit.isdecimal() and used.isdecimal():
            lines = _read_kernel_file(group / "memory.stat").splitlines()
            idle = sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
            rooms.append(int(limit) - int(used) + idle)
    return min(rooms, default=None)


def read_memory_limit(root: Path = CGROUPS, own: Path = CGROUP) -> int | None:
    """The least memory limit of the groups, bytes; None if there is none."""
    limits = (
        _read_kernel_file(group / "memory.max").strip() for group in _iterate_groups(root, own)
    )
    return min((int(limit) for limit in limits if limit.isdecimal()), default=None)


def _iterate_groups(root: Path, own: Path) -> Iterator[Path]:
    """The control group of this process and those above it."""
    lines = _read_kernel_file(own).splitlines()
    path = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "/")
    group = root / path.strip("/")
    while group != root:
        yield group
        group = group.parent
    yield root


def _read_kernel_file(path: Path) -> str:
    """Text of a file of the kernel; empty if this kernel or group has none."""
    try:
        return path.read_text()
    except OSError:
        return ""
