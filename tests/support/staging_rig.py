"""A delegated link with a device at each end, on real engines: for tests of staging."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from simulated_device import SimulatedDevice
from torch import Tensor
from waiting import until

from pipemorph_trainer.transport.channels.staging import StagedIncoming, StagedOutgoing, Staging
from pipemorph_trainer.transport.engine_setup import load_engine_module
from pipemorph_trainer.transport.fault_injection import LinkFaults
from pipemorph_trainer.transport.link_recorder import LinkRecorder, PeerClock
from pipemorph_trainer.transport.message import Direction, MessageBatch, TensorMeta

TIMEOUT = 60.0
SECRET = b"a secret of the test"


@dataclass
class Rig:
    """A link: what stage 0 sends and stage 1 receives, each with a device of its own."""

    sender: Any
    receiver: Any
    out: Staging
    into: Staging
    outgoing: StagedOutgoing
    incoming: StagedIncoming
    rings: list[str]

    def batch(self, *metas: TensorMeta, iteration: int = 0, microbatches: int = 8) -> MessageBatch:
        return MessageBatch(1, iteration, microbatches, metas)

    def lease(self, batch: MessageBatch, slots: int = 8) -> None:
        """Reserve slots, as many and one more, and page-lock them where they are leased."""
        self.incoming.reserve_slots(slots, batch)
        until(lambda: self.free_slots() == slots + 1, "the slots are granted")
        self.out.page_lock_added()

    def free_slots(self) -> int:
        """Slots that the sender may use."""
        return int(self.outgoing.link.send_slots(int(Direction.FORWARD)))

    def copied(self) -> tuple[int, int]:
        """Bytes that the engine has copied on the host, at the sender and at the receiver."""
        ends = self.outgoing.link.stats(), self.incoming._link.stats()
        return ends[0].bytes_copied_out, ends[1].bytes_copied_in

    def begin(self, batch: MessageBatch, slots: int = 8) -> None:
        if slots:
            self.incoming.reserve_slots(slots, batch)
        self.outgoing.begin_batch(batch)
        self.incoming.begin_batch(batch)

    @property
    def sent(self) -> int:
        """Messages that the engine has been given."""
        stats = self.outgoing.link.stats()
        return int(stats.messages_sent + stats.sends_in_flight)

    def slots_in_use(self) -> int:
        return int(self.incoming._link.stats().slots_in_use)

    def arrived(self, microbatch: int) -> list[Tensor | None]:
        """Take a message once it has arrived; its copies may not be done."""
        until(
            lambda: self.incoming.ready_at(microbatch) is not None,
            f"microbatch {microbatch} has arrived",
        )
        return self.incoming.pop_message(microbatch)


@contextlib.contextmanager
def linked(transport: str) -> Iterator[tuple[Any, Any]]:
    """The two ends of an engine link, which is number 4: of rank 0, that sends, and of rank 1."""
    module = load_engine_module()
    engines = [
        module.Engine(
            job="staging", rank=rank, secret=SECRET, host="127.0.0.1", transport=transport
        )
        for rank in range(2)
    ]
    links: list[object] = []
    thread = threading.Thread(
        target=lambda: links.append(engines[1].accept(peer_rank=0, link_id=4, timeout=TIMEOUT))
    )
    thread.start()
    low = engines[0].connect(
        peer_rank=1, link_id=4, host="127.0.0.1", port=engines[1].port, timeout=TIMEOUT
    )
    thread.join()
    try:
        yield low, links[0]
    finally:
        for engine in engines:
            engine.close(0.0)


@contextlib.contextmanager
def rigged(
    transport: str = "tcp",
    deadline: float = TIMEOUT,
    register_refuses: str | None = None,
    devices: tuple[Any, Any] | None = None,
) -> Iterator[Rig]:
    """``devices``: accelerators of sender and receiver; simulated ones if not given."""
    with linked(transport) as (low, high):
        yield from _rigged(low, high, deadline, register_refuses, devices)


def _rigged(
    low: Any,
    high: Any,
    deadline: float,
    register_refuses: str | None,
    devices: tuple[Any, Any] | None,
) -> Iterator[Rig]:
    rings: list[str] = []
    if devices is None:
        devices = SimulatedDevice(), SimulatedDevice(register_refuses=register_refuses)
    out = Staging(devices[0], wake=lambda: rings.append("out"), deadline=deadline)
    into = Staging(devices[1], wake=lambda: rings.append("into"), deadline=deadline)
    rig = Rig(
        *devices,
        out,
        into,
        StagedOutgoing(
            staging=out,
            name="link 4",
            link=low,
            direction=Direction.FORWARD,
            hold=LinkFaults([], Direction.FORWARD).hold_message,
            queues=8,
            on_block=lambda iteration, microbatch: None,
            on_unblock=lambda: None,
        ),
        StagedIncoming(
            staging=into,
            name="link 4",
            link=high,
            direction=Direction.FORWARD,
            peer_clock=PeerClock(),
            recorder=LinkRecorder(4, 0, Direction.FORWARD),
        ),
        rings,
    )
    yield rig
    for device in devices:
        if isinstance(device, SimulatedDevice):
            device.fail("the test is over")
    out.close(abandon=True)
    into.close(abandon=True)
