"""The links of one stage: meeting the neighbours and what each end of a link has.

Set up once, before the first iteration: groups from the device mesh, one socket per link, and
where the engine is built and wanted one engine link beside it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from pipemorph.api.spec import Fault, Rdma
from pipemorph.planning import Path
from pipemorph_trainer.errors import PipelineError
from pipemorph_trainer.links import peer_socket
from pipemorph_trainer.links.channels.arrival import OpClock, PeerClock
from pipemorph_trainer.links.channels.delegated import DelegatedIncoming, DelegatedOutgoing
from pipemorph_trainer.links.channels.direct import (
    MAX_OUTSTANDING,
    OUTSTANDING_ON_DEVICE,
    POSTED_ON_DEVICE,
    DirectIncoming,
    DirectOutgoing,
)
from pipemorph_trainer.links.channels.edges import make_edges
from pipemorph_trainer.links.channels.failover import Failover
from pipemorph_trainer.links.channels.fault_injection import Severer, Shaper, shaping
from pipemorph_trainer.links.channels.message import Direction
from pipemorph_trainer.links.channels.shared_queue import SharedQueue
from pipemorph_trainer.links.channels.staging import StagedIncoming, StagedOutgoing, Staging
from pipemorph_trainer.links.link import LinkEnd, Neighbourhood
from pipemorph_trainer.links.peer_socket import PeerSocket
from pipemorph_trainer.links.poller import Poller
from pipemorph_trainer.links.recorder import LinkRecorder
from pipemorph_trainer.topology import addresses
from pipemorph_trainer.topology.accelerator import accelerator_of
from pipemorph_trainer.topology.coordinate import Coordinate
from pipemorph_trainer.topology.gpu_affinity import near
from pipemorph_trainer.topology.groups import Groups
from pipemorph_trainer.topology.machine import this_machine

if TYPE_CHECKING:
    import pipemorph_trainer._engine as _engine

log = logging.getLogger("pipemorph.trainer")


@dataclass(frozen=True)
class EngineOptions:
    """How to make the engine; ``transport`` is auto, tcp, shm or rdma. The rest is as in
    :class:`pipemorph.api.spec.Transport`."""

    job: str
    transport: str = "auto"
    queues: int = 8
    require: str | None = None
    rdma: Rdma = field(default_factory=Rdma)


def engine_module() -> Any | None:
    """The compiled engine, None where it is not built."""
    try:
        import pipemorph_trainer._engine as _engine
    except ImportError:
        return None
    return _engine


def _shared_queue(coordinate: Coordinate, faults: Sequence[Fault]) -> SharedQueue | None:
    """The queue of the link to the next stage, made by the lower stage where it is needed."""
    own = [f for f in faults if f.link == coordinate.stage and f.replica == coordinate.replica]
    return SharedQueue.create() if shaping(own) and not coordinate.last else None


def meet(
    coordinate: Coordinate,
    *,
    secret: bytes,
    master_addr: str,
    faults: Sequence[Fault],
    poller: Poller,
    op_clock: OpClock,
    device: torch.device,
    engine_options: EngineOptions | None,
    deadline: float,
    setup_seconds: float = 120.0,
    on_block: Callable[[LinkEnd, int, int], None],
    on_unblock: Callable[[], None],
    half_duplex: bool = False,
    max_sends: int | None = None,
    groups: Groups,
) -> Neighbourhood:
    """Connect to both neighbours. Collective: every rank calls it.

    ``half_duplex``: both directions of a direct path share one communicator and one queue.
    ``max_sends``: of a direct path, outstanding at a time; None: as few as is usual.
    ``groups``: where the groups of the direct paths are made.
    Raises :class:`PipelineError` naming the neighbour that did not come.
    """
    module = engine_module() if engine_options is not None else None
    hosts: list[Any] = [None] * (coordinate.stages * coordinate.replicas)
    here = this_machine()
    own_address = addresses.own_address(master_addr)
    dist.all_gather_object(hosts, (here, own_address))
    one_loopback = all(here.shares_loopback(machine) for machine, _ in hosts)
    bind = "127.0.0.1" if one_loopback else addresses.everywhere(own_address)
    listener = peer_socket.listen(bind)
    engine = None
    if module is not None and engine_options is not None:
        engine = module.Engine(
            job=f"{engine_options.job}/{coordinate.replica}",
            rank=coordinate.rank,
            secret=secret,
            host=bind,
            queues=engine_options.queues,
            transport=engine_options.transport,
            require=engine_options.require,
            rdma_devices=engine_options.rdma.devices,
            gid_index=(
                -1 if engine_options.rdma.gid_index is None else engine_options.rdma.gid_index
            ),
            traffic_class=engine_options.rdma.traffic_class,
            service_level=engine_options.rdma.service_level,
            **near(device),
        )
        if engine.rails_trouble is not None:
            wanted = engine_options.transport == "rdma"
            log.log(
                logging.WARNING if wanted else logging.DEBUG,
                "%s: RDMA rails in use: %s; %s",
                coordinate,
                ", ".join(engine.rails) or "none",
                engine.rails_trouble,
            )
        poller.watch_eventfd(engine.bell_fd)
    accelerator = accelerator_of(device)
    staging = None
    if engine is not None and accelerator is not None:
        staging = Staging(accelerator, wake=poller.wake, deadline=deadline)
    ports: list[Any] = [None] * len(hosts)
    if half_duplex and device.type == "cuda":
        # Receives are posted ahead of sends here; on one NCCL stream that would deadlock.
        raise PipelineError(
            "transport.directDuplex is half, which is for comparisons on the CPU; use full on CUDA"
        )
    queue = _shared_queue(coordinate, faults) if half_duplex else None
    mine = (
        listener.getsockname()[1],
        engine.port if engine is not None else None,
        queue.name if queue is not None else None,
    )
    dist.all_gather_object(ports, mine)

    def address(rank: int) -> str:
        machine, towards_rank_0 = hosts[rank]
        return "127.0.0.1" if here.shares_loopback(machine) else str(towards_rank_0)

    def connect(peer: int, *, dials: bool) -> PeerSocket:
        if dials:
            return peer_socket.dial(
                address(peer), ports[peer][0],
                rank=coordinate.rank, peer_rank=peer, secret=secret, timeout=setup_seconds,
            )  # fmt: skip
        return peer_socket.accept(
            listener, rank=coordinate.rank, peer_rank=peer, secret=secret, timeout=setup_seconds
        )

    def end(link: int, peer: int, receives: Direction, socket: PeerSocket) -> LinkEnd:
        own = [f for f in faults if f.link == link and f.replica == coordinate.replica]
        recorder = LinkRecorder(link, coordinate.replica, receives)
        shared = queue if receives is Direction.BACKWARD else None
        if receives is Direction.FORWARD and ports[peer][2] is not None:
            shared = SharedQueue.open(ports[peer][2], link)
        shaper = Shaper(own, Direction(1 - receives), shared)
        clock = PeerClock()
        engine_link = None
        if engine is not None and ports[peer][1] is not None:
            engine_link = _engine_link(
                engine, link, peer, address(peer), ports[peer][1],
                dials=receives is Direction.BACKWARD, timeout=setup_seconds,
            )  # fmt: skip

        def cut(what: str) -> None:
            assert engine_link is not None
            log.warning("%s: fault trace cuts the %s connection of link %d", coordinate, what, link)
            if what == "direct":
                direct[0].abandon()
            elif what == "data":
                engine_link.sever_data_path()
            else:
                engine_link.sever_control()

        # One end cuts, and it is the lower stage's.
        severs = own if receives is Direction.BACKWARD else []
        made = LinkEnd(
            link=link,
            peer_rank=peer,
            peer_stage=coordinate.stage + (1 if receives is Direction.BACKWARD else -1),
            receives=receives,
            socket=socket,
            recorder=recorder,
            shaper=shaper,
            severer=Severer(severs, cut if engine_link is not None else None),
            peer_clock=clock,
            direct_transport="nccl" if device.type == "cuda" else "gloo",
        )
        made.engine_link = engine_link
        made.same_host = here.shares_clock(hosts[peer][0])
        groups = edge_groups[link]
        direct = (
            DirectIncoming(
                group=groups[receives], peer=peer, direction=receives, socket=socket, poller=poller,
                op_clock=op_clock, peer_clock=clock, recorder=recorder, device=device,
                accelerator=accelerator if device.type == "cuda" else None,
                posted=POSTED_ON_DEVICE if device.type == "cuda" else None,
            ),
            DirectOutgoing(
                group=groups[made.sends], peer=peer, direction=made.sends, socket=socket,
                shaper=shaper, on_block=partial(on_block, made), on_unblock=on_unblock,
                deadline=deadline, device=device, asks=device.type == "cuda",
                max_outstanding=direct_sends,
            ),
        )  # fmt: skip
        if engine_link is not None and engine_options is not None:
            receiver: dict[str, Any] = {
                "link": engine_link, "direction": receives, "peer_clock": clock,
                "recorder": recorder,
            }  # fmt: skip
            sender: dict[str, Any] = {
                "link": engine_link, "direction": made.sends, "shaper": shaper,
                "queues": engine_options.queues, "on_block": partial(on_block, made),
                "on_unblock": on_unblock,
            }  # fmt: skip
            delegated: tuple[DelegatedIncoming, DelegatedOutgoing]
            if staging is None:
                delegated = DelegatedIncoming(**receiver), DelegatedOutgoing(**sender)
            else:
                name = f"link {link} (delegated)"
                delegated = (
                    StagedIncoming(staging=staging, name=name, **receiver),
                    StagedOutgoing(staging=staging, name=name, **sender),
                )
            made.add(Path.DELEGATED, *delegated)
            made.failover = Failover(f"{coordinate}, link {link}", socket, direct, delegated)
            made.add(Path.DIRECT, made.failover.incoming, made.failover.outgoing)
        else:
            made.add(Path.DIRECT, *direct)
        made.select(Path.DIRECT)
        poller.watch_socket(socket.fileno())
        return made

    direct_sends = OUTSTANDING_ON_DEVICE if device.type == "cuda" else MAX_OUTSTANDING
    if max_sends is not None:
        direct_sends = max_sends
    edge_groups = make_edges(coordinate, device, deadline, groups)
    up_socket = down_socket = None
    with listener:
        if not coordinate.last:
            down_socket = connect(coordinate.rank + 1, dials=True)
        if not coordinate.first:
            up_socket = connect(coordinate.rank - 1, dials=False)
    # From the first link to the last, so that nobody waits for a neighbour out of turn.
    upstream = downstream = None
    if up_socket is not None:
        upstream = end(coordinate.stage - 1, coordinate.rank - 1, Direction.FORWARD, up_socket)
    if down_socket is not None:
        downstream = end(coordinate.stage, coordinate.rank + 1, Direction.BACKWARD, down_socket)
    if engine is not None:
        for reason in engine.refused():
            log.warning("%s: engine refused a connection: %s", coordinate, reason)
    return Neighbourhood(upstream, downstream, engine, staging)


def _engine_link(
    engine: _engine.Engine, link: int, peer: int, host: str, port: int,
    *, dials: bool, timeout: float,
) -> _engine.Link:  # fmt: skip
    try:
        if dials:
            return engine.connect(
                peer_rank=peer, link_id=link, host=host, port=port, timeout=timeout
            )
        return engine.accept(peer_rank=peer, link_id=link, timeout=timeout)
    except RuntimeError as error:
        raise PipelineError(f"engine link {link} to rank {peer}: {error}") from error
