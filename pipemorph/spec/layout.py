"""Layout of a job: the place of each rank, the number of layers of each stage, and the wires
between ranks.

A *place* is where a rank runs: a slot of a pod, with its device. Places are numbered like the ranks
of the job's first layout, in which rank *r* runs at place *r*. A *wire* is the connection between
two pods; measurements of a wire remain valid when other ranks use it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from pydantic import ConfigDict, Field

from pipemorph.errors import InputError
from pipemorph.spec.mesh import DATA_DIMENSIONS, MeshShape
from pipemorph.spec.sections.parallelism import Parallelism
from pipemorph.spec.status_base import MAX_STAGES, StatusModel

MAX_PLACED = 512
"""Limit of ranks in a job whose ranks change places: status and all messages to pods list them."""

Wire = tuple[int, int]
"""Two pods, the lower one first; equal if both ends are in one pod."""


def may_change_places(mesh: MeshShape) -> bool:
    """True if ranks of such a mesh may change places. The cost of a slow wire is unknown for ranks
    that share a stage, which communicate within each op."""
    return mesh.data_size > 1 and mesh.lockstep_size == 1 and mesh.world_size <= MAX_PLACED


class RankLayout(StatusModel):
    """Layout in messages and status. Empty tuples: as in the first layout."""

    model_config = ConfigDict(frozen=True)

    layers: tuple[int, ...] = Field(
        default=(),
        max_length=MAX_STAGES,
        description="Layers of each stage; empty: equal numbers.",
    )
    places: tuple[int, ...] = Field(
        default=(),
        max_length=MAX_PLACED,
        description="Place of each rank: index of its pod × ranksPerPod, plus its number there."
        " Empty: each rank at the place of its own number.",
    )

    def __bool__(self) -> bool:
        return bool(self.layers or self.places)

    def __str__(self) -> str:
        """``layers 4, 2`` or ``places 0, 2, 1, 3``"""
        named = (("layers", self.layers), ("places", self.places))
        parts = [f"{name} {', '.join(map(str, each))}" for name, each in named if each]
        return " and ".join(parts) or "the first layout"

    def find_ranks_in_pod(self, pod: int, ranks_per_pod: int) -> list[int]:
        """Ranks of a pod, in the order of their numbers in it."""
        slots = range(pod * ranks_per_pod, (pod + 1) * ranks_per_pod)
        if not self.places:
            return list(slots)
        ranks = {place: rank for rank, place in enumerate(self.places)}
        return [ranks[slot] for slot in slots]

    def find_pod(self, rank: int, ranks_per_pod: int) -> int:
        """Index of the pod that runs a rank."""
        return (self.places[rank] if self.places else rank) // ranks_per_pod


@dataclass(frozen=True)
class Layout:
    """Layout of a job. ``places``: place of each rank. ``layers``: number of layers of each stage;
    empty: spread evenly, as in the first layout."""

    mesh: MeshShape
    places: tuple[int, ...]
    ranks_per_pod: int = 1
    layers: tuple[int, ...] = ()

    @staticmethod
    def build_first(mesh: MeshShape, ranks_per_pod: int = 1) -> Layout:
        """Layout with which a job begins."""
        return Layout(mesh, tuple(range(mesh.world_size)), ranks_per_pod)

    @staticmethod
    def from_parallelism(cut: Parallelism) -> Layout:
        return Layout.build_first(cut.mesh, cut.ranks_per_pod)

    @property
    def is_first(self) -> bool:
        """True if every rank runs at its first place."""
        return self.places == tuple(range(len(self.places)))

    @property
    def places_json(self) -> str:
        """JSON, for :meth:`read_places`."""
        return json.dumps(self.places)

    @property
    def rank_layout(self) -> RankLayout:
        """Form of this layout in messages and status."""
        return RankLayout(layers=self.layers, places=() if self.is_first else self.places)

    def to_explicit_layout(self, layers: int | None) -> RankLayout:
        """:attr:`rank_layout` with explicit numbers also for the first layout. ``layers``: those of
        the model; None: unknown. Omits places of more than :data:`MAX_PLACED` ranks, which never
        move.
        """
        spread = self.spread_layers(layers) if layers is not None else ()
        places = self.places if len(self.places) <= MAX_PLACED else ()
        return RankLayout(layers=spread, places=places)

    def apply_rank_layout(self, to: RankLayout) -> Layout:
        """Layout ``to`` of the same job. Raises :class:`InputError` if it does not fit."""
        made = (
            self.read_places(json.dumps(to.places))
            if to.places
            else replace(self, places=tuple(range(self.mesh.world_size)))
        )
        layers = to.layers and self.read_layers(json.dumps(to.layers), self.mesh.stages)
        return made.with_layers(layers)

    def read_places(self, text: str) -> Layout:
        """Copy with the places of ``text``. Raises :class:`InputError` unless it assigns each place
        to one rank."""
        try:
            places = json.loads(text)
        except (ValueError, RecursionError):
            places = None
        if not isinstance(places, list) or sorted(map(str, places)) != sorted(
            map(str, range(self.mesh.world_size))
        ):
            raise InputError(
                f"places are {text[:80]!r}; expected each number below"
                f" {self.mesh.world_size} once, as a JSON array"
            )
        return replace(self, places=tuple(map(int, places)))

    @staticmethod
    def read_layers(text: str, stages: int) -> tuple[int, ...]:
        """:attr:`layers` from JSON. Raises :class:`InputError` unless each stage has a number of
        layers, at least 1."""
        try:
            layers = json.loads(text)
        except (ValueError, RecursionError):
            layers = None
        if (
            not isinstance(layers, list)
            or len(layers) != stages
            or not all(isinstance(each, int) and each > 0 for each in layers)
        ):
            raise InputError(
                f"layers are {text[:80]!r}; expected a JSON array of {stages} numbers of layers,"
                " each at least 1"
            )
        return tuple(layers)

    def swap_places(self, rank: int, other: int) -> Layout:
        """Copy with the places of two ranks exchanged."""
        places = list(self.places)
        places[rank], places[other] = places[other], places[rank]
        return replace(self, places=tuple(places))

    def with_layers(self, layers: Sequence[int]) -> Layout:
        """Copy with other numbers of layers per stage."""
        even = len(set(layers)) == 1
        return replace(self, layers=() if even else tuple(layers))

    def spread_layers(self, total: int) -> tuple[int, ...]:
        """Number of layers of each stage, of ``total``."""
        return self.layers or (total // self.mesh.stages,) * self.mesh.stages

    def count_moved_layers(self, to: Layout, total: int) -> int:
        """Number of layers, of ``total``, that are in another stage in ``to``."""
        here, there = (
            [stage for stage, count in enumerate(each.spread_layers(total)) for _ in range(count)]
            for each in (self, to)
        )
        return sum(one != other for one, other in zip(here, there, strict=True))

    def find_moved_ranks(self, to: Layout) -> tuple[int, ...]:
        """Ranks that run at another place in ``to``."""
        pairs = enumerate(zip(self.places, to.places, strict=True))
        return tuple(rank for rank, (here, there) in pairs if here != there)

    def find_pod(self, rank: int) -> int:
        return self.places[rank] // self.ranks_per_pod

    def find_wire(self, rank: int, other: int) -> Wire:
        """Wire between the places of two ranks."""
        low, high = sorted((self.find_pod(rank), self.find_pod(other)))
        return low, high

    def find_link_wire(self, link: int, column: int) -> Wire:
        """Wire of a link between two stages."""
        return self.find_wire(
            self.mesh.find_rank(link, column), self.mesh.find_rank(link + 1, column)
        )

    @cached_property
    def rings(self) -> tuple[tuple[int, ...], ...]:
        """Groups of ranks that reduce gradients together, each in the order of its ring."""
        return (
            tuple(map(tuple, self.mesh.group_ranks(DATA_DIMENSIONS)))
            if self.mesh.data_size > 1
            else ()
        )

    def find_ring_wires(self, ring: tuple[int, ...]) -> Iterator[Wire]:
        """Wires of a ring: from each rank to the next, and from the last to the first."""
        for at, rank in enumerate(ring):
            yield self.find_wire(rank, ring[(at + 1) % len(ring)])
