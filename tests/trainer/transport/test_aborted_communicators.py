"""Giving up a direct route between GPUs ends the work of both of its communicators on the devices.

NCCL has a communicator per direction, and aborting one end says nothing to the other. The groups
here are in its place: an operation ends when it has met its counterpart, or when its own end of its
communicator is aborted, and at no other time.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from simulated_device import Driver, SimulatedDevice
from torch import Tensor
from waiting import until

from pipemorph_trainer.topology import groups
from pipemorph_trainer.transport import control_socket
from pipemorph_trainer.transport.channels import direct
from pipemorph_trainer.transport.channels.direct import DirectIncoming, DirectOutgoing
from pipemorph_trainer.transport.channels.failover import Failover
from pipemorph_trainer.transport.channels.send_timestamps import SendTimestamps
from pipemorph_trainer.transport.fault_injection import LinkFaults
from pipemorph_trainer.transport.link_recorder import LinkRecorder, OpClock, PeerClock
from pipemorph_trainer.transport.message import Direction, MessageBatch, TensorMeta

META = TensorMeta((16,), torch.float32)
BATCH = MessageBatch(1, 0, 8, (META,))
GPU = torch.device("cuda", 0)


class Work:
    """An operation on one end of a communicator."""

    def __init__(self, end: Communicator, tensor: Tensor) -> None:
        self.end, self.tensor = end, tensor
        self.met = False

    def is_completed(self) -> bool:
        return self.met or self.end.aborted > 0

    def exception(self) -> RuntimeError | None:
        aborted = self.end.aborted and not self.met
        return RuntimeError("NCCL communicator was aborted") if aborted else None

    def wait(self) -> None:
        until(self.is_completed, "the receive ends")


class Communicator:
    """End of a communicator of two."""

    def __init__(self) -> None:
        self.aborted = 0
        self.works: deque[Work] = deque()
        self.waiting: deque[Work] = deque()
        self.other = self
        self.broken = False
        """True if nothing passes any more, of which neither end gets an error."""

    def size(self) -> int:
        return 2

    def abort(self) -> None:
        self.aborted += 1

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        return self._begin(tensors[0], lambda mine, other: other.tensor.copy_(mine.tensor))

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        return self._begin(tensors[0], lambda mine, other: mine.tensor.copy_(other.tensor))

    def _begin(self, tensor: Tensor, move: Any) -> Work:
        if self.aborted:
            raise RuntimeError("NCCL communicator was aborted")
        work = Work(self, tensor)
        self.works.append(work)
        if self.broken:
            return work
        if self.other.waiting:
            counterpart = self.other.waiting.popleft()
            move(work, counterpart)
            work.met = counterpart.met = True
        else:
            self.waiting.append(work)
        return work


class End:
    """End of a link, with its failover and the messages that its engine was given."""

    def __init__(self, ways: dict[Direction, Communicator], sock: Any, sends: Direction) -> None:
        receives = Direction(1 - sends)
        self.ways, self.resent = ways, list[int]()
        self.device = SimulatedDevice()
        self._driver = Driver(self.device, 5)
        self.departures = SendTimestamps(self.device)
        incoming = DirectIncoming(
            group=ways[receives],  # type: ignore[arg-type]
            peer=1, direction=receives, socket=sock,
            poller=SimpleNamespace(wake=lambda: None, awaited=True),  # type: ignore[arg-type]
            op_clock=OpClock(), peer_clock=PeerClock(), recorder=LinkRecorder(0, 0, receives),
            device=GPU, accelerator=self.device, posted=direct.POSTED_ON_DEVICE,
        )  # fmt: skip
        outgoing = DirectOutgoing(
            group=ways[sends],  # type: ignore[arg-type]
            peer=1, direction=sends, socket=sock, hold=LinkFaults([], sends).hold_message,
            on_block=lambda *_: None, on_unblock=lambda: None,
            deadline=30.0, device=GPU, max_outstanding=8, departures=self.departures,
        )  # fmt: skip
        delegated: Any = SimpleNamespace(
            begin_batch=lambda batch: None, makes_room=False, ready_at=lambda microbatch: None,
            send=lambda microbatch, tensors: self.resent.append(microbatch),
        )  # fmt: skip
        self.failover = Failover("rank 0, link 0", sock, (incoming, outgoing), (delegated,) * 2)
        self.incoming, self.outgoing = self.failover.incoming, self.failover.outgoing

    def begin(self) -> None:
        self.outgoing.begin_batch(BATCH)
        self.incoming.begin_batch(BATCH)

    def aborted(self) -> list[int]:
        return [self.ways[way].aborted for way in Direction]

    def pending(self) -> int:
        return sum(not work.is_completed() for way in self.ways.values() for work in way.works)

    def close(self) -> None:
        self.incoming._direct.close(abandon=True)
        self.departures.close()
        self._driver.close()


@contextmanager
def linked(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[End, End]]:
    """The lower and the upper end of a link between two devices."""
    monkeypatch.setattr(direct.dist, "get_group_rank", lambda group, rank: 0)
    monkeypatch.setattr(TensorMeta, "new_empty", lambda self, device: torch.empty(self.shape))
    with control_socket.open_listener("127.0.0.1") as listener:
        low = control_socket.ControlSocket(socket.create_connection(listener.getsockname()), 1)
        high = control_socket.ControlSocket(listener.accept()[0], 0)
    ways = {way: (Communicator(), Communicator()) for way in Direction}
    for one, other in ways.values():
        one.other, other.other = other, one
    lower = End({way: pair[0] for way, pair in ways.items()}, low, Direction.FORWARD)
    upper = End({way: pair[1] for way, pair in ways.items()}, high, Direction.BACKWARD)
    lower.begin()
    upper.begin()
    yield lower, upper
    for end, sock in ((lower, low), (upper, high)):
        end.close()
        sock.close(goodbye=False)


def break_all(*ends: End) -> None:
    for end in ends:
        for way in end.ways.values():
            way.broken = True


def attended(end: End) -> bool:
    end.failover.socket.read_arrived()
    end.failover.resend_missing()
    return end.failover.answered


@pytest.mark.parametrize("noticed", ["lower receives", "upper receives", "lower sends", "is cut"])
def test_both_communicators_end_at_both_ends(noticed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sends and receives on the devices would meet nothing any more, whichever end notices."""
    with linked(monkeypatch) as (lower, upper):
        lower.outgoing.send(0, [torch.ones(16)])
        until(lambda: upper.incoming.ready_at(0) is not None, "the first message")
        assert upper.incoming.pop_message(0) is not None
        break_all(lower, upper)
        for microbatch in (1, 2, 3):
            lower.outgoing.send(microbatch, [torch.ones(16)])
        upper.outgoing.send(0, [torch.ones(16)])
        assert lower.pending() and upper.pending()
        finds = upper if noticed == "upper receives" else lower
        if noticed == "lower sends":
            lower.ways[Direction.FORWARD].abort()  # torch's watchdog does so.
            lower.outgoing.send(4, [torch.ones(16)])
        elif noticed == "is cut":
            lower.incoming._direct.abort_connection()
        else:
            finds.ways[finds.incoming._direct.direction].abort()

        def gave_up() -> bool:
            if finds.failover.broken is None:
                finds.incoming.ready_at(1)
            return finds.failover.broken is not None

        until(gave_up, "the end that notices gives up")
        assert all(finds.aborted())
        assert not finds.pending(), "an operation stays on the device"
        other = lower if finds is upper else upper
        assert not any(other.aborted()), "NCCL does not tell"
        until(lambda: attended(other), "the other end knows")
        assert all(other.aborted())
        assert not other.pending(), "an operation stays on the device"
        until(lambda: attended(finds), "and answers")
        assert [m for m in lower.resent if m < 4] == [1, 2, 3]
        assert upper.resent == [0]


@pytest.mark.parametrize("clean", [True, False])
def test_an_aborted_communicator_is_not_shut_down(
    clean: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run ends after a failover as others do; the rest of its groups are destroyed."""
    destroyed: list[Any] = []
    monkeypatch.setattr(groups.dist, "destroy_process_group", destroyed.append)
    monkeypatch.setattr(groups.dist, "get_backend_config", lambda group: "cuda:nccl")
    made = groups.ProcessGroups()
    broken, sound = (made.adopt_group(Communicator()) for _ in range(2))
    assert not groups.abort_group(broken, "nccl")
    made.destroy_all(clean=clean)
    assert destroyed == ([sound] if clean else [])
    assert broken.aborted == 1, "once is enough"  # type: ignore[attr-defined]
