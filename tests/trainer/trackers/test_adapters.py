"""What each tracker is given. TensorBoard is real; the others are fakes with the signatures of
wandb 0.31 and mlflow 3.18. ``test_real_trackers.py`` has these themselves."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from torch.utils.tensorboard import SummaryWriter

from pipemorph.errors import InputError
from pipemorph_trainer.trackers import (
    FinishedIteration,
    MLflow,
    PlanChange,
    TensorBoard,
    WandB,
)

PLAIN = FinishedIteration(
    index=7, seconds=0.5, loss=2.25, bubble_fraction=0.125, plan_version=1, total=20
)
CHANGED = replace(
    PLAIN, index=8, plan_version=2, change=PlanChange(1, 2, "link 0 is late by 60 ms", 0.25)
)
TOLD = "plan 2 in place of plan 1: link 0 is late by 60 ms (25% promised)"
PLAIN_FIGURES = {
    "iteration_seconds": 0.5, "bubble_fraction": 0.125, "plan_version": 1, "loss": 2.25,
    "tokens_per_second": 2048.0,
}  # fmt: skip
CHANGED_FIGURES = PLAIN_FIGURES | {"plan_version": 2, "promised_gain": 0.25}
WORK = {"tokens": 1024}


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


def test_what_is_not_known_is_not_logged() -> None:
    run = Run()
    tracker = WandB(run)
    tracker(FinishedIteration(index=0, seconds=0.0, loss=None, bubble_fraction=0, plan_version=0))
    tracker(replace(CHANGED, change=PlanChange(1, 2)))
    first, second = run.rows
    assert set(first) == {f"pipemorph/{n}" for n in (
        "iteration", "iteration_seconds", "bubble_fraction", "plan_version",
    )}  # fmt: skip
    assert "pipemorph/promised_gain" not in second
    assert second["pipemorph/plan_change"] == "plan 2 in place of plan 1"


def test_tensorboard_reads_what_was_logged(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with SummaryWriter(str(tmp_path)) as writer:
        tracker = TensorBoard(writer, work=WORK)
        for finished in (PLAIN, CHANGED):
            tracker(finished)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    found = {
        tag.removeprefix("pipemorph/"): [(e.step, e.value) for e in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }
    wanted: dict[str, list[tuple[int, float]]] = {}
    for index, each in ((7, PLAIN_FIGURES), (8, CHANGED_FIGURES)):
        for name, value in each.items():
            wanted.setdefault(name, []).append((index, value))
    assert found == wanted
    (text,) = events.Tensors("pipemorph/plan_change/text_summary")
    assert (text.step, text.tensor_proto.string_val) == (8, [TOLD.encode()])


class Run:
    """A run of wandb, as far as it is used."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.axes: dict[str, Any] = {}

    def define_metric(  # noqa: PLR0917  wandb's order
        self,
        name: str,
        step_metric: Any = None,
        step_sync: bool | None = None,
        hidden: bool | None = None,
        summary: str | None = None,
        overwrite: bool | None = None,
    ) -> None:
        self.axes[name] = step_metric

    def log(
        self, data: dict[str, Any], step: int | None = None, commit: bool | None = None
    ) -> None:
        # The step is the script's.
        assert step is None and commit is None
        self.rows.append(data)


def test_wandb_gets_a_row_per_iteration_over_an_axis_of_its_own() -> None:
    run = Run()
    tracker = WandB(run, work=WORK)
    for finished in (PLAIN, CHANGED):
        tracker(finished)
    assert run.axes == {"pipemorph/iteration": None, "pipemorph/*": "pipemorph/iteration"}
    wanted = [
        {"iteration": 7, **PLAIN_FIGURES},
        {"iteration": 8, **CHANGED_FIGURES, "plan_change": TOLD},
    ]
    assert run.rows == [{f"pipemorph/{n}": v for n, v in row.items()} for row in wanted]


class Mlflow:
    """The modules ``mlflow`` and ``mlflow.entities``, as far as they are used."""

    def __init__(self, active: str | None) -> None:
        self.batches: list[tuple[str, dict[str, tuple[float, int]], dict[str, str]]] = []
        outer = self

        class MlflowClient:
            def log_batch(
                self,
                run_id: str,
                metrics: Sequence[Any] = (),
                params: Sequence[Any] = (),
                tags: Sequence[Any] = (),
                synchronous: bool | None = None,
            ) -> None:
                rows = {each.key: (each.value, each.step) for each in metrics}
                assert all(each.timestamp > 1.7e12 for each in metrics), "milliseconds"
                outer.batches.append((run_id, rows, {each.key: each.value for each in tags}))

        def metric(key: str, value: float, timestamp: int, step: int) -> Any:
            return SimpleNamespace(key=key, value=value, timestamp=timestamp, step=step)

        def tag(key: str, value: str) -> Any:
            return SimpleNamespace(key=key, value=value)

        run = None if active is None else SimpleNamespace(info=SimpleNamespace(run_id=active))
        self.module: Any = ModuleType("mlflow")
        self.module.active_run, self.module.MlflowClient = lambda: run, MlflowClient
        self.entities: Any = ModuleType("mlflow.entities")
        self.entities.Metric, self.entities.RunTag = metric, tag

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "mlflow", self.module)
        monkeypatch.setitem(sys.modules, "mlflow.entities", self.entities)


def test_mlflow_gets_one_batch_per_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Mlflow("abc")
    fake.install(monkeypatch)
    tracker = MLflow(work=WORK)
    for finished in (PLAIN, CHANGED):
        tracker(finished)
    MLflow("given")(PLAIN)
    rows = [
        {f"pipemorph/{n}": (v, index) for n, v in each.items()}
        for index, each in ((7, PLAIN_FIGURES), (8, CHANGED_FIGURES))
    ]
    assert fake.batches[:2] == [("abc", rows[0], {}), ("abc", rows[1], {"pipemorph.plan.2": TOLD})]
    assert fake.batches[2][0] == "given"


def test_mlflow_without_a_run_or_a_package_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    Mlflow(None).install(monkeypatch)
    with pytest.raises(InputError, match=r"no MLflow run is active.*mlflow\.start_run"):
        MLflow()
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(InputError, match="pip install mlflow-skinny"):
        MLflow("abc")
