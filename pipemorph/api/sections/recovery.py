"""``spec.recovery`` and ``spec.failurePolicy``: what ranks keep in memory for those that come after
them, and how long others wait."""

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


class FailurePolicy(SpecModel):
    max_restarts: int = Field(default=0, ge=0, le=1000)
    hang_seconds: int | None = Field(
        default=None,
        ge=1,
        le=86400,
        description="Longest time without a finished iteration, once there was one. Then all "
        "ranks print their stacks, and it is a failure. Must be longer than an evaluation, and "
        "than a checkpoint that is waited for; with recovery.neighbour than "
        "`transport.deadlineSeconds`, as long as a copy may be waited for. Default: only messages "
        "have a deadline, that one.",
    )
    start_seconds: int | None = Field(
        default=None,
        ge=1,
        le=86400,
        description="Longest time from the start of a pod's ranks to their first finished "
        "iteration; else they hang, too. Pods that wait for others are included, as are the "
        "program's imports and its data. Default: with hangSeconds, that much longer than twice "
        "the longest start so far of these ranks, and any time for the first.",
    )
    replacement_seconds: int = Field(
        default=10,
        ge=0,
        le=300,
        description="With parallelism.minReplicas: how long all replicas wait for the pod that "
        "takes the place of a lost one, before those that are whole train on.",
    )
