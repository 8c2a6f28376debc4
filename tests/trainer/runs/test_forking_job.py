"""`pipemorph run` of a job whose ranks fork in every iteration, over a delegated link."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.full, pytest.mark.needs_engine, pytest.mark.timeout(270)]

ITERATIONS, MICROBATCHES = 3, 4


def job(engine: str) -> dict[str, Any]:
    return {
        "apiVersion": "pipemorph.io/v1alpha1",
        "kind": "PipeMorphJob",
        "metadata": {"name": "forking"},
        "spec": {
            "parallelism": {"stages": 2},
            "schedule": {"microbatches": MICROBATCHES},
            "transport": {"route": "delegated", "engine": engine, "deadlineSeconds": 120.0},
            "trainer": {"module": "forking_rank", "iterations": ITERATIONS},
        },
    }


@pytest.mark.parametrize("engine", ["tcp", pytest.param("shm", marks=pytest.mark.soak)])
def test_a_job_whose_children_end_in_every_iteration_trains_on(engine: str, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(json.dumps(job(engine)))
    out = tmp_path / "out"
    done = subprocess.run(
        [sys.executable, "-m", "pipemorph.cli", "run", tmp_path / "job.yaml", "--out", out],
        cwd=Path(__file__).parents[2] / "support",  # where the ranks find their module
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    logs = [path.read_text() for path in sorted((out / "logs").glob("*.log"))]
    everything = "\n".join([done.stdout, done.stderr, *logs])
    assert done.returncode == 0, everything
    report = json.loads((out / "report.json").read_text())
    assert report["completed"] is True, everything
    assert len(report["iterations"]) == ITERATIONS
    assert all(iteration["loss"] is not None for iteration in report["iterations"])
    # On one and the same connection, at both ends.
    links = [line for log in logs for line in log.splitlines() if "LINK" in line]
    assert len(links) == 2, everything
    for line in links:
        stats = json.loads(line[line.index("{") :])
        assert stats.pop("sent") >= (ITERATIONS - 1) * MICROBATCHES
        assert stats == {"state": "up", "reconnects": 0, "chunks_resent": 0}
    assert report["status"]["training"]["transports"] == [engine]
    assert not report["adaptations"]
