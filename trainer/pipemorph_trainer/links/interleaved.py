"""Links between stages of which a rank has several: to other ranks, or to itself.

Link *s* joins stage *s* and *s+1*, wherever they are. Between two ranks it is a direct path of
its own, with its own group and socket, so that the messages of two links between the same ranks
cannot be mistaken for each other. Within a rank a message is handed over as it is.
"""

from __future__ import annotations

import ipaddress
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from pipemorph.api.spec import Fault
from pipemorph.planning import Path
from pipemorph_trainer.links import peer_socket
from pipemorph_trainer.links.channels.arrival import OpClock, PeerClock
from pipemorph_trainer.links.channels.direct import DirectIncoming, DirectOutgoing
from pipemorph_trainer.links.channels.fault_injection import Severer, Shaper
from pipemorph_trainer.links.channels.message import Batch, Direction, TensorMeta
from pipemorph_trainer.links.link import LinkEnd, Neighbourhood
from pipemorph_trainer.links.peer_socket import PeerSocket
from pipemorph_trainer.links.poller import Poller
from pipemorph_trainer.links.recorder import LinkRecorder
from pipemorph_trainer.topology.addresses import everywhere
from pipemorph_trainer.topology.groups import Groups

SETUP_SECONDS = 120.0


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

    def __init__(self) -> None:
        self.shapes: deque[tuple[TensorMeta, ...] | None] = deque()

    def send_shapes(self, metas: tuple[TensorMeta, ...] | None) -> None:
        self.shapes.append(metas)

    def pump(self) -> None:
        """Nothing comes from outside."""

    def ends_within(self, seconds: float) -> bool:
        return False

    def close(self, *, goodbye: bool) -> None:
        self.shapes.clear()


@dataclass
class ChunkLinks:
    """``neighbours[s]`` for every stage *s* of this rank; ``ends`` are those to other ranks."""

    neighbours: dict[int, Neighbourhood]
    ends: list[LinkEnd]

    def close(self, *, goodbye: bool) -> None:
        for end in self.ends:
            end.close(goodbye=goodbye)


def meet_chunks(
    placement: Sequence[int],
    rank: int,
    *,
    microbatches: int,
    secret: bytes,
    address: str,
    faults: Sequence[Fault],
    poller: Poller,
    op_clock: OpClock,
    deadline: float,
    on_block: Callable[[LinkEnd, int, int], None],
    on_unblock: Callable[[], None],
    made: Groups,
) -> ChunkLinks:
    """Connect the links of all stages of a rank. Collective: every rank calls it.

    ``placement[s]`` is the rank of stage *s*; ``address`` is where this rank is reached;
    ``made`` is where the links' groups are made.
    Raises :class:`~pipemorph_trainer.errors.PipelineError` naming the rank that did not come.
    """
    last = len(placement) - 1
    across = [s for s in range(last) if placement[s] != placement[s + 1]]
    # Behind the executors' deadlines, also behind those of the first iteration.
    timeout = timedelta(seconds=2 * deadline * len(placement) + 60)
    groups: dict[int, Any] = {
        link: made.new(
            [placement[link], placement[link + 1]],
            timeout=timeout,
            backend="gloo",
            group_desc=f"pipemorph link {link}",
        )
        for link in across
    }
    clocks = {link: PeerClock() for link in across}

    def remote(link: int, socket: PeerSocket, receives: Direction) -> LinkEnd:
        upper = receives is Direction.FORWARD
        peer = placement[link] if upper else placement[link + 1]
        made = _end(link, peer, receives, socket, [f for f in faults if f.link == link])
        made.peer_clock = clocks[link]
        made.add(
            Path.DIRECT,
            DirectIncoming(
                group=groups[link], peer=peer, direction=receives, socket=socket, poller=poller,
                op_clock=op_clock, peer_clock=clocks[link], recorder=made.recorder,
                device=torch.device("cpu"),
            ),
            DirectOutgoing(
                group=groups[link], peer=peer, direction=made.sends, socket=socket,
                shaper=made.shaper, on_block=partial(on_block, made), on_unblock=on_unblock,
                deadline=deadline, device=torch.device("cpu"),
                # Two stages of a rank take turns: a bound on sends of one could hold up the
                # other, and the ranks would wait for each other.
                max_outstanding=microbatches,
            ),
        )  # fmt: skip
        made.select(Path.DIRECT)
        poller.watch_socket(socket.fileno())
        return made

    neighbours = {
        s: Neighbourhood(None, None, None) for s, where in enumerate(placement) if where == rank
    }
    ends = []
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
                socket = peer_socket.dial(
                    host, ports[link], rank=rank, peer_rank=upper, secret=secret,
                    timeout=SETUP_SECONDS,
                )  # fmt: skip
                end = remote(link, socket, Direction.BACKWARD)
                neighbours[link].downstream = end
                ends.append(end)
            elif upper == rank:
                socket = peer_socket.accept(
                    listeners[link], rank=rank, peer_rank=lower, secret=secret,
                    timeout=SETUP_SECONDS,
                )  # fmt: skip
                end = remote(link, socket, Direction.FORWARD)
                neighbours[link + 1].upstream = end
                ends.append(end)
    return ChunkLinks(neighbours, ends)


def _bound(address: str) -> str:
    """What to listen on where this rank is reached at ``address``: nobody else has to get in."""
    loopback = ipaddress.ip_address(address).is_loopback
    return address if loopback else everywhere(address)


def _end(
    link: int, peer: int, receives: Direction, socket: PeerSocket, faults: Sequence[Fault]
) -> LinkEnd:
    """An end without a path yet."""
    return LinkEnd(
        link=link,
        peer_rank=peer,
        peer_stage=link if receives is Direction.FORWARD else link + 1,
        receives=receives,
        socket=socket,
        recorder=LinkRecorder(link, 0, receives),
        shaper=Shaper(faults, Direction(1 - receives)),
        severer=Severer([], None),
        peer_clock=PeerClock(),
        direct_transport="gloo",
    )


def _join_locally(link: int, rank: int, neighbours: dict[int, Neighbourhood]) -> None:
    """Two stages of one rank that follow each other."""
    socket = cast(PeerSocket, LocalPeerSocket())
    forward, backward = LocalLane(), LocalLane()
    below = _end(link, rank, Direction.BACKWARD, socket, ())
    above = _end(link, rank, Direction.FORWARD, socket, ())
    below.add(Path.DIRECT, backward, forward)
    above.add(Path.DIRECT, forward, backward)
    below.select(Path.DIRECT)
    above.select(Path.DIRECT)
    neighbours[link].downstream = below
    neighbours[link + 1].upstream = above
