"""``status.recoveries``: starts of ranks within their pods, and their layout since."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from pipemorph.api.layout import MAX_PLACED, RankLayout
from pipemorph.api.status_base import MAX_STAGES, StatusModel, Text, Timestamp, at_most, number

MAX_RECOVERIES_KEPT = 10
MAX_REPLICAS = 4096
MAX_REPLACED_KEPT = 16
MAX_REFUSED_KEPT = 8


class RecoveryRecord(StatusModel):
    """One start of all ranks within their pods, after some had ended."""

    attempt: int = number("Attempt in which it was.")
    generation: int = Field(ge=1, description="Generation of ranks that began.")
    lost_at: Timestamp = Field(description="When the ingest was told of the loss.")
    cause: Text = Field(description="What was lost, and how.")
    pod: int | None = Field(default=None, ge=0, description="Pod of the rank that failed first.")
    rank: int | None = Field(default=None, ge=0, description="That rank.")
    iterations_done: int = number("Iterations that were finished before.")
    went_on_with: int | None = Field(
        default=None, ge=0, description="First iteration that was finished afterwards."
    )
    repeated: int | None = Field(
        default=None, ge=0, description="Iterations that had been finished and were run again."
    )
    seconds: float | None = Field(
        default=None, ge=0, description="From lostAt to the end of that first iteration."
    )
    state: str | None = Field(
        default=None,
        max_length=32,
        description="Where the state came from: kept, replica, neighbour, checkpoint or beginning.",
    )
    replaced: list[int] = at_most(
        MAX_REPLACED_KEPT,
        "Pods that were lost, and in whose places others began; empty if all pods stayed.",
    )
    replicas: int | None = Field(
        default=None,
        ge=1,
        description="Replicas that train from then on; only with parallelism.minReplicas.",
    )
    layers: list[int] = at_most(
        MAX_STAGES, "Layers of each stage from then on; empty if the layout is that of before."
    )
    places: list[int] = at_most(
        MAX_PLACED,
        "By rank, the place that runs it from then on; empty if the layout is that of before.",
    )
    promised: float | None = Field(
        default=None,
        description="If the layout changed since that pays: fraction of an iteration that it was"
        " predicted to save.",
    )
    measured: float | None = Field(
        default=None, description="Fraction of an iteration that it saves, once that is known."
    )


class PodReplacement(StatusModel):
    """A pod that was lost, and in whose place the attempt's Job makes another one."""

    attempt: int = number("Attempt in which it was.")
    pod: int = number("Index of the pod.")
    uid: str = Field(max_length=64, description="UID of the pod that was lost.")
    at: Timestamp = Field(description="When the operator noticed.")
    gone_by: Timestamp | None = Field(
        default=None,
        description="When its ranks have ended at the latest: after its grace period, if it is "
        "being deleted. Its node may be lost, and no connection end.",
    )
    cause: Text = Field(description="Which ranks, on which node, and how it was lost.")
    counted: bool = Field(
        default=True,
        description="False for evictions, deletions and lost nodes: they do not count against "
        "failurePolicy.maxRestarts.",
    )


class Recoveries(StatusModel):
    """Generations of ranks: their starts within living pods, after failures."""

    attempt: int = number("Attempt that generation counts for.")
    generation: int = number("Generation of ranks in progress, from 0; begins anew with attempts.")
    count: int = number("Generations that have followed a failure, over all attempts.")
    counted: int = number(
        "Those of them that count against failurePolicy.maxRestarts: no further iteration had been "
        "finished."
    )
    finished: int = number("Most iterations that were finished at a failure.")
    idle: int = number("Failures since then.")
    error: Text | None = Field(
        default=None, description="The exception in which a rank ended, at the last failure."
    )
    left_out: list[int] = at_most(
        MAX_REPLICAS,
        "Replicas that do not train in this generation, since pods of them are missing, while the "
        "others do (parallelism.minReplicas).",
    )
    places: list[int] = at_most(
        MAX_PLACED,
        "By rank, the place that runs it in this generation: index of its pod × ranksPerPod, plus"
        " its number there. Empty: each rank at the place of its number (adaptation.relayout).",
    )
    layers: list[int] = at_most(
        MAX_STAGES,
        "Layers of each stage in this generation; empty: evenly many (adaptation.relayout).",
    )
    layout_before: RankLayout | None = Field(
        default=None,
        description="While these places and layers are on trial, those that a failure goes back to."
        " Absent: they count.",
    )
    layouts_refused: list[RankLayout] = at_most(
        MAX_REFUSED_KEPT,
        "Layouts with which ranks have failed, or that were undone, newest last: they are not tried"
        " again.",
    )
    layers_fixed: Text | None = Field(
        default=None,
        description="Why no layers move between stages, as ranks say. Absent: they may.",
    )
    completed: bool = Field(
        default=False,
        description="Whether all iterations are finished, so that pods without ranks, and those "
        "that come back, only have to end.",
    )
    last: list[RecoveryRecord] = at_most(MAX_RECOVERIES_KEPT, "The newest, newest last.")

    @property
    def layout(self) -> RankLayout:
        """:attr:`places` and :attr:`layers`."""
        return RankLayout(layers=tuple(self.layers), places=tuple(self.places))

    def with_layout(self, now: RankLayout, before: RankLayout | None) -> Recoveries:
        """These with another layout, and the one that a failure goes back to; None: ``now``
        counts."""
        update: dict[str, Any] = {"layers": list(now.layers), "places": list(now.places)}
        return self.model_copy(update=update | {"layout_before": before})
