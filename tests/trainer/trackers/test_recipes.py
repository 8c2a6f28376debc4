"""Recipes for experiment trackers: each block of docs/how-to/track-experiments.md is executed."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipemorph_trainer.trackers import FinishedIteration, PlanChange

PAGE = Path(__file__).resolve().parents[3] / "docs/how-to/track-experiments.md"
MOST_LINES = 15
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
WORDS = "plan 2 in place of plan 1: link 0 is late by 60 ms (25% promised)"
PLAIN_FIGURES = {
    "iteration_seconds": 0.5, "bubble_fraction": 0.125, "plan_version": 1, "loss": 2.25
}  # fmt: skip
CHANGED_FIGURES = PLAIN_FIGURES | {"plan_version": 2, "loss": 2.0, "promised_gain": 0.25}


def recipe(title: str) -> str:
    """The code block below the paragraph that begins with ``title``."""
    text = PAGE.read_text()
    block = re.search(r"```python\n(.*?)```", text[text.index(f"**{title}") :], re.DOTALL)
    return block[1]


def executed(title: str, rank: int = 0) -> dict[str, Any]:
    """The names of the recipe, executed on a rank."""
    names: dict[str, Any] = {"context": SimpleNamespace(rank=rank)}
    exec(compile(recipe(title), str(PAGE), "exec"), names)
    return names


def in_thread(call: Callable[[FinishedIteration], None], *iterations: FinishedIteration) -> None:
    """Call it from another thread, as rank 0 calls its listeners."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            for finished in iterations:
                call(finished)
        except BaseException as error:  # noqa: BLE001  raised below
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (PlanChange(0, 3), "plan 3 in place of plan 0"),
        (PlanChange(0, 3, "why"), "plan 3 in place of plan 0: why"),
        (PlanChange(1, 2, "why", -0.05), "plan 2 in place of plan 1: why (-5% promised)"),
    ],
)
def test_a_change_of_plan_in_words(change: PlanChange, text: str) -> None:
    assert str(change) == text


def test_figures_are_those_that_are_known() -> None:
    assert (PLAIN.figures(), CHANGED.figures()) == (PLAIN_FIGURES, CHANGED_FIGURES)
    assert "loss" not in replace(PLAIN, loss=None).figures()
    assert "promised_gain" not in replace(CHANGED, change=PlanChange(1, 2)).figures()


@pytest.mark.parametrize("title", ["TensorBoard", "Weights & Biases", "MLflow"])
def test_a_recipe_is_short(title: str) -> None:
    assert len(recipe(title).splitlines()) <= MOST_LINES


def test_tensorboard_reads_what_the_recipe_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.chdir(tmp_path)
    assert executed("TensorBoard", rank=1)["writer"] is None
    assert [*tmp_path.iterdir()] == [], "other ranks write nothing"
    names = executed("TensorBoard")
    in_thread(names["on_iteration"], PLAIN, CHANGED)
    names["writer"].close()
    events = EventAccumulator(str(tmp_path / "runs/gpt"))
    events.Reload()
    found = {
        tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }
    wanted: dict[str, list[tuple[int, float]]] = {}
    for index, figures in ((7, PLAIN_FIGURES), (8, CHANGED_FIGURES)):
        for name, value in figures.items():
            wanted.setdefault(f"pipemorph/{name}", []).append((index, value))
    assert found == wanted
    (text,) = events.Tensors("pipemorph/plan_change/text_summary")
    assert (text.step, text.tensor_proto.string_val) == (8, [WORDS.encode()])


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_mlflow_has_every_iteration_and_the_change_of_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow-skinny is not installed: not checked")
    # Newer releases require a setting for files.
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    names = executed("MLflow")
    in_thread(names["on_iteration"], PLAIN, CHANGED, BROKEN)
    mlflow.end_run()
    client, run_id = mlflow.MlflowClient(), names["run"].info.run_id

    def history(name: str) -> list[tuple[int, float]]:
        found = client.get_metric_history(run_id, f"pipemorph/{name}")
        return [(each.step, each.value) for each in found]

    assert history("loss")[:2] == [(7, 2.25), (8, 2.0)]
    assert history("plan_version") == [(7, 1), (8, 2), (9, 1)]
    assert history("promised_gain") == [(8, 0.25)]
    assert client.get_run(run_id).data.tags["pipemorph.plan.2"] == WORDS


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_wandb_has_every_iteration_and_what_the_script_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed: not checked")
    for name, value in (("SILENT", "true"), ("MODE", "offline"), ("DIR", str(tmp_path))):
        monkeypatch.setenv(f"WANDB_{name}", value)
    names = executed("Weights & Biases")
    run = names["run"]
    for step, finished in enumerate((PLAIN, BROKEN, CHANGED)):
        run.log({"mine": step}, step=step)
        in_thread(names["on_iteration"], finished)
    summary = dict(run.summary)
    run.finish()
    assert summary["mine"] == 2, "the script's own steps stay"
    logged = {name.removeprefix("pipemorph/"): value for name, value in summary.items()}
    wanted = {"iteration": 8, **CHANGED_FIGURES, "plan_change": WORDS}
    assert {name: logged.get(name) for name in wanted} == wanted
    (written,) = tmp_path.rglob("*.wandb")
    assert b"pipemorph/bubble_fraction" in written.read_bytes()
