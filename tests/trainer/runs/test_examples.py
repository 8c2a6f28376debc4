"""The examples run as they are but for their length; a slow link changes no loss."""

import json
import sys
from pathlib import Path
from typing import Any

import prepared_processes
import pytest
import yaml
from gate import same_bits

from pipemorph.manifest import load_job

EXAMPLES = Path(__file__).parents[3] / "examples"
SMALL = {"width": 32, "heads": 2, "sequence": 32, "microbatch_size": 2}


def run(folder: Path, name: str, change: Any) -> dict[str, Any]:
    """The report of an example after ``change`` made it shorter."""
    manifest = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())
    change(manifest["spec"])
    (folder / f"{name}.yaml").write_text(json.dumps(manifest))
    done = prepared_processes.run(
        [sys.executable, "-m", "pipemorph.cli", "run", f"{name}.yaml", "--out", name],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report: dict[str, Any] = json.loads((folder / name / "report.json").read_text())
    assert report["completed"] is True
    assert len(report["iterations"]) == manifest["spec"]["trainer"]["iterations"]
    assert (folder / name / "timeline.png").stat().st_size > 0
    predicted = report["predicted"]
    assert predicted["seconds"] > 0 and predicted["measured"] > 0, predicted
    return report


def short_gpt(spec: dict[str, Any]) -> None:
    spec["trainer"] |= {"iterations": 10, "args": SMALL}
    for fault in spec.get("faults", []):
        fault |= {"fromIteration": 3, "toIteration": 8}


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_slow_link_changes_no_loss_of_the_gpt(tmp_path: Path) -> None:
    def two_stages(spec: dict[str, Any]) -> None:
        short_gpt(spec)
        spec["parallelism"]["stages"] = 2

    losses = [
        [iteration["loss"] for iteration in run(tmp_path, name, two_stages)["iterations"]]
        for name in ("gpt", "gpt-slow-link")
    ]
    same_bits(losses[0], losses[1], "losses of the two runs")
    assert all(isinstance(loss, float) for loss in losses[0])
    assert losses[0][-1] < losses[0][0], "it learns nothing"


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_torchs_stages_train_the_gpt_to_the_same_losses(tmp_path: Path) -> None:
    """The example with torch's stages has no clipping; sixteen microbatches, so that to divide the
    loss by them or the gradients is the same."""

    def unclipped(spec: dict[str, Any]) -> None:
        short_gpt(spec)
        spec["parallelism"] = {"stages": 2, "layers": 4}
        spec["trainer"]["args"] = SMALL | {"clip": 1e9}

    losses = [
        [iteration["loss"] for iteration in run(tmp_path, name, unclipped)["iterations"]]
        for name in ("gpt", "gpt-torch")
    ]
    same_bits(losses[0], losses[1], "losses of the two runs")


@pytest.mark.full
@pytest.mark.timeout(500)
def test_the_emulated_profile_runs(tmp_path: Path) -> None:
    def short(spec: dict[str, Any]) -> None:
        spec["trainer"]["iterations"] = 4
        spec["faults"] = [{"link": 6, "fromIteration": 2, "toIteration": 3, "delayMs": 60.0}]

    report = run(tmp_path, "emulated-14b", short)
    assert report["emulated"] is True
    # 24 microbatches of 26 ms, and never less.
    assert all(iteration["seconds"] > 24 * 0.026 for iteration in report["iterations"])


@pytest.mark.parametrize("name", ["gpt", "hf-llama"])
def test_the_operator_runs_the_script_that_runs_here(name: str) -> None:
    here, there = (
        load_job(EXAMPLES / f"{folder}{name}.yaml").spec.trainer for folder in ("", "kubernetes/")
    )
    assert here.module == there.module is not None
