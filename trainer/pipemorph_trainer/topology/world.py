"""The ranks of a job: process groups and device mesh (``dp`` × ``pp``)."""

from __future__ import annotations

import atexit
import os
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from pipemorph.errors import InputError
from pipemorph_trainer.context import TrainerContext
from pipemorph_trainer.topology.coordinate import Coordinate
from pipemorph_trainer.topology.groups import Groups


@dataclass(eq=False)
class World:
    """The groups of a job. ``control``: all ranks, for the small collectives of every iteration.

    No group is shared with the user, so that neither delays or reorders the other's collectives.
    """

    coordinate: Coordinate
    mesh: DeviceMesh
    groups: Groups
    control: dist.ProcessGroup
    stages: dist.ProcessGroup
    replicas: dist.ProcessGroup | None
    secret: bytes

    def __post_init__(self) -> None:
        self._process = os.getpid()
        # In case the script does not close the pipeline.
        atexit.register(self.leave, clean=False)

    def share(self, value: Any) -> Any:
        """The value of rank 0, on every rank. Only at the start."""
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

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
            del self.mesh, self.control, self.stages, self.replicas


def coordinate_of(context: TrainerContext, stages: int) -> Coordinate:
    """The coordinate of a rank. Raises :class:`InputError` if ``stages`` does not divide the
    world."""
    if context.world_size % stages:
        raise InputError(
            f"{context.world_size} ranks cannot be cut into pipelines of {stages} stages; start "
            f"a multiple of {stages} ranks"
        )
    return Coordinate(
        rank=context.rank,
        stage=context.rank % stages,
        stages=stages,
        replica=context.rank // stages,
        replicas=context.world_size // stages,
    )
