"""Process group of a job, and torch's ``DeviceMesh`` over it."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pipemorph.errors import InputError
from pipemorph.planning.ir import StagePlacement
from pipemorph.spec.mesh import DIMENSIONS, Dimension, MeshShape
from pipemorph_trainer.context import TrainerContext
from pipemorph_trainer.topology.addresses import format_for_url, is_loopback
from pipemorph_trainer.topology.groups import destroy_at_exit

SETUP_SECONDS = 300.0
"""Timeout for the ranks to connect to each other."""
BACKLOG = 1024
"""Length of the accept queue of the ranks' store: all ranks connect at once."""


def make_mesh(
    context: TrainerContext,
    device: torch.device | str = "cpu",
    *,
    stages: int | None = None,
    stages_per_rank: int | None = None,
) -> DeviceMesh:
    """Make the ``DeviceMesh`` of the job, over which a stage is sharded before ``Pipeline`` gets
    it. Joins the process group if the script has not done so. Collective over all ranks.

    The dimensions are those of ``spec.parallelism`` with more than one rank, and ``pp``. Without a
    job file: ``stages`` (default: as many as fit on all ranks) × replicas, with
    ``stages_per_rank`` (default: 1).

    Raises :class:`InputError` if the stages cannot be divided over the ranks.
    """
    device = torch.device(device)
    shape = context.mesh_shape(stages, stages_per_rank)
    join_process_group(context, device)
    return create_device_mesh(shape, device)


def create_device_mesh(shape: MeshShape, device: torch.device) -> DeviceMesh:
    """Create the mesh of a shape, without dimensions of size 1 except ``pp``. Collective."""
    names = [name for name in shape.order if shape.sizes[name] > 1 or name == "pp"]
    if "pp" not in names:
        names.insert(0, "pp")
    sizes = tuple(shape.sizes[name] for name in names)
    return init_device_mesh(device.type, sizes, mesh_dim_names=tuple(names))


def read_mesh_shape(
    mesh: DeviceMesh,
    world_size: int,
    stages_per_rank: int = 1,
    placement: StagePlacement = "interleaved",
) -> MeshShape:
    """Read the sizes and the order of dimensions of a mesh. Raises :class:`InputError` if it does
    not number all ranks of the job in order, or has dimensions that a pipeline lacks."""
    names = mesh.mesh_dim_names or ()
    order: list[Dimension] = [name for name in DIMENSIONS if name in names]
    order.sort(key=names.index)
    if len(order) < len(names) or not names:
        shown = ", ".join(names) or "without names"
        raise InputError(f"mesh has the dimensions {shown}; expected {', '.join(DIMENSIONS)}")
    ranks = mesh.mesh.flatten().tolist()
    if ranks != list(range(world_size)):
        raise InputError(
            f"mesh numbers {len(ranks)} ranks as {_format_ranks(ranks)}; expected all {world_size} "
            "ranks in order, as init_device_mesh makes it"
        )
    in_column, replicas, shard, context, tensor = (
        mesh.size(names.index(name)) if name in names else 1 for name in DIMENSIONS
    )
    return MeshShape(
        in_column * stages_per_rank, replicas, shard, context, tensor, tuple(order),
        stages_per_rank, placement,
    )  # fmt: skip


def _format_ranks(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")


def join_process_group(context: TrainerContext, device: torch.device) -> bool:
    """Join the job's process group, unless the script has done so. The group need not carry CPU
    tensors (``init_process_group("nccl")``), since the pipeline's own groups do. Returns True if
    the group was made here. Raises :class:`InputError` if torch has no gloo."""
    if not dist.is_gloo_available():
        raise InputError(
            "torch was built without gloo, over which ranks agree on plans; install a build with it"
        )
    if device.type == "cuda" and device.index is not None:
        # Otherwise torch's DeviceMesh makes the GPU of LOCAL_RANK the current one.
        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch.cuda.set_device(device)
    if dist.is_initialized():
        return False
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=SETUP_SECONDS)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # torchrun already serves the store; its variables have the address.
        dist.init_process_group(backend, timeout=timeout)
    else:
        where: dict[str, Any] = {
            "init_method": f"tcp://{format_for_url(context.master_addr)}:{context.master_port}"
        }
        if is_loopback(context.master_addr):
            where = {"store": open_loopback_store(context, timeout)}
        dist.init_process_group(
            backend, rank=context.rank, world_size=context.world_size, timeout=timeout, **where
        )
    assert dist.GroupMember.WORLD is not None
    destroy_at_exit(dist.GroupMember.WORLD)
    return True


_stores: dict[tuple[int, str, int], TCPStore] = {}
"""Stores that this process serves until it ends, by process, host and port."""


def open_loopback_store(context: TrainerContext, timeout: timedelta) -> TCPStore:
    """Open the store of ranks on a single machine. Rank 0 serves it at a loopback address only:
    torch's own rendezvous listens at every address, and its store has no authentication. Raises
    :class:`InputError` on rank 0 if the port is in use."""
    host, port = context.master_addr, context.master_port
    serving: dict[str, Any] = {}
    if served := _stores.get((os.getpid(), host, port)):
        return served  # Of an earlier pipeline of this script; torch shares it by multi_tenant.
    if context.rank == 0:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            raise InputError(
                f"port {port} of {host} cannot be used for the ranks' store ({error.strerror});"
                " set MASTER_PORT to a port that is free"
            ) from None
        serving = {"master_listen_fd": listener.detach()}
    store = TCPStore(
        host, port, context.world_size, context.rank == 0, timeout, multi_tenant=True, **serving
    )
    if serving:
        _stores[os.getpid(), host, port] = store
    return store
