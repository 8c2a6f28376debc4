"""A PipeMorphPlan: the plan of a job, saved for the next ingest, in an object of its own.

It has the job's name and namespace, and belongs to the job: Kubernetes deletes it with the job. The
ingest alone writes it. ``status.control`` of the job has the versions: this object is never ahead
of it, and may be behind.
"""

from __future__ import annotations

from pydantic import Field

from pipemorph.api.status_base import StatusModel, Text

MAX_PACKED = 1472 * 1024
"""Most bytes of a packed snapshot: etcd takes 1.5 MiB, of which 64 KiB are for the rest."""


class PlanSummary(StatusModel):
    """The plan of the newest directive, for people; times in seconds."""

    version: int = Field(ge=1, description="Version of the plan.")
    kind: str | None = Field(
        default=None,
        max_length=16,
        description="adapt, return or revert, as in the job's status.training.lastAdaptation.",
    )
    policy: str = Field(max_length=32, description="Policy that made it.")
    dispatch: str = Field(
        max_length=16, description="How stages choose their next op: static or guided."
    )
    stages: int = Field(ge=1, description="Number of stages.")
    microbatches: int = Field(ge=1, description="Microbatches of an iteration.")
    delegated_links: int = Field(ge=0, description="Links on the route delegated.")
    iteration_seconds: float | None = Field(
        default=None, ge=0, description="Predicted time of an iteration."
    )
    promised: float | None = Field(
        default=None,
        description="Fraction of an iteration that it is predicted to save.",
    )
    reason: Text | None = Field(default=None, description="Why it was made.")


class SavedPlan(StatusModel):
    """The state of a job's controller, with the plan in force and the one for healthy links."""

    job_uid: str = Field(max_length=64, description="UID of the PipeMorphJob.")
    attempt: int = Field(ge=0, description="Attempt of the job.")
    plan_version: int = Field(
        ge=0, description="Highest plan version issued when this was saved; never decreases."
    )
    plan: PlanSummary | None = Field(
        default=None, description="The plan of the newest directive; none: the plan of the start."
    )
    snapshot: str = Field(
        max_length=MAX_PACKED, description="State of the controller: JSON, xz, base64."
    )
