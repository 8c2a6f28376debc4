"""A rank's ends of its links, with the channels of both routes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipemorph.planning import Route
from pipemorph_trainer.links.channels.delegated import DelegatedIncoming
from pipemorph_trainer.links.channels.departures import Departures
from pipemorph_trainer.links.channels.direct import DirectOutgoing
from pipemorph_trainer.links.channels.failover import Failover, FailoverOutgoing
from pipemorph_trainer.links.channels.staging import StagedIncoming, StagedOutgoing, Staging
from pipemorph_trainer.links.faults import LinkFaults
from pipemorph_trainer.links.message import Direction, Incoming, Outgoing
from pipemorph_trainer.links.peer_socket import PeerSocket
from pipemorph_trainer.links.recorder import LinkRecorder, PeerClock, Transport

if TYPE_CHECKING:
    import pipemorph_trainer._engine as _engine

END_SECONDS = 1.0
"""Longest time in which the kernel closes all connections of a process that died."""


class LinkEnd:
    """This rank's end of one link: it receives and sends messages on either route."""

    def __init__(
        self,
        link: int,
        receives: Direction,
        socket: PeerSocket,
        *,
        replica: int = 0,
        faults: LinkFaults | None = None,
        direct_transport: Transport = "gloo",
    ) -> None:
        """``socket``: to the neighbour. ``faults``: injected at this end; None: no faults. Channels
        are added afterwards."""
        self.link = link
        self.peer_rank = socket.peer_rank
        self.peer_stage = link if receives is Direction.FORWARD else link + 1
        self.receives = receives
        self.sends = Direction(1 - receives)
        self.socket = socket
        self.recorder = LinkRecorder(link, replica, receives)
        self.faults = faults or LinkFaults([], self.sends)
        self.peer_clock = PeerClock()
        self.engine_link: _engine.Link | None = None
        self.failover: Failover | None = None
        """None if a broken direct route cannot be replaced."""
        self.no_direct: str | None = None
        """Why there is no direct route; None if there is."""
        self.same_host = True
        """Whether the neighbour has the same clock."""
        self._direct_transport = direct_transport
        self._incoming: dict[Route, Incoming] = {}
        self._outgoing: dict[Route, Outgoing] = {}
        self._staged_outgoing: StagedOutgoing | None = None
        self._selected = Route.DIRECT
        self.incoming: Incoming
        self.outgoing: Outgoing

    def add(self, route: Route, incoming: Incoming, outgoing: Outgoing) -> None:
        self._incoming[route], self._outgoing[route] = incoming, outgoing
        if isinstance(outgoing, StagedOutgoing):
            self._staged_outgoing = outgoing

    @property
    def delegated(self) -> DelegatedIncoming | None:
        found = self._incoming.get(Route.DELEGATED)
        return found if isinstance(found, DelegatedIncoming) else None

    @property
    def staged(self) -> bool:
        """Whether delegated tensors pass through page-locked host memory."""
        return isinstance(self.delegated, StagedIncoming)

    def expect(self, messages: int) -> None:
        """Set the number of messages to the neighbour that may be in flight."""
        outgoing = self._staged_outgoing
        if outgoing is not None:
            outgoing.expect(messages)

    def has(self, route: Route) -> bool:
        return route in self._incoming

    def select(self, route: Route) -> None:
        """Use this route from the next :meth:`Incoming.begin` on."""
        self._selected = route
        self.incoming, self.outgoing = self._incoming[route], self._outgoing[route]

    @property
    def route(self) -> Route:
        """The route in use: delegated if the direct route broke, else the selected one."""
        return Route.DELEGATED if self.failed_over else self._selected

    @property
    def failed_over(self) -> bool:
        """Whether the direct route broke, and was given up."""
        return self.failover is not None and self.failover.broken is not None

    def attend(self) -> None:
        """Handle messages of the neighbour on the control socket. Call during every wait."""
        self.socket.pump()
        if self.failover is not None and self.socket.lost is None:
            self.failover.attend()

    def allow(self, deadline: float) -> None:
        """Set the longest time of a send on the direct route, seconds."""
        outgoing = self._outgoing.get(Route.DIRECT)
        if isinstance(outgoing, DirectOutgoing | FailoverOutgoing):
            outgoing.allow(deadline)

    def tell_departures(self) -> None:
        """Tell the neighbour when messages of the direct route were complete on the device."""
        outgoing = self._outgoing.get(Route.DIRECT)
        if isinstance(outgoing, DirectOutgoing | FailoverOutgoing):
            outgoing.tell_departures()

    def finish_sends(self) -> None:
        """Wait until all sends on the direct route are done."""
        outgoing = self._outgoing.get(Route.DIRECT)
        if isinstance(outgoing, DirectOutgoing | FailoverOutgoing):
            outgoing.finish()

    def all_taken(self) -> bool:
        """Whether the neighbour can no longer request a message again."""
        return self.failover is None or self.failover.outgoing.all_taken()

    @property
    def transport(self) -> Transport:
        if self.route is Route.DIRECT or self.engine_link is None:
            return self._direct_transport
        # The current one: a link with rails may have fallen back.
        found: Transport = self.engine_link.stats().transport
        return found

    def __str__(self) -> str:
        return f"link {self.link} ({self.route.value}, {self.transport})"

    def is_lost(self) -> bool:
        """Whether the neighbour is lost. Asked when another connection broke, so it waits a moment
        for the end of the control socket, which says more."""
        return self.socket.ends_within(END_SECONDS)

    def gone(self) -> str:
        """Text: the neighbour is lost, and how."""
        why = f"rank {self.peer_rank} (stage {self.peer_stage}) is gone: {self.socket.lost}"
        return f"{why}; {trouble}" if (trouble := self.trouble()) else why

    def trouble(self) -> str:
        """What is or just was wrong with the engine's connections to the neighbour; empty if
        nothing, or without an engine."""
        if self.engine_link is None:
            return ""
        said = self.engine_link.error or self.engine_link.stats().path_trouble
        return f"{self}: {said}" if said else ""

    def taking(self, call: str, microbatch: int) -> str:
        """Description of a sender's wait, on the direct route for the send two messages before.
        ``call``: such as ``iteration 7``."""
        return (
            f"stage {self.peer_stage} to take {self.sends.letter} of microbatch {microbatch} of "
            f"{call} on {self}"
        )

    def refresh_clock(self) -> None:
        """Update the clock offset and the least round trip from the engine, if there is one."""
        if self.engine_link is None:
            return
        stats = self.engine_link.stats()
        self.recorder.rtt_min = stats.rtt_min
        if stats.clock_offset is not None and not self.same_host:
            self.peer_clock.offset, self.peer_clock.known = stats.clock_offset, True

    def close(self, *, goodbye: bool) -> None:
        if goodbye:
            for outgoing in self._outgoing.values():
                outgoing.close()
        else:
            # First, since the end of this connection says more to the neighbour than the others.
            self.socket.close(goodbye=False)
        for incoming in self._incoming.values():
            incoming.close(abandon=not goodbye)
        if goodbye:
            self.socket.close(goodbye=True)
        self.faults.close()

    @property
    def receiving(self) -> bool:
        """Whether a receiver thread is still running after :meth:`close`."""
        return any(incoming.receiving for incoming in self._incoming.values())


@dataclass
class Neighbourhood:
    """The links of one stage to both neighbours."""

    upstream: LinkEnd | None = None
    downstream: LinkEnd | None = None


@dataclass
class Links:
    """All links of a rank, and the engine that they share."""

    of: dict[int, Neighbourhood]
    """By stage of this rank."""
    ends: list[LinkEnd]
    """The ends of the links to other ranks, in order."""
    engine: _engine.Engine | None = None
    staging: Staging | None = None
    """Shared by delegated links on a device; None on the CPU."""
    departures: Departures | None = None
    """Of messages on direct links between devices; None without any."""

    def gone(self) -> str | None:
        """Text: which neighbour is lost, and how, after a connection broke; None if none is."""
        return next((end.gone() for end in self.ends if end.is_lost()), None)
