"""Links between stages if a rank has several: to other ranks, or within the rank.

Link *s* joins stages *s* and *s+1*. Between two ranks each link has its own direct route with its
own group and socket, so that messages of two links between the same ranks cannot be confused.
Within a rank, a message is passed on without a copy.
"""

from __future__ import annotations

import ipaddress
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor

from pipemorph.planning import Route
from pipemorph_trainer.links import peer_socket
from pipemorph_trainer.links.faults import LinkFaults
from pipemorph_trainer.links.link import LinkEnd, Neighbourhood
from pipemorph_trainer.links.message import Batch, Contents, Direction
from pipemorph_trainer.links.peer_socket import PeerSocket
from pipemorph_trainer.links.rendezvous import LinkConfig
from pipemorph_trainer.topology.addresses import everywhere
from pipemorph_trainer.topology.groups import Groups


class LocalLane:
    """One direction of a link within a rank: a message arrives when it is sent."""

    receiving = False

    def __init__(self) -> None:
        self._held: dict[int, list[Tensor | None] | None] = {}

    def begin(self, batch: Batch) -> None:
        """Does nothing: no receives are posted."""

    def slot_free_at(self) -> float:
        return 0.0

    def send(self, microbatch: int, tensors: list[Tensor | None] | None) -> None:
        self._held[microbatch] = (
            None if tensors is None else [None if t is None else t.detach() for t in tensors]
        )

    def sent(self, messages: int) -> None:
        """Does nothing: no receives are posted."""

    def ready_at(self, microbatch: int) -> float | None:
        return 0.0 if microbatch in self._held else None

    def take(self, microbatch: int) -> list[Tensor | None] | None:
        return self._held.pop(microbatch)

    def close(self, *, abandon: bool = False) -> None:
        self._held.clear()


class LocalPeerSocket:
    """Stands for the control socket of a link within a rank: passes on shapes."""

    lost: str | None = None

    def __init__(self, rank: int) -> None:
        self.peer_rank = rank
        self.shapes: deque[Contents | None] = deque()

    def send_shapes(self, contents: Contents | None) -> None:
        self.shapes.append(contents)

    def pump(self) -> None:
        """Does nothing: there is no connection."""

    def ends_within(self, seconds: float) -> bool:
        return False

    def close(self, *, goodbye: bool) -> None:
        self.shapes.clear()


@dataclass(frozen=True)
class ChunkLinks:
    """The links of the stages of ``rank``. ``neighbours[s]``: the links of its stage *s*."""

    rank: int
    neighbours: dict[int, Neighbourhood]

    @cached_property
    def ends(self) -> list[LinkEnd]:
        """The ends of links to other ranks."""
        found = [end for each in self.neighbours.values() for end in each.ends]
        return [end for end in found if end.peer_rank != self.rank]

    def close(self, *, goodbye: bool) -> None:
        for end in self.ends:
            end.close(goodbye=goodbye)


def meet_chunks(
    placement: Sequence[int], rank: int, config: LinkConfig, *, address: str, groups: Groups
) -> ChunkLinks:
    """Connect the links of all stages of a rank. Collective over all ranks.

    ``placement[s]``: the rank of stage *s*; ``address``: of this rank; ``groups``: gets the links'
    groups. Raises :class:`~pipemorph_trainer.errors.PipelineError`, which names the rank that did
    not connect.
    """
    last = len(placement) - 1
    across = [s for s in range(last) if placement[s] != placement[s + 1]]
    # Longer than the executors' deadlines, also than those of the first iteration.
    timeout = timedelta(seconds=2 * config.deadline * len(placement) + 60)
    edges = {
        link: groups.new(
            [placement[link], placement[link + 1]],
            timeout=timeout,
            backend="gloo",
            group_desc=f"pipemorph link {link}",
        )
        for link in across
    }

    def make_end(link: int, receives: Direction, control: PeerSocket) -> LinkEnd:
        faults = LinkFaults(config.faults.of(link, 0), Direction(1 - receives))
        end = LinkEnd(link, receives, control, faults=faults)
        edge = dict.fromkeys(Direction, edges[link])
        end.add(Route.DIRECT, *config.direct_channels(end, edge))
        end.select(Route.DIRECT)
        config.poller.watch_socket(control.fileno())
        return end

    neighbours = {
        s: Neighbourhood(None, None, None) for s, where in enumerate(placement) if where == rank
    }
    with ExitStack() as stack:
        # One listener per link, so that connections of different links cannot be confused.
        listeners = {
            link: stack.enter_context(peer_socket.listen(_bound(address)))
            for link in across
            if placement[link + 1] == rank
        }
        mine = (address, {link: sock.getsockname()[1] for link, sock in listeners.items()})
        others: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(others, mine)
        # All ranks connect the links in the same order, so no two wait for each other.
        for link in range(last):
            lower, upper = placement[link], placement[link + 1]
            if lower == upper == rank:
                _join_locally(link, rank, neighbours)
            elif lower == rank:
                host, ports = others[upper]
                control = config.dial(host, ports[link], rank=rank, peer=upper)
                neighbours[link].downstream = make_end(link, Direction.BACKWARD, control)
            elif upper == rank:
                control = config.accept(listeners[link], rank=rank, peer=lower)
                neighbours[link + 1].upstream = make_end(link, Direction.FORWARD, control)
    return ChunkLinks(rank, neighbours)


def _bound(address: str) -> str:
    """The address to listen on: ``address`` if it is loopback, else the wildcard address."""
    loopback = ipaddress.ip_address(address).is_loopback
    return address if loopback else everywhere(address)


def _join_locally(link: int, rank: int, neighbours: dict[int, Neighbourhood]) -> None:
    """Connect two consecutive stages of one rank."""
    control = cast(PeerSocket, LocalPeerSocket(rank))
    forward, backward = LocalLane(), LocalLane()
    below = LinkEnd(link, Direction.BACKWARD, control)
    above = LinkEnd(link, Direction.FORWARD, control)
    below.add(Route.DIRECT, backward, forward)
    above.add(Route.DIRECT, forward, backward)
    below.select(Route.DIRECT)
    above.select(Route.DIRECT)
    neighbours[link].downstream = below
    neighbours[link + 1].upstream = above
