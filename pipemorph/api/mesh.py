"""Where each rank of a job is: its coordinate in the mesh, as numbered by the mesh's order.

The one function from a rank to its coordinate, and back. The operator, the hosts and the trainer
use it; the trainer makes torch's ``DeviceMesh`` with the same dimensions and order.
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
"""A dimension of the mesh, named as in torchtitan."""
DIMENSIONS: tuple[Dimension, ...] = get_args(Dimension)
"""All dimensions in the default order, from outermost to innermost."""
_FIELDS = dict(zip(DIMENSIONS, ("stage", "replica", "shard", "context", "tensor"), strict=True))
COLUMN: tuple[Dimension, ...] = DIMENSIONS[1:]
"""The dimensions that number a column, from outermost to innermost."""
DATA: tuple[Dimension, ...] = ("dp_replicate", "dp_shard", "cp")
"""Dimensions along which ranks have different data, so that their gradients are averaged."""
LOCKSTEP: tuple[Dimension, ...] = ("dp_shard", "cp", "tp")
"""Dimensions along which ranks run collectives inside ops, so the same ops in the same order."""


@dataclass(frozen=True)
class MeshShape:
    """The sizes of a mesh, and the ``order`` in which its ranks are numbered: dimensions from
    outermost to innermost. Ranks along the innermost dimension have consecutive numbers.

    A *column* is a pipeline: one rank per stage, which share the other four coordinates. Columns
    are numbered by (replica, shard, context, tensor), whatever the order; with replicas alone a
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
    def placed(self) -> tuple[int, ...]:
        """Index along ``pp`` of the rank of every stage."""
        return place_stages(self.stages, self.sizes["pp"], self.placement)

    @property
    def data(self) -> int:
        """Ranks of a stage with data of their own, which reduce their gradients together."""
        return prod(self.sizes[name] for name in DATA)

    def data_group(self, column: int) -> int:
        """The first column of those that reduce their gradients together with ``column``."""
        return self.coordinate(self.coordinate(self.rank(0, column)).first_along(DATA)).column

    @property
    def lockstep(self) -> int:
        """Number of ranks of one stage and replica: its columns, which run one plan."""
        return self.shard * self.context * self.tensor

    @property
    def block(self) -> int:
        """Ranks of the smallest block of consecutive ranks that is made of whole pipelines; all
        ranks, if the dimension ``pp`` is the outermost."""
        inner = self.order[self.order.index("pp") :] if "pp" in self.order else ()
        return prod(self.sizes[name] for name in inner)

    @property
    def replica_stride(self) -> int:
        """By how much the numbers of two ranks differ that differ by one replica alone."""
        if "dp_replicate" not in self.order:
            return self.world_size
        inner = self.order[self.order.index("dp_replicate") + 1 :]
        return prod(self.sizes[name] for name in inner)

    def described(self) -> str:
        """Sizes and order, the same for meshes that number their ranks in the same way."""
        several = [name for name in self.order if self.sizes[name] > 1]
        return f"{self} in the order {', '.join(several)}" if len(several) > 1 else str(self)

    def coordinate(self, rank: int) -> Coordinate:
        """The coordinate of a rank. Raises :class:`InputError` if the mesh has no such rank."""
        if not 0 <= rank < self.world_size:
            raise InputError(f"rank is {rank}; the mesh has {self.world_size} ranks ({self})")
        place = _digits(rank, self.order, self.sizes)
        # In both placements the first turn gives stage i to index i.
        stage, replica, shard, context, tensor = (place.get(name, 0) for name in DIMENSIONS)
        return Coordinate(rank, self, stage, replica, shard, context, tensor)

    def rank(self, stage: int, column: int) -> int:
        """The rank of a stage in a column."""
        place = {**_digits(column, COLUMN, self.sizes), "pp": self.placed[stage]}
        rank = 0
        for name in self.order:
            rank = rank * self.sizes[name] + place[name]
        return rank

    def groups(self, names: Collection[Dimension]) -> list[list[int]]:
        """The ranks that share all coordinates but those of ``names``, for every such group."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            place = _digits(rank, self.order, self.sizes)
            key = tuple(place.get(name, 0) for name in DIMENSIONS if name not in names)
            found.setdefault(key, []).append(rank)
        return list(found.values())

    def others(self, place: Coordinate, names: Collection[Dimension]) -> list[int]:
        """The ranks that share all coordinates of ``place`` but those of ``names``, itself too."""
        return next(group for group in self.groups(names) if place.rank in group)

    def lockstep_name(self, column: int) -> str:
        """What tells a column's data-parallel group from others of its stage, for messages:
        ``tensor 1``; empty if there is only one."""
        return f"tensor {self.coordinate(self.rank(0, column)).tensor}" if self.tensor > 1 else ""

    def column_name(self, column: int) -> str:
        """A column for messages: ``replica 1, tensor 0``; empty if it is the only one."""
        place = _digits(column, COLUMN, self.sizes)
        return ", ".join(f"{_FIELDS[n]} {place[n]}" for n in COLUMN if self.sizes[n] > 1)

    def __str__(self) -> str:
        """``2 stages × 4 replicas × 2 tensor``, ``4 stages (2 per rank, v) × 2 replicas``."""
        stages = f"{self.stages} stages"
        if self.stages_per_rank > 1:
            stages += f" ({self.stages_per_rank} per rank, {self.placement})"
        words = dict(zip(COLUMN, ("replicas", "shard", "context", "tensor"), strict=True))
        named = [f"{self.sizes[name]} {word}" for name, word in words.items()]
        return " × ".join([stages, *(n for n in named if not n.startswith("1 "))])


@dataclass(frozen=True)
class Coordinate:
    """A rank's place in the mesh, or that of one of its stages (:meth:`of`). ``stage``: the first
    of the rank's stages, or the one."""

    rank: int
    mesh: MeshShape
    stage: int = 0
    replica: int = 0
    shard: int = 0
    context: int = 0
    tensor: int = 0
    alone: bool = False
    """Whether this is the place of one stage of several."""

    @property
    def stages(self) -> int:
        return self.mesh.stages

    @cached_property
    def held(self) -> tuple[int, ...]:
        """The stages at this place, in order: those of the rank, or the one."""
        if self.alone or self.mesh.stages_per_rank == 1:
            return (self.stage,)
        here = self.mesh.placed[self.stage]
        return tuple(stage for stage, at in enumerate(self.mesh.placed) if at == here)

    def of(self, stage: int) -> Coordinate:
        """The place of one of the stages."""
        return self if self.held == (stage,) else replace(self, stage=stage, alone=True)

    @cached_property
    def first(self) -> bool:
        return self.held[0] == 0

    @cached_property
    def last(self) -> bool:
        return self.held[-1] == self.mesh.stages - 1

    @cached_property
    def column(self) -> int:
        """Number of the rank's pipeline column, see :class:`MeshShape`."""
        column = 0
        for name in COLUMN:
            column = column * self.mesh.sizes[name] + self.along(name)
        return column

    @property
    def dp_rank(self) -> int:
        """Index of the rank's part of a batch, of :attr:`dp_size`: the same on all ranks that get
        the same samples, along ``pp``, ``cp`` and ``tp``."""
        return self.replica * self.mesh.shard + self.shard

    @property
    def dp_size(self) -> int:
        """Into how many parts a batch is divided: replicas × shards."""
        return self.mesh.replicas * self.mesh.shard

    def along(self, name: Dimension) -> int:
        """The rank's index along a dimension."""
        if name == "pp":
            return self.mesh.placed[self.stage]
        index: int = getattr(self, _FIELDS[name])
        return index

    def at_stage(self, stage: int) -> int:
        """The rank of another stage in the same column."""
        return self.mesh.rank(stage, self.column)

    def first_along(self, names: Collection[Dimension]) -> int:
        """The rank with the same coordinate, but index 0 along ``names``."""
        column = 0
        for name in COLUMN:
            column = column * self.mesh.sizes[name] + (0 if name in names else self.along(name))
        return self.mesh.rank(0 if "pp" in names else self.stage, column)

    def __str__(self) -> str:
        """``rank 5 (stage 1, replica 0, tensor 1)``, without dimensions of size 1; ``rank 1
        (stages 1 and 2)``."""
        column = self.mesh.column_name(self.column)
        several = "s" if len(self.held) > 1 else ""
        stages = " and ".join(map(str, self.held))
        return f"rank {self.rank} (stage{several} {stages}{', ' if column else ''}{column})"


def _digits(
    number: int, order: Collection[Dimension], sizes: dict[Dimension, int]
) -> dict[Dimension, int]:
    """The index along each dimension of ``order``, of which the last runs fastest."""
    digits: dict[Dimension, int] = {}
    for name in reversed(tuple(order)):
        number, digits[name] = divmod(number, sizes[name])
    return digits
