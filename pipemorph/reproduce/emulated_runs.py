"""Runs of ``pipemorph run`` with emulated stages.

They hold for the op times of a model and compute nothing. Executor, transports, detection and
control loop are those of a real job.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipemorph.errors import PipeMorphError
from pipemorph.reproduce.published import Model

DEADLINE_SECONDS = 400
MESSAGE_BYTES, STANDS_FOR = 1 << 16, 1 << 24
"""Size of a message, and of the real one that it stands for."""
MOST_LINES = 15
"""Most lines of a failed run's output in an error."""


class FailedRunError(PipeMorphError):
    """Run that failed or was not done in time. The message ends with the last lines it printed."""


def build_job(
    name: str,
    model: Model,
    policy: str,
    iterations: int,
    *,
    route: str = "auto",
    duplex: str = "full",
    faults: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Manifest of an emulated job of one replica. ``duplex``: ``half`` if a pair of ranks has one
    queue for both directions of a direct route; ``faults``: entries of ``spec.faults``."""
    ops = zip(model.forward, model.backward_input, model.backward_weight, strict=True)
    times = [
        {"forward": forward, "backwardInput": backward, "backwardWeight": weight}
        for forward, backward, weight in ops
    ]
    return {
        "apiVersion": "pipemorph.io/v1alpha1",
        "kind": "PipeMorphJob",
        "metadata": {"name": name},
        "spec": {
            "parallelism": {"stages": model.stages},
            "schedule": {
                "microbatches": model.microbatches,
                "policy": policy,
                "stageTimes": times,
            },
            "transport": {"route": route},
            "emulation": {
                "stageTimes": times,
                "messageBytes": MESSAGE_BYTES,
                "standsForBytes": STANDS_FOR,
            },
            "trainer": {
                "module": "pipemorph_trainer.examples.emulated",
                "iterations": iterations,
                "args": {"direct_duplex": duplex},
            },
            "faults": list(faults),
        },
    }


def run_job(folder: Path, job: Mapping[str, Any]) -> dict[str, Any]:
    """Run a job with one thread per rank, its output in ``folder`` under the job's name. Returns
    its report. Raises :class:`FailedRunError`."""
    name = job["metadata"]["name"]
    file, out = folder / f"{name}.json", folder / name
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(job))
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pipemorph.cli", "run", str(file), "--out", str(out)],
            capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise FailedRunError(f"{name}: was not done after {DEADLINE_SECONDS} s") from None
    if done.returncode:
        logs = "".join(log.read_text()[-1500:] for log in sorted((out / "logs").glob("*")))
        printed = (logs + done.stdout + done.stderr).splitlines()[-MOST_LINES:]
        raise FailedRunError("\n".join([f"{name}: exit {done.returncode}", *printed]))
    report: dict[str, Any] = json.loads((out / "report.json").read_text())
    return report
