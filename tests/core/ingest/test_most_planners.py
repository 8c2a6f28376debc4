"""How many planner processes a host starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipemorph.ingest.processors import PLANNER_BYTES, most_planners

GIB = 1 << 30


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 16),
        ({"cpu.max": "max 100000"}, 16),
        ({"cpu.max": "250000 100000"}, 3),
        ({"cpu.max": "10000 100000"}, 1),
        ({"pod/cpu.max": "400000 100000"}, 4),
        ({"pod/cpu.max": "200000 100000", "pod/c/cpu.max": "800000 100000"}, 2),
        ({"pod/c/memory.max": str(GIB)}, GIB // 3 // PLANNER_BYTES),
        ({"memory.max": "max"}, 16),
        ({"memory.max": "1000000"}, 1),
        ({"other/cpu.max": "100000 100000"}, 16),
    ],
)
def test_as_many_as_processors_and_memory_allow(
    files: dict[str, str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    own, root = tmp_path / "cgroup", tmp_path / "groups"
    own.write_text("3:cpu:/x\n0::/pod/c\n")
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    assert most_planners(root, own) == expected


def test_without_control_groups_affinity_counts(tmp_path: Path) -> None:
    assert most_planners(tmp_path, tmp_path / "none") == len(os.sched_getaffinity(0))
