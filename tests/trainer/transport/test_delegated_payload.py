"""Delegated messages of the CPU: sent from where they are, and read where they arrived."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from gate import same_bits
from staging_rig import linked
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from waiting import until

from pipemorph.doctor import host
from pipemorph.planning.ir import Route
from pipemorph_trainer.errors import PipelineError
from pipemorph_trainer.transport.channels.delegated import (
    LARGE_BYTES,
    DelegatedIncoming,
    DelegatedOutgoing,
    make_payload,
)
from pipemorph_trainer.transport.fault_injection import LinkFaults
from pipemorph_trainer.transport.link_recorder import LinkRecorder, PeerClock
from pipemorph_trainer.transport.message import Direction, MessageBatch, TensorMeta

pytestmark = pytest.mark.needs_engine
COUNT = LARGE_BYTES // 2
META = TensorMeta((COUNT,), torch.float32)
NBYTES = META.nbytes


@dataclass
class Ends:
    outgoing: DelegatedOutgoing
    incoming: DelegatedIncoming
    sender: Any
    receiver: Any

    def begin(
        self, *metas: TensorMeta, messages: int = 4, used: int = 2, iteration: int = 0
    ) -> None:
        batch = MessageBatch(1, iteration, 8, metas)
        self.incoming.reserve_slots(messages, batch, used)
        self.incoming.begin_batch(batch)
        self.outgoing.begin_batch(batch)

    def free(self) -> int:
        """Slots that the sender may use."""
        return int(self.sender.send_slots(0))

    def granted(self, slots: int) -> None:
        until(lambda: self.free() == slots, f"{slots} slots are free")

    def copied(self) -> tuple[int, int]:
        """Bytes that the engine has copied, out and in."""
        return self.sender.stats().bytes_copied_out, self.receiver.stats().bytes_copied_in

    def take(self, microbatch: int) -> list[Tensor | None]:
        until(lambda: self.incoming.ready_at(microbatch) is not None, "the message has arrived")
        tensors = self.incoming.pop_message(microbatch)
        assert tensors is not None
        return tensors


@contextlib.contextmanager
def ends(transport: str) -> Iterator[Ends]:
    with linked(transport) as (low, high):
        yield Ends(
            DelegatedOutgoing(
                link=low,
                direction=Direction.FORWARD,
                hold=LinkFaults([], Direction.FORWARD).hold_message,
                queues=8,
                on_block=lambda iteration, microbatch: None,
                on_unblock=lambda: None,
            ),
            DelegatedIncoming(
                link=high,
                direction=Direction.FORWARD,
                peer_clock=PeerClock(),
                recorder=LinkRecorder(4, 0, Direction.FORWARD),
            ),
            low,
            high,
        )


def values(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_tensor_is_read_where_it_arrived(transport: str) -> None:
    with ends(transport) as e:
        e.begin(META)
        e.granted(4 + 2)
        for microbatch in range(8):
            e.outgoing.send(microbatch, [values(microbatch, COUNT)])
            (came,) = e.take(microbatch)
            same_bits(came, values(microbatch, COUNT))
            address = came.data_ptr()
            assert any(at <= address < at + n for at, n in e.receiver.slot_memory())
            del came
            e.granted(6)
        out, into = e.copied()
        # Over sockets, what was read together with the header is stored once more.
        assert out == (8 * NBYTES if transport == "shm" else 0) and into < 2 * NBYTES


@pytest.mark.parametrize(
    "transport, limit, capable, held",
    [
        ("shm", 1 << 26, False, 2),
        ("rdma", 1 << 26, False, 0),
        ("rdma", 1 << 26, True, 2),
        ("rdma", host.UNLIMITED, False, 2),
    ],
)
def test_tensors_stay_in_locked_memory_only_if_any_amount_may_be_locked(
    monkeypatch: pytest.MonkeyPatch, transport: str, limit: int, capable: bool, held: int
) -> None:
    monkeypatch.setattr(host, "read_locked_memory_limit", lambda: limit)
    monkeypatch.setattr(host, "has_ipc_lock", lambda: capable)
    link = Mock(transport=transport)
    incoming = DelegatedIncoming(
        link=link,
        direction=Direction.FORWARD,
        peer_clock=PeerClock(),
        recorder=LinkRecorder(4, 0, Direction.FORWARD),
    )
    incoming.reserve_slots(4, MessageBatch(1, 0, 8, (META,)), 2)
    link.reserve.assert_called_once_with(0, 4 + held, NBYTES)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_wire_times_are_those_of_the_engine_wherever_a_tensor_is(transport: str) -> None:
    with ends(transport) as e:
        recorder = e.incoming._recorder
        recorder.begin_iteration(Route.DELEGATED, "tcp", 7)
        e.begin(META)
        began = time.time()
        e.outgoing.send(0, [values(0, COUNT)])
        e.take(0)
        took, sample = time.time() - began, recorder.drain_window()
        assert sample is not None and sample.wire is not None
        assert sample.wire.exact == 1 and 0 < sample.wire.p50 <= took


def test_a_slot_is_held_until_its_last_tensor_is_gone() -> None:
    with ends("shm") as e:
        e.begin(META)
        e.granted(6)
        e.outgoing.send(0, [values(0, COUNT)])
        (came,) = e.take(0)
        assert came is not None and not came._is_view()
        weight = torch.ones((), requires_grad=True)
        # Autograd keeps it: the slot is not granted before the backward.
        product = (weight * came.view(2, -1)).sum()
        del came
        gc.collect()
        assert e.receiver.stats().slots_in_use == 1
        product.backward()
        assert weight.grad is not None
        torch.testing.assert_close(weight.grad, values(0, COUNT).sum())
        del product
        e.granted(6)


def test_tensors_that_are_held_do_not_hold_up_those_that_follow() -> None:
    """Tensors may be held for ever: only so many stay in their slots, and others are copied."""
    with ends("shm") as e:
        e.begin(META, messages=1, used=2)
        e.granted(3)
        held = []
        for microbatch in range(8):
            e.outgoing.send(microbatch, [values(microbatch, COUNT)])
            held += e.take(microbatch)
        assert e.copied()[1] == 6 * NBYTES
        for microbatch, tensor in enumerate(held):
            same_bits(tensor, values(microbatch, COUNT), f"microbatch {microbatch}")
        del held, tensor
        e.granted(3)


@pytest.mark.parametrize(
    "tensor",
    [
        values(1, 2 * COUNT)[::2],
        values(1, 8, COUNT // 8).T,
        torch.conj(torch.complex(values(1, COUNT), values(2, COUNT))),
        nn.Parameter(values(1, COUNT)),
        values(1, COUNT).requires_grad_() * 2,
        torch.zeros(1, dtype=torch.bfloat16).expand(COUNT, 2),
        values(1, COUNT) > 0,
        AsyncCollectiveTensor(values(1, COUNT)),
    ],
    ids=[
        "strided",
        "transposed",
        "conjugate",
        "parameter",
        "graph",
        "expanded",
        "bool",
        "subclass",
    ],
)
def test_whatever_a_tensor_is_its_elements_arrive(tensor: Tensor) -> None:
    meta = TensorMeta.from_tensor(tensor)
    with ends("shm") as e:
        e.begin(meta)
        e.granted(6 if meta.nbytes >= LARGE_BYTES else 4)
        e.outgoing.send(0, [tensor])
        (came,) = e.take(0)
        assert (came.dtype, came.shape, came.requires_grad) == (tensor.dtype, tensor.shape, False)
        if isinstance(tensor, AsyncCollectiveTensor):
            tensor = values(1, COUNT)
        same_bits(came, tensor.detach().resolve_conj().contiguous())


def test_small_tensors_none_and_nothing_in_one_message() -> None:
    sent = [values(1, COUNT), None, torch.tensor(2.5), torch.empty(0, 4), values(2, COUNT)]
    metas = [META if t is None else TensorMeta.from_tensor(t) for t in sent]
    with ends("shm") as e:
        e.begin(*metas)
        e.granted(6 * 5)
        e.outgoing.send(0, sent)
        came = e.take(0)
        for mine, theirs in zip(came, sent, strict=True):
            assert (mine is None) == (theirs is None)
            if mine is not None and theirs is not None:
                same_bits(mine, theirs)
        assert e.copied() == (2 * NBYTES + 4, 4)
        del came, mine, theirs
        e.granted(30)


def test_what_was_received_stays_when_the_link_is_closed() -> None:
    with ends("shm") as e:
        e.begin(META)
        e.granted(6)
        e.outgoing.send(0, [values(0, COUNT)])
        (came,) = e.take(0)
        assert came is not None
        e.sender.close()
        e.receiver.close()
        with pytest.raises(PipelineError, match="closed"):
            e.outgoing.send(1, [values(1, COUNT)])
    same_bits(came, values(0, COUNT))
    came[0] = 1.0


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_many_messages_of_changing_sizes(transport: str) -> None:
    with ends(transport) as e:
        for iteration in range(6):
            count = (COUNT, 10, 3 * COUNT)[iteration % 3]
            meta = TensorMeta((count,), torch.float32)
            e.begin(meta, meta, messages=1 + iteration % 2, used=2, iteration=iteration)
            ahead: list[tuple[int, list[Tensor | None]]] = []
            for microbatch in range(8):
                e.outgoing.send(microbatch, [values(20 * microbatch + k, count) for k in range(2)])
                ahead.append((microbatch, e.take(microbatch)))
                if len(ahead) > microbatch % 4:
                    which, tensors = ahead.pop(0)
                    for k, tensor in enumerate(tensors):
                        same_bits(tensor, values(20 * which + k, count), f"{iteration}, {which}")
            ahead.clear()
            del tensors, tensor
        until(lambda: e.receiver.stats().slots_in_use == 0, "all slots are free")


def test_a_tensor_without_memory_is_refused() -> None:
    with pytest.raises((TypeError, RuntimeError, NotImplementedError)):
        make_payload(torch.empty(4, device="meta"))
