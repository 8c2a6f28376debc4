"""Links between stages of which a rank has several: to other ranks, or to itself.

Link *s* joins stage *s* and *s+1*, wherever they are. Between two ranks it is a direct route of
its own, with its own group and socket, so that the messages of two links between the same ranks
cannot be mistaken for each other. Within a rank a message is handed over as it is.
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
from pipemorph_trainer.links.message import Batch, Direction, TensorMeta
from pipemorph_trainer.links.peer_socket import PeerSocket
from pipemorph_trainer.links.rendezvous import LinkConfig
from pipemorph_trainer.topology.addresses import everywhere
from pipemorph_trainer.topology.groups import Groups


class LocalLane:
    """One direction of a link within a rank: what is sent is there."""

    receiving = False

    def __init__(self) -> None:
        self._held: dict[int, list[Tensor | None] | None] = {}

    def begin(self, batch: Batch) -> None:
        """Both ends say so; nothing is posted."""

    def slot_free_at(self) -> float:
        return 0.0

    def send(self, microbatch: int, tensors: list[Tensor | None] | None) -> None:
        self._held[microbatch] = (
            None if tensors is None else [None if t is None else t.detach() for t in tensors]
        )

    def sent(self, messages: int) -> None:
        """Nothing is posted."""

    def ready_at(self, microbatch: int) -> float | None:
        return 0.0 if microbatch in self._held else None

    def take(self, microbatch: int) -> list[Tensor | None] | None:
        return self._held.pop(microbatch)

    def close(self, *, abandon: bool = False) -> None:
        self._held.clear()


class LocalPeerSocket:
    """What the two ends of a link within a rank tell each other beside tensors: shapes."""

    lost: str | None = None

    def __init__(self, rank: int) -> None:
        self.peer_rank = rank
        self.shapes: deque[tuple[TensorMeta, ...] | None] = deque()

    def send_shapes(self, metas: tuple[TensorMeta, ...] | None) -> None:
        self.shapes.append(metas)

    def pump(self) -> None:
        """Nothing comes from outside."""

    def ends_within(self, seconds: float) -> bool:
        return False

    def close(self, *, goodbye: bool) -> None:
        self.shapes.clear()


@dataclass(frozen=True)
class ChunkLinks:
    """The links of the stages of ``rank``; ``neighbours[s]`` are those of its stage *s*."""

    rank: int
    neighbours: dict[int, Neighbourhood]

    @cached_property
    def ends(self) -> list[LinkEnd]:
        """Those to other ranks."""
        found = [end for each in self.neighbours.values() for end in each.ends]
        return [end for end in found if end.peer_rank != self.rank]

    def close(self, *, goodbye: bool) -> None:
        for end in self.ends:
            end.close(goodbye=goodbye)


def meet_chunks(
    placement: Sequence[int], rank: int, config: LinkConfig, *, address: str, groups: Groups
) -> ChunkLinks:
    """Connect the links of all stages of a rank. Collective: every rank calls it.

    ``placement[s]`` is the rank of stage *s*; ``address`` is where this rank is reached;
    ``groups`` is where the links' groups are made.
    Raises :class:`~pipemorph_trainer.errors.PipelineError` naming the rank that did not come.
    """
    last = len(placement) - 1
    across = [s for s in range(last) if placement[s] != placement[s + 1]]
    # Behind the executors' deadlines, also behind those of the first iteration.
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
        # One listener per link, or a rank that dials early would take another's place.
        listeners = {
            link: stack.enter_context(peer_socket.listen(_bound(address)))
            for link in across
            if placement[link + 1] == rank
        }
        mine = (address, {link: sock.getsockname()[1] for link, sock in listeners.items()})
        others: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(others, mine)
        # All ranks go through the links in one order, so both ends of the first are there.
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
    """What to listen on where this rank is reached at ``address``: nobody else has to get in."""
    loopback = ipaddress.ip_address(address).is_loopback
    return address if loopback else everywhere(address)


def _join_locally(link: int, rank: int, neighbours: dict[int, Neighbourhood]) -> None:
    """Two stages of one rank that follow each other."""
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
