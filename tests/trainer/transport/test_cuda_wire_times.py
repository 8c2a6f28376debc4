"""Times of a device's streams by the host's clock, and wire times of the direct route, on CUDA.

NCCL needs a GPU for each rank, so on one GPU a stream takes its place: see ``device_wire``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from busy_device import busy, cycles_per_second
from device_wire import DirectLink, direct_link
from torch import Tensor
from waiting import until

from pipemorph_trainer.topology.accelerator import CudaAccelerator
from pipemorph_trainer.topology.device_event_clock import RENEWED_AFTER, DeviceEventClock
from pipemorph_trainer.transport.channels.direct import EXACT_WITHIN
from pipemorph_trainer.transport.message import MessageBatch, TensorMeta

pytestmark = [pytest.mark.gpu]
DEVICE = torch.device("cuda", 0)
META = TensorMeta((1 << 20,), torch.float32)
MESSAGES = 12
OP, DELAY = 0.03, 0.012
"""Seconds."""


def test_the_host_knows_when_the_device_reached_an_event() -> None:
    """The event may be long past before the clocks were compared, or the host may compute."""
    accelerator = CudaAccelerator(DEVICE)
    clock = DeviceEventClock(accelerator)
    cycles_per_second()
    found = []
    for _ in range(8):
        torch.cuda.synchronize()
        before = time.time()
        event = accelerator.record_event(accelerator.compute_stream(), timed=True)
        event.synchronize()
        after = time.time()
        # The compute stream is busy when the clocks are compared.
        busy(0.02)
        for _ in range(2):
            at, within = clock.time_event(event)
            assert before - within <= at <= after + within, (at - before, after - at, within)
            found.append(within)
            time.sleep(RENEWED_AFTER / 4)
    torch.cuda.synchronize()
    print(f"errors of {len(found)} times: {1e6 * min(found):.0f} to {1e6 * max(found):.0f} µs")
    assert sorted(found)[len(found) // 2] < EXACT_WITHIN / 2


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Iterator[DirectLink]:
    """Link whose ends share the GPU, each with streams of its own."""

    def carry(stream: Any, destination: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(stream):
            busy(DELAY)
            destination.copy_(source)

    ends = CudaAccelerator(DEVICE), CudaAccelerator(DEVICE)
    cycles_per_second()
    with direct_link(monkeypatch, *ends, carry) as made:
        yield made
        torch.cuda.synchronize()


def test_wire_times_are_exact_though_the_host_launches_ahead(link: DirectLink) -> None:
    """The host waits for no device in it, and the time of an op is none of the wire's."""
    sent = [torch.full(META.shape, float(m), device=DEVICE) for m in range(MESSAGES)]
    batch = MessageBatch(1, 0, MESSAGES, (META,))
    link.outgoing.begin_batch(batch)
    link.incoming.begin_batch(batch)
    until(lambda: link.wire.receives == 1, "the first receive is posted")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        began = time.monotonic()
        for microbatch, tensor in enumerate(sent):
            busy(OP)
            link.outgoing.send(microbatch, [tensor])
            if microbatch < 4:
                launched = time.monotonic() - began
            link.outgoing.report_send_timestamps()
            link.other.read_arrived()
            if microbatch >= 4:
                _take(link, microbatch - 4)
        for microbatch in range(MESSAGES - 4, MESSAGES):
            _take(link, microbatch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert launched < 4 * OP, "the host does not wait for the device"
    torch.cuda.synchronize()

    def departures_known() -> bool:
        link.outgoing.report_send_timestamps()
        link.other.read_arrived()
        return not vars(link.incoming)["_untimed"]

    until(departures_known, "all departures are known")
    sample = link.recorder.drain_window()
    wire = sample.wire
    print(
        f"{wire.exact} of {wire.count} exact; wire {1e3 * wire.min:.2f} to {1e3 * wire.p99:.2f} ms,"
        f" mean {1e3 * wire.mean:.2f}; {1e3 * DELAY:.0f} ms and a copy are right"
    )
    assert wire.count == MESSAGES
    assert wire.exact >= MESSAGES - 2
    # The GPU's clock may change within a test, and its cycles are what the delay is made of.
    assert 0.8 * DELAY <= wire.min <= wire.p50 <= 1.5 * DELAY


def _take(link: DirectLink, microbatch: int) -> None:
    until(lambda: link.incoming.ready_at(microbatch) is not None, f"message {microbatch} is here")
    found = link.incoming.pop_message(microbatch)
    assert found is not None and found[0] is not None
