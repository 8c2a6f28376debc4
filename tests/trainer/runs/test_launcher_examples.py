"""The examples for Slurm and for Kubeflow Trainer train, with stand-ins for both."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from launch import free_port
from served import certificate
from torch.distributed.run import get_args_parser

from pipemorph.cli import main

pytestmark = pytest.mark.timeout(240)

SECONDS = 200.0
"""Time limit of two nodes with torch, on a machine that may be busy."""
ROOT = Path(__file__).resolve().parents[3]
SRUN = """#!/bin/bash
# Starts $SLURM_NNODES processes of its command, as on nodes, and forwards SIGTERM.
while [[ $1 == -* ]]; do shift; done
nodes=() status=0
trap 'kill -TERM "${nodes[@]}"' TERM
for node in $(seq 0 $((SLURM_NNODES - 1))); do
  SLURM_NODEID=$node SLURM_STEP_NUM_TASKS=$SLURM_NNODES "$@" & nodes+=($!)
done
for node in "${nodes[@]}"; do wait "$node" || status=$?; done
exit $status
"""
TORCHRUN = """#!/bin/sh
echo "$SLURM_NODEID $PIPEMORPH_INGEST_URL $(cat "$PIPEMORPH_TOKEN_FILE" | wc -l) $*" >> started
exit 4
"""


def make_program(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def make_python_programs(folder: Path) -> Path:
    """Make ``pipemorph`` and ``torchrun`` of this Python."""
    for name, module in (("pipemorph", "pipemorph.cli"), ("torchrun", "torch.distributed.run")):
        make_program(folder / name, f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
    return folder


@pytest.fixture
def slurm(tmp_path: Path) -> Path:
    """Folder of the Slurm example, smaller, with programs of Slurm in ``bin`` beside it."""
    for name in ("slurm", "tutorial"):
        shutil.copytree(ROOT / "examples" / name, tmp_path / name)
    for file, before, after in (
        ("slurm/job.yaml", "iterations: 40", "iterations: 4"),
        ("tutorial/train.py", "LAYERS, BATCH = 1024, 8, 512", "LAYERS, BATCH = 32, 2, 32"),
    ):
        text = (tmp_path / file).read_text()
        assert before in text
        (tmp_path / file).write_text(text.replace(before, after))
    make_program(tmp_path / "bin" / "srun", SRUN)
    make_python_programs(tmp_path / "bin")
    return tmp_path / "slurm"


def run_batch_script(folder: Path) -> subprocess.CompletedProcess[str]:
    script = (folder / "train.sbatch").read_text()
    assert ":29400" in script
    (folder / "train.sbatch").write_text(script.replace(":29400", f":{free_port()}"))
    environment = {
        "PATH": f"{folder.parent / 'bin'}:{os.environ['PATH']}",
        "SLURM_NNODES": "2", "SLURM_JOB_ID": "77", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    return subprocess.run(
        ["bash", "train.sbatch"], cwd=folder, env=environment, capture_output=True, text=True,
        timeout=SECONDS, check=False,
    )  # fmt: skip


def test_slurm_script_starts_torchrun_on_every_node(slurm: Path) -> None:
    make_program(slurm.parent / "bin" / "torchrun", TORCHRUN)
    done = run_batch_script(slurm)
    assert done.returncode == 4, done.stderr
    assert done.stdout.splitlines()[-1] == "0 of 4 iterations; srun exited with code 4"
    started = sorted((slurm / "started").read_text().splitlines())
    assert [line.split()[0] for line in started] == ["0", "1"]
    for line in started:
        _, url, secrets, *launched = line.split()
        assert url.startswith("https://") and "127.0.0.1" not in url
        found = get_args_parser().parse_args(launched)
        assert (secrets, found.nnodes, found.nproc_per_node) == ("1", "2", "1")
        assert (slurm / found.training_script).exists()


@pytest.mark.full
def test_slurm_script_trains(slurm: Path) -> None:
    done = run_batch_script(slurm)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all 2 ranks have joined" in done.stdout
    assert json.loads((slurm / "out-77" / "report.json").read_text())["end"] == "completed"
    assert sorted(path.name for path in slurm.iterdir()) == ["job.yaml", "out-77", "train.sbatch"]


@pytest.mark.full
@pytest.mark.parametrize("model", ["own", "gpt"])
def test_written_script_trains_under_torchrun(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = make_python_programs(tmp_path / "bin")
    folder = tmp_path / "mine"
    small = ("--stages", "2", "--microbatches", "2", "--iterations", "2")
    assert main(["init", str(folder), "--model", model, *small]) == 0
    (line,) = (
        line.removeprefix("# ")
        for line in (folder / "job.yaml").read_text().splitlines()
        if "torchrun" in line
    )
    done = subprocess.run(
        line.split(), cwd=folder, env=os.environ | {"PATH": f"{programs}:{os.environ['PATH']}"},
        capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((folder / "out-torchrun" / "report.json").read_text())["end"] == "completed"


# --- Kubeflow Trainer -------------------------------------------------------------------------


def read_containers(runtime: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The container of each replicated job of a runtime."""
    jobs = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    specs = {each["name"]: each["template"]["spec"]["template"]["spec"] for each in jobs}
    return {name: spec["containers"][0] for name, spec in specs.items()}


@pytest.mark.full
def test_kubeflow_runtime_trains(tmp_path: Path) -> None:
    """Containers are processes of this test, with the variables that Kubeflow Trainer sets.

    Paths of volumes and the name of the serving pod are this machine's.
    """
    folder = ROOT / "examples/kubeflow"
    (runtime,) = yaml.safe_load_all((folder / "runtime.yaml").read_text())
    config, train_job = yaml.safe_load_all((folder / "trainjob.yaml").read_text())
    containers, port = read_containers(runtime), str(free_port())
    identity = tmp_path / "identity"
    identity.mkdir()
    for made, name in zip(certificate(tmp_path), ("tls.crt", "tls.key"), strict=True):
        made.rename(identity / name)
    for name in ("token", "secret"):
        (identity / name).write_text("0123456789abcdef\n")
    for name in ("job", "run"):
        (tmp_path / name).mkdir()
    (tmp_path / "run" / "pipemorph").mkdir()
    job = config["data"]["job.yaml"]
    assert "iterations: 200" in job
    (tmp_path / "job" / "job.yaml").write_text(job.replace("iterations: 200", "iterations: 3"))

    def localize(text: str) -> str:
        text = re.sub(r"(?<![\w/])/(identity|job|run)/", f"{tmp_path}/\\1/", text)
        return text.replace(":7411", f":{port}").replace(
            "$(TRAINJOB)-control-0-0.$(TRAINJOB)", "127.0.0.1"
        )

    programs = make_python_programs(tmp_path / "bin")
    base = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }

    def start(argv: list[str], name: str, **variables: str) -> subprocess.Popen[bytes]:
        with (tmp_path / f"{name}.log").open("wb") as log:
            return subprocess.Popen(
                argv, env=base | variables, stdout=log, stderr=subprocess.STDOUT, cwd=tmp_path
            )

    serve, node, trainer = containers["control"], containers["node"], train_job["spec"]["trainer"]
    argv = [localize(each) for each in (*serve["command"], *serve["args"])]
    processes = {"control": start(argv, "control")}
    variables = {each["name"]: localize(each["value"]) for each in node["env"] if "value" in each}
    variables |= {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(free_port()),
    }
    try:
        for rank in range(trainer["numNodes"]):
            name = f"node-{rank}"
            processes[name] = start(trainer["command"], name, PET_NODE_RANK=str(rank), **variables)
        until = time.monotonic() + SECONDS
        codes = {
            name: process.wait(max(1.0, until - time.monotonic()))
            for name, process in processes.items()
        }
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
        logs = "\n".join(path.read_text() for path in sorted(tmp_path.glob("*.log")))
    assert codes == dict.fromkeys(processes, 0), logs
    assert "completed: 3 of 3 iterations" in logs
