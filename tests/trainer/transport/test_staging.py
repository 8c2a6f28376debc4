"""Messages of a device through host memory, on a simulated device and a real engine link.

The device's streams do their work when a test says so, or in random order. See
``simulated_device.py`` for how memory that is used too early or too late is found.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import random
import time
from collections.abc import Iterator

import pytest
import torch
from gate import same_bits
from simulated_device import Driver, SimulatedDevice
from staging_rig import Rig, rigged
from torch import Tensor
from waiting import until

from pipemorph.spec.sections.faults import Fault
from pipemorph_trainer.errors import PipelineError, WaitTimeoutError
from pipemorph_trainer.transport.channels.copy_stream import JOIN_SECONDS
from pipemorph_trainer.transport.channels.staging import MESSAGES_AHEAD
from pipemorph_trainer.transport.fault_injection import LinkFaults
from pipemorph_trainer.transport.message import Direction, TensorMeta

pytestmark = pytest.mark.needs_engine


@pytest.fixture(params=["tcp", "shm"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    with rigged(request.param) as rig:
        yield rig


def values(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def read(device: SimulatedDevice, tensor: Tensor, into: list[bytes]) -> None:
    """An op that reads a tensor, by address: it does not keep it."""
    address, nbytes = tensor.data_ptr(), tensor.numel() * tensor.element_size()
    device.launch(lambda: into.append(ctypes.string_at(address, nbytes)))


def raw(tensor: Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


META = TensorMeta((64,), torch.float32)


# --- out -----------------------------------------------------------------------------------------


def test_a_message_leaves_when_its_op_and_its_copy_are_done(rig: Rig) -> None:
    rig.begin(rig.batch(META))
    wanted = values(1, 64)
    tensor = rig.sender.tensor(wanted)
    rig.outgoing.send(0, [tensor])
    # The copy waits for the op, and the engine for the copy; the executor for nothing.
    rig.sender.run(rig.out.to_host.stream)
    assert not rig.sender.copied
    rig.sender.run(rig.sender.compute)
    assert rig.sent == 0
    rig.sender.run()
    until(lambda: rig.sent == 1, "the engine has the message")
    (came,) = rig.arrived(0)
    rig.receiver.run()
    same_bits(came, wanted)


def test_memory_of_a_tensor_that_is_gone_waits_for_its_copy(rig: Rig) -> None:
    rig.begin(rig.batch(META))
    wanted = values(1, 64)
    tensor = rig.sender.tensor(wanted)
    rig.outgoing.send(0, [tensor])
    del tensor
    # The next op gets memory of the same size, and the compute stream is as early as it can be.
    other = rig.sender.tensor(values(2, 64))
    rig.sender.run(rig.sender.compute)
    rig.sender.run()
    (came,) = rig.arrived(0)
    rig.receiver.run()
    same_bits(came, wanted)
    same_bits(other, values(2, 64))


@pytest.mark.parametrize("slots", [8, 0], ids=["slots", "no slot yet"])
def test_a_source_is_held_until_its_copy_is_done_and_no_longer(rig: Rig, slots: int) -> None:
    """The reference holds it, so its allocator knows of the compute stream alone. A message that
    waits for a slot does not hold it."""
    metas = (META, META)
    rig.begin(rig.batch(*metas), slots=slots)
    sources = [rig.sender.tensor(values(seed, 64)) for seed in (1, 2)]
    blocks = [rig.sender._block(source.data_ptr()) for source in sources]
    rig.outgoing.send(0, sources)
    sources.clear()
    rig.sender.run(rig.sender.compute)
    assert not any(block.free or block.streams for block in blocks)
    rig.sender.run()

    def freed() -> bool:
        rig.sender.runnable()
        return all(block.free for block in blocks)

    until(freed, "both sources are given back")
    rig.incoming.reserve_slots(8, rig.batch(*metas))
    came = rig.arrived(0)
    rig.receiver.run()
    for tensor, seed in zip(came, (1, 2), strict=True):
        same_bits(tensor, values(seed, 64))


def test_a_tensor_that_is_not_contiguous(rig: Rig) -> None:
    rig.begin(rig.batch(TensorMeta((8, 4), torch.float32)))
    wanted = values(3, 4, 8)
    tensor = rig.sender.tensor(wanted)
    rig.sender.run(rig.sender.compute)
    rig.outgoing.send(0, [tensor.t()])
    rig.sender.run()
    (came,) = rig.arrived(0)
    rig.receiver.run()
    same_bits(came, wanted.t())


def test_pinned_memory_stays_until_the_receiver_has_it_and_is_used_again(rig: Rig) -> None:
    """The engine holds what it was given, as no slot is granted."""
    batch = rig.batch(META, microbatches=6)
    rig.begin(batch, slots=0)
    for microbatch in range(6):
        rig.outgoing.send(microbatch, [rig.sender.tensor(values(microbatch, 64))])
        rig.sender.run()
    until(lambda: rig.sent == 6, "the engine has the messages")
    gc.collect()
    # Newly pinned memory must not be memory that the engine still has.
    other = [rig.sender.allocate_pinned((64,), torch.float32) for _ in range(6)]
    for tensor in other:
        tensor.fill_(-1.0)
    rig.incoming.reserve_slots(6, batch)
    for microbatch in range(6):
        (came,) = rig.arrived(microbatch)
        rig.receiver.run()
        same_bits(came, values(microbatch, 64), f"microbatch {microbatch}")
    del other, tensor
    until(lambda: rig.outgoing.link.stats().sends_in_flight == 0, "all is acknowledged")
    blocks = len(rig.sender.pinned_blocks)
    assert blocks >= 12
    again = rig.batch(META, iteration=1, microbatches=6)
    rig.begin(again, slots=0)
    for microbatch in range(6):
        rig.outgoing.send(microbatch, [rig.sender.tensor(values(microbatch, 64))])
        rig.sender.run()
        rig.arrived(microbatch)
        rig.receiver.run()
    assert len(rig.sender.pinned_blocks) == blocks, "the pool was not used again"


def test_what_cannot_leave_yet_does_not_hold_up_another_link() -> None:
    """The receiver has not granted slots of the new size; the other link's messages go on."""
    with rigged() as one, rigged() as two:
        # The links are of one rank: they share the sending device and its streams.
        two.outgoing._staging, two.sender = one.out, one.sender
        small = one.batch(META)
        one.begin(small)
        two.begin(small)
        large = one.batch(TensorMeta((4096,), torch.float32), iteration=1)
        one.outgoing.begin_batch(large)
        one.outgoing.send(0, [one.sender.tensor(values(1, 4096))])
        one.sender.run()
        two.outgoing.send(0, [one.sender.tensor(values(2, 64))])
        one.sender.run()
        (came,) = two.arrived(0)
        two.receiver.run()
        same_bits(came, values(2, 64))
        assert one.sent == 0
        one.incoming.reserve_slots(8, large)
        one.incoming.begin_batch(large)
        (came,) = one.arrived(0)
        one.receiver.run()
        same_bits(came, values(1, 4096))


def test_times_on_the_queue_begin_when_the_bytes_are_there() -> None:
    """The launch of the op is too early: that is not the link's time."""
    with rigged() as rig:
        held = Fault(link=4, delay_ms=50.0, from_iteration=0)
        rig.outgoing._hold = LinkFaults([held], Direction.FORWARD).hold_message
        rig.begin(rig.batch(META))
        rig.outgoing.send(0, [rig.sender.tensor(values(1, 64))])
        launched = time.time()
        until(lambda: time.time() > launched + 0.05, "some time has passed")
        ran = time.time()
        rig.sender.run()
        until(lambda: rig.incoming.ready_at(0) is not None, "the message has arrived")
        at = rig.incoming.ready_at(0)
        assert at >= ran + 0.05


# --- in ------------------------------------------------------------------------------------------


def give(rig: Rig, microbatch: int, tensor: Tensor) -> None:
    """Send one message all the way into the receiver's slot."""
    rig.outgoing.send(microbatch, [rig.sender.tensor(tensor)])
    rig.sender.run()


def test_a_slot_is_free_when_the_copy_from_it_is_done(rig: Rig) -> None:
    rig.begin(rig.batch(META))
    give(rig, 0, values(1, 64))
    (came,) = rig.arrived(0)
    assert came is not None
    assert rig.slots_in_use() == 1
    assert not rig.receiver.copied
    rig.receiver.run()
    until(lambda: rig.slots_in_use() == 0, "the slot is free")
    assert rig.receiver.copied == [(rig.into.to_device.stream.name, 256)]
    assert rig.receiver.ever_registered, "it came straight from the slot"
    assert not rig.receiver.pinned_blocks


def test_the_op_waits_for_the_copy_and_the_host_does_not(rig: Rig) -> None:
    rig.begin(rig.batch(META))
    give(rig, 0, values(1, 64))
    (came,) = rig.arrived(0)
    assert came is not None
    seen: list[bytes] = []
    read(rig.receiver, came, seen)
    rig.receiver.run(rig.receiver.compute)
    assert not seen, "the op ran before its input was there"
    rig.receiver.run()
    assert seen == [raw(values(1, 64))]


def test_memory_of_a_message_waits_for_the_op_that_uses_it(rig: Rig) -> None:
    rig.begin(rig.batch(META))
    for microbatch in range(3):
        give(rig, microbatch, values(microbatch, 64))
    seen: list[bytes] = []
    for microbatch in range(3):
        (came,) = rig.arrived(microbatch)
        assert came is not None
        read(rig.receiver, came, seen)
        # Dropped right after the launch, as the inputs of a stage without autograd are; the next
        # message gets memory of the same size, and its stream is as early as it can be.
        del came
        rig.receiver.run(rig.into.to_device.stream)
    rig.receiver.run()
    assert seen == [raw(values(microbatch, 64)) for microbatch in range(3)]


def test_what_arrives_is_copied_before_its_op_but_not_all_of_it(rig: Rig) -> None:
    rig.begin(rig.batch(META))
    for microbatch in range(MESSAGES_AHEAD + 2):
        give(rig, microbatch, values(microbatch, 64))
    link = rig.incoming._link
    until(
        lambda: all(link.arrived((1, 0, m, 0, 0)) or m == 0 for m in range(MESSAGES_AHEAD + 2)),
        "all messages have arrived",
    )
    until(lambda: rig.incoming.ready_at(0) is not None, "the first is ready")
    rig.receiver.run()
    assert len(rig.receiver.copied) == MESSAGES_AHEAD
    until(lambda: rig.slots_in_use() == 2, "the slots of those are free")
    rig.incoming.pop_message(0)
    rig.incoming.ready_at(1)
    rig.receiver.run()
    assert len(rig.receiver.copied) == MESSAGES_AHEAD + 1


def test_slots_that_cannot_be_page_locked_cost_a_copy_and_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with rigged(register_refuses="operation not supported") as rig:
        with caplog.at_level(logging.WARNING, "pipemorph.trainer"):
            rig.begin(rig.batch(META))
            rig.incoming.reserve_slots(8, rig.batch(META))
        (record,) = caplog.records
        assert "page-locked: operation not supported" in record.getMessage()
        give(rig, 0, values(1, 64))
        (came,) = rig.arrived(0)
        assert rig.slots_in_use() == 0
        rig.receiver.run()
        same_bits(came, values(1, 64))


def test_awkward_tensors(rig: Rig) -> None:
    """Message of None, 0-dim, empty, integers and bfloat16."""
    sent = [
        values(1, 3, 5, dtype=torch.bfloat16),
        None,
        torch.tensor(2.5),
        torch.empty(0, 4),
        torch.tensor([True, False, True]),
        torch.tensor([1 + 2j]),
    ]
    metas = [
        TensorMeta((7,), torch.float32) if t is None else TensorMeta.from_tensor(t) for t in sent
    ]
    rig.begin(rig.batch(*metas), slots=8)
    rig.outgoing.send(0, [None if t is None else rig.sender.tensor(t) for t in sent])
    rig.sender.run()
    came = rig.arrived(0)
    rig.receiver.run()
    assert len(came) == len(sent)
    for mine, theirs in zip(came, sent, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            assert mine.dtype == theirs.dtype
            same_bits(mine, theirs)
    until(lambda: rig.slots_in_use() == 0, "all slots are free")


# --- leases --------------------------------------------------------------------------------------


@pytest.fixture
def leasing() -> Iterator[Rig]:
    with rigged("shm") as made:
        yield made


def test_a_tensor_is_copied_straight_into_the_receivers_slot(leasing: Rig) -> None:
    rig, batch = leasing, leasing.batch(META)
    rig.lease(batch)
    for iteration in range(3):
        rig.begin(rig.batch(META, iteration=iteration), slots=0)
        rig.outgoing.send(0, [rig.sender.tensor(values(iteration, 64))])
        assert rig.free_slots() == 8, "the slot is taken when the copy is launched"
        rig.sender.run(rig.out.to_host.stream)
        assert rig.sent == iteration, "it was sent before its op ran"
        rig.sender.run()
        (came,) = rig.arrived(0)
        rig.receiver.run()
        same_bits(came, values(iteration, 64))
        until(lambda: rig.free_slots() == 9, "the slot is granted again")
    assert rig.copied() == (0, 0)
    assert rig.sender.ever_registered and not rig.sender.pinned_blocks
    assert rig.sender.copied == [(rig.out.to_host.stream.name, 256)] * 3


def test_what_finds_no_slot_to_lease_goes_through_memory_of_the_sender(leasing: Rig) -> None:
    """Slots that are not page-locked here yet, or none that is free but the last one."""
    rig, batch = leasing, leasing.batch(META)
    rig.begin(batch, slots=2)
    until(lambda: rig.free_slots() == 3, "the slots are granted")
    give(rig, 0, values(0, 64))
    for microbatch in range(5):
        (came,) = rig.arrived(microbatch)
        rig.receiver.run()
        same_bits(came, values(microbatch, 64), f"microbatch {microbatch}")
        if microbatch:
            continue
        until(lambda: rig.free_slots() == 3, "the slot is granted again")
        assert rig.copied() == (256, 0)
        rig.out.page_lock_added()
        for ahead in range(1, 5):  # of which the first two find one
            rig.outgoing.send(ahead, [rig.sender.tensor(values(ahead, 64))])
        rig.sender.run()
    until(lambda: rig.free_slots() == 3, "all slots are granted again")
    assert rig.copied() == (3 * 256, 0)


def test_nothing_is_leased_before_older_messages_have_their_slots(leasing: Rig) -> None:
    """Slots of a message of two tensors could be waited for for ever else."""
    rig, batch = leasing, leasing.batch(META, META)
    rig.begin(batch, slots=3)
    until(lambda: rig.free_slots() == 7, "the slots are granted")
    pairs = [[values(2 * microbatch + k, 64) for k in range(2)] for microbatch in range(5)]

    def send(microbatch: int) -> None:
        rig.outgoing.send(microbatch, [rig.sender.tensor(each) for each in pairs[microbatch]])

    send(0)  # The slots are not page-locked yet.
    rig.out.page_lock_added()
    for microbatch in range(1, 4):
        send(microbatch)
        assert rig.free_slots() == 7, "the first message has none yet"
    rig.sender.run()
    for microbatch in range(5):
        if microbatch == 4:
            until(lambda: rig.free_slots() == 7, "the slots are granted again")
            send(4)
            assert rig.free_slots() == 5
            rig.sender.run()
        for k, came in enumerate(rig.arrived(microbatch)):
            rig.receiver.run()
            same_bits(came, pairs[microbatch][k], f"microbatch {microbatch}, {k}")
    assert rig.copied() == (4 * 2 * 256, 0)


def test_leases_are_sent_once_although_their_paths_are_lost(leasing: Rig) -> None:
    size = 700_000  # of several chunks
    meta = TensorMeta((size,), torch.float32)
    rig, batch = leasing, leasing.batch(meta)
    rig.lease(batch)
    rig.begin(batch, slots=0)
    for microbatch in range(6):
        rig.outgoing.send(microbatch, [rig.sender.tensor(values(microbatch, size))])
    rig.sender.run()
    rig.outgoing.link.sever_data_path()
    rig.incoming._link.sever_data_path()
    for microbatch in range(6):
        (came,) = rig.arrived(microbatch)
        rig.receiver.run()
        same_bits(came, values(microbatch, size), f"microbatch {microbatch}")
    until(lambda: rig.free_slots() == 9, "all slots are granted again")
    assert rig.copied() == (0, 0)
    stats = rig.incoming._link.stats()
    assert (stats.messages_received, stats.bytes_received) == (6, 6 * meta.nbytes)


def test_a_lease_whose_copy_cannot_be_launched_is_given_back(
    leasing: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, batch = leasing, leasing.batch(META)
    rig.lease(batch)
    rig.begin(batch, slots=0)

    def refuses(*_: object) -> None:
        raise RuntimeError("CUDA error: out of memory")

    tensor = rig.sender.tensor(values(0, 64))
    with monkeypatch.context() as broken:
        broken.setattr(rig.sender, "copy_tensor", refuses)
        with pytest.raises(RuntimeError, match="out of memory"):
            rig.outgoing.send(0, [tensor])
    gc.collect()
    assert rig.free_slots() == 9


def test_slots_of_the_receiver_that_cannot_be_page_locked_cost_a_copy_and_a_warning(
    leasing: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig, batch = leasing, leasing.batch(META)
    rig.sender.register_refuses = "operation not supported"
    with caplog.at_level(logging.WARNING, "pipemorph.trainer"):
        rig.lease(batch)
        rig.out.page_lock_added()
    (record,) = caplog.records
    assert "memory to send from" in record.getMessage()
    rig.begin(batch, slots=0)
    give(rig, 0, values(1, 64))
    (came,) = rig.arrived(0)
    rig.receiver.run()
    same_bits(came, values(1, 64))
    assert rig.copied() == (256, 0)
    until(lambda: rig.free_slots() == 9, "all slots are granted again")


def test_leased_memory_stays_page_locked_while_what_is_given_up_may_reach_it(leasing: Rig) -> None:
    rig, batch = leasing, leasing.batch(META)
    rig.lease(batch)
    rig.begin(batch, slots=0)
    give(rig, 0, values(0, 64))
    assert len(rig.sender.registered) == 1
    rig.outgoing.send(1, [rig.sender.tensor(values(1, 64))])
    with rig.sender.progress:  # Waiting threads get the error; the work stays.
        rig.sender.broken = "the device hangs"
        rig.sender.progress.notify_all()
    rig.out.close(abandon=True)
    assert len(rig.sender.registered) == 1, "a copy to it is under way"


def test_closing_unlocks_leased_memory(leasing: Rig) -> None:
    rig, batch = leasing, leasing.batch(META)
    rig.lease(batch)
    rig.begin(batch, slots=0)
    give(rig, 0, values(0, 64))
    rig.outgoing.close()
    rig.out.close()
    assert not rig.sender.registered


# --- any order -----------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_the_streams_work(seed: int, transport: str) -> None:
    """Messages of changing shapes; tensors are dropped at once, and their memory used again. Over
    shared memory some are leased, and some find no slot."""
    rng = random.Random(seed)
    with rigged(transport) as rig:
        drivers = [Driver(device, seed) for device in (rig.sender, rig.receiver)]
        for iteration in range(4):
            size = rng.choice((17, 1000, 70_000))
            meta = TensorMeta((size,), torch.float32)
            batch = rig.batch(meta, meta, iteration=iteration, microbatches=10)
            rig.begin(batch, slots=rng.choice((1, 3, 10)))
            rig.out.page_lock_added()
            seen: list[bytes] = []
            wanted: list[bytes] = []
            sent = 0
            for microbatch in range(10):
                # Up to four are ahead of the taken ones.
                for ahead in range(sent, min(10, microbatch + rng.randint(1, 4))):
                    pair = [values(100 * iteration + 2 * ahead + k, size) for k in range(2)]
                    rig.outgoing.send(ahead, [rig.sender.tensor(each) for each in pair])
                    wanted += [raw(each) for each in pair]
                    sent = ahead + 1
                for came in rig.arrived(microbatch):
                    assert came is not None
                    read(rig.receiver, came, seen)
                del came
            until(lambda seen=seen: len(seen) == 20, "all ops have run")
            assert seen == wanted, f"iteration {iteration}"
        rig.out.drain_sends()
        for driver in drivers:
            driver.close()
        until(lambda: rig.slots_in_use() == 0, "all slots are free")
        assert not rig.rings


# --- errors and the end --------------------------------------------------------------------------


def test_a_link_that_dies_under_the_thread_is_reported_by_the_next_send() -> None:
    with rigged() as rig:
        rig.begin(rig.batch(META))
        rig.outgoing.send(3, [rig.sender.tensor(values(1, 64))])
        rig.outgoing.link.close()
        rig.sender.run()
        until(lambda: rig.rings == ["out"], "the executor is woken")
        with pytest.raises(PipelineError, match="F of microbatch 3 of iteration 0 on link 4: "):
            rig.outgoing.send(4, [values(1, 64)])
        with pytest.raises(PipelineError, match="F of microbatch 3 of iteration 0 on link 4: "):
            rig.out.drain_sends()


def test_a_device_that_fails_is_reported_where_a_message_is_waited_for() -> None:
    with rigged() as rig:
        rig.begin(rig.batch(META))
        give(rig, 0, values(1, 64))
        rig.arrived(0)
        rig.receiver.fail("CUDA error: an illegal memory access was encountered")
        until(lambda: rig.rings == ["into"], "the executor is woken")
        with pytest.raises(PipelineError, match=r"F of microbatch 0 .*: CUDA error: an illegal"):
            rig.incoming.ready_at(1)


def test_a_message_of_another_size_is_an_error_in_words() -> None:
    with rigged() as rig:
        rig.begin(rig.batch(META))
        give(rig, 0, values(1, 64))
        rig.incoming.begin_batch(rig.batch(TensorMeta((63,), torch.float32)))
        link = rig.incoming._link
        until(lambda: link.arrived((1, 0, 0, 0, 0)), "the message has arrived")
        with pytest.raises(PipelineError, match=r"has 256 bytes; expected float32\[63\]"):
            rig.incoming.ready_at(0)


def test_another_links_death_is_no_error_of_this_one() -> None:
    """The other link's messages may all have been taken, as at the end of a run."""
    with rigged() as one, rigged() as two:
        one.into.incoming.append(two.incoming)
        one.begin(one.batch(META))
        two.begin(two.batch(META))
        two.incoming._link.close()
        give(one, 0, values(1, 64))
        (came,) = one.arrived(0)
        assert came is not None
        with pytest.raises(PipelineError):
            two.incoming.ready_at(0)


def test_draining_names_what_did_not_leave() -> None:
    with rigged(deadline=0.05) as rig:
        rig.begin(rig.batch(META))
        rig.outgoing.send(5, [rig.sender.tensor(values(1, 64))])
        with pytest.raises(WaitTimeoutError, match=r"F of microbatch 5 .* the deadline is 0.05 s"):
            rig.outgoing.close()


def test_closing_gives_everything_back(rig: Rig) -> None:
    rig.begin(rig.batch(META))
    give(rig, 0, values(1, 64))
    rig.arrived(0)
    assert rig.receiver.registered
    rig.outgoing.close()
    rig.receiver.run()
    rig.incoming.close()
    rig.into.close()
    rig.into.close()
    assert not rig.receiver.registered
    rig.out.close()
    assert rig.sent == 1


def test_giving_up_does_not_wait_for_the_device() -> None:
    with rigged() as rig:
        rig.begin(rig.batch(META))
        for microbatch in range(3):
            rig.outgoing.send(microbatch, [rig.sender.tensor(values(1, 64))])
        rig.sender.run(rig.sender.compute)
        rig.sender.fail("given up")
        began = time.monotonic()
        rig.out.close(abandon=True)
        assert time.monotonic() - began < JOIN_SECONDS, "it waited for its thread"
        assert rig.sent <= 1
