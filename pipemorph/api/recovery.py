"""``spec.recovery``: how ranks keep their state in memory for those that come after them."""

from __future__ import annotations

from pydantic import Field, model_validator

from pipemorph.api.base import FieldError, SpecModel


class Recovery(SpecModel):
    """What ranks keep in memory, so that a failure repeats little. Needs a host that starts ranks
    again (``failurePolicy.maxRestarts``)."""

    snapshot_iterations: int | None = Field(
        default=None,
        ge=0,
        le=1_000_000,
        description="Each rank copies its state into shared memory before every so many "
        "iterations. With more than 1, iterations since the last copy run again after a failure. "
        "0: nothing is kept, and ranks go on from the newest checkpoint. Default: 1, but ranks "
        "on a GPU keep nothing unless this is set.",
    )
    neighbour: bool = Field(
        default=False,
        description="Whether each pod also holds copies of the state of the pod before it, for "
        "when that is lost with its memory. For hosts that replace a pod within the attempt, and "
        "jobs of one replica: the ranks of several have each other's state.",
    )

    @model_validator(mode="after")
    def _copies_what_is_kept(self) -> Recovery:
        if self.neighbour and self.snapshot_iterations == 0:
            raise FieldError(
                "neighbour",
                "is true, and snapshotIterations is 0: nothing is kept that a neighbour could"
                " hold; expected snapshotIterations of at least 1",
            )
        return self
