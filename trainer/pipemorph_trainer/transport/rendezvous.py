"""Rendezvous of the ranks of a pipeline with their neighbours.

It runs once, before the first iteration, and creates the groups of direct routes, one control
socket per link and, if the engine is built and needed, one engine link per link.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from pipemorph.planning import Route
from pipemorph.spec.mesh import Coordinate
from pipemorph_trainer.errors import PipelineError
from pipemorph_trainer.topology import addresses
from pipemorph_trainer.topology.accelerator import describe_queue_shortage, get_accelerator
from pipemorph_trainer.topology.addresses import Machine, identify_machine
from pipemorph_trainer.topology.gpu_affinity import get_gpu_uuid
from pipemorph_trainer.topology.groups import ProcessGroups, gather_values
from pipemorph_trainer.transport import control_socket
from pipemorph_trainer.transport.channels.delegated import DelegatedIncoming, DelegatedOutgoing
from pipemorph_trainer.transport.channels.direct import (
    MAX_OUTSTANDING,
    OUTSTANDING_ON_DEVICE,
    POSTED_ON_DEVICE,
    DirectIncoming,
    DirectOutgoing,
)
from pipemorph_trainer.transport.channels.direct_groups import SETUP_SECONDS, make_direct_groups
from pipemorph_trainer.transport.channels.failover import Failover
from pipemorph_trainer.transport.channels.send_timestamps import SendTimestamps
from pipemorph_trainer.transport.channels.staging import StagedIncoming, StagedOutgoing, Staging
from pipemorph_trainer.transport.control_socket import ControlSocket
from pipemorph_trainer.transport.engine_setup import EngineOptions, connect_engine_link, make_engine
from pipemorph_trainer.transport.fault_injection import FaultTrace, LinkFaults, SharedQueue
from pipemorph_trainer.transport.link import LinkEnd, RankLinks, StageLinks
from pipemorph_trainer.transport.link_recorder import OpClock
from pipemorph_trainer.transport.local_link import make_local_link
from pipemorph_trainer.transport.message import Direction, SenderLoad
from pipemorph_trainer.transport.poller import Poller

if TYPE_CHECKING:
    import pipemorph_trainer._engine as _engine

log = logging.getLogger("pipemorph.trainer")


@dataclass(frozen=True)
class LinkConfig:
    """Configuration shared by all links of a rank.

    ``secret``: shared by both ends of a connection. ``deadline``: longest wait for a message,
    seconds. ``begin_wait(what, *args)`` and ``end_wait()`` are called around a send that waits for
    ``what(*args)``. ``load``: of this rank. ``max_sends``: most outstanding sends of a direct
    route; None: the default. ``engine``: options of the engine; None: there is none.

    Raises :class:`PipelineError` for faults in half duplex on CUDA.
    """

    secret: bytes
    device: torch.device
    deadline: float
    poller: Poller
    op_clock: OpClock
    begin_wait: Callable[..., None]
    end_wait: Callable[[], None]
    faults: FaultTrace = field(default_factory=FaultTrace)
    load: SenderLoad = field(default_factory=SenderLoad)
    max_sends: int | None = None
    engine: EngineOptions | None = None

    def __post_init__(self) -> None:
        if self.faults.half_duplex and self.cuda:
            # Receives are posted before sends; on one NCCL stream that would deadlock.
            raise PipelineError(
                "direct_duplex is half, which is for comparisons on the CPU; use full on CUDA"
            )

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def connect_control_socket(
        self, host: str, port: int, *, rank: int, peer: int
    ) -> ControlSocket:
        return control_socket.connect_to_peer(
            host, port, rank=rank, peer_rank=peer, secret=self.secret, timeout=SETUP_SECONDS
        )

    def accept_control_socket(
        self, listener: socket.socket, *, rank: int, peer: int
    ) -> ControlSocket:
        return control_socket.accept_peer(
            listener, rank=rank, peer_rank=peer, secret=self.secret, timeout=SETUP_SECONDS
        )

    def make_wait_callbacks(self, end: LinkEnd) -> dict[str, Callable[..., None]]:
        """Make a channel's callbacks around a send that waits."""
        return {
            "on_block": partial(self.begin_wait, end.describe_send_wait),
            "on_unblock": self.end_wait,
        }

    def make_direct_channels(
        self,
        end: LinkEnd,
        groups: Mapping[Direction, dist.ProcessGroup],
        departures: SendTimestamps | None,
    ) -> tuple[DirectIncoming, DirectOutgoing]:
        """Make both directions of the direct route of a link, with one group each.
        ``departures``: of this rank's messages; None on the CPU."""
        accelerator = get_accelerator(self.device)
        usual = MAX_OUTSTANDING if accelerator is None else OUTSTANDING_ON_DEVICE
        return (
            DirectIncoming(
                group=groups[end.receives], peer=end.peer_rank, direction=end.receives,
                socket=end.socket, poller=self.poller, op_clock=self.op_clock,
                peer_clock=end.peer_clock, recorder=end.recorder, device=self.device,
                accelerator=accelerator,
                posted=None if accelerator is None else POSTED_ON_DEVICE,
            ),
            DirectOutgoing(
                group=groups[end.sends], peer=end.peer_rank, direction=end.sends,
                socket=end.socket, hold=end.faults.hold_message if end.faults.has_delays else None,
                load=end.faults.load, deadline=self.deadline,
                device=self.device, departures=departures, **self.make_wait_callbacks(end),
                max_outstanding=usual if self.max_sends is None else self.max_sends,
            ),
        )  # fmt: skip


class _PeerAddresses(NamedTuple):
    """Addresses of a rank."""

    machine: Machine
    address: str
    ports: Mapping[int, int]
    """Ports by link, so that connections of different links cannot be confused."""
    engine_port: int | None
    queues: Mapping[int, str]
    """Shared queues by link."""
    gpu: str | None
    """UUID of its GPU; None on the CPU."""


class Rendezvous:
    """Rendezvous of a rank with its neighbours, in the steps of :meth:`connect_links`."""

    def __init__(
        self,
        coordinate: Coordinate,
        config: LinkConfig,
        master_addr: str,
        groups: ProcessGroups,
        control: dist.ProcessGroup | None,
    ) -> None:
        self._coordinate, self._config, self._groups = coordinate, config, groups
        self._control = control
        placed, here = coordinate.mesh.pp_indices, coordinate.index_along("pp")
        links = range(coordinate.stages - 1)
        self._local_links = [i for i in links if placed[i] == placed[i + 1] == here]
        self._links_below = [i for i in links if placed[i] == here and placed[i + 1] != here]
        """Links whose forward-sending end is at this rank."""
        self._links_above = [i for i in links if placed[i] != here and placed[i + 1] == here]
        address = addresses.find_own_address(master_addr)
        self._mine = _PeerAddresses(
            identify_machine(), address, {}, None, {}, get_gpu_uuid(config.device)
        )
        self._peers: list[_PeerAddresses] = []
        self._engine: _engine.Engine | None = None
        self._staging: Staging | None = None
        self._send_timestamps: SendTimestamps | None = None
        self._queues: dict[int, SharedQueue] = {}
        self._edges: dict[int, dict[Direction, dist.ProcessGroup]] = {}

    def connect_links(self) -> RankLinks:
        """Connect the links. Collective over all ranks. Raises :class:`PipelineError`, which names
        the neighbour that did not connect."""
        rank, config, place = self._coordinate.rank, self._config, self._coordinate
        host = self.find_listen_host()
        controls: dict[int, ControlSocket] = {}
        across = sorted(self._links_below + self._links_above)
        with ExitStack() as stack:
            listeners = {
                link: stack.enter_context(control_socket.open_listener(host))
                for link in self._links_above
            }
            self.make_shared_resources(host)
            self.exchange_addresses({i: at.getsockname()[1] for i, at in listeners.items()})
            self._edges = make_direct_groups(
                place, config.device, config.deadline, self._groups,
                gpus=[peer.gpu for peer in self._peers],
            )  # fmt: skip
            # All ranks follow the order of the links, here and below, so that no two ranks wait for
            # each other.
            for link in across:
                if link in listeners:
                    peer = place.find_rank_at_stage(link)
                    controls[link] = config.accept_control_socket(
                        listeners[link], rank=rank, peer=peer
                    )
                else:
                    peer = place.find_rank_at_stage(link + 1)
                    port = self._peers[peer].ports[link]
                    controls[link] = config.connect_control_socket(
                        self._find_address(peer), port, rank=rank, peer=peer
                    )
        of = {stage: StageLinks() for stage in place.held_stages}
        ends = []
        for link in across:
            if link in self._links_above:
                end = of[link + 1].upstream = self.make_link_end(
                    link, Direction.FORWARD, controls[link]
                )
            else:
                end = of[link].downstream = self.make_link_end(
                    link, Direction.BACKWARD, controls[link]
                )
            ends.append(end)
        for link in self._local_links:
            of[link].downstream, of[link + 1].upstream = make_local_link(link, rank)
        if self._engine is not None:
            for reason in self._engine.refused():
                log.warning("%s: engine refused a connection: %s", place, reason)
        return RankLinks(of, ends, self._engine, self._staging, self._send_timestamps)

    def find_listen_host(self) -> str:
        """Exchange machines and addresses. Returns the address to listen on: loopback if all ranks
        share it."""
        self._gather_peers(self._mine)
        if all(self._mine.machine.shares_loopback(peer.machine) for peer in self._peers):
            return "127.0.0.1"
        elsewhere = [
            peer.address
            for peer in self._peers
            if not self._mine.machine.shares_loopback(peer.machine)
        ]
        if elsewhere:
            found = addresses.find_reachable_address(self._mine.address, elsewhere)
            self._mine = self._mine._replace(address=found)
        return addresses.get_wildcard_address(self._mine.address)

    def make_shared_resources(self, host: str) -> None:
        """Create the engine, staging and departures that the links of this rank share, and the
        queues of half duplex."""
        config, accelerator = self._config, get_accelerator(self._config.device)
        if accelerator is not None:
            self._send_timestamps = SendTimestamps(accelerator)
            if why := describe_queue_shortage():
                log.warning("%s: %s", self._coordinate, why)
        self._engine = make_engine(
            config.engine, self._coordinate,
            secret=config.secret, host=host, device=config.device,
        )  # fmt: skip
        if self._engine is not None:
            config.poller.watch_eventfd(self._engine.notifier_fd)
            if accelerator is not None:
                self._staging = Staging(
                    accelerator, wake=config.poller.wake, deadline=config.deadline
                )
        # The lower stage makes the queue of a link.
        for link in self._links_below:
            queue = config.faults.make_shared_queue(link, self._coordinate.column)
            if queue is not None:
                self._queues[link] = queue

    def exchange_addresses(self, ports: Mapping[int, int]) -> None:
        """Exchange the listening ports of all ranks. ``ports``: of this one, by link."""
        self._mine = self._mine._replace(
            ports=ports,
            engine_port=self._engine.port if self._engine is not None else None,
            queues={link: queue.name for link, queue in self._queues.items()},
        )
        self._gather_peers(self._mine)

    def make_link_end(self, link: int, receives: Direction, control: ControlSocket) -> LinkEnd:
        """Make this rank's end of a link whose control socket is connected."""
        config, column = self._config, self._coordinate.column
        lower = receives is Direction.BACKWARD
        queue = self._queues.get(link)
        peer = self._peers[control.peer_rank]
        if link in peer.queues:
            queue = SharedQueue.open(peer.queues[link], link)
        faults = LinkFaults(
            config.faults.find_link_faults(link, column),
            Direction(1 - receives),
            queue,
            config.load,
        )
        end = LinkEnd(
            link, receives, control, replica=column, faults=faults,
            direct_transport="nccl" if config.cuda else "gloo",
        )  # fmt: skip
        end.same_host = self._mine.machine.shares_clock(peer.machine)
        end.peer_clock.known = end.same_host
        if self._engine is not None and peer.engine_port is not None:
            end.engine_link = connect_engine_link(
                self._engine, link, end.peer_rank, self._find_address(end.peer_rank),
                peer.engine_port, dials=lower, timeout=SETUP_SECONDS,
            )  # fmt: skip
        groups = self._edges.get(link)
        direct: Any = (
            None
            if groups is None
            else config.make_direct_channels(end, groups, self._send_timestamps)
        )
        delegated = None
        if end.engine_link is not None:
            faults.cut = partial(
                self._cut_connection, end, direct[0] if direct is not None else None
            )
            delegated = self._make_delegated_channels(end, end.engine_link)
            end.add_route(Route.DELEGATED, *delegated)
        if direct is not None and delegated is not None:
            name = f"{self._coordinate}, link {link}"
            end.failover = Failover(name, control, direct, delegated)
            direct = end.failover.incoming, end.failover.outgoing
        if direct is not None:
            end.add_route(Route.DIRECT, *direct)
        else:
            end.no_direct = (
                f"ranks {self._coordinate.rank} and {end.peer_rank} share GPU {self._mine.gpu}, "
                "and NCCL needs one for each rank"
            )
            if delegated is None:
                raise PipelineError(
                    f"link {link} has no route: {end.no_direct}, and there is no transfer engine; "
                    "give each rank a GPU, or build the engine and set transport.route: delegated"
                )
        end.select_route(Route.DIRECT if direct is not None else Route.DELEGATED)
        config.poller.watch_socket(control.fileno())
        return end

    def _make_delegated_channels(
        self, end: LinkEnd, engine_link: _engine.Link
    ) -> tuple[DelegatedIncoming, DelegatedOutgoing]:
        config = self._config
        assert config.engine is not None
        receiver: dict[str, Any] = {
            "link": engine_link, "direction": end.receives, "peer_clock": end.peer_clock,
            "recorder": end.recorder,
        }  # fmt: skip
        sender: dict[str, Any] = {
            "link": engine_link, "direction": end.sends, "hold": end.faults.hold_message,
            "queues": config.engine.queues, **config.make_wait_callbacks(end),
        }  # fmt: skip
        if self._staging is None:
            return DelegatedIncoming(**receiver), DelegatedOutgoing(**sender)
        name = f"link {end.link} (delegated)"
        return (
            StagedIncoming(staging=self._staging, name=name, **receiver),
            StagedOutgoing(staging=self._staging, name=name, **sender),
        )

    def _cut_connection(self, end: LinkEnd, direct: DirectIncoming | None, what: str) -> None:
        """Break a connection of a link for a fault trace."""
        assert end.engine_link is not None
        if what == "direct" and direct is None:
            log.warning(
                "%s: fault trace: link %d has no direct connection to cut, since %s",
                self._coordinate, end.link, end.no_direct,
            )  # fmt: skip
            return
        log.warning(
            "%s: fault trace cuts the %s connection of link %d", self._coordinate, what, end.link
        )
        if what == "direct":
            assert direct is not None
            direct.abort_connection()
        elif what == "data":
            end.engine_link.sever_data_path()
        else:
            end.engine_link.sever_control()

    def _find_address(self, rank: int) -> str:
        peer = self._peers[rank]
        return "127.0.0.1" if self._mine.machine.shares_loopback(peer.machine) else peer.address

    def _gather_peers(self, mine: _PeerAddresses) -> None:
        self._peers = gather_values(mine, _PeerAddresses, self._control)


def connect_neighbours(
    coordinate: Coordinate,
    config: LinkConfig,
    *,
    master_addr: str,
    groups: ProcessGroups,
    control: dist.ProcessGroup | None = None,
) -> RankLinks:
    """Connect a rank to its neighbours. ``groups``: receives the groups of direct routes;
    ``master_addr``: of rank 0; ``control``: group for the exchange of addresses (None: the default
    group). Collective, see :meth:`Rendezvous.connect_links`."""
    return Rendezvous(coordinate, config, master_addr, groups, control).connect_links()
