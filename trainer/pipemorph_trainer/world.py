"""The ranks of a job: process group, device mesh (``dp`` × ``pp``) and what they share."""

from __future__ import annotations

import atexit
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pipemorph.errors import InputError
from pipemorph_trainer.addresses import in_url
from pipemorph_trainer.context import TrainerContext
from pipemorph_trainer.groups import Groups, destroy_at_exit
from pipemorph_trainer.links import Seat
from pipemorph_trainer.start import Start, exchange

SETUP_SECONDS = 300.0
"""How long ranks may take to find each other."""


@dataclass(eq=False)
class World:
    """``control`` is a group of all ranks for the small collectives of every iteration.

    All groups are apart from the user's, so that neither can hold up or reorder the other.
    """

    seat: Seat
    mesh: DeviceMesh
    groups: Groups
    control: dist.ProcessGroup
    stages: dist.ProcessGroup
    replicas: dist.ProcessGroup | None
    secret: bytes
    starts: Sequence[Start]
    """What each rank brought, in their order."""

    def __post_init__(self) -> None:
        self._process = os.getpid()
        # For a script that closes no pipeline.
        atexit.register(self.leave, clean=False)

    def share(self, value: Any) -> Any:
        """Rank 0's value, on every rank. Start-up only."""
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def leave(self, *, clean: bool) -> None:
        """End the groups that were made for this world; see :meth:`Groups.destroy`.

        The default group stays: it is the user's, or ends with the interpreter.
        """
        if os.getpid() != self._process:
            return  # A forked child: the connections are its parent's.
        atexit.unregister(self.leave)
        self.groups.destroy(clean=clean)
        if hasattr(self, "control"):
            # The last references: dropping them waits for gloo's threads.
            del self.mesh, self.control, self.stages, self.replicas


def seat_of(context: TrainerContext, stages: int) -> Seat:
    """Raises :class:`InputError` if ``stages`` does not divide the world."""
    if context.world_size % stages:
        raise InputError(
            f"{context.world_size} ranks cannot be cut into pipelines of {stages} stages; start "
            f"a multiple of {stages} ranks"
        )
    return Seat(
        rank=context.rank,
        stage=context.rank % stages,
        stages=stages,
        replica=context.rank // stages,
        replicas=context.world_size // stages,
    )


def join(context: TrainerContext, device: torch.device, start: Start) -> World:
    """Join the job's process group (or use the one there is), tell the other ranks of ``start``
    and hear of theirs, and cut the group in ``dp`` and ``pp``.

    Raises :class:`InputError`, on all ranks alike, if any of them refuses or if their starts do
    not fit together (:func:`~pipemorph_trainer.start.check_starts`); and if there is a process
    group that carries no CPU tensors.
    """
    groups = Groups()
    try:
        if not dist.is_initialized():
            _init_process_group(context, device)
        elif "cpu:" not in dist.get_backend_config():
            raise InputError(
                f"the process group was made with {dist.get_backend_config()}; it has to carry CPU "
                "tensors as well: init_process_group('cpu:gloo,cuda:nccl'), or leave it to Pipeline"
            )
        control = groups.new(backend="gloo", group_desc="pipemorph control")
        # Without a secret from the host, the ranks trust whom the process group let in.
        secret = b"" if context.secret else secrets.token_bytes(32)
        starts = exchange(replace(start, secret=secret), control)
    except InputError:
        groups.destroy(clean=True)
        raise
    except RuntimeError as error:
        if not start.refusal:
            raise
        # The others did not come to hear it.
        raise InputError(start.refusal) from error
    seat = seat_of(context, start.stages)
    mesh = init_device_mesh(device.type, (seat.replicas, seat.stages), mesh_dim_names=("dp", "pp"))
    for group in mesh.get_all_groups():
        # For a dimension of all ranks a mesh has the default group, which is not ours.
        if group is not dist.GroupMember.WORLD:
            groups.adopt(group)
    # Rank 0 may fail next and end, with the store that the others are still using.
    dist.barrier(control)
    return World(
        seat=seat,
        mesh=mesh,
        groups=groups,
        control=control,
        stages=mesh["pp"].get_group() if seat.replicas > 1 else control,
        replicas=_replicas(mesh, groups, seat.stages) if seat.replicas > 1 else None,
        secret=context.secret or starts[0].secret,
        starts=starts,
    )


def _replicas(mesh: DeviceMesh, groups: Groups, stages: int) -> dist.ProcessGroup:
    if stages == 1:
        return groups.new(group_desc="pipemorph replicas")
    return mesh["dp"].get_group()


def _init_process_group(context: TrainerContext, device: torch.device) -> None:
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=SETUP_SECONDS)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # torchrun already serves the store; its variables say where.
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(
            backend,
            init_method=f"tcp://{in_url(context.master_addr)}:{context.master_port}",
            rank=context.rank,
            world_size=context.world_size,
            timeout=timeout,
        )
    assert dist.GroupMember.WORLD is not None
    destroy_at_exit(dist.GroupMember.WORLD)
