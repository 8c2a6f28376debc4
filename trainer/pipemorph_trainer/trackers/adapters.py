"""TensorBoard, Weights & Biases and MLflow: each takes finished iterations and logs them.

An adapter is an argument ``on_iteration`` of :class:`~pipemorph_trainer.Pipeline`. ``work``: what
all ranks get through in one iteration, by name, such as ``{"tokens": 8 * 1024}``: then
``tokens_per_second`` is logged as well. The rank does not know it otherwise.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping
from typing import Any

from pipemorph.errors import InputError
from pipemorph_trainer.trackers.finished import FinishedIteration

PREFIX = "pipemorph"
MOST_TAG = 5000
"""Characters of a tag's value that every MLflow server takes."""


def figures(finished: FinishedIteration, work: Mapping[str, float]) -> dict[str, float]:
    """What is logged of an iteration, by name. Without what is not known."""
    found: dict[str, float] = {
        "iteration_seconds": finished.seconds,
        "bubble_fraction": finished.bubble_fraction,
        "plan_version": finished.plan_version,
    }
    if finished.loss is not None:
        found["loss"] = finished.loss
    if finished.change is not None and finished.change.promised is not None:
        found["promised_gain"] = finished.change.promised
    if finished.seconds > 0:
        found |= {f"{name}_per_second": each / finished.seconds for name, each in work.items()}
    return found


class TensorBoard:
    """Logs scalars ``pipemorph/…`` by iteration, and each change of plan as text.

    ``writer``: a ``torch.utils.tensorboard.SummaryWriter``, or what has its ``add_scalar`` and
    ``add_text``.
    """

    def __init__(self, writer: Any, *, work: Mapping[str, float] | None = None) -> None:
        self._writer, self._work = writer, dict(work or {})

    def __call__(self, finished: FinishedIteration) -> None:
        for name, value in figures(finished, self._work).items():
            self._writer.add_scalar(f"{PREFIX}/{name}", value, finished.index)
        if finished.change is not None:
            self._writer.add_text(f"{PREFIX}/plan_change", str(finished.change), finished.index)


class WandB:
    """Logs ``pipemorph/…`` over ``pipemorph/iteration``, a row per iteration.

    ``run``: what ``wandb.init()`` returned. Each row counts as one of the run's steps. So what the
    script logs beside it has to leave ``step`` out: W&B drops a row of an earlier step.
    """

    def __init__(self, run: Any, *, work: Mapping[str, float] | None = None) -> None:
        self._run, self._work = run, dict(work or {})
        run.define_metric(f"{PREFIX}/iteration")
        run.define_metric(f"{PREFIX}/*", step_metric=f"{PREFIX}/iteration")

    def __call__(self, finished: FinishedIteration) -> None:
        row: dict[str, Any] = {"iteration": finished.index, **figures(finished, self._work)}
        if finished.change is not None:
            row["plan_change"] = str(finished.change)
        self._run.log({f"{PREFIX}/{name}": value for name, value in row.items()})


class MLflow:
    """Logs metrics ``pipemorph/…`` by iteration, one request each, and each change of plan as a tag
    ``pipemorph.plan.VERSION``.

    ``run_id``: default: that of the run that is active in this thread. Raises :class:`InputError`
    if there is none, or if neither ``mlflow`` nor ``mlflow-skinny`` is installed.
    """

    def __init__(
        self, run_id: str | None = None, *, work: Mapping[str, float] | None = None
    ) -> None:
        try:
            mlflow = importlib.import_module("mlflow")
            self._entities = importlib.import_module("mlflow.entities")
        except ImportError as error:
            raise InputError(
                f"MLflow cannot be imported: {error}; pip install mlflow-skinny"
            ) from None
        if run_id is None:
            active = mlflow.active_run()
            if active is None:
                raise InputError(
                    "no MLflow run is active in this thread; call mlflow.start_run() before, or"
                    " give MLflow a run_id"
                )
            run_id = active.info.run_id
        # Not the module's functions: their active run is that of a thread.
        self._client, self._run_id = mlflow.MlflowClient(), run_id
        self._work = dict(work or {})

    def __call__(self, finished: FinishedIteration) -> None:
        now, change = int(time.time() * 1000), finished.change
        metrics = [
            self._entities.Metric(f"{PREFIX}/{name}", value, now, finished.index)
            for name, value in figures(finished, self._work).items()
        ]
        tags = []
        if change is not None:
            key = f"{PREFIX}.plan.{change.after}"
            tags.append(self._entities.RunTag(key, str(change)[:MOST_TAG]))
        self._client.log_batch(self._run_id, metrics=metrics, tags=tags)
