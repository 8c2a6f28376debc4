"""torchtitan's own trainer with our schedule: the losses, norms and weights of its own 1F1B.

torchtitan is no dependency of ours: ``pip install --no-deps torchtitan==0.3.0`` and what it imports
(docs/how-to/torchtitan.md). Without it the tests fail.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from launch import run_ranks
from soak_packages import require_package
from titan_job import STEPS, TitanJob, train

from pipemorph.planning import Link, Problem, Route, StageTimes, plan

ROOT = Path(__file__).resolve().parents[3]

pytestmark = [pytest.mark.soak]

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "sharded": {"shard": 2},
    "tensor": {"tensor": 2},
    "sharded, tensor": {"shard": 2, "tensor": 2},
    "hybrid sharded": {"replicate": 2, "shard": 2},
    "chunked loss, selective checkpointing": {"chunked_loss": True, "recompute": "selective"},
    "the same, hybrid sharded": {
        "replicate": 2,
        "shard": 2,
        "chunked_loss": True,
        "recompute": "selective",
    },
    "the same, sharded, tensor": {
        "shard": 2,
        "tensor": 2,
        "chunked_loss": True,
        "recompute": "selective",
    },
    "full checkpointing": {"recompute": "full"},
    "two stages per rank": {"schedule": "Interleaved1F1B"},
    "two stages per rank, V": {"schedule": "ZBVZeroBubble", "placement": "v"},
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_of_torchtitans_own_schedule(case: str) -> None:
    require_package("torchtitan")
    stages = 4 if "schedule" in CASES[case] else 2
    times = StageTimes(forward=1, backward_input=1, backward_weight=1)
    problem = Problem(
        microbatches=4, stages=(times,) * stages, links=(Link(delay=1),) * (stages - 1), ranks=2,
        placement=CASES[case].get("placement", "interleaved"),
    )  # fmt: skip
    planned = plan(problem)
    moved = planned.to_plan(3, (Route.DELEGATED,) * (stages - 1))
    job = TitanJob(adaptive=True, plan=moved, **CASES[case])
    ranks = job.pipeline * job.replicate * job.shard * job.tensor
    wanted = run_ranks(ranks, train, replace(job, adaptive=False), timeout=280)
    found = run_ranks(ranks, train, job, timeout=280)
    for mine, its in zip(found, wanted, strict=True):
        assert len(its.seen) == STEPS
        assert mine.seen == its.seen
        assert mine.parameters == its.parameters
        assert mine.plan == 3
    deferred = frozenset().union(*(each.deferred for each in found))
    assert len(deferred) >= 30, "Linears of six layers"


@pytest.mark.timeout(600)
def test_example_adapts(tmp_path: Path) -> None:
    """The commands of docs/how-to/torchtitan.md."""
    require_package("torchtitan")
    shutil.copytree(ROOT / "examples/torchtitan", tmp_path, dirs_exist_ok=True)
    command = [sys.executable, "-m", "pipemorph.cli", "run", "job.yaml", "--out", "out"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert report["completed"] is True
    assert len(report["iterations"]) == 30
    assert "plan v1: in effect since iteration" in ran.stdout
