"""Runs of ``pipemorph run`` for benchmarks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

DEADLINE_SECONDS = 400


def run_job(folder: Path, job: dict[str, Any]) -> dict[str, Any]:
    """Run a job with one thread per rank, its output in ``folder`` under the job's name. Returns
    its report. Raises SystemExit with the logs' ends if it fails, and
    :class:`subprocess.TimeoutExpired` after :data:`DEADLINE_SECONDS`."""
    name = job["metadata"]["name"]
    file, out = folder / f"{name}.json", folder / name
    file.write_text(json.dumps(job))
    done = subprocess.run(
        [sys.executable, "-m", "pipemorph.cli", "run", str(file), "--out", str(out)],
        capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    if done.returncode:
        logs = "".join(log.read_text()[-1500:] for log in sorted((out / "logs").glob("*")))
        raise SystemExit(f"{name} failed:\n{done.stdout}{done.stderr}{logs}")
    report: dict[str, Any] = json.loads((out / "report.json").read_text())
    return report
