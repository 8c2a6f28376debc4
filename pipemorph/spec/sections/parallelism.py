"""``spec.parallelism``: division of a job into ranks."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from pipemorph.planning.ir import StagePlacement
from pipemorph.spec.base import FieldError, SpecModel
from pipemorph.spec.mesh import DIMENSIONS, Dimension, MeshShape

MAX_RANKS = 100_000
"""Kubernetes' limit of completions of an Indexed Job."""
MAX_RANKS_PER_POD = 64


class Parallelism(SpecModel):
    """Division into ranks: a mesh of stages, replicas, shards, context and tensor."""

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
        description="Stages of a rank with several. interleaved: of n ranks, each has every n-th "
        "stage; v: stages run from the first rank to the last and back.",
    )
    replicas: int = Field(
        default=1, ge=1, le=4096, description="Data-parallel replicas (dp_replicate)."
    )
    min_replicas: int | None = Field(
        default=None,
        ge=1,
        description="Least number of replicas that train on while pods of other replicas are "
        "lost; gradients are averaged over the running ones. Needs a cluster, "
        "failurePolicy.maxRestarts and state in memory. Default: all wait for a lost pod.",
    )
    batch: Literal["shrink", "keep"] = Field(
        default="shrink",
        description="With minReplicas, the global batch while fewer replicas train. shrink: each "
        "has as many microbatches as before, so the batch is smaller meanwhile. keep: they share "
        "the microbatches of all replicas, so each iteration takes longer.",
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
        "the innermost one have consecutive numbers. Dimensions of size 1 may be omitted.",
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
        description="Number of equal layers, split evenly over the stages; divisible by stages. "
        "With adaptation.relayout they may move between stages later.",
    )

    @model_validator(mode="after")
    def _check_sizes(self) -> Parallelism:
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
                    "batch", f"is {self.batch}, without minReplicas: set minReplicas or omit batch"
                )
            return
        if least > self.replicas:
            raise FieldError(
                "minReplicas", f"is {least}; expected at most the {self.replicas} replicas"
            )
        stride, each = self.mesh.replica_stride, self.ranks_per_pod
        whole = stride * self.replicas == self.world_size and each % stride == 0
        if stride % each and not whole:
            raise FieldError(
                "minReplicas",
                f"is {least}, but a pod of {each} ranks has parts of several replicas, which are "
                "all lost with it; name dp_replicate first in parallelism.order, and let "
                "ranksPerPod divide a replica's ranks",
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
        """Device mesh, which maps ranks to coordinates."""
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
