"""Runs of ``pipemorph run``, by default of emulated stages, and what they leave."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import prepared_processes

STAGES, MICROBATCHES = 4, 12
ITERATIONS = 30
"""Enough for the return even if a stall before a fault had passed for a slow link: then it is put
off by eight iterations."""
TIMES = {"forward": 10.0, "backwardInput": 10.0, "backwardWeight": 10.0}
DEADLINE = 280


@dataclass
class Done:
    """A run that has ended."""

    status: int
    output: str
    out: Path

    @property
    def report(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.out / "report.json").read_text())
        return content

    def __str__(self) -> str:
        logs = sorted((self.out / "logs").glob("*.log"))
        return "\n".join([self.output, *(f"{p.name}: {p.read_text()[-2000:]}" for p in logs)])


def manifest(**spec: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "parallelism": {"stages": STAGES},
        "schedule": {"microbatches": MICROBATCHES, "policy": "pipemorph"},
        "emulation": {"stageTimes": [TIMES], "messageBytes": 16384, "standsForBytes": 1 << 24},
        "trainer": {"module": "pipemorph_trainer.examples.emulated", "iterations": ITERATIONS},
    }
    return {
        "apiVersion": "pipemorph.io/v1alpha1",
        "kind": "PipeMorphJob",
        "metadata": {"name": "emulated"},
        "spec": base | spec,
    }


def command(folder: Path, job: dict[str, Any]) -> list[str]:
    (folder / "job.yaml").write_text(json.dumps(job))
    run = [sys.executable, "-m", "pipemorph.cli", "run"]
    return [*run, str(folder / "job.yaml"), "--out", str(folder / "out")]


def run(folder: Path, job: dict[str, Any]) -> Done:
    done = prepared_processes.run(
        command(folder, job), capture_output=True, text=True, timeout=DEADLINE, check=False
    )
    return Done(done.returncode, done.stdout + done.stderr, folder / "out")


def report_of(folder: Path, job: dict[str, Any]) -> dict[str, Any]:
    """The report of a run that must succeed; ``said``: its output."""
    folder.mkdir(exist_ok=True)
    done = run(folder, job)
    assert done.status == 0, done
    return done.report | {"said": done.output}


def read_until(host: subprocess.Popen[str], iteration: int) -> str:
    """What a run says until ``iteration`` or a later one is over: not each has a line."""
    assert host.stdout is not None
    said = ""
    for line in host.stdout:
        said += line
        told = re.search(r"iteration (\d+) of", line)
        if told is not None and int(told[1]) >= iteration:
            return said
    raise AssertionError(f"the run ended before iteration {iteration}:\n{said}")


def rank_of(host: int, rank: int) -> int:
    """The process id of a rank of that host."""
    return next(
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and _is_rank(int(entry.name), host, rank)
    )


def _is_rank(pid: int, host: int, rank: int) -> bool:
    """Whether a process is that rank of that host (and not something the rank started)."""
    try:
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return False
    return name == f"rank-{rank}" and parent == host
