"""Ends of a rank's links, with the channels of both routes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipemorph.planning import Route
from pipemorph_trainer.transport.channels.delegated import DelegatedIncoming
from pipemorph_trainer.transport.channels.direct import DirectOutgoing
from pipemorph_trainer.transport.channels.failover import Failover, FailoverOutgoing
from pipemorph_trainer.transport.channels.send_timestamps import SendTimestamps
from pipemorph_trainer.transport.channels.staging import StagedIncoming, StagedOutgoing, Staging
from pipemorph_trainer.transport.control_socket import ControlSocket
from pipemorph_trainer.transport.fault_injection import LinkFaults
from pipemorph_trainer.transport.link_recorder import LinkRecorder, PeerClock, Transport
from pipemorph_trainer.transport.message import Direction, IncomingChannel, OutgoingChannel

if TYPE_CHECKING:
    import pipemorph_trainer._engine as _engine

END_SECONDS = 1.0
"""Longest time in which the kernel closes all connections of a process that died."""


class LinkEnd:
    """End of a link at this rank: it receives and sends messages on either route."""

    def __init__(
        self,
        link: int,
        receives: Direction,
        socket: ControlSocket,
        *,
        replica: int = 0,
        faults: LinkFaults | None = None,
        direct_transport: Transport = "gloo",
    ) -> None:
        """``socket``: to the neighbour. ``faults``: injected at this end; None: no faults.
        :meth:`add_route` adds the channels."""
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
        """Reason for which there is no direct route; None if there is one."""
        self.same_host = True
        """True if the neighbour has the same clock."""
        self._direct_transport = direct_transport
        self._incoming: dict[Route, IncomingChannel] = {}
        self._outgoing: dict[Route, OutgoingChannel] = {}
        self._staged_outgoing: StagedOutgoing | None = None
        self._selected = Route.DIRECT
        self.incoming: IncomingChannel
        self.outgoing: OutgoingChannel

    def add_route(self, route: Route, incoming: IncomingChannel, outgoing: OutgoingChannel) -> None:
        self._incoming[route], self._outgoing[route] = incoming, outgoing
        if isinstance(outgoing, StagedOutgoing):
            self._staged_outgoing = outgoing

    @property
    def delegated(self) -> DelegatedIncoming | None:
        found = self._incoming.get(Route.DELEGATED)
        return found if isinstance(found, DelegatedIncoming) else None

    @property
    def staged(self) -> bool:
        """True if delegated tensors pass through page-locked host memory."""
        return isinstance(self.delegated, StagedIncoming)

    def expect_messages(self, messages: int) -> None:
        """Set the number of messages to the neighbour that may be in flight."""
        outgoing = self._staged_outgoing
        if outgoing is not None:
            outgoing.expect_messages(messages)

    def has_route(self, route: Route) -> bool:
        return route in self._incoming

    def select_route(self, route: Route) -> None:
        """Use this route from the next :meth:`IncomingChannel.begin_batch` on."""
        self._selected = route
        self.incoming, self.outgoing = self._incoming[route], self._outgoing[route]

    @property
    def route(self) -> Route:
        """Route in use: delegated if the direct route broke, else the selected one."""
        return Route.DELEGATED if self.failed_over else self._selected

    @property
    def failed_over(self) -> bool:
        """True if the direct route broke and was given up."""
        return self.failover is not None and self.failover.broken is not None

    def handle_control_messages(self) -> None:
        """Handle the neighbour's messages on the control socket. Call this during every wait."""
        self.socket.read_arrived()
        if self.failover is not None and self.socket.lost is None:
            self.failover.resend_missing()

    def set_deadline(self, deadline: float) -> None:
        """Set the longest time of a send on the direct route, seconds."""
        outgoing = self._outgoing.get(Route.DIRECT)
        if isinstance(outgoing, DirectOutgoing | FailoverOutgoing):
            outgoing.set_deadline(deadline)

    def report_send_timestamps(self) -> None:
        """Send the neighbour the times at which direct messages were complete on the device."""
        outgoing = self._outgoing.get(Route.DIRECT)
        if isinstance(outgoing, DirectOutgoing | FailoverOutgoing):
            outgoing.report_send_timestamps()

    def finish_sends(self) -> None:
        """Wait until all sends on the direct route are done."""
        outgoing = self._outgoing.get(Route.DIRECT)
        if isinstance(outgoing, DirectOutgoing | FailoverOutgoing):
            outgoing.finish_sends()

    def all_consumed(self) -> bool:
        """True if the neighbour can no longer request a message again."""
        return self.failover is None or self.failover.outgoing.all_consumed()

    @property
    def transport(self) -> Transport:
        if self.route is Route.DIRECT or self.engine_link is None:
            return self._direct_transport
        # A link with rails may have fallen back to TCP.
        found: Transport = self.engine_link.stats().transport
        return found

    def __str__(self) -> str:
        return f"link {self.link} ({self.route.value}, {self.transport})"

    def is_peer_lost(self) -> bool:
        """True if the neighbour is lost. Called when another connection broke, so it waits up to
        :data:`END_SECONDS` for the end of the control socket, whose reason is clearer."""
        return self.socket.wait_for_end(END_SECONDS)

    def describe_loss(self) -> str:
        """Text: the neighbour is lost, with the reason."""
        why = f"rank {self.peer_rank} (stage {self.peer_stage}) is gone: {self.socket.lost}"
        return f"{why}; {trouble}" if (trouble := self.describe_engine_error()) else why

    def describe_engine_error(self) -> str:
        """Text: current or recent error of the engine's connections to the neighbour; empty if
        there is none, or no engine."""
        if self.engine_link is None:
            return ""
        error = self.engine_link.error or self.engine_link.stats().path_errors
        return f"{self}: {error}" if error else ""

    def describe_send_wait(self, call: str, microbatch: int) -> str:
        """Text that describes the wait of a send, on the direct route for the send two messages
        earlier. ``call``: such as ``iteration 7``."""
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
            # This socket closes first, since its end gives the neighbour the clearest error.
            self.socket.close(goodbye=False)
        for incoming in self._incoming.values():
            incoming.close(abandon=not goodbye)
        if goodbye:
            self.socket.close(goodbye=True)
        self.faults.close()

    @property
    def receiving(self) -> bool:
        """True if a receiver thread is still running after :meth:`close`."""
        return any(incoming.receiving for incoming in self._incoming.values())


@dataclass
class StageLinks:
    """Links of a stage to both neighbours."""

    upstream: LinkEnd | None = None
    downstream: LinkEnd | None = None


@dataclass
class RankLinks:
    """Links of a rank, and the engine that they share."""

    by_stage: dict[int, StageLinks]
    """Links by stage of this rank."""
    ends: list[LinkEnd]
    """Ends of the links to other ranks, in order."""
    engine: _engine.Engine | None = None
    staging: Staging | None = None
    """Shared by delegated links on a device; None on the CPU."""
    send_timestamps: SendTimestamps | None = None
    """Departures on direct links between devices; None without any."""

    def describe_loss(self) -> str | None:
        """Text: the lost neighbour, with the reason, after a connection broke; None if none is."""
        return next((end.describe_loss() for end in self.ends if end.is_peer_lost()), None)
