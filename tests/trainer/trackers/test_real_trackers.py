"""MLflow and Weights & Biases themselves, on this machine alone, get what a job logs.

Neither is a dependency: `make soak` installs both. Without one nothing of it is checked, and the
run says so. They are called from a thread, as rank 0 calls its listeners.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pipemorph.errors import InputError
from pipemorph_trainer.trackers import FinishedIteration, MLflow, PlanChange, WandB

pytestmark = pytest.mark.soak

PLAIN = FinishedIteration(
    index=7, seconds=0.5, loss=2.25, bubble_fraction=0.125, plan_version=1, total=20
)
CHANGED = replace(
    PLAIN,
    index=8,
    loss=2.0,
    plan_version=2,
    change=PlanChange(1, 2, "link 0 is late by 60 ms", 0.25),
)
BROKEN = replace(PLAIN, index=9, loss=math.nan)
TOLD = "plan 2 in place of plan 1: link 0 is late by 60 ms (25% promised)"
WORK = {"tokens": 1024}


def in_a_thread(call: Callable[[], None]) -> None:
    failed: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001  raised below
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


@pytest.mark.timeout(600)
def test_mlflow_has_every_iteration_and_the_change_of_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow-skinny is not installed: not checked")
    # Newer releases want to be told that files are meant.
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    with pytest.raises(InputError, match="no MLflow run is active"):
        MLflow()
    with mlflow.start_run() as run:
        tracker = MLflow(work=WORK)
        for finished in (PLAIN, CHANGED, BROKEN):
            in_a_thread(lambda finished=finished: tracker(finished))
    client = mlflow.MlflowClient()
    found = client.get_run(run.info.run_id).data

    def history(name: str) -> list[tuple[int, float]]:
        return [
            (each.step, each.value)
            for each in client.get_metric_history(run.info.run_id, f"pipemorph/{name}")
        ]

    assert history("loss")[:2] == [(7, 2.25), (8, 2.0)]
    assert history("plan_version") == [(7, 1), (8, 2), (9, 1)]
    assert history("tokens_per_second") == [(7, 2048.0), (8, 2048.0), (9, 2048.0)]
    assert history("promised_gain") == [(8, 0.25)]
    assert found.tags["pipemorph.plan.2"] == TOLD


@pytest.mark.timeout(600)
def test_wandb_has_every_iteration_beside_what_the_script_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb", reason="wandb is not installed: not checked")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = wandb.init(project="test", dir=str(tmp_path), mode="offline")
    tracker = WandB(run, work=WORK)
    for step, finished in enumerate((PLAIN, BROKEN, CHANGED)):
        run.log({"mine": step}, step=step)
        in_a_thread(lambda finished=finished: tracker(finished))
    summary = dict(run.summary)
    run.finish()
    assert summary["mine"] == 2, "the script's own steps stay"
    logged = {name.removeprefix("pipemorph/"): value for name, value in summary.items()}
    wanted = {
        "iteration": 8, "iteration_seconds": 0.5, "bubble_fraction": 0.125, "plan_version": 2,
        "loss": 2.0, "tokens_per_second": 2048.0, "promised_gain": 0.25, "plan_change": TOLD,
    }  # fmt: skip
    assert {name: logged.get(name) for name in wanted} == wanted
    (written,) = tmp_path.rglob("*.wandb")
    assert b"pipemorph/bubble_fraction" in written.read_bytes()
