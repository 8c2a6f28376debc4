"""A direct link between two devices in one process, for machines without NCCL.

It keeps to what NCCL promises: a send waits, in a stream of its own, for the ops before it; sends
and receives of one direction meet in order; ``wait`` of a receive makes the current stream wait.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from pipemorph_trainer.topology.accelerator import Accelerator, DeviceEvent
from pipemorph_trainer.transport import control_socket
from pipemorph_trainer.transport.channels import direct
from pipemorph_trainer.transport.channels.direct import DirectIncoming, DirectOutgoing
from pipemorph_trainer.transport.channels.send_timestamps import SendTimestamps
from pipemorph_trainer.transport.fault_injection import LinkFaults
from pipemorph_trainer.transport.link_recorder import LinkRecorder, OpClock, PeerClock
from pipemorph_trainer.transport.message import Direction, MessageBatch

TIMEOUT = 30.0


class _Meeting:
    """A send and its receive: the bytes move once both are there."""

    def __init__(self) -> None:
        self.source: Tensor | None = None
        self.ready: DeviceEvent | None = None
        self.destination: Tensor | None = None
        self.done: DeviceEvent | None = None
        self.launched = threading.Event()


class Wire:
    """``carry(stream, destination, source)`` moves a message in a stream of the sender."""

    def __init__(
        self,
        sender: Accelerator,
        receiver: Accelerator,
        carry: Callable[[Any, Tensor, Tensor], None],
    ) -> None:
        self._sender, self._receiver, self._carry = sender, receiver, carry
        self.stream = sender.new_stream()
        self.side: Callable[[], Any]
        """The receiver's stream."""
        self._meetings: list[_Meeting] = []
        self._lock = threading.Lock()
        self._sends = self.receives = 0

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        with self._lock:
            meeting = self._meeting(self._sends)
            self._sends += 1
            meeting.source = tensors[0]
            meeting.ready = self._sender.record_event(self._sender.compute_stream())
            self._launch(meeting)

        def complete() -> bool:
            return meeting.done is not None and meeting.done.query()

        return SimpleNamespace(is_completed=complete, exception=lambda: None)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        with self._lock:
            meeting = self._meeting(self.receives)
            self.receives += 1
            meeting.destination = tensors[0]
            self._launch(meeting)

        def wait() -> None:
            assert meeting.launched.wait(TIMEOUT), "nothing was sent"
            if meeting.done is None:
                raise RuntimeError("the communicator was aborted")
            self._receiver.wait_event(self.side(), meeting.done)

        return SimpleNamespace(wait=wait, is_completed=lambda: True, exception=lambda: None)

    def abort(self) -> None:
        """End the receives whose messages were not sent."""
        for meeting in self._meetings:
            meeting.launched.set()

    def _meeting(self, number: int) -> _Meeting:
        if number == len(self._meetings):
            self._meetings.append(_Meeting())
        return self._meetings[number]

    def _launch(self, meeting: _Meeting) -> None:
        if meeting.ready is None or meeting.destination is None or meeting.source is None:
            return
        self._sender.wait_event(self.stream, meeting.ready)
        self._carry(self.stream, meeting.destination, meeting.source)
        meeting.done = self._sender.record_event(self.stream)
        meeting.launched.set()


@dataclass
class DirectLink:
    """The forward direction of a link, from a device to a device."""

    wire: Wire
    outgoing: DirectOutgoing
    incoming: DirectIncoming
    recorder: LinkRecorder
    departures: SendTimestamps
    mine: control_socket.ControlSocket
    other: control_socket.ControlSocket

    def begin(self, batch: MessageBatch) -> None:
        self.outgoing.begin_batch(batch)
        self.incoming.begin_batch(batch)


@contextlib.contextmanager
def direct_link(
    monkeypatch: pytest.MonkeyPatch,
    sender: Accelerator,
    receiver: Accelerator,
    carry: Callable[[Any, Tensor, Tensor], None],
) -> Iterator[DirectLink]:
    monkeypatch.setattr(direct.dist, "get_group_rank", lambda group, rank: 0)
    with control_socket.open_listener("127.0.0.1") as listener:
        mine = control_socket.ControlSocket(socket.create_connection(listener.getsockname()), 1)
        other = control_socket.ControlSocket(listener.accept()[0], 0)
    wire = Wire(sender, receiver, carry)
    group: Any = wire
    departures, recorder = SendTimestamps(sender), LinkRecorder(0, 0, Direction.FORWARD)
    poller: Any = SimpleNamespace(wake=lambda: None, awaited=True)
    incoming = DirectIncoming(
        group=group, peer=0, direction=Direction.FORWARD, socket=other, poller=poller,
        op_clock=OpClock(), peer_clock=PeerClock(), recorder=recorder, device=receiver.device,
        accelerator=receiver, posted=direct.POSTED_ON_DEVICE,
    )  # fmt: skip
    wire.side = lambda: incoming._side
    monkeypatch.setattr(incoming, "abort_connection", wire.abort)
    outgoing = DirectOutgoing(
        group=group, peer=1, direction=Direction.FORWARD, socket=mine,
        hold=LinkFaults([], Direction.FORWARD).hold_message, on_block=lambda *_: None,
        on_unblock=lambda: None, deadline=TIMEOUT, device=sender.device,
        max_outstanding=direct.OUTSTANDING_ON_DEVICE, departures=departures,
    )  # fmt: skip
    yield DirectLink(wire, outgoing, incoming, recorder, departures, mine, other)
    incoming.close(abandon=True)
    departures.close()
    mine.close(goodbye=False)
    other.close(goodbye=False)
