"""Ranks of a job: the device mesh and the process groups of a pipeline."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.torch_version import TorchVersion

from pipemorph.spec.mesh import DIMENSIONS, LOCKSTEP_DIMENSIONS, Coordinate, Dimension
from pipemorph_trainer.topology.groups import ProcessGroups, carries_cpu_tensors, gather_values
from pipemorph_trainer.topology.hierarchy import RankHierarchy, list_round_groups

T = TypeVar("T")
IN_ROUNDS = TorchVersion(torch.__version__) >= "2.15"
"""True if ranks can make a group without the others. Earlier versions of torch may name such a
group differently on each rank if the script has made groups of some ranks: then all would wait
forever. With those, the collectives of :class:`RankHierarchy` go round a single ring."""


@dataclass(eq=False)
class World:
    """Groups of a job. ``control``: all ranks, for the start, checkpoints and failures;
    ``all_ranks``: all ranks, for the small collectives of every iteration. ``column``: ranks of
    this pipeline; None for a single rank. ``columns``: first stages of all pipelines; None on other
    stages, and for a single pipeline. ``same_plan_columns``: those whose pipelines must run the
    same plan; None if each may run its own.

    No group is shared with the user, so that neither delays or reorders the other's collectives.
    ``owns_mesh``: the groups of ``mesh`` belong to the pipeline.
    """

    coordinate: Coordinate
    mesh: DeviceMesh
    groups: ProcessGroups
    control: dist.ProcessGroup
    secret: bytes
    owns_mesh: bool = True
    all_ranks: RankHierarchy = field(init=False)
    column: dist.ProcessGroup | None = field(default=None, init=False)
    columns: dist.ProcessGroup | None = field(default=None, init=False)
    same_plan_columns: dist.ProcessGroup | None = field(default=None, init=False)
    _made: dict[tuple[Dimension, ...], dist.ProcessGroup] = field(default_factory=dict)
    _hierarchies: dict[tuple[Dimension, ...], RankHierarchy] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._process = os.getpid()
        for group in self.mesh.get_all_groups() if self.owns_mesh else ():
            if group is not dist.GroupMember.WORLD:
                self.groups.adopt_group(group)
        # For scripts that do not close the pipeline.
        atexit.register(self.destroy_groups, clean=False)

    def get_group(self, names: Iterable[Dimension]) -> dist.ProcessGroup | None:
        """Return the group, made by :meth:`create_groups`, of the ranks that differ from this one
        only in dimensions ``names``, in rank order; None if there is no other rank."""
        names = self._filter_dimensions(names)
        return self._made[names] if names else None

    def create_groups(self, wanted: Iterable[Iterable[Dimension]]) -> None:
        """Make groups for :meth:`group`. Collective: all ranks pass the same."""
        for names in dict.fromkeys(map(self._filter_dimensions, wanted)):
            if names and names not in self._made:
                self._made[names] = self._create_group(names)

    def get_hierarchy(self, names: Iterable[Dimension]) -> RankHierarchy | None:
        """Return the ranks of :meth:`group`, for small collectives in every iteration;
        :meth:`create_hierarchies` has made it."""
        names = self._filter_dimensions(names)
        return self._hierarchies[names] if names else None

    def create_hierarchies(self, wanted: Iterable[Iterable[Dimension]]) -> None:
        """Make :attr:`all_ranks`, and those for :meth:`get_hierarchy`. Collective: all ranks pass
        the same."""
        mine, shape = self.coordinate.rank, self.coordinate.mesh
        for names in dict.fromkeys(map(self._filter_dimensions, (DIMENSIONS, *wanted))):
            if names in self._hierarchies or (not names and shape.world_size > 1):
                continue
            ranks = next((each for each in shape.group_ranks(names) if mine in each), [mine])
            rounds = list_round_groups(mine, ranks) if IN_ROUNDS else [ranks]
            if len(ranks) == shape.world_size and len(rounds) == 1:
                found = [self.control]
            elif len(rounds) == 1:
                self.create_groups([names])
                found = [self._made[names]]
            else:
                # Only the ranks of a group wait for its creation: with all ranks of a large job it
                # would take minutes.
                found = [
                    self.groups.create_group(
                        each, backend="gloo", use_local_synchronization=True,
                        group_desc=f"pipemorph {' × '.join(names)}, round {number}",
                    )
                    for number, each in enumerate(rounds)
                ]  # fmt: skip
            self._hierarchies[names] = RankHierarchy(found)
        self.all_ranks = self._hierarchies[self._filter_dimensions(DIMENSIONS)]

    def _filter_dimensions(self, names: Iterable[Dimension]) -> tuple[Dimension, ...]:
        """Filter ``names`` for dimensions with several ranks, in the order of DIMENSIONS."""
        wanted = frozenset(names)
        return tuple(
            n for n, size in self.coordinate.mesh.sizes.items() if n in wanted and size > 1
        )

    def _create_group(self, names: tuple[Dimension, ...]) -> dist.ProcessGroup:
        """Make the group along ``names``, or reuse one that belongs to the pipeline."""
        shape = self.coordinate.mesh
        ranks = shape.group_ranks(names)
        if len(ranks) == 1 and names == ("pp",):
            return self.control
        if self.owns_mesh and len(names) == 1:
            group: Any = self.mesh.get_group(names[0])
            # A dimension with all ranks uses the default group, which belongs to the user.
            if group is not dist.GroupMember.WORLD and carries_cpu_tensors(group):
                return group  # type: ignore[no-any-return]
        made = [
            self.groups.create_group(each, group_desc=f"pipemorph {' × '.join(names)}")
            for each in ranks
        ]
        return next(
            group for group, each in zip(made, ranks, strict=True) if self.coordinate.rank in each
        )

    def connect_first_stages(self, *, one_plan: bool = False) -> None:
        """Make :attr:`columns` and :attr:`same_plan_columns`, and set :attr:`column`, made by
        :meth:`create_groups`. ``one_plan``: all columns must run the same plan. Collective over all
        ranks."""
        self.column = self.get_group(("pp",))
        shape = self.coordinate.mesh
        of_columns = [shape.find_rank(0, column) for column in range(shape.columns)]
        found = [of_columns] if len(of_columns) > 1 else []
        if one_plan and found:
            found.append([*of_columns])
        elif shape.lockstep_size > 1:
            found += [
                ranks
                for ranks in shape.group_ranks(LOCKSTEP_DIMENSIONS)
                if shape.find_coordinate(ranks[0]).is_first
            ]
        for ranks in found:
            # Separate groups: other stages use those of the same dimensions for other sums.
            made = self.groups.create_group(ranks, backend="gloo", group_desc="pipemorph columns")
            if self.coordinate.rank not in ranks:
                continue
            if ranks is of_columns:
                self.columns = made
            else:
                self.same_plan_columns = made

    def broadcast_value(self, value: T, kind: Any) -> T:
        """Return the value of rank 0, of the type ``kind``, on every rank. Only at the start."""
        return self.gather_all(value, kind)[0]

    def gather_all(self, value: T, kind: Any) -> list[T]:
        """Gather the values of all ranks in rank order (:func:`gather_values`), at the start."""
        return gather_values(value, kind, self.control)

    def destroy_groups(self, *, clean: bool) -> None:
        """Destroy the groups of this world, see :meth:`ProcessGroups.destroy_all`. The default
        group stays: it belongs to the user, or ends with the interpreter.
        """
        if os.getpid() != self._process:
            return  # A forked child: the connections are its parent's.
        atexit.unregister(self.destroy_groups)
        self.groups.destroy_all(clean=clean)
        if hasattr(self, "control"):
            # The last references: dropping them waits for gloo's threads.
            self._made.clear()
            self._hierarchies.clear()
            self.column = self.columns = self.same_plan_columns = None
            vars(self).pop("all_ranks", None)
            del self.mesh, self.control
