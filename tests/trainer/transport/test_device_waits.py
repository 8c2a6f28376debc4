"""Calls that wait for all work of a device find none there that waits for their caller.

Page-locking memory, growing a pool of it or making a communicator may be such calls. A simulated
device that is strict makes them wait; one that could never return ends with the names of the
receives it waits for.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from launch import run_ranks
from simulated_device import Driver, SimulatedDevice, SimulatedEvent
from simulated_runs import device_with_receives
from staging_rig import rigged
from torch import Tensor
from trainer_jobs import Job, assert_same, make_plan, part, reference, train
from waiting import until

from pipemorph.planning import Plan, Route
from pipemorph.spec.mesh import MeshShape
from pipemorph_trainer import TrainerContext
from pipemorph_trainer.agent.messages import NullControlClient
from pipemorph_trainer.agent.rank_plan import RankPlan
from pipemorph_trainer.errors import PipelineError, WaitTimeoutError
from pipemorph_trainer.executor import stage_executor
from pipemorph_trainer.memory.host_pool import HostPool
from pipemorph_trainer.schedule import iteration
from pipemorph_trainer.schedule.plan_receiver import PlanReceiver
from pipemorph_trainer.schedule.plan_store import PlanStore
from pipemorph_trainer.topology.accelerator import QUEUES, describe_queue_shortage
from pipemorph_trainer.topology.groups import ProcessGroups
from pipemorph_trainer.trackers.listeners import IterationListeners
from pipemorph_trainer.transport import rendezvous
from pipemorph_trainer.transport.channels import direct, direct_groups
from pipemorph_trainer.transport.channels.direct import DirectIncoming, DirectOutgoing
from pipemorph_trainer.transport.channels.send_timestamps import SendTimestamps
from pipemorph_trainer.transport.control_socket import ArrivedNote
from pipemorph_trainer.transport.fault_injection import FaultTrace, LinkFaults
from pipemorph_trainer.transport.link_recorder import LinkRecorder, OpClock, PeerClock
from pipemorph_trainer.transport.message import (
    ALL_PRESENT,
    Direction,
    MessageBatch,
    Note,
    ReceiveLimits,
    TensorMeta,
)

META = TensorMeta((16,), torch.float32, gradient=True)
PATIENCE = 0.3
LONG = 30.0
NEVER = r"waited 0.3 s for all that the device was given; not complete: "


@contextmanager
def driven(device: SimulatedDevice) -> Iterator[SimulatedDevice]:
    driver = Driver(device, 3)
    yield device
    device.fail("the test is over")
    driver.close()


# --- receives of the direct route -----------------------------------------------------------------


class Receive:
    """Work that a process group returns for a receive on a device."""

    def __init__(self, device: SimulatedDevice, event: SimulatedEvent, stream: Any) -> None:
        self._device, self.event, self._stream = device, event, stream

    def wait(self) -> None:
        self._device.wait_event(self._stream(), self.event)

    def is_completed(self) -> bool:
        return self.event.query()

    def exception(self) -> None:
        return None


@pytest.mark.parametrize("after", [(1, 2), ()], ids=["when it can come", "at the start"])
def test_a_stage_can_page_lock_memory_before_it_has_sent(
    after: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients come only once it has. Receives that are posted at the start show that the device
    would never have got to the end."""
    monkeypatch.setattr(direct.dist, "get_group_rank", lambda group, rank: 0)
    posted: list[SimulatedEvent] = []

    def recv(tensors: list[Tensor], peer: int, tag: int) -> Receive:
        event = device.post_receive(f"B of microbatch {len(posted)}")
        posted.append(event)
        return Receive(device, event, lambda: incoming._side)

    notes = {
        (1, 0, m): ArrivedNote(Note(1, 0, m, ALL_PRESENT, 0.0, 0.0, 0.0), None) for m in range(2)
    }
    with driven(SimulatedDevice(strict=True, patience=PATIENCE)) as device:
        group: Any = SimpleNamespace(recv=recv)
        socket: Any = SimpleNamespace(notes=notes, find_note=notes.get)
        poller: Any = SimpleNamespace(wake=lambda: None, awaited=True)
        incoming = DirectIncoming(
            group=group, peer=1, direction=Direction.BACKWARD, socket=socket, poller=poller,
            op_clock=OpClock(), peer_clock=PeerClock(),
            recorder=LinkRecorder(0, 0, Direction.BACKWARD), device=torch.device("cpu"),
            accelerator=device, posted=1,
        )  # fmt: skip
        incoming.begin_batch(MessageBatch(1, 0, 2, (META,), receives=ReceiveLimits(after)))
        memory = torch.empty(64, dtype=torch.uint8)
        if not after:
            with pytest.raises(RuntimeError, match=f"cudaHostRegister {NEVER}B of microbatch 0"):
                device.lock_pages(memory.data_ptr(), 64)
        else:
            assert device.lock_pages(memory.data_ptr(), 64) is None
            for m in range(2):
                incoming.record_sent(m + 1)
                until(lambda m=m: len(posted) == m + 1, f"receive {m} is posted")
                device.deliver(posted[m])
                until(lambda m=m: incoming.ready_at(m) is not None, f"message {m} is here")
                assert incoming.pop_message(m) is not None
        for event in posted:
            device.deliver(event)
        incoming.close()


# --- memory that is page-locked -------------------------------------------------------------------


@pytest.mark.needs_engine
def test_a_plan_that_needs_page_locked_memory_is_prepared_when_nothing_is_posted() -> None:
    job = Job(2, 12)
    mesh = MeshShape(2)
    first, same = (part(make_plan(job, version, "1f1b"), 1, mesh) for version in (0, 1))
    wide = part(make_plan(job, 2, "pipemorph", warmup=(9, 1)), 1, mesh)
    device = SimulatedDevice(strict=True, patience=PATIENCE)
    with driven(device), rigged(devices=(SimulatedDevice(), device)) as rig:
        end: Any = SimpleNamespace(
            link=0, staged=True, delegated=rig.incoming, route=Route.DIRECT,
            has_route=lambda _: True, expect_messages=lambda _: None, no_direct=None,
        )  # fmt: skip
        book = PlanStore(first, mesh.find_coordinate(1), [end], no_offload={}, no_recompute={})
        book.set_link_shapes(end, (META,))
        had = len(device.registered)
        assert had, "the first plan has slots"
        receive = device.post_receive("F of microbatch 3")
        arrived: list[RankPlan] = []
        reporter: Any = SimpleNamespace(prepared=0, has_listener=True)
        control: Any = SimpleNamespace(pop_newest_plan=lambda: arrived.pop() if arrived else None)
        arriving = PlanReceiver(
            coordinate=mesh.find_coordinate(1), ends=[], plans=book, agreements=(), control=control,
            reporter=reporter, listeners=IterationListeners(()), warm=True,
        )  # fmt: skip

        def between_ops(plan: RankPlan) -> None:
            arrived.append(plan)
            arriving.take_plan(page_lock=False)
            assert not arrived

        between_ops(same)
        assert book.list_held_versions() == {1}, "it needs no more memory than the first one"
        between_ops(wide)
        assert book.list_held_versions() == {1}
        assert len(device.registered) == had
        with pytest.raises(RuntimeError, match=f"cudaHostRegister {NEVER}F of microbatch 3"):
            arriving.prepare_postponed()
        device.deliver(receive)
        arriving.prepare_postponed()
        assert book.list_held_versions() == {1, 2}
        assert len(device.registered) > had


@pytest.mark.needs_engine
def test_sends_find_page_locked_memory() -> None:
    device = SimulatedDevice(strict=True, patience=PATIENCE)
    with driven(device), rigged(devices=(device, SimulatedDevice())) as rig:
        rig.outgoing.expect_messages(4)
        rig.begin(rig.batch(META))
        grown = len(device.waited_for_all)
        assert grown
        device.post_receive("B of microbatch 0")
        for m in range(4):
            rig.outgoing.send(m, [torch.ones(16)])
        assert len(device.waited_for_all) == grown
        larger = torch.ones(1 << 12)
        rig.outgoing._batch = rig.batch(TensorMeta.from_tensor(larger))
        with pytest.raises(RuntimeError, match=f"cudaHostAlloc {NEVER}B of microbatch 0"):
            rig.outgoing.send(4, [larger])


def test_activations_find_page_locked_memory() -> None:
    with driven(SimulatedDevice(strict=True, patience=PATIENCE)) as device:
        pool = HostPool(4 * 1024, device)
        pool.grow_to(3)
        assert pool.nbytes == 0, "no size is known yet"
        pool.return_block(pool.take_block(1024))
        pool.grow_to(3)
        assert pool.nbytes == 3 * 1024
        pool.grow_to(9)
        assert pool.nbytes == 4 * 1024, "beyond its limit"
        receive = device.post_receive("F of microbatch 1")
        blocks = [pool.take_block(1000) for _ in range(4)]
        for block in blocks:
            pool.return_block(block)
        grown = HostPool(None, device)
        with pytest.raises(RuntimeError, match=f"cudaHostRegister {NEVER}F of microbatch 1"):
            grown.take_block(1024)
        device.deliver(receive)
        pool.close()


def test_memory_for_sends_is_page_locked_before_receives_are_posted() -> None:
    order: list[str] = []

    def end(name: str) -> Any:
        def lane(way: str) -> Any:
            return SimpleNamespace(begin_batch=lambda batch: order.append(f"{way} {name}"))

        return SimpleNamespace(incoming=lane("receive from"), outgoing=lane("send to"))

    above, below = end("above"), end("below")
    nothing: Any = lambda *_, **__: None  # noqa: E731
    executor = stage_executor.StageExecutor(
        MeshShape(3).find_coordinate(1),
        SimpleNamespace(
            begin_iteration=nothing, run_forward=nothing, backward_input=nothing,
            run_fused_backward=nothing, backward_weight=nothing,
        ),  # type: ignore[arg-type]
        SimpleNamespace(upstream=above, downstream=below),  # type: ignore[arg-type]
        stage_executor.ExecutorContext(
            mailbox=SimpleNamespace(), op_clock=OpClock(),  # type: ignore[arg-type]
            between_ops=nothing, on_last_forward=nothing, reserve_slots=nothing,
        ),
    )  # fmt: skip
    executor.input_metas = executor.output_metas = (META,)
    plan = make_plan(Job(3, 4), 0, "1f1b")
    executor.begin_iteration(
        stage_executor.StageIteration(ops=plan.schedule.stages[1], iteration=1)
    )
    assert order[:2] == ["send to above", "send to below"], order
    assert sorted(order[2:]) == ["receive from above", "receive from below"], order


# --- sends of the direct route --------------------------------------------------------------------


class Send:
    """Work that a process group returns for a send on a device."""

    def __init__(self) -> None:
        self.complete = False
        self.failure: str | None = None

    def wait(self, *_: Any) -> None:
        raise AssertionError("the compute stream was made to wait for a send")

    def is_completed(self) -> bool:
        return self.complete

    def exception(self) -> str | None:
        return self.failure


@contextmanager
def sending(
    monkeypatch: pytest.MonkeyPatch,
    most: int,
    deadline: float = LONG,
    *,
    asks: bool = True,
    taken: dict[int, tuple[int, int]] | None = None,
) -> Iterator[tuple[DirectOutgoing, list[Send], list[tuple[int, int]]]]:
    """``asks``: as on a device. ``taken``: the neighbour's count of used messages."""
    monkeypatch.setattr(direct.dist, "get_group_rank", lambda group, rank: 0)
    sends: list[Send] = []
    blocked: list[tuple[str, int]] = []

    def send(tensors: list[Tensor], peer: int, tag: int) -> Send:
        sends.append(Send())
        return sends[-1]

    group: Any = SimpleNamespace(send=send)
    socket: Any = SimpleNamespace(send_note=lambda *_: None, consumed=taken or {})
    outgoing = DirectOutgoing(
        group=group, peer=1, direction=Direction.FORWARD, socket=socket,
        hold=LinkFaults([], Direction.FORWARD).hold_message,
        on_block=lambda call, microbatch: blocked.append((call, microbatch)),
        on_unblock=lambda: None, deadline=deadline, device=torch.device("cpu"),
        max_outstanding=most, departures=SendTimestamps(SimulatedDevice()) if asks else None,
    )  # fmt: skip
    outgoing.begin_batch(MessageBatch(1, 7, 32, (META,)))
    yield outgoing, sends, blocked


@pytest.mark.parametrize("profiled", [False, True])
def test_a_send_that_the_neighbour_has_used_is_not_waited_for(
    profiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU skips these. A profiler's records end in these waits, so it has them all."""
    waited: list[Send] = []
    monkeypatch.setattr(Send, "wait", lambda self, *_: waited.append(self))
    monkeypatch.setattr(direct, "profiling", lambda: profiled)
    taken = {int(Direction.FORWARD): (6, 31), int(Direction.BACKWARD): (7, 9)}
    with sending(monkeypatch, most=2, asks=False, taken=taken) as (outgoing, sends, _):
        for m in range(3):
            outgoing.send(m, [torch.ones(16)])
        assert waited == sends[:1], "the neighbour has used none of this iteration"
        taken[Direction.FORWARD] = 7, 2
        outgoing.send(3, [torch.ones(16)])
        assert waited == sends[: 2 if profiled else 1]
        outgoing.send(4, [torch.ones(16)])
        assert sends[2] in waited, "it has not said that it has used this one"


def test_sends_do_not_hold_the_compute_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    with sending(monkeypatch, most=3) as (outgoing, sends, blocked):
        for m in range(3):
            outgoing.send(m, [torch.ones(16)])
        sends[0].complete = True
        outgoing.send(3, [torch.ones(16)])
        assert not blocked, "the oldest was through"
        assert [sent.microbatch for sent in outgoing._outstanding] == [1, 2, 3]
        threading.Timer(0.05, lambda: setattr(sends[1], "complete", True)).start()
        outgoing.send(4, [torch.ones(16)])
        assert blocked == [("iteration 7", 1)], "the host waits where as many are held as may be"
        for send in sends:
            send.complete = True
        outgoing.close()
        assert not outgoing._outstanding


def test_a_send_that_fails_or_stays_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with sending(monkeypatch, most=1, deadline=0.05) as (outgoing, sends, _):
        outgoing.send(0, [torch.ones(16)])
        with pytest.raises(WaitTimeoutError, match=r"the deadline is 0.05 s"):
            outgoing.send(1, [torch.ones(16)])
        sends[0].failure = "NCCL communicator was aborted"
        with pytest.raises(PipelineError, match=r"connection to rank 1 failed: NCCL communicator"):
            outgoing.send(1, [torch.ones(16)])


# --- communicators --------------------------------------------------------------------------------


def test_communicators_are_there_before_the_first_message() -> None:
    """Communicators are used once by both ends, in an order in which none waits out of turn."""
    wires = {direction: queue.Queue[Tensor]() for direction in Direction}
    used: list[tuple[str, Direction]] = []

    def group(direction: Direction, rank: int) -> Any:
        def send(tensors: list[Tensor], peer: int, tag: int) -> Any:
            assert peer == 1 - rank
            used.append(("send", direction))
            wires[direction].put(tensors[0])
            return SimpleNamespace(wait=lambda: None)

        def recv(tensors: list[Tensor], peer: int, tag: int) -> Any:
            assert peer == 1 - rank
            used.append(("receive", direction))
            return SimpleNamespace(wait=lambda: wires[direction].get(timeout=LONG))

        return SimpleNamespace(send=send, recv=recv, rank=lambda: rank)

    def connect(rank: int) -> None:
        mine = {direction: group(direction, rank) for direction in Direction}
        direct_groups.create_communicators(mine, torch.device("cpu"), is_lower=rank == 0)

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
        assert not thread.is_alive(), "an end still waits for the other"
    assert sorted(used) == [(what, way) for what in ("receive", "send") for way in Direction]


@pytest.mark.parametrize(
    ("value", "within", "warns"), [(None, "2", False), ("2", "2", False), ("3", "3", True)]
)
def test_a_broken_communicator_does_not_end_the_process(
    value: str | None,
    within: str,
    warns: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The user may say otherwise; the groups of others are not touched."""
    monkeypatch.delenv(direct_groups.ASYNC_ERRORS, raising=False)
    monkeypatch.delenv("NCCL_ASYNC_ERROR_HANDLING", raising=False)
    if value is not None:
        monkeypatch.setenv(direct_groups.ASYNC_ERRORS, value)
    with (
        caplog.at_level(logging.WARNING),
        direct_groups.keep_process_on_nccl_error(MeshShape(2).find_coordinate(0)),
    ):
        assert os.environ[direct_groups.ASYNC_ERRORS] == within
    assert os.environ.get(direct_groups.ASYNC_ERRORS) == value
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == warns
    assert all("TORCH_NCCL_ASYNC_ERROR_HANDLING=3 ends the process" in text for text in messages)


# --- a whole run ----------------------------------------------------------------------------------


def directed(context: TrainerContext, job: Job, moved: Plan) -> Any:
    """Train on a strict device that is given the receives of direct links, too. A directive moves
    the first link while ops run."""

    def newest_plan(self: Any) -> RankPlan | None:
        nonlocal came
        first, came = not came and bool(given), came or bool(given)
        return part(moved, context.rank, MeshShape(job.stages)) if first else None

    # At every op: five iterations may take less time than there is between two looks.
    iteration.PLAN_POLL_SECONDS = 0.0
    NullControlClient.pop_newest_plan = newest_plan  # type: ignore[method-assign]
    came = False
    with device_with_receives(context.rank) as (device, given):
        return train(context, job), device.waited_for_all


@pytest.mark.needs_engine
def test_a_directive_that_moves_a_link_in_mid_run() -> None:
    job = Job(3, 6, policy="1f1b", route="auto", iterations=5)
    moved = make_plan(job, 2, "1f1b", routes=(Route.DELEGATED, Route.DIRECT))
    found = run_ranks(3, directed, job, moved, timeout=100)
    assert_same([record for record, _ in found], reference(job))
    assert [record.versions[-1] for record, _ in found] == [2, 2, 2]
    assert all("cudaHostRegister" in waited for _, waited in found)


# --- queues of the device -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "few"),
    [(None, False), ("1", True), (" 1 ", True), ("2", True), ("7", True), ("8", False),
     ("32", False), ("0", False), ("-1", False), ("", False), ("many", False)],
)  # fmt: skip
def test_too_few_queues(value: str | None, few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that CUDA does not take as a number change nothing."""
    monkeypatch.delenv(QUEUES, raising=False)
    if value is not None:
        monkeypatch.setenv(QUEUES, value)
    said = describe_queue_shortage()
    assert bool(said) is few
    assert not few or said.startswith(f"{QUEUES}={value.strip()}: streams of the device share")  # type: ignore[union-attr]


@pytest.mark.parametrize("on_device", [True, False])
def test_a_rank_on_a_device_warns_of_too_few_queues(
    on_device: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device = SimulatedDevice() if on_device else None
    monkeypatch.setattr(rendezvous, "get_accelerator", lambda _: device)
    monkeypatch.setattr(rendezvous, "make_engine", lambda *_, **__: None)
    monkeypatch.setenv(QUEUES, "1")
    config: Any = SimpleNamespace(
        device=torch.device("cpu"), engine=None, secret=b"", faults=FaultTrace()
    )
    meeting = rendezvous.Rendezvous(
        MeshShape(2).find_coordinate(0), config, "127.0.0.1", ProcessGroups(), None
    )
    with caplog.at_level(logging.WARNING):
        meeting.make_shared_resources("127.0.0.1")
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ([f"rank 0 (stage 0): {describe_queue_shortage()}"] if on_device else [])
