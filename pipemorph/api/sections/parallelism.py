"""``spec.parallelism``: how the ranks of a job are divided."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from pipemorph.api.base import FieldError, SpecModel
from pipemorph.api.mesh import DIMENSIONS, Dimension, MeshShape
from pipemorph.planning.ir import StagePlacement

MAX_RANKS = 100_000
"""Kubernetes' limit of completions of an Indexed Job."""
MAX_RANKS_PER_POD = 64


class Parallelism(SpecModel):
    """How the ranks are divided: a mesh of stages, replicas, shards, context and tensor."""

    stages: int = Field(
        ge=1,
        le=512,
        description="Pipeline stages. The device mesh has one rank per stage in dimension pp, or "
        "one per stagesPerRank stages.",
    )
    stages_per_rank: int = Field(
        default=1, ge=1, le=64, description="Stages of each rank; divides stages."
    )
    stage_placement: StagePlacement = Field(
        default="interleaved",
        description="Which stages a rank with several has. interleaved: every n-th of n ranks; v: "
        "in turns from the first rank to the last and back.",
    )
    replicas: int = Field(
        default=1, ge=1, le=4096, description="Data-parallel replicas (dp_replicate)."
    )
    min_replicas: int | None = Field(
        default=None,
        ge=1,
        description="Replicas that train on while pods of the others are lost, until these are "
        "back; gradients are averaged over those that run. Needs a cluster, "
        "failurePolicy.maxRestarts and state in memory. Default: all wait for a lost pod.",
    )
    batch: Literal["shrink", "keep"] = Field(
        default="shrink",
        description="With minReplicas, what becomes of the global batch while fewer replicas "
        "train. shrink: each has as many microbatches as before, so the batch is smaller "
        "meanwhile. keep: they share out the microbatches of all, so each iteration takes longer.",
    )
    shard: int = Field(
        default=1,
        ge=1,
        le=4096,
        description="Ranks over which the parameters of a stage are sharded, each with its own "
        "data (dp_shard).",
    )
    context: int = Field(default=1, ge=1, le=1024, description="Ranks that divide a sequence (cp).")
    tensor: int = Field(
        default=1, ge=1, le=1024, description="Ranks that divide a stage's layers (tp)."
    )
    order: list[Dimension] = Field(
        default=list(DIMENSIONS),
        max_length=len(DIMENSIONS),
        json_schema_extra={"x-kubernetes-list-type": "set"},
        description="Dimensions of the mesh, from outermost to innermost: ranks that differ in "
        "the innermost one have consecutive numbers. Dimensions of size 1 may be left out.",
    )
    ranks_per_pod: int = Field(
        default=1,
        ge=1,
        le=MAX_RANKS_PER_POD,
        description="Ranks in one pod, one per GPU; divides the number of ranks.",
    )
    layers: int | None = Field(
        default=None,
        ge=1,
        description="Equal layers, split evenly over the stages; must be divisible by stages. With "
        "adaptation.relayout they may move between stages later.",
    )

    @model_validator(mode="after")
    def _fits(self) -> Parallelism:
        if self.stages % self.stages_per_rank:
            raise FieldError(
                "stagesPerRank",
                f"is {self.stages_per_rank}, which does not divide the {self.stages} stages; use "
                "a divisor",
            )
        self._check_order()
        if self.world_size > MAX_RANKS:
            raise FieldError(
                "replicas",
                f"is {self.replicas}; {self.mesh} are {self.world_size} ranks; "
                f"expected at most {MAX_RANKS}",
            )
        if self.world_size % self.ranks_per_pod:
            raise FieldError(
                "ranksPerPod",
                f"is {self.ranks_per_pod}, which does not divide the job's {self.world_size} "
                "ranks; use a divisor",
            )
        self._check_min_replicas()
        if self.layers is not None and self.layers % self.stages:
            raise FieldError(
                "layers",
                f"is {self.layers}, which {self.stages} stages do not divide; "
                f"use a multiple of {self.stages} layers or another number of stages",
            )
        return self

    def _check_min_replicas(self) -> None:
        least = self.min_replicas
        if least is None:
            if self.batch != "shrink":
                raise FieldError(
                    "batch", f"is {self.batch}, without minReplicas: set that, or leave it out"
                )
            return
        if least > self.replicas:
            raise FieldError(
                "minReplicas", f"is {least}; there are {self.replicas} replicas: use at most that"
            )
        stride, each = self.mesh.replica_stride, self.ranks_per_pod
        whole = stride * self.replicas == self.world_size and each % stride == 0
        if stride % each and not whole:
            raise FieldError(
                "minReplicas",
                f"is {least}, and pods of {each} ranks have parts of several replicas, which are "
                "all lost with one pod; name dp_replicate first in parallelism.order, with a "
                "ranksPerPod that divides a replica's ranks",
            )

    def _check_order(self) -> None:
        shown = ", ".join(self.order) or "empty"
        if len(set(self.order)) < len(self.order):
            raise FieldError("order", f"is {shown}; expected every dimension once")
        for name, size in self.mesh.sizes.items():
            if size > 1 and name not in self.order:
                raise FieldError("order", f"is {shown}, without {name}, which has {size} ranks")

    @property
    def mesh(self) -> MeshShape:
        """Where each rank is."""
        return MeshShape(
            self.stages, self.replicas, self.shard, self.context, self.tensor, tuple(self.order),
            self.stages_per_rank, self.stage_placement,
        )  # fmt: skip

    @property
    def world_size(self) -> int:
        return self.mesh.world_size

    @property
    def pods(self) -> int:
        """Number of pods."""
        return self.world_size // self.ranks_per_pod
