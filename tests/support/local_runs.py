"""Runs of ``pipemorph run``, by default of emulated stages, and what they leave."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import prepared_processes
from manifests import manifest_of

STAGES, MICROBATCHES = 4, 12
ITERATIONS = 30
"""Iterations that suffice for the return even if a stall before a fault had passed for a slow link:
then it is put off by eight iterations."""
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
        return json.loads((self.out / "report.json").read_text())

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
    return manifest_of(base | spec, "emulated")


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


MOVES = """
import json, sys
from pathlib import Path
from pipemorph.control.decide.layouts import layout_changes
from pipemorph.control.decide.layouts.layout_search import LayoutProposal
from pipemorph.local import run
from pipemorph.local.processes import supervision

job, out, what, changes = *sys.argv[1:4], json.loads(sys.argv[4])

def search_for_change(self, network, cost, finished):
    if len(self.made_changes) == len(changes):
        return None
    wanted = changes[len(self.made_changes)]
    change = self.layout.with_layers if what == "layers" else self.layout.read_places
    proposal = LayoutProposal(change(wanted), 2.0, 1.0, cost, network.iterations_remaining, 0.0)
    return layout_changes.LayoutChange("as planned", proposal, self.layout)

if changes:
    layout_changes.LayoutChanges.search_for_change = search_for_change
layout_changes.CHECK_SECONDS = 0.0
if what == "layers":
    layout_changes.REST_FACTOR = 0.0
    supervision.REFRESH_SECONDS = 0.005
sys.exit(run.run_job(job, Path(out)))
"""


def run_moves(
    folder: Path, script: str, what: str, changes: Sequence[Any], args: dict[str, Any], **spec: Any
) -> dict[str, Any]:
    """Report of a job of ``script``, in which ranks move by ``changes``: ``what``, ``layers`` or
    ``places``, they have after each change; ``said``: its output."""
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(script)
    (folder / "driver.py").write_text(MOVES)
    base = {
        "schedule": {"microbatches": 4},
        "failurePolicy": {"maxRestarts": 2},
        "adaptation": {"relayout": True},
        "emulation": None,
    }
    command, iterations = ["python", str(folder / "train.py")], spec.pop("iterations")
    base["trainer"] = {"command": command, "iterations": iterations, "args": args}
    (folder / "job.json").write_text(json.dumps(manifest(**base | spec)))
    drive = [sys.executable, str(folder / "driver.py"), str(folder / "job.json")]
    drive += [str(folder / "out"), what, json.dumps(changes)]
    done = prepared_processes.run(drive, capture_output=True, text=True, timeout=560)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return Done(0, done.stdout, folder / "out").report | {"said": done.stdout}


def losses(report: dict[str, Any]) -> dict[int, float]:
    """Losses by iteration."""
    return {each["index"]: each["loss"] for each in report["iterations"]}


def read_until(host: subprocess.Popen[str], iteration: int) -> str:
    """Output of a run until ``iteration`` or a later one is over: not each has a line."""
    assert host.stdout is not None
    said = ""
    for line in host.stdout:
        said += line
        found = re.search(r"iteration (\d+) of", line)
        if found is not None and int(found[1]) >= iteration:
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
    """True if a process is that rank of that host (and not something the rank started)."""
    try:
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return False
    return name == f"rank-{rank}" and parent == host
