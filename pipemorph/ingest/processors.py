"""How many planner processes a host may run: by its processors, and by its memory."""

from __future__ import annotations

from math import ceil
from pathlib import Path

from pipemorph.discovery.cgroup import CGROUP, CGROUPS, memory_limit, processors

PLANNER_BYTES = 64 << 20
"""Memory of one planner process: 40 MB to begin with, and that of a large problem."""
MEMORY_SHARE = 1 / 3
"""Part of the memory limit that planner processes may take: a third is the host's, another that of
the process that makes pages."""


def most_planners(root: Path = CGROUPS, own: Path = CGROUP) -> int:
    """As many as the processors that this process may use, within a third of its control group's
    memory limit; at least one."""
    most, memory = ceil(processors(root, own)), memory_limit(root, own)
    if memory is not None:
        most = min(most, int(MEMORY_SHARE * memory // PLANNER_BYTES))
    return max(1, most)
