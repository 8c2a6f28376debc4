"""A job's layout: which place runs which rank, how many layers each stage holds, and which wires
lie between the ranks.

A *place* is where a rank runs: a slot of a pod, with its device. Places are numbered like the ranks
of the job's first layout, so in that one rank *r* runs at place *r*. A *wire* is what is between
two pods; what is known of one stays known of it when other ranks use it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from pydantic import ConfigDict, Field

from pipemorph.api.mesh import DATA, MeshShape
from pipemorph.api.sections.parallelism import Parallelism
from pipemorph.api.status_base import MAX_STAGES, StatusModel
from pipemorph.errors import InputError

MAX_PLACED = 512
"""Most ranks of a job whose ranks change places: all places are in status, and told to all pods."""

Wire = tuple[int, int]
"""Two pods, the lower one first; equal if both ends are in one pod."""


def may_change_places(mesh: MeshShape) -> bool:
    """Whether ranks of such a mesh may change places. Ranks that share a stage talk within each op,
    and what a late wire costs them is not known."""
    return mesh.data > 1 and mesh.lockstep == 1 and mesh.world_size <= MAX_PLACED


class RankLayout(StatusModel):
    """A layout in messages and status. Empty tuples: as in the beginning."""

    model_config = ConfigDict(frozen=True)

    layers: tuple[int, ...] = Field(
        default=(),
        max_length=MAX_STAGES,
        description="Layers of each stage; empty: evenly many.",
    )
    places: tuple[int, ...] = Field(
        default=(),
        max_length=MAX_PLACED,
        description="By rank, the place that runs it: index of its pod × ranksPerPod, plus its"
        " number there. Empty: each rank at the place of its own number.",
    )

    def __bool__(self) -> bool:
        return bool(self.layers or self.places)

    def __str__(self) -> str:
        """``layers 4, 2`` or ``places 0, 2, 1, 3``"""
        named = (("layers", self.layers), ("places", self.places))
        told = [f"{name} {', '.join(map(str, each))}" for name, each in named if each]
        return " and ".join(told) or "the first layout"

    def ranks_in(self, pod: int, ranks_per_pod: int) -> list[int]:
        """The ranks of a pod, by their numbers in it."""
        slots = range(pod * ranks_per_pod, (pod + 1) * ranks_per_pod)
        if not self.places:
            return list(slots)
        ranks = {place: rank for rank, place in enumerate(self.places)}
        return [ranks[slot] for slot in slots]

    def pod(self, rank: int, ranks_per_pod: int) -> int:
        """The pod that runs a rank."""
        return (self.places[rank] if self.places else rank) // ranks_per_pod


@dataclass(frozen=True)
class Layout:
    """``places``: by rank, the place that runs it. ``layers``: by stage, how many layers it holds;
    empty: they are spread evenly, as in the beginning."""

    mesh: MeshShape
    places: tuple[int, ...]
    ranks_per_pod: int = 1
    layers: tuple[int, ...] = ()

    @staticmethod
    def first(mesh: MeshShape, ranks_per_pod: int = 1) -> Layout:
        """The layout that a job begins with."""
        return Layout(mesh, tuple(range(mesh.world_size)), ranks_per_pod)

    @staticmethod
    def of(cut: Parallelism) -> Layout:
        return Layout.first(cut.mesh, cut.ranks_per_pod)

    @property
    def is_first(self) -> bool:
        """Whether every rank runs at its first place."""
        return self.places == tuple(range(len(self.places)))

    @property
    def text(self) -> str:
        """JSON, for :meth:`read`."""
        return json.dumps(self.places)

    @property
    def told(self) -> RankLayout:
        """This layout in messages and status."""
        return RankLayout(layers=self.layers, places=() if self.is_first else self.places)

    def whole(self, layers: int | None) -> RankLayout:
        """:attr:`told` with all numbers, also those of the beginning. ``layers``: of the model,
        None: not known. Places of more than :data:`MAX_PLACED` ranks never change."""
        spread = self.spread(layers) if layers is not None else ()
        places = self.places if len(self.places) <= MAX_PLACED else ()
        return RankLayout(layers=spread, places=places)

    def changed(self, to: RankLayout) -> Layout:
        """The layout ``to`` of the same job. Raises :class:`InputError` if it does not fit."""
        made = (
            self.read(json.dumps(to.places))
            if to.places
            else replace(self, places=tuple(range(self.mesh.world_size)))
        )
        layers = to.layers and self.read_layers(json.dumps(to.layers), self.mesh.stages)
        return made.with_layers(layers)

    def read(self, text: str) -> Layout:
        """This layout with other places. Raises :class:`InputError` unless ``text`` gives each
        place to one rank."""
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
        """:attr:`layers` from JSON. Raises :class:`InputError` unless there is a number of layers,
        at least 1, for each stage."""
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

    def swapped(self, rank: int, other: int) -> Layout:
        """This layout with the places of two ranks exchanged."""
        places = list(self.places)
        places[rank], places[other] = places[other], places[rank]
        return replace(self, places=tuple(places))

    def with_layers(self, layers: Sequence[int]) -> Layout:
        """This layout with so many layers per stage."""
        even = len(set(layers)) == 1
        return replace(self, layers=() if even else tuple(layers))

    def spread(self, total: int) -> tuple[int, ...]:
        """By stage, how many of ``total`` layers it holds."""
        return self.layers or (total // self.mesh.stages,) * self.mesh.stages

    def handed_over(self, to: Layout, total: int) -> int:
        """How many of ``total`` layers are of another stage in ``to``."""
        here, there = (
            [stage for stage, count in enumerate(each.spread(total)) for _ in range(count)]
            for each in (self, to)
        )
        return sum(one != other for one, other in zip(here, there, strict=True))

    def moved(self, to: Layout) -> tuple[int, ...]:
        """The ranks that run elsewhere in ``to``."""
        pairs = enumerate(zip(self.places, to.places, strict=True))
        return tuple(rank for rank, (here, there) in pairs if here != there)

    def pod(self, rank: int) -> int:
        return self.places[rank] // self.ranks_per_pod

    def wire(self, rank: int, other: int) -> Wire:
        """What is between the places of two ranks."""
        low, high = sorted((self.pod(rank), self.pod(other)))
        return low, high

    def link(self, link: int, column: int) -> Wire:
        """What a link between two stages goes over."""
        return self.wire(self.mesh.rank(link, column), self.mesh.rank(link + 1, column))

    @cached_property
    def rings(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that reduce gradients together, each group in the order of its ring."""
        return tuple(map(tuple, self.mesh.groups(DATA))) if self.mesh.data > 1 else ()

    def edges(self, ring: tuple[int, ...]) -> Iterator[Wire]:
        """What is between the ranks of a ring: from each to the next, from the last to the
        first."""
        for at, rank in enumerate(ring):
            yield self.wire(rank, ring[(at + 1) % len(ring)])
