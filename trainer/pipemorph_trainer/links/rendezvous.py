"""Connects the ranks of a pipeline to their neighbours.

Done once, before the first iteration: creates the groups of direct routes, one control socket per
link and, if the engine is built and needed, one engine link.
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

from pipemorph.api.mesh import Coordinate
from pipemorph.planning import Route
from pipemorph_trainer.errors import PipelineError
from pipemorph_trainer.links import peer_socket
from pipemorph_trainer.links.channels.delegated import DelegatedIncoming, DelegatedOutgoing
from pipemorph_trainer.links.channels.departures import Departures
from pipemorph_trainer.links.channels.direct import (
    MAX_OUTSTANDING,
    OUTSTANDING_ON_DEVICE,
    POSTED_ON_DEVICE,
    DirectIncoming,
    DirectOutgoing,
)
from pipemorph_trainer.links.channels.edges import SETUP_SECONDS, make_edges
from pipemorph_trainer.links.channels.failover import Failover
from pipemorph_trainer.links.channels.staging import StagedIncoming, StagedOutgoing, Staging
from pipemorph_trainer.links.engine import EngineOptions, make_engine, make_engine_link
from pipemorph_trainer.links.faults import FaultTrace, LinkFaults, SharedQueue
from pipemorph_trainer.links.link import LinkEnd, Links, Neighbourhood
from pipemorph_trainer.links.message import Direction, SenderLoad
from pipemorph_trainer.links.peer_socket import PeerSocket
from pipemorph_trainer.links.poller import Poller
from pipemorph_trainer.links.recorder import OpClock
from pipemorph_trainer.links.within import join_within
from pipemorph_trainer.topology import addresses
from pipemorph_trainer.topology.accelerator import accelerator_of, too_few_queues
from pipemorph_trainer.topology.addresses import Machine, this_machine
from pipemorph_trainer.topology.gpu_affinity import gpu_of
from pipemorph_trainer.topology.groups import Groups, gather_values

if TYPE_CHECKING:
    import pipemorph_trainer._engine as _engine

log = logging.getLogger("pipemorph.trainer")


@dataclass(frozen=True)
class LinkConfig:
    """Configuration shared by all links of a rank.

    ``secret``: what both ends of a connection have to know. ``deadline``: longest wait for one
    message, seconds. ``begin_wait(what, *args)`` and ``end_wait()`` are called around a send that
    waits for ``what(*args)``.
    ``load``: of this rank. ``max_sends``: of a direct route, outstanding at a time; None: as few as
    is usual. ``engine``: how to make the engine; None: there is none.

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

    def dial(self, host: str, port: int, *, rank: int, peer: int) -> PeerSocket:
        return peer_socket.dial(
            host, port, rank=rank, peer_rank=peer, secret=self.secret, timeout=SETUP_SECONDS
        )

    def accept(self, listener: socket.socket, *, rank: int, peer: int) -> PeerSocket:
        return peer_socket.accept(
            listener, rank=rank, peer_rank=peer, secret=self.secret, timeout=SETUP_SECONDS
        )

    def told_of_sends(self, end: LinkEnd) -> dict[str, Callable[..., None]]:
        """Callbacks of a channel around a send that waits."""
        return {
            "on_block": partial(self.begin_wait, end.taking), "on_unblock": self.end_wait,
        }  # fmt: skip

    def direct_channels(
        self,
        end: LinkEnd,
        groups: Mapping[Direction, dist.ProcessGroup],
        departures: Departures | None,
    ) -> tuple[DirectIncoming, DirectOutgoing]:
        """Both directions of the direct route of a link, with one group each. ``departures``: of
        this rank's messages; None on the CPU."""
        accelerator = accelerator_of(self.device)
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
                socket=end.socket, hold=end.faults.hold if end.faults.holds else None,
                load=end.faults.load, deadline=self.deadline,
                device=self.device, departures=departures, **self.told_of_sends(end),
                max_outstanding=usual if self.max_sends is None else self.max_sends,
            ),
        )  # fmt: skip


class _Peer(NamedTuple):
    """Addresses of a rank."""

    machine: Machine
    address: str
    ports: Mapping[int, int]
    """By link, so that connections of different links cannot be confused."""
    engine_port: int | None
    queues: Mapping[int, str]
    """By link."""
    gpu: str | None
    """UUID of its GPU; None on the CPU."""


class Rendezvous:
    """Connects one rank to its neighbours, in the steps of :meth:`meet`."""

    def __init__(
        self,
        coordinate: Coordinate,
        config: LinkConfig,
        master_addr: str,
        groups: Groups,
        control: dist.ProcessGroup | None,
    ) -> None:
        self._coordinate, self._config, self._groups = coordinate, config, groups
        self._control = control
        placed, here = coordinate.mesh.placed, coordinate.along("pp")
        links = range(coordinate.stages - 1)
        self._within = [i for i in links if placed[i] == placed[i + 1] == here]
        self._below = [i for i in links if placed[i] == here and placed[i + 1] != here]
        """Links of which this rank has the end that sends forward."""
        self._above = [i for i in links if placed[i] != here and placed[i + 1] == here]
        address = addresses.own_address(master_addr)
        self._mine = _Peer(this_machine(), address, {}, None, {}, gpu_of(config.device))
        self._peers: list[_Peer] = []
        self._engine: _engine.Engine | None = None
        self._staging: Staging | None = None
        self._departures: Departures | None = None
        self._queues: dict[int, SharedQueue] = {}
        self._edges: dict[int, dict[Direction, dist.ProcessGroup]] = {}

    def meet(self) -> Links:
        """Connect. Collective over all ranks. Raises :class:`PipelineError`, which names the
        neighbour that did not connect."""
        rank, config, place = self._coordinate.rank, self._config, self._coordinate
        host = self.find_host()
        controls: dict[int, PeerSocket] = {}
        across = sorted(self._below + self._above)
        with ExitStack() as stack:
            listeners = {
                link: stack.enter_context(peer_socket.listen(host)) for link in self._above
            }
            self.make_shared(host)
            self.exchange_addresses({i: at.getsockname()[1] for i, at in listeners.items()})
            self._edges = make_edges(
                place, config.device, config.deadline, self._groups,
                gpus=[peer.gpu for peer in self._peers],
            )  # fmt: skip
            # In the order of the links on every rank, here and below, so that no two wait for each
            # other.
            for link in across:
                if link in listeners:
                    peer = place.at_stage(link)
                    controls[link] = config.accept(listeners[link], rank=rank, peer=peer)
                else:
                    peer = place.at_stage(link + 1)
                    port = self._peers[peer].ports[link]
                    controls[link] = config.dial(self._address(peer), port, rank=rank, peer=peer)
        of = {stage: Neighbourhood() for stage in place.held}
        ends = []
        for link in across:
            if link in self._above:
                end = of[link + 1].upstream = self.make_end(link, Direction.FORWARD, controls[link])
            else:
                end = of[link].downstream = self.make_end(link, Direction.BACKWARD, controls[link])
            ends.append(end)
        for link in self._within:
            of[link].downstream, of[link + 1].upstream = join_within(link, rank)
        if self._engine is not None:
            for reason in self._engine.refused():
                log.warning("%s: engine refused a connection: %s", place, reason)
        return Links(of, ends, self._engine, self._staging, self._departures)

    def find_host(self) -> str:
        """Exchange machines and addresses. Returns the address to listen on: loopback if
        possible."""
        self._gather(self._mine)
        if all(self._mine.machine.shares_loopback(peer.machine) for peer in self._peers):
            return "127.0.0.1"
        elsewhere = [
            peer.address
            for peer in self._peers
            if not self._mine.machine.shares_loopback(peer.machine)
        ]
        if elsewhere:
            found = addresses.for_other_machines(self._mine.address, elsewhere)
            self._mine = self._mine._replace(address=found)
        return addresses.everywhere(self._mine.address)

    def make_shared(self, host: str) -> None:
        """Create what the links of this rank share, the engine, staging and departures, and the
        queues of half duplex."""
        config, accelerator = self._config, accelerator_of(self._config.device)
        if accelerator is not None:
            self._departures = Departures(accelerator)
            if why := too_few_queues():
                log.warning("%s: %s", self._coordinate, why)
        self._engine = make_engine(
            config.engine, self._coordinate,
            secret=config.secret, host=host, device=config.device,
        )  # fmt: skip
        if self._engine is not None:
            config.poller.watch_eventfd(self._engine.bell_fd)
            if accelerator is not None:
                self._staging = Staging(
                    accelerator, wake=config.poller.wake, deadline=config.deadline
                )
        # The lower stage makes the queue of a link.
        for link in self._below:
            queue = config.faults.make_queue(link, self._coordinate.column)
            if queue is not None:
                self._queues[link] = queue

    def exchange_addresses(self, ports: Mapping[int, int]) -> None:
        """Exchange the listening ports of all ranks. ``ports``: of this one, by link."""
        self._mine = self._mine._replace(
            ports=ports,
            engine_port=self._engine.port if self._engine is not None else None,
            queues={link: queue.name for link, queue in self._queues.items()},
        )
        self._gather(self._mine)

    def make_end(self, link: int, receives: Direction, control: PeerSocket) -> LinkEnd:
        """This rank's end of a link whose control socket is connected."""
        config, column = self._config, self._coordinate.column
        lower = receives is Direction.BACKWARD
        queue = self._queues.get(link)
        peer = self._peers[control.peer_rank]
        if link in peer.queues:
            queue = SharedQueue.open(peer.queues[link], link)
        faults = LinkFaults(
            config.faults.of(link, column), Direction(1 - receives), queue, config.load
        )
        end = LinkEnd(
            link, receives, control, replica=column, faults=faults,
            direct_transport="nccl" if config.cuda else "gloo",
        )  # fmt: skip
        end.same_host = self._mine.machine.shares_clock(peer.machine)
        end.peer_clock.known = end.same_host
        if self._engine is not None and peer.engine_port is not None:
            end.engine_link = make_engine_link(
                self._engine, link, end.peer_rank, self._address(end.peer_rank), peer.engine_port,
                dials=lower, timeout=SETUP_SECONDS,
            )  # fmt: skip
        groups = self._edges.get(link)
        direct: Any = (
            None if groups is None else config.direct_channels(end, groups, self._departures)
        )
        delegated = None
        if end.engine_link is not None:
            faults.cut = partial(self._cut, end, direct[0] if direct is not None else None)
            delegated = self._delegated_channels(end, end.engine_link)
            end.add(Route.DELEGATED, *delegated)
        if direct is not None and delegated is not None:
            name = f"{self._coordinate}, link {link}"
            end.failover = Failover(name, control, direct, delegated)
            direct = end.failover.incoming, end.failover.outgoing
        if direct is not None:
            end.add(Route.DIRECT, *direct)
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
        end.select(Route.DIRECT if direct is not None else Route.DELEGATED)
        config.poller.watch_socket(control.fileno())
        return end

    def _delegated_channels(
        self, end: LinkEnd, engine_link: _engine.Link
    ) -> tuple[DelegatedIncoming, DelegatedOutgoing]:
        config = self._config
        assert config.engine is not None
        receiver: dict[str, Any] = {
            "link": engine_link, "direction": end.receives, "peer_clock": end.peer_clock,
            "recorder": end.recorder,
        }  # fmt: skip
        sender: dict[str, Any] = {
            "link": engine_link, "direction": end.sends, "hold": end.faults.hold,
            "queues": config.engine.queues, **config.told_of_sends(end),
        }  # fmt: skip
        if self._staging is None:
            return DelegatedIncoming(**receiver), DelegatedOutgoing(**sender)
        name = f"link {end.link} (delegated)"
        return (
            StagedIncoming(staging=self._staging, name=name, **receiver),
            StagedOutgoing(staging=self._staging, name=name, **sender),
        )

    def _cut(self, end: LinkEnd, direct: DirectIncoming | None, what: str) -> None:
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
            direct.abandon()
        elif what == "data":
            end.engine_link.sever_data_path()
        else:
            end.engine_link.sever_control()

    def _address(self, rank: int) -> str:
        peer = self._peers[rank]
        return "127.0.0.1" if self._mine.machine.shares_loopback(peer.machine) else peer.address

    def _gather(self, mine: _Peer) -> None:
        self._peers = gather_values(mine, _Peer, self._control)


def meet(
    coordinate: Coordinate,
    config: LinkConfig,
    *,
    master_addr: str,
    groups: Groups,
    control: dist.ProcessGroup | None = None,
) -> Links:
    """Connect a rank to its neighbours. ``groups``: gets the groups of direct routes;
    ``master_addr``: of rank 0; ``control``: carries what ranks tell each other (None: the default
    group). Collective, see :meth:`Rendezvous.meet`."""
    return Rendezvous(coordinate, config, master_addr, groups, control).meet()
