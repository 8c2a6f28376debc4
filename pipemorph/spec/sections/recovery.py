"""``spec.recovery`` and ``spec.failurePolicy``: copies of state, restarts and time limits."""

from __future__ import annotations

from pydantic import Field, model_validator

from pipemorph.spec.base import FieldError, SpecModel


class RecoverySpec(SpecModel):
    """Copies of the ranks' state in memory, so that a failure repeats few iterations. Needs a host
    that starts ranks again (``failurePolicy.maxRestarts``)."""

    snapshot_iterations: int | None = Field(
        default=None,
        ge=0,
        le=1_000_000,
        description="Iterations between copies of each rank's state into shared memory. With more "
        "than 1, iterations since the last copy run again after a failure. 0: no copies; ranks "
        "continue from the newest checkpoint. Default: 1, but ranks on a GPU make copies only if "
        "this is set.",
    )
    neighbour: bool = Field(
        default=False,
        description="Whether each pod also holds copies of the previous pod's state, in case that "
        "pod is lost with its memory. For hosts that replace a pod within the attempt, and jobs "
        "with one replica: several replicas hold each other's state.",
    )

    @model_validator(mode="after")
    def _check_neighbour_copies(self) -> RecoverySpec:
        if self.neighbour and self.snapshot_iterations == 0:
            raise FieldError(
                "neighbour",
                "is true, but snapshotIterations is 0, so there are no copies that a neighbour"
                " could hold; expected snapshotIterations of at least 1",
            )
        return self


class FailurePolicy(SpecModel):
    """Restarts of a job, and time limits after which ranks have failed."""

    max_restarts: int = Field(default=0, ge=0, le=1000)
    hang_seconds: int | None = Field(
        default=None,
        ge=1,
        le=86400,
        description="Longest time without a finished iteration, after the first one. Then all "
        "ranks print their stacks, and it is a failure. Must exceed the time of an evaluation and "
        "of a checkpoint that ranks wait for; with recovery.neighbour also "
        "`transport.deadlineSeconds`, the longest wait for a copy. Default: none; only messages "
        "have a deadline (`transport.deadlineSeconds`).",
    )
    start_seconds: int | None = Field(
        default=None,
        ge=1,
        le=86400,
        description="Longest time from the start of a pod's ranks to their first finished "
        "iteration; longer counts as a hang. Includes the wait for other pods, the program's "
        "imports and loading of data. Default: with hangSeconds, that plus twice the longest start "
        "of these ranks so far; no limit for the first start.",
    )
    replacement_seconds: int = Field(
        default=10,
        ge=0,
        le=300,
        description="With parallelism.minReplicas: time for which all replicas wait for the "
        "replacement of a lost pod before the complete replicas train on.",
    )
