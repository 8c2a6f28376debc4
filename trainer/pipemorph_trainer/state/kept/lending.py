"""Lends layers of a rank's copy to ranks of other pods, whose part of the model has changed.

Ranks of one memory read each other's copies there. For the others every rank says what its copy
holds and what its new part is made of. All work out the same loans, and whether there is room for
them, before any is made; and each lender sends no more than what is lacking.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from pipemorph.api.mesh import Coordinate, MeshShape
from pipemorph_trainer.state.kept.composed import Source
from pipemorph_trainer.state.kept.copies import Copy, Form
from pipemorph_trainer.topology.addresses import this_machine


@dataclass(frozen=True)
class Needs:
    """What a rank says. ``memory``: that its copies are in, see :func:`memory_of`; ``room``: bytes
    that are left there. ``held``, ``wanted``: names of what its copy has, with the bytes of each,
    and of what its part is made of; only of the first column, as ranks of a stage have the same."""

    memory: str
    room: int = 0
    held: Mapping[str, int] = field(default_factory=dict)
    wanted: tuple[str, ...] = ()


class Loan(NamedTuple):
    """Rank ``source`` sends what has these ``names`` to rank ``to``: so many bytes of tensors."""

    source: int
    to: int
    names: frozenset[str]
    size: int


def memory_of(folder: Path) -> str:
    """The memory that a folder is in: ranks of one pod share it."""
    found = folder.stat()
    return f"{this_machine().boot_id} {found.st_dev} {found.st_ino}"


def nearest(place: Coordinate) -> Iterator[int]:
    """The other stages, those first that are nearest."""
    stages = sorted(range(place.stages), key=lambda each: abs(each - place.stage))
    return (stage for stage in stages if stage != place.stage)


def loans(needs: Sequence[Needs], mesh: MeshShape) -> list[Loan]:
    """Who lends what to whom, in the order in which all do so. ``needs``: by rank."""
    told = [needs[mesh.rank(stage, 0)] for stage in range(mesh.stages)]
    held, wanted = [each.held for each in told], [set(each.wanted) for each in told]
    found = []
    for rank, own in enumerate(needs):
        place = mesh.coordinate(rank)
        lacking = wanted[place.stage] - held[place.stage].keys()
        for stage in nearest(place):
            names = lacking & held[stage].keys()
            lacking -= names
            source = place.at_stage(stage)
            if names and needs[source].memory != own.memory:
                size = sum(held[stage][name] for name in names)
                found.append(Loan(source, rank, frozenset(names), size))
    return found


def no_room(loans: Sequence[Loan], needs: Sequence[Needs]) -> str:
    """Why a rank has no memory for what it lends and borrows; empty if all have. It has one loan at
    a time to make, and all that it gets until it has composed its state."""
    for rank, each in enumerate(needs):
        takes = sum(loan.size for loan in loans if loan.to == rank)
        takes += max((loan.size for loan in loans if loan.source == rank), default=0)
        if takes > each.room // 2:
            return (
                f"rank {rank} has no memory for layers that move to and from other pods: they take"
                f" {takes:,} bytes, more than half of the {each.room:,} bytes that are left"
            )
    return ""


def lent(source: Source, names: Collection[str], path: Path) -> Copy:
    """What a copy has of these names. ``path``: of a file in memory, which has no name any more on
    return. Raises :class:`OSError` if there is no memory for it."""
    form = tuple(source.entries(names))
    made = nameless(path, form, len(source.copy.object))
    made.begin()
    made.write({entry.name: source.tensor(entry) for entry in form})
    made.write_object(source.copy.object)
    made.finish(source.copy.mark)
    return made


def nameless(path: Path, form: Form, object_bytes: int) -> Copy:
    """A copy that is gone with this process, also if that is killed. Raises as
    :meth:`Copy.create`."""
    made = Copy.create(path, form, object_bytes)
    path.unlink()
    return made
