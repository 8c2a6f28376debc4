"""The CUDA side of ``topology.accelerator`` and of its users, on one GPU."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator

import pytest
import torch
from busy_device import busy, cycles_per_second
from staging_rig import Rig, rigged
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from waiting import until

from pipemorph.planning import OpKind
from pipemorph_trainer.executor.device_times import DeviceTimes, LossCopy, MeasuredOp
from pipemorph_trainer.topology.accelerator import CudaAccelerator
from pipemorph_trainer.transport.message import TensorMeta

pytestmark = [pytest.mark.times, pytest.mark.gpu, pytest.mark.needs_engine]
DEVICE = torch.device("cuda", 0)
MEBI = 1 << 20


@pytest.fixture(params=["tcp", "shm"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """Sender and receiver share a GPU, each with streams of its own."""
    with rigged(request.param, devices=(CudaAccelerator(DEVICE), CudaAccelerator(DEVICE))) as made:
        yield made
        torch.cuda.synchronize()


def exchange_one(rig: Rig, meta: TensorMeta) -> None:
    """Memory for one message is there afterwards: to allocate it may wait for the device."""
    rig.begin(rig.batch(meta))
    rig.outgoing.send(0, [torch.full(meta.shape, 1.0, device=DEVICE)])
    torch.full(meta.shape, 2.0, device=DEVICE)
    rig.arrived(0)
    rig.out.drain_sends()
    torch.cuda.synchronize()
    cycles_per_second()


def test_a_send_waits_neither_for_its_op_nor_for_its_copy(rig: Rig) -> None:
    meta = TensorMeta((4 * MEBI,), torch.float32)
    exchange_one(rig, meta)
    sent = rig.sent
    rig.begin(rig.batch(meta, iteration=1))
    send_behind_a_long_op(rig, meta)
    assert rig.sent == sent
    (came,) = rig.arrived(0)
    assert came is not None
    assert bool((came == 3.0).all())


def send_behind_a_long_op(rig: Rig, meta: TensorMeta) -> None:
    """Send threes while the device is busy; the host must not wait for it."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        began = time.monotonic()
        busy(0.5)
        tensor = torch.full(meta.shape, 3.0, device=DEVICE)
        rig.outgoing.send(0, [tensor])
        # Memory of the next op must not be that of the tensor on its way.
        del tensor
        torch.full(meta.shape, 4.0, device=DEVICE)
        took = time.monotonic() - began
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert took < 0.4, f"the executor was held up for {took:.2f} s"


def test_a_message_is_on_the_device_before_the_op_that_runs_is_over(rig: Rig) -> None:
    meta = TensorMeta((4 * MEBI,), torch.float32)
    exchange_one(rig, meta)
    rig.begin(rig.batch(meta, iteration=1))
    rig.outgoing.send(0, [torch.full(meta.shape, 5.0, device=DEVICE)])
    link = rig.incoming._link
    until(lambda: link.arrived((1, 1, 0, 0, 0)), "the message has arrived")
    torch.cuda.synchronize()
    busy(1.0)
    over = torch.cuda.Event()
    over.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert rig.incoming.ready_at(0) is not None
        until(rig.into.to_device.stream.query, "the copy is done")
        assert not over.query(), "the copy waited for the op"
        (came,) = rig.incoming.pop_message(0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert came is not None
    assert bool((came == 5.0).all())
    until(lambda: rig.slots_in_use() == 0, "the slot is free")


def test_messages_come_straight_from_the_slots(rig: Rig) -> None:
    meta = TensorMeta((MEBI,), torch.float32)
    rig.begin(rig.batch(meta))
    assert [region.leased for region in rig.into._regions] == [False]
    assert not rig.into._refused
    assert rig.into._regions[0].memory.is_pinned()


@pytest.fixture
def leasing() -> Iterator[Rig]:
    devices = CudaAccelerator(DEVICE), CudaAccelerator(DEVICE)
    with rigged("shm", devices=devices) as made:
        yield made
        torch.cuda.synchronize()


def test_messages_are_copied_by_the_device_alone(leasing: Rig) -> None:
    """Messages go into a slot of the receiver's, which is page-locked if the sender maps it."""
    rig, meta = leasing, TensorMeta((4 * MEBI + 3,), torch.bfloat16)
    rig.lease(rig.batch(meta))
    (region,) = (r for r in rig.out._regions if r.leased)
    assert region.memory.is_pinned() and not rig.out._refused
    for iteration in range(3):
        rig.begin(rig.batch(meta, iteration=iteration), slots=0)
        for microbatch in range(8):
            wanted = 8.0 * iteration + microbatch
            rig.outgoing.send(
                microbatch, [torch.full(meta.shape, wanted, device=DEVICE).bfloat16()]
            )
            torch.full(meta.shape, -1.0, device=DEVICE)
        for microbatch in range(8):
            (came,) = rig.arrived(microbatch)
            assert came is not None
            assert bool((came == 8.0 * iteration + microbatch).all()), (iteration, microbatch)
        del came
        until(lambda: rig.free_slots() == 9, "all slots are granted again")
    assert rig.copied() == (0, 0)


def test_a_lease_waits_neither_for_its_op_nor_for_its_copy(leasing: Rig) -> None:
    rig, meta = leasing, TensorMeta((4 * MEBI,), torch.float32)
    exchange_one(rig, meta)
    rig.lease(rig.batch(meta))
    rig.begin(rig.batch(meta, iteration=1), slots=0)
    sent, copied = rig.sent, rig.copied()
    send_behind_a_long_op(rig, meta)
    assert rig.sent == sent and rig.free_slots() == 8
    (came,) = rig.arrived(0)
    assert came is not None
    assert bool((came == 3.0).all())
    assert rig.copied() == copied, "it was leased"


def test_leased_slots_are_unlocked_before_they_are_unmapped(leasing: Rig) -> None:
    rig, meta = leasing, TensorMeta((MEBI,), torch.float32)
    rig.lease(rig.batch(meta))
    rig.begin(rig.batch(meta), slots=0)
    rig.outgoing.send(0, [torch.full(meta.shape, 3.0, device=DEVICE)])
    (came,) = rig.arrived(0)
    assert came is not None and bool((came == 3.0).all())
    (region,) = (r for r in rig.out._regions if r.leased)
    rig.outgoing.close()
    rig.out.close()
    # To page-lock it anew is no error, though it is page-locked already.
    device = rig.out.accelerator
    assert device.lock_pages(region.address, region.memory.numel()) is None
    device.unlock_pages(region.address)


def test_many_messages_keep_their_content(rig: Rig) -> None:
    """Far more than there are slots and blocks, with ops of the same sizes in between."""
    for iteration in range(20):
        size = (1, 3 * MEBI + 17, 1000)[iteration % 3]
        meta = TensorMeta((size,), torch.float32)
        rig.begin(rig.batch(meta, meta, iteration=iteration), slots=4)
        rig.out.page_lock_added()
        for microbatch in range(8):
            tensors = [
                torch.full((size,), 100.0 * iteration + microbatch + k, device=DEVICE)
                for k in (0.0, 0.5)
            ]
            rig.outgoing.send(microbatch, tensors)
            del tensors
            torch.randn(size, device=DEVICE)
            came = rig.arrived(microbatch)
            for k, tensor in zip((0.0, 0.5), came, strict=True):
                assert tensor is not None
                wanted = 100.0 * iteration + microbatch + k
                assert bool((tensor == wanted).all()), (iteration, microbatch, k)


def test_copies_run_during_ops_in_the_trace(rig: Rig) -> None:
    """torch.profiler's device events: most of the copying lies within kernels' times."""
    meta = TensorMeta((16 * MEBI,), torch.float32)
    rig.begin(rig.batch(meta))
    a = torch.randn(4096, 4096, device=DEVICE)
    payload = torch.randn(meta.shape, device=DEVICE)

    def ops() -> None:
        for _ in range(40):
            torch.mm(a, a)

    def exchange(iteration: int) -> None:
        rig.begin(rig.batch(meta, iteration=iteration))
        for microbatch in range(4):
            rig.outgoing.send(microbatch, [payload])
            ops()
        for microbatch in range(4):
            rig.arrived(microbatch)
            ops()
        torch.cuda.synchronize()

    exchange(0)  # pins memory
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        exchange(1)
    kernels, copies = [], []
    for event in found.events() or ():
        if event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        where = (event.time_range.start, event.time_range.end)
        if "memcpy" in event.name.lower() and "dtod" not in event.name.lower().replace(" ", ""):
            copies.append(where)
        elif "memcpy" not in event.name.lower() and "memset" not in event.name.lower():
            kernels.append(where)
    assert len(copies) >= 8, "the trace has no copies"
    total = sum(end - start for start, end in copies)
    hidden = sum(
        max(0.0, min(end, over) - max(start, began))
        for start, end in copies
        for began, over in kernels
    )
    assert hidden > 0.6 * total, f"{hidden / total:.0%} of the copying is hidden behind ops"


def test_what_cannot_be_page_locked_leaves_no_error_behind() -> None:
    device = CudaAccelerator(DEVICE)
    memory = (ctypes.c_uint8 * (1 << 16))()
    address = ctypes.addressof(memory)
    assert device.lock_pages(address, 1 << 16) is None
    why = device.lock_pages(address, 1 << 16)
    assert why is not None
    # Depending on CUDA's version: "... is already mapped" or "... already registered".
    assert "already" in why
    # The runtime holds its last error for the next launch.
    assert int(torch.ones(3, device=DEVICE).sum()) == 3
    device.unlock_pages(address)
    device.unlock_pages(address)
    assert int(torch.ones(3, device=DEVICE).sum()) == 3


def test_ops_are_timed_by_the_device() -> None:
    times = DeviceTimes(CudaAccelerator(DEVICE))
    torch.cuda.synchronize()
    began = time.time()
    ops = []
    for index in range(2):
        times.mark_op_start()
        busy(0.05)
        times.mark_op_end()
        ops.append(MeasuredOp(OpKind.F, index, 0.0, 0.0))
    launched = time.time() - began
    resolved = times.resolve_ops(ops)
    ended = time.time()
    assert launched < 0.05
    for op in resolved:
        assert 0.02 < op.end - op.start < 0.5
        assert began - 0.01 <= op.start <= op.end <= ended + 0.01
    assert resolved[0].end <= resolved[1].start + 1e-4


def test_losses_are_exact_and_cost_no_wait() -> None:
    device = CudaAccelerator(DEVICE)
    losses: list[Tensor] = [torch.tensor(v, device=DEVICE) for v in (0.1, 1e-7, 2.0 / 3.0)]
    # The first copy loads kernels and page-locks memory, which waits for the device.
    LossCopy(device, losses).wait_for_losses()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        busy(0.2)
        copy = LossCopy(device, losses)
        assert not copy.is_complete()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert copy.wait_for_losses() == [float(loss) for loss in losses]
