"""The ranks of a job: the device mesh and the process groups of a pipeline."""

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

from pipemorph.api.mesh import DIMENSIONS, LOCKSTEP, Coordinate, Dimension
from pipemorph_trainer.topology.groups import Groups, carries_cpu, gather_values
from pipemorph_trainer.topology.hierarchy import Hierarchy, groups_of

T = TypeVar("T")
IN_ROUNDS = TorchVersion(torch.__version__) >= "2.15"
"""Whether ranks can make a group without the others. torch before it may name it differently on
each, if the script has made groups that some ranks have and others have not: they would wait for
ever. There the collectives of :class:`Hierarchy` go round one ring."""


@dataclass(eq=False)
class World:
    """The groups of a job. ``control``: all ranks, at the start, at checkpoints and after failures;
    ``everyone``: the same, for the small collectives of every iteration. ``column``: the ranks of
    this pipeline; None if it has one. ``columns``: the first stages of all pipelines; None on other
    stages, and for one pipeline. ``together``: those of them whose pipelines must run one plan;
    None if each may differ.

    No group is shared with the user, so that neither delays or reorders the other's collectives:
    ``owns_mesh`` says whether the groups of ``mesh`` are the pipeline's.
    """

    coordinate: Coordinate
    mesh: DeviceMesh
    groups: Groups
    control: dist.ProcessGroup
    secret: bytes
    owns_mesh: bool = True
    everyone: Hierarchy = field(init=False)
    column: dist.ProcessGroup | None = field(default=None, init=False)
    columns: dist.ProcessGroup | None = field(default=None, init=False)
    together: dist.ProcessGroup | None = field(default=None, init=False)
    _made: dict[tuple[Dimension, ...], dist.ProcessGroup] = field(default_factory=dict)
    _hierarchies: dict[tuple[Dimension, ...], Hierarchy] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._process = os.getpid()
        for group in self.mesh.get_all_groups() if self.owns_mesh else ():
            if group is not dist.GroupMember.WORLD:
                self.groups.adopt(group)
        # In case the script does not close the pipeline.
        atexit.register(self.leave, clean=False)

    def group(self, names: Iterable[Dimension]) -> dist.ProcessGroup | None:
        """The ranks that share all coordinates but those of ``names``, in rank order; None if this
        is the only one. :meth:`make_groups` has made it."""
        names = self._several(names)
        return self._made[names] if names else None

    def make_groups(self, wanted: Iterable[Iterable[Dimension]]) -> None:
        """Make groups for :meth:`group`. Collective: all ranks give the same."""
        for names in dict.fromkeys(map(self._several, wanted)):
            if names and names not in self._made:
                self._made[names] = self._make(names)

    def hierarchy(self, names: Iterable[Dimension]) -> Hierarchy | None:
        """As :meth:`group`, for small collectives in every iteration. :meth:`make_hierarchies` has
        made it."""
        names = self._several(names)
        return self._hierarchies[names] if names else None

    def make_hierarchies(self, wanted: Iterable[Iterable[Dimension]]) -> None:
        """Make :attr:`everyone`, and those for :meth:`hierarchy`. Collective: all ranks give the
        same."""
        mine, shape = self.coordinate.rank, self.coordinate.mesh
        for names in dict.fromkeys(map(self._several, (DIMENSIONS, *wanted))):
            if names in self._hierarchies or (not names and shape.world_size > 1):
                continue
            ranks = next((each for each in shape.groups(names) if mine in each), [mine])
            rounds = groups_of(mine, ranks) if IN_ROUNDS else [ranks]
            if len(ranks) == shape.world_size and len(rounds) == 1:
                found = [self.control]
            elif len(rounds) == 1:
                self.make_groups([names])
                found = [self._made[names]]
            else:
                # Only the ranks of a group wait for it: if all of a large job did, it would take
                # minutes.
                found = [
                    self.groups.new(
                        each, backend="gloo", use_local_synchronization=True,
                        group_desc=f"pipemorph {' × '.join(names)}, round {number}",
                    )
                    for number, each in enumerate(rounds)
                ]  # fmt: skip
            self._hierarchies[names] = Hierarchy(found)
        self.everyone = self._hierarchies[self._several(DIMENSIONS)]

    def _several(self, names: Iterable[Dimension]) -> tuple[Dimension, ...]:
        """Those of ``names`` with more than one rank, in the order of the dimensions."""
        wanted = frozenset(names)
        return tuple(
            n for n, size in self.coordinate.mesh.sizes.items() if n in wanted and size > 1
        )

    def _make(self, names: tuple[Dimension, ...]) -> dist.ProcessGroup:
        shape = self.coordinate.mesh
        ranks = shape.groups(names)
        if len(ranks) == 1 and names == ("pp",):
            return self.control
        if self.owns_mesh and len(names) == 1:
            group: Any = self.mesh.get_group(names[0])
            # For a dimension with all ranks the mesh uses the default group, which is the user's.
            if group is not dist.GroupMember.WORLD and carries_cpu(group):
                return group  # type: ignore[no-any-return]
        made = [
            self.groups.new(each, group_desc=f"pipemorph {' × '.join(names)}") for each in ranks
        ]
        return next(
            group for group, each in zip(made, ranks, strict=True) if self.coordinate.rank in each
        )

    def connect_first_stages(self) -> None:
        """Make :attr:`columns` and :attr:`together`, and set :attr:`column`, which
        :meth:`make_groups` has made. Collective over all ranks."""
        self.column = self.group(("pp",))
        shape = self.coordinate.mesh
        of_columns = [shape.rank(0, column) for column in range(shape.columns)]
        found = [of_columns] if len(of_columns) > 1 else []
        if shape.lockstep > 1:
            found += [ranks for ranks in shape.groups(LOCKSTEP) if shape.coordinate(ranks[0]).first]
        for ranks in found:
            # Groups of their own: other stages use those of the same dimensions for other sums.
            made = self.groups.new(ranks, backend="gloo", group_desc="pipemorph columns")
            if self.coordinate.rank not in ranks:
                continue
            if ranks is of_columns:
                self.columns = made
            else:
                self.together = made

    def share(self, value: T, kind: Any) -> T:
        """The value of rank 0, of the type ``kind``, on every rank. Only at the start."""
        return self.tell_all(value, kind)[0]

    def tell_all(self, value: T, kind: Any) -> list[T]:
        """The values of all ranks, in rank order, see :func:`gather_values`. Only at the start."""
        return gather_values(value, kind, self.control)

    def leave(self, *, clean: bool) -> None:
        """Destroy the groups of this world; see :meth:`Groups.destroy`.

        The default group stays: it belongs to the user, or ends with the interpreter.
        """
        if os.getpid() != self._process:
            return  # A forked child: the connections are its parent's.
        atexit.unregister(self.leave)
        self.groups.destroy(clean=clean)
        if hasattr(self, "control"):
            # The last references: dropping them waits for gloo's threads.
            self._made.clear()
            self._hierarchies.clear()
            self.column = self.columns = self.together = None
            vars(self).pop("everyone", None)
            del self.mesh, self.control
