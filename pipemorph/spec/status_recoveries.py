"""``status.recoveries``: restarts of the ranks in living pods, and the layout in effect.

Also the records of ``status.replacements``: lost pods that were replaced within their Job.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from pipemorph.spec.layout import MAX_PLACED, RankLayout
from pipemorph.spec.status_base import (
    MAX_STAGES,
    StatusModel,
    Text,
    Timestamp,
    list_field,
    number_field,
)

MAX_RECOVERIES_KEPT = 10
MAX_REPLICAS = 4096
MAX_REPLACED_KEPT = 16
MAX_REFUSED_KEPT = 8


class RecoveryRecord(StatusModel):
    """Start of all ranks within their pods, after some had ended."""

    attempt: int = number_field("Attempt of the start.")
    generation: int = Field(ge=1, description="Generation of ranks that began.")
    lost_at: Timestamp = Field(description="Time at which the ingest received the loss.")
    cause: Text = Field(description="Lost rank or pod, and the cause.")
    pod: int | None = Field(default=None, ge=0, description="Pod of the rank that failed first.")
    rank: int | None = Field(default=None, ge=0, description="Rank that failed first.")
    iterations_done: int = number_field("Iterations that were finished before.")
    went_on_with: int | None = Field(
        default=None, ge=0, description="First iteration that was finished afterwards."
    )
    repeated: int | None = Field(
        default=None, ge=0, description="Finished iterations that were run again."
    )
    seconds: float | None = Field(
        default=None, ge=0, description="From lostAt to the end of that first iteration."
    )
    state: str | None = Field(
        default=None,
        max_length=32,
        description="Source of the state: kept (own memory), replica, neighbour, checkpoint or"
        " beginning.",
    )
    replaced: list[int] = list_field(
        MAX_REPLACED_KEPT,
        "Lost pods that were replaced; empty if all pods stayed.",
    )
    replicas: int | None = Field(
        default=None,
        ge=1,
        description="Replicas that train from then on; only with parallelism.minReplicas.",
    )
    layers: list[int] = list_field(
        MAX_STAGES, "Layers of each stage from then on; empty if the layout did not change."
    )
    places: list[int] = list_field(
        MAX_PLACED,
        "Place of each rank from then on; empty if the layout did not change.",
    )
    promised: float | None = Field(
        default=None,
        description="Predicted saving of a changed layout as a fraction of an iteration.",
    )
    measured: float | None = Field(
        default=None, description="Measured saving as a fraction of an iteration, once known."
    )


class PodReplacement(StatusModel):
    """Lost pod that the attempt's Job replaces."""

    attempt: int = number_field("Attempt of the pod.")
    pod: int = number_field("Index of the pod.")
    uid: str = Field(max_length=64, description="UID of the lost pod.")
    at: Timestamp = Field(description="Time at which the operator noticed the loss.")
    gone_by: Timestamp | None = Field(
        default=None,
        description="Latest time at which its ranks have ended: after its grace period, if it is "
        "being deleted. If its node is lost, its connections may stay open.",
    )
    cause: Text = Field(description="Ranks, node and cause of the loss.")
    counted: bool = Field(
        default=True,
        description="False for evictions, deletions and lost nodes: they do not count against "
        "failurePolicy.maxRestarts.",
    )


class Recoveries(StatusModel):
    """Current generation of the ranks, its layout, failures so far, and the newest recoveries."""

    attempt: int = number_field("Attempt to which the generation belongs.")
    generation: int = number_field("Generation of ranks in progress, from 0 in each attempt.")
    count: int = number_field("Number of generations that followed a failure, over all attempts.")
    counted: int = number_field(
        "Number of these that count against failurePolicy.maxRestarts, because no further iteration"
        " had been finished."
    )
    finished: int = number_field("Largest number of iterations finished at a failure.")
    idle: int = number_field("Counted failures in a row without a further finished iteration.")
    error: Text | None = Field(
        default=None, description="Exception that ended a rank, at the last failure."
    )
    excluded_replicas: list[int] = list_field(
        MAX_REPLICAS,
        "Replicas that do not train in this generation because their pods are missing, while the "
        "others do (parallelism.minReplicas).",
    )
    places: list[int] = list_field(
        MAX_PLACED,
        "Place of each rank in this generation: index of its pod × ranksPerPod, plus its number"
        " there. Empty: each rank at the place of its number (adaptation.relayout).",
    )
    layers: list[int] = list_field(
        MAX_STAGES,
        "Layers of each stage in this generation; empty: equal numbers (adaptation.relayout).",
    )
    layout_before: RankLayout | None = Field(
        default=None,
        description="Layout to restore after a failure while the current one is on trial. Absent:"
        " the current one is accepted.",
    )
    layouts_refused: list[RankLayout] = list_field(
        MAX_REFUSED_KEPT,
        "Layouts that failed or were undone, newest last; they are not tried again.",
    )
    layers_fixed: Text | None = Field(
        default=None,
        description="Reason why layers cannot move, reported by ranks. Absent: they can.",
    )
    completed: bool = Field(
        default=False,
        description="Whether all iterations are finished, so that pods without ranks, and pods "
        "that return, only need to end.",
    )
    last: list[RecoveryRecord] = list_field(MAX_RECOVERIES_KEPT, "Newest recoveries, newest last.")

    @property
    def layout(self) -> RankLayout:
        """Layout of :attr:`places` and :attr:`layers`."""
        return RankLayout(layers=tuple(self.layers), places=tuple(self.places))

    def with_layout(self, now: RankLayout, before: RankLayout | None) -> Recoveries:
        """Copy with another layout, and ``before`` to restore on failure; None: ``now`` stays."""
        update: dict[str, Any] = {"layers": list(now.layers), "places": list(now.places)}
        return self.model_copy(update=update | {"layout_before": before})
