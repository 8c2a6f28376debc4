"""Lends layers of a rank's copy to ranks of other pods, whose part of the model has changed.

Ranks of one pod read each other's copies in shared memory. For ranks of other pods, every rank
announces the values of its copy and those of its new part. All ranks compute the same loans, and
check that there is memory for them, before any is made. Each lender sends only missing values.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from pipemorph.spec.mesh import Coordinate, MeshShape
from pipemorph_trainer.checkpoint.memory.composition import StageCopy
from pipemorph_trainer.checkpoint.memory.state_copy import CopyForm, StateCopy
from pipemorph_trainer.topology.addresses import identify_machine


@dataclass(frozen=True)
class LayerNeeds:
    """Announcement of a rank. ``memory_id``: where its copies are, see :func:`identify_memory`;
    ``free_bytes``: those free there. ``held_bytes``: bytes of each value of its copy, by name;
    ``wanted_names``: names of the values of its new part. Both only for the first column, since
    ranks of a stage have the same."""

    memory_id: str
    free_bytes: int = 0
    held_bytes: Mapping[str, int] = field(default_factory=dict)
    wanted_names: tuple[str, ...] = ()


class LayerLoan(NamedTuple):
    """Transfer of values ``names``, tensors of ``size`` bytes, from ``lender`` to ``borrower``."""

    lender: int
    borrower: int
    names: frozenset[str]
    size: int


def identify_memory(folder: Path) -> str:
    """Identify the memory that a folder is in, which ranks of one pod share."""
    found = folder.stat()
    return f"{identify_machine().boot_id} {found.st_dev} {found.st_ino}"


def list_nearest_stages(place: Coordinate) -> Iterator[int]:
    """Yield the other stages, nearest first."""
    stages = sorted(range(place.stages), key=lambda each: abs(each - place.stage))
    return (stage for stage in stages if stage != place.stage)


def plan_loans(needs: Sequence[LayerNeeds], mesh: MeshShape) -> list[LayerLoan]:
    """Plan all loans, in the order in which all ranks make them. ``needs``: by rank."""
    stages = [needs[mesh.find_rank(stage, 0)] for stage in range(mesh.stages)]
    held, wanted = [each.held_bytes for each in stages], [set(each.wanted_names) for each in stages]
    found = []
    for rank, own in enumerate(needs):
        place = mesh.find_coordinate(rank)
        lacking = wanted[place.stage] - held[place.stage].keys()
        for stage in list_nearest_stages(place):
            names = lacking & held[stage].keys()
            lacking -= names
            source = place.find_rank_at_stage(stage)
            if names and needs[source].memory_id != own.memory_id:
                size = sum(held[stage][name] for name in names)
                found.append(LayerLoan(source, rank, frozenset(names), size))
    return found


def find_memory_shortage(loans: Sequence[LayerLoan], needs: Sequence[LayerNeeds]) -> str:
    """Explain which rank lacks memory for its loans; empty if none does. A rank holds the copies of
    all that it borrows until its state is composed, and of a single loan that it makes."""
    for rank, each in enumerate(needs):
        takes = sum(loan.size for loan in loans if loan.borrower == rank)
        takes += max((loan.size for loan in loans if loan.lender == rank), default=0)
        if takes > each.free_bytes // 2:
            return (
                f"rank {rank} has no memory for layers that move to and from other pods: they take"
                f" {takes:,} bytes, more than half of the {each.free_bytes:,} bytes that are free"
            )
    return ""


def copy_lent_layers(source: StageCopy, names: Collection[str], path: Path) -> StateCopy:
    """Copy the values ``names`` of a copy into an unnamed file in memory. ``path``: its name until
    it is made. Raises :class:`OSError` if there is no memory for it."""
    form = tuple(source.select_entries(names))
    made = create_unnamed_copy(path, form, len(source.copy.pickled_object))
    made.begin_write()
    made.write_tensors({entry.name: source.get_tensor(entry) for entry in form})
    made.write_object(source.copy.pickled_object)
    made.finish_write(source.copy.mark)
    return made


def create_unnamed_copy(path: Path, form: CopyForm, object_bytes: int) -> StateCopy:
    """Create a copy that ends with this process, even if it is killed. Raises as
    :meth:`StateCopy.create`."""
    made = StateCopy.create(path, form, object_bytes)
    path.unlink()
    return made
