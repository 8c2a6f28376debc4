"""Wire times of the direct route between two simulated devices, each with a clock of its own.

The host launches ops and sends long before the devices run them.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from device_wire import DirectLink, direct_link
from simulated_device import SimulatedDevice, SimulatedEvent, SimulatedStream
from torch import Tensor
from waiting import until

from pipemorph.planning import Route
from pipemorph.protocol import LinkSample
from pipemorph_trainer.transport.channels.direct import EXACT_WITHIN
from pipemorph_trainer.transport.message import (
    UNLIMITED_RECEIVES,
    HoldTimes,
    MessageBatch,
    ReceiveLimits,
    TensorMeta,
)

META = TensorMeta((16,), torch.float32)
MESSAGES = 4
OP, DELAY = 0.03, 0.012
"""Seconds."""


class Device(SimulatedDevice):
    """Device whose clock is ahead of the host's and faster. A stream that waits for nothing runs
    what it is given at once."""

    def __init__(self, ahead: float, drift: float) -> None:
        super().__init__(clock=lambda: ahead + (1 + drift) * time.time())
        self._ahead, self._drift = ahead, drift
        self.timed: defaultdict[str, list[SimulatedEvent]] = defaultdict(list)
        self._gates: defaultdict[str, deque[SimulatedEvent]] = defaultdict(deque)

    def record_event(self, stream: SimulatedStream, *, timed: bool = False) -> SimulatedEvent:
        event = super().record_event(stream)
        if timed:
            self.timed[stream.name].append(event)
        return event

    def _enqueue(self, stream: SimulatedStream, work: Any) -> None:
        super()._enqueue(stream, work)
        self.run(stream)

    def run(self, *streams: SimulatedStream) -> None:
        with self.progress:
            super().run(*streams)

    def gate(self, stream: SimulatedStream) -> None:
        """Work that takes until :meth:`open`."""
        gate = SimulatedEvent(self)
        self._gates[stream.name].append(gate)
        self._enqueue(stream, gate)

    def open(self, stream: SimulatedStream) -> None:
        """End the oldest such work of a stream."""
        with self.progress:
            self._gates[stream.name].popleft().passed_at = self._clock()
            self.run()

    def host_time(self, event: SimulatedEvent) -> float:
        return (event.passed_at - self._ahead) / (1 + self._drift)


class Link:
    """A link whose sender computes ops of :data:`OP` and whose messages take :data:`DELAY`."""

    def __init__(self, link: DirectLink, sender: Device, receiver: Device) -> None:
        self.ends, self._sender, self._receiver = link, sender, receiver

    def begin(self, iteration: int = 0, receives: ReceiveLimits = UNLIMITED_RECEIVES) -> None:
        batch = MessageBatch(1, iteration, MESSAGES, (META,), receives=receives)
        self.ends.outgoing.begin_batch(batch)
        self.ends.incoming.begin_batch(batch)

    def launch(self, microbatch: int) -> None:
        """An op, and the send of its result: both wait for the device."""
        self._sender.gate(self._sender.compute)
        self.ends.outgoing.send(microbatch, [torch.full(META.shape, float(microbatch))])

    def posted(self, receives: int) -> None:
        until(lambda: self.ends.wire.receives >= receives, f"receive {receives - 1} is posted")

    def compute(self) -> None:
        """The device runs the oldest op that remains."""
        time.sleep(OP)
        self._sender.open(self._sender.compute)

    def move(self, microbatch: int) -> None:
        """The device moves its message, which is taken."""
        ends = self.ends
        time.sleep(DELAY)
        self._sender.open(ends.wire.stream)

        def here() -> bool:
            self._receiver.run()
            return ends.incoming.ready_at(microbatch) is not None

        until(here, f"message {microbatch} is here")
        found = ends.incoming.pop_message(microbatch)
        assert found is not None and found[0] is not None
        assert bool((found[0] == microbatch).all())

    def tell(self, departures: int) -> None:
        """Send departures as between two ops, once this number is known."""
        known = vars(self.ends.outgoing)["_unreported_timestamps"]
        until(lambda: len(known) == departures, "departures are known")
        self.ends.outgoing.report_send_timestamps()
        self.ends.other.read_arrived()

    def truth(self) -> list[float]:
        """Seconds from the end of each op to the arrival of its message."""
        side = vars(self.ends.incoming)["_side"]
        ready, came = self._sender.timed["compute"], self._receiver.timed[side.name]
        return [
            self._receiver.host_time(arrival) - self._sender.host_time(departure)
            for departure, arrival in zip(ready, came, strict=True)
        ]

    def sample(self) -> LinkSample:
        found = self.ends.recorder.drain_window()
        assert found is not None
        return found


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Iterator[Link]:
    sender, receiver = Device(5000.0, 4e-5), Device(-77.0, -6e-5)

    def carry(stream: Any, destination: Tensor, source: Tensor) -> None:
        sender.gate(stream)
        sender.work(stream, lambda: destination.copy_(source))

    with direct_link(monkeypatch, sender, receiver, carry) as made:
        yield Link(made, sender, receiver)


def test_they_are_exact_though_the_host_has_launched_everything_before(link: Link) -> None:
    link.begin()
    for microbatch in range(MESSAGES):
        link.launch(microbatch)
    for microbatch in range(MESSAGES):
        link.posted(microbatch + 1)
        link.compute()
        link.move(microbatch)
    assert not link.ends.recorder, "nothing is known before the sender tells"
    link.tell(MESSAGES)
    sample, truth = link.sample(), link.truth()
    assert (sample.wire.count, sample.wire.exact) == (MESSAGES, MESSAGES)
    assert sample.wire.min == pytest.approx(min(truth), abs=EXACT_WITHIN)
    assert sample.wire.mean == pytest.approx(sum(truth) / MESSAGES, abs=EXACT_WITHIN)
    assert min(truth) >= DELAY
    assert sample.spacing is None and sample.queue_p50 == 0.0, "a device's ops are no queue"


def test_a_message_taken_after_its_departure_was_sent(link: Link) -> None:
    """The frame holds several messages."""
    link.begin()
    link.launch(0)
    link.compute()
    link.tell(1)
    link.move(0)
    sample, truth = link.sample(), link.truth()
    assert sample.wire.exact == 1
    assert sample.wire.p50 == pytest.approx(truth[0], abs=EXACT_WITHIN)


def test_one_whose_receive_was_posted_late_is_an_upper_bound(link: Link) -> None:
    """The message may have been sent before, or only then."""
    link.begin(receives=ReceiveLimits((1,) * MESSAGES))
    link.launch(0)
    link.compute()
    time.sleep(OP)
    link.ends.incoming.record_sent(1)
    link.posted(1)
    link.move(0)
    link.tell(1)
    sample, (truth,) = link.sample(), link.truth()
    assert (sample.wire.count, sample.wire.exact) == (1, 0)
    assert truth >= OP + DELAY
    assert 0.0 <= sample.wire.p50 - truth < OP / 2, "not from the launch"


def test_a_message_sent_while_another_was_under_way_is_an_upper_bound(link: Link) -> None:
    """The receive was posted, but behind that of the message before, whose time it shares."""
    link.begin()
    for microbatch in range(2):
        link.launch(microbatch)
    link.posted(2)
    for _ in range(2):
        link.compute()
    for microbatch in range(2):
        link.move(microbatch)
    link.tell(2)
    sample = link.sample()
    assert (sample.wire.count, sample.wire.exact) == (2, 1)


def test_without_departures_they_are_upper_bounds_from_the_launch(link: Link) -> None:
    """Departures of an iteration are awaited until the next one is over."""
    link.begin()
    link.launch(0)
    link.compute()
    link.move(0)
    link.begin(iteration=1)
    assert not link.ends.recorder
    link.begin(iteration=2)
    sample = link.sample()
    assert (sample.wire.count, sample.wire.exact) == (1, 0)
    assert sample.wire.p50 >= OP + DELAY


@pytest.mark.parametrize("early", [False, True], ids=["sent after it", "sent in it"])
def test_those_of_an_evaluation_are_not_recorded(link: Link, early: bool) -> None:
    link.begin()
    link.ends.recorder.paused = True
    link.launch(0)
    link.compute()
    if early:
        link.tell(1)
    link.move(0)
    link.ends.recorder.paused = False
    if not early:
        link.tell(1)
    link.begin(iteration=1)
    link.begin(iteration=2)
    assert not link.ends.recorder


def test_those_of_a_closed_window_are_not_recorded(link: Link) -> None:
    """A sample is of one route."""
    link.begin()
    link.launch(0)
    link.compute()
    link.move(0)
    link.ends.recorder.begin_iteration(Route.DELEGATED, "tcp", 1)
    link.tell(1)
    assert not link.ends.recorder


def test_a_fault_holds_a_message_from_its_launch_on(link: Link) -> None:
    link.begin()
    held_until = time.time() + OP + DELAY + 5.0
    vars(link.ends.outgoing)["_hold"] = lambda queue, nbytes, now: HoldTimes(now, held_until, 5.0)
    link.launch(0)
    link.compute()
    link.move(0)
    link.tell(1)
    sample = link.sample()
    assert sample.wire.exact == 1 and sample.wire.p50 > 5.0


def test_a_device_that_fails_ends_it(link: Link) -> None:
    """The executor detects it by itself, with the reason."""
    link.begin()
    link.launch(0)
    vars(link)["_sender"].fail("CUDA error: an illegal memory access was encountered")
    thread = vars(link.ends.departures)["_thread"]
    thread.join(10)
    assert not thread.is_alive()
    link.ends.departures.mark_message((0, 1), deque())
    assert vars(link.ends.departures)["_marked"].empty(), "nothing is awaited any more"
    vars(link)["_receiver"].fail("over")
