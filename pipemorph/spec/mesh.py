"""Device mesh of a job: maps each rank to its coordinate, by the mesh's order, and back.

The operator, the hosts and the trainer all use this mapping; the trainer creates torch's
``DeviceMesh`` with the same dimensions and order.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Literal, get_args

from pipemorph.errors import InputError
from pipemorph.planning.ir import StagePlacement, place_stages

Dimension = Literal["pp", "dp_replicate", "dp_shard", "cp", "tp"]
"""Dimension of the mesh, named as in torchtitan."""
DIMENSIONS: tuple[Dimension, ...] = get_args(Dimension)
"""Dimensions in the default order, from outermost to innermost."""
_FIELDS = dict(zip(DIMENSIONS, ("stage", "replica", "shard", "context", "tensor"), strict=True))
COLUMN_DIMENSIONS: tuple[Dimension, ...] = DIMENSIONS[1:]
"""Dimensions that number a column, from outermost to innermost."""
DATA_DIMENSIONS: tuple[Dimension, ...] = ("dp_replicate", "dp_shard", "cp")
"""Dimensions along which ranks have different data, so that their gradients are averaged."""
LOCKSTEP_DIMENSIONS: tuple[Dimension, ...] = ("dp_shard", "cp", "tp")
"""Dimensions along which ranks run collectives inside ops, and so the same ops in one order."""


@dataclass(frozen=True)
class MeshShape:
    """Sizes of a mesh, and the ``order`` in which its ranks are numbered: dimensions from outermost
    to innermost. Ranks along the innermost dimension have consecutive numbers.

    A *column* is a pipeline: one rank per stage, which share the other four coordinates. Columns
    are numbered by (replica, shard, context, tensor), whatever the order; with replicas alone, a
    column is a replica. Telemetry names links by column.

    With ``stages_per_rank`` above 1 a column has fewer ranks than stages, placed as ``placement``
    says.
    """

    stages: int = 1
    replicas: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    order: tuple[Dimension, ...] = DIMENSIONS
    stages_per_rank: int = 1
    placement: StagePlacement = "interleaved"

    @cached_property
    def sizes(self) -> dict[Dimension, int]:
        """Size of every dimension, in ranks."""
        ranks = self.stages // self.stages_per_rank
        sizes = (ranks, self.replicas, self.shard, self.context, self.tensor)
        return dict(zip(DIMENSIONS, sizes, strict=True))

    @cached_property
    def world_size(self) -> int:
        return prod(self.sizes.values())

    @cached_property
    def columns(self) -> int:
        return self.world_size // self.sizes["pp"]

    @cached_property
    def pp_indices(self) -> tuple[int, ...]:
        """Index along ``pp`` of the rank of every stage."""
        return place_stages(self.stages, self.sizes["pp"], self.placement)

    @property
    def data_size(self) -> int:
        """Number of ranks of a stage with different data, which reduce gradients together."""
        return prod(self.sizes[name] for name in DATA_DIMENSIONS)

    def find_data_group(self, column: int) -> int:
        """First of the columns that reduce gradients together with ``column``."""
        return self.find_coordinate(
            self.find_coordinate(self.find_rank(0, column)).find_first_along(DATA_DIMENSIONS)
        ).column

    @property
    def lockstep_size(self) -> int:
        """Number of ranks of one stage and replica: their columns run one plan."""
        return self.shard * self.context * self.tensor

    @property
    def lockstep_dimensions(self) -> tuple[str, ...]:
        """Dimensions of more than one rank that run collectives inside ops: ``dp_shard``, …"""
        return tuple(name for name in LOCKSTEP_DIMENSIONS if self.sizes[name] > 1)

    @property
    def pipeline_block_size(self) -> int:
        """Size of the smallest block of consecutive ranks that consists of whole pipelines; all
        ranks if the dimension ``pp`` is the outermost."""
        inner = self.order[self.order.index("pp") :] if "pp" in self.order else ()
        return prod(self.sizes[name] for name in inner)

    @property
    def replica_stride(self) -> int:
        """Difference between the numbers of two ranks that differ only by one replica."""
        if "dp_replicate" not in self.order:
            return self.world_size
        inner = self.order[self.order.index("dp_replicate") + 1 :]
        return prod(self.sizes[name] for name in inner)

    def describe_order(self) -> str:
        """Sizes and order as text, equal for meshes that number their ranks in the same way."""
        several = [name for name in self.order if self.sizes[name] > 1]
        return f"{self} in the order {', '.join(several)}" if len(several) > 1 else str(self)

    def find_coordinate(self, rank: int) -> Coordinate:
        """Coordinate of a rank. Raises :class:`InputError` if the mesh has no such rank."""
        if not 0 <= rank < self.world_size:
            raise InputError(f"rank is {rank}; the mesh has {self.world_size} ranks ({self})")
        place = _split_digits(rank, self.order, self.sizes)
        # In both placements, index i holds stage i in the first turn.
        stage, replica, shard, context, tensor = (place.get(name, 0) for name in DIMENSIONS)
        return Coordinate(rank, self, stage, replica, shard, context, tensor)

    def find_rank(self, stage: int, column: int) -> int:
        """Rank of a stage in a column."""
        place = {
            **_split_digits(column, COLUMN_DIMENSIONS, self.sizes),
            "pp": self.pp_indices[stage],
        }
        rank = 0
        for name in self.order:
            rank = rank * self.sizes[name] + place[name]
        return rank

    def group_ranks(self, names: Collection[Dimension]) -> list[list[int]]:
        """Groups of ranks that share all coordinates except those of ``names``."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            place = _split_digits(rank, self.order, self.sizes)
            key = tuple(place.get(name, 0) for name in DIMENSIONS if name not in names)
            found.setdefault(key, []).append(rank)
        return list(found.values())

    def find_group(self, place: Coordinate, names: Collection[Dimension]) -> list[int]:
        """Ranks that share all coordinates of ``place`` except those of ``names``, itself too."""
        return next(group for group in self.group_ranks(names) if place.rank in group)

    def format_lockstep_name(self, column: int) -> str:
        """Text that distinguishes a column's data-parallel group from others of its stage:
        ``tensor 1``; empty if there is only one."""
        return (
            f"tensor {self.find_coordinate(self.find_rank(0, column)).tensor}"
            if self.tensor > 1
            else ""
        )

    def format_column_name(self, column: int) -> str:
        """Text on a column: ``replica 1, tensor 0``; empty if it is the only one."""
        place = _split_digits(column, COLUMN_DIMENSIONS, self.sizes)
        return ", ".join(f"{_FIELDS[n]} {place[n]}" for n in COLUMN_DIMENSIONS if self.sizes[n] > 1)

    def __str__(self) -> str:
        """``2 stages × 4 replicas × 2 tensor``, ``4 stages (2 per rank, v) × 2 replicas``."""
        stages = f"{self.stages} stages"
        if self.stages_per_rank > 1:
            stages += f" ({self.stages_per_rank} per rank, {self.placement})"
        words = dict(
            zip(COLUMN_DIMENSIONS, ("replicas", "shard", "context", "tensor"), strict=True)
        )
        named = [f"{self.sizes[name]} {word}" for name, word in words.items()]
        return " × ".join([stages, *(n for n in named if not n.startswith("1 "))])


@dataclass(frozen=True)
class Coordinate:
    """Place of a rank in the mesh, or of one of its stages (:meth:`with_stage`). ``stage``: the
    first of the rank's stages, or that one."""

    rank: int
    mesh: MeshShape
    stage: int = 0
    replica: int = 0
    shard: int = 0
    context: int = 0
    tensor: int = 0
    is_single_stage: bool = False
    """True if this is the place of one of the rank's several stages."""

    @property
    def stages(self) -> int:
        return self.mesh.stages

    @cached_property
    def held_stages(self) -> tuple[int, ...]:
        """Stages at this place, in order: those of the rank, or the single one."""
        if self.is_single_stage or self.mesh.stages_per_rank == 1:
            return (self.stage,)
        here = self.mesh.pp_indices[self.stage]
        return tuple(stage for stage, at in enumerate(self.mesh.pp_indices) if at == here)

    def with_stage(self, stage: int) -> Coordinate:
        """Place of one of the stages."""
        return (
            self
            if self.held_stages == (stage,)
            else replace(self, stage=stage, is_single_stage=True)
        )

    @cached_property
    def is_first(self) -> bool:
        return self.held_stages[0] == 0

    @cached_property
    def is_last(self) -> bool:
        return self.held_stages[-1] == self.mesh.stages - 1

    @cached_property
    def column(self) -> int:
        """Number of the rank's pipeline column, see :class:`MeshShape`."""
        column = 0
        for name in COLUMN_DIMENSIONS:
            column = column * self.mesh.sizes[name] + self.index_along(name)
        return column

    @property
    def dp_rank(self) -> int:
        """Index of the rank's part of a batch, below :attr:`dp_size`: equal on all ranks with the
        same samples, along ``pp``, ``cp`` and ``tp``."""
        return self.replica * self.mesh.shard + self.shard

    @property
    def dp_size(self) -> int:
        """Number of parts of a batch: replicas × shards."""
        return self.mesh.replicas * self.mesh.shard

    def index_along(self, name: Dimension) -> int:
        """Index of the rank along a dimension."""
        if name == "pp":
            return self.mesh.pp_indices[self.stage]
        index: int = getattr(self, _FIELDS[name])
        return index

    def find_rank_at_stage(self, stage: int) -> int:
        """Rank of another stage in the same column."""
        return self.mesh.find_rank(stage, self.column)

    def find_first_along(self, names: Collection[Dimension]) -> int:
        """Rank with the same coordinate, but index 0 along ``names``."""
        column = 0
        for name in COLUMN_DIMENSIONS:
            column = column * self.mesh.sizes[name] + (
                0 if name in names else self.index_along(name)
            )
        return self.mesh.find_rank(0 if "pp" in names else self.stage, column)

    def __str__(self) -> str:
        """``rank 5 (stage 1, replica 0, tensor 1)``, without dimensions of size 1; ``rank 1
        (stages 1 and 2)``."""
        column = self.mesh.format_column_name(self.column)
        several = "s" if len(self.held_stages) > 1 else ""
        stages = " and ".join(map(str, self.held_stages))
        return f"rank {self.rank} (stage{several} {stages}{', ' if column else ''}{column})"


def _split_digits(
    number: int, order: Collection[Dimension], sizes: dict[Dimension, int]
) -> dict[Dimension, int]:
    """Index along each dimension of ``order``, of which the last varies fastest."""
    digits: dict[Dimension, int] = {}
    for name in reversed(tuple(order)):
        number, digits[name] = divmod(number, sizes[name])
    return digits
