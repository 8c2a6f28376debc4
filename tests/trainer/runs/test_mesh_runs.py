"""A job on a mesh under ``pipemorph run``: one link of one column is slow."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import pytest

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(300)]

STAGES, COLUMN, SLOW_FROM, ITERATIONS = 2, 3, 6, 20


def manifest() -> dict[str, Any]:
    return {
        "apiVersion": "pipemorph.io/v1alpha1",
        "kind": "PipeMorphJob",
        "metadata": {"name": "mesh"},
        "spec": {
            "parallelism": {"stages": STAGES, "replicas": 2, "tensor": 2},
            "schedule": {"microbatches": 10, "policy": "pipemorph"},
            "emulation": {
                "stageTimes": [{"forward": 12, "backwardInput": 12, "backwardWeight": 12}],
                "messageBytes": 4096,
            },
            "faults": [
                {"link": 0, "replica": COLUMN, "fromIteration": SLOW_FROM, "delayMs": 30},
            ],
            "trainer": {
                "module": "pipemorph_trainer.examples.emulated",
                "iterations": ITERATIONS,
            },
        },
    }


def test_a_slow_link_is_named_by_its_coordinate_and_planned_for(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(json.dumps(manifest()))
    done = subprocess.run(
        [
            sys.executable, "-m", "pipemorph.cli", "run", str(tmp_path / "job.json"),
            "--out", str(tmp_path / "out"),
        ],
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    adapted = [each for each in report["adaptations"] if each["kind"] == "adapt"]
    assert adapted, done.stdout
    assert "link 0 of replica 1, tensor 1 is slow by" in adapted[-1]["reason"], done.stdout
    assert {link["replica"] for link in adapted[-1]["links"]} == {COLUMN}
    seconds = [each["seconds"] for each in report["iterations"]]
    assert median(seconds[-5:]) < 0.92 * seconds[SLOW_FROM], seconds
