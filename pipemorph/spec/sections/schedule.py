"""``spec.schedule`` and ``spec.adaptation``: scheduled work, and conditions for changing plans."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from pipemorph.planning.ir import Dispatch, Policy
from pipemorph.spec.base import FieldError, Milliseconds, SpecModel

Reorder = Literal["bits", "sums"]


class StageTime(SpecModel):
    """Expected op times of one stage, milliseconds per microbatch."""

    forward: Milliseconds
    backward_input: Milliseconds
    backward_weight: Milliseconds
    fused_backward: Milliseconds | None = Field(
        default=None,
        description="Time of one fused backward. Default: backwardInput + backwardWeight.",
    )
    offload_copy: Milliseconds = Field(
        default=0.0,
        description="Time to copy one microbatch's activations to host memory, or back.",
    )


ONE_ORDER_IN_LOCKSTEP = (
    "ranks of one stage that run collectives inside ops (shard, context or tensor above 1) need "
    "one order of ops: use dispatch static"
)


class ScheduleSpec(SpecModel):
    """Work of an iteration and the policy that schedules it."""

    microbatches: int = Field(ge=1, le=65536, description="Microbatches per iteration, N.")
    global_batch_size: int | None = Field(
        default=None,
        ge=1,
        description="Samples per iteration of all replicas and shards; divisible by replicas × "
        "shard × microbatches.",
    )
    policy: Literal[
        "pipemorph", "zero-bubble", "1f1b", "gpipe", "1f1b-interleaved", "zero-bubble-v"
    ] = "pipemorph"
    dispatch: Literal["static", "guided", "auto"] = "auto"
    objective: Literal["auto", "makespan", "period"] = Field(
        default="auto",
        description="Time that plans minimize: the iteration of all stages together (makespan), or "
        "the occupied time of each stage (period), which is the time per iteration if stages do "
        "not wait for each other between iterations. auto: the period once the trainer reports "
        "that they do not wait, such as for the gradient norm of all stages.",
    )
    in_flight_limit: (
        Annotated[int, Field(ge=1)]
        | Annotated[list[Annotated[int, Field(ge=1)]], Field(max_length=512)]
        | None
    ) = Field(
        default=None,
        description="Limit of microbatches in flight (F started, W not finished) per stage: "
        "one number, or one per stage. A stage that offloads counts those on its device.",
    )
    activation_memory: int | None = Field(
        default=None,
        ge=1,
        description="Bytes of device memory per rank for the activations of microbatches in "
        "flight. Divided by the measured bytes of one microbatch it is a limit like inFlightLimit; "
        "the lower limit applies. Several stages of a rank share it at any moment, or evenly if "
        "activations may leave the device.",
    )
    recompute: Literal["never", "auto"] = Field(
        default="never",
        description="Whether plans may drop activations of a stage and run its forward again in "
        "the backward, to have more microbatches in flight than inFlightLimit or activationMemory "
        "allow. auto: where it is predicted to save time. Results are bitwise equal.",
    )
    warmup: list[Annotated[int, Field(ge=1)]] | None = Field(
        default=None, max_length=512, description="Fixed warm-up counts, one per stage."
    )
    stage_times: list[StageTime] | None = Field(
        default=None,
        max_length=512,
        description="Expected op times, one entry for all stages or one per stage; used until they"
        " are measured.",
    )

    @property
    def policy_kind(self) -> Policy:
        return Policy(self.policy)

    @property
    def dispatch_kind(self) -> Dispatch:
        """Dispatch of the first plan."""
        return Dispatch.STATIC if self.dispatch == "auto" else Dispatch(self.dispatch)


class Adaptation(SpecModel):
    """Conditions for changing to a new plan."""

    enabled: bool = True
    min_gain: float = Field(
        default=0.02,
        ge=0,
        lt=1,
        description="Fraction of iteration time that a new plan must be predicted to save.",
    )
    min_delay_ms: Milliseconds = Field(
        default=2.0, description="Changes of link delay below this count as noise."
    )
    stale_after_seconds: float = Field(
        default=30.0,
        gt=0,
        allow_inf_nan=False,
        description="Time without samples after which a link is Unknown.",
    )
    allow_offload: bool = Field(
        default=False,
        description="Whether plans may move activations to host memory, to have more microbatches "
        "in flight than fit on the device if that outweighs the copies.",
    )
    host_memory: int | None = Field(
        default=None,
        ge=1,
        description="Bytes of host memory per rank for offloaded activations; a hard limit. "
        "Required by allowOffload.",
    )
    reorder: Reorder = Field(
        default="bits",
        description="Whether the microbatches of an iteration may run in another order than the "
        "script's, where it gives their costs. bits: no; losses and gradients are bitwise those of "
        "a plain loop over microbatches. sums: in the order with the shortest iteration; gradients "
        "are summed in that order, so results differ by rounding.",
    )
    relayout: bool = Field(
        default=False,
        description="Whether ranks may change places if a wire of a gradient reduction is slow, "
        "and layers may move between stages (parallelism.layers) if one computes slowly, provided "
        "that the remaining iterations pay for it. A change that makes iterations slower is "
        "undone. Needs failurePolicy.maxRestarts, snapshots and one stage per rank. Ranks that "
        "share a stage with tensor, context or FSDP ranks never change places, because the cost of "
        "a slow wire is unknown for them; their layers may move.",
    )

    rebalance: bool = Field(
        default=False,
        description="Whether plans may give replicas unequal numbers of microbatches, while a "
        "device of some replica computes slowly. Iterations have the same samples, but sums another"
        " order. The script passes a source of microbatches to step. Needs several replicas, shard"
        " 1 and policy pipemorph; replicas must share no parameters or collectives.",
    )

    @model_validator(mode="after")
    def _check_offload_memory(self) -> Adaptation:
        if self.allow_offload and self.host_memory is None:
            raise FieldError(
                "hostMemory",
                "is missing, but allowOffload is true; give the bytes of host memory per rank"
                " that offloaded activations may take",
            )
        return self
