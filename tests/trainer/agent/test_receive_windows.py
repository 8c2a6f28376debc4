"""Receives are posted when their senders wait for nothing more from here, and few of them."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from drawn_plans import random_plan
from torch import Tensor
from waiting import until

from pipemorph.planning import (
    Dispatch,
    Link,
    OpKind,
    Plan,
    Policy,
    Problem,
    Route,
    StageTimes,
    plan,
)
from pipemorph_trainer.agent import receive_windows
from pipemorph_trainer.errors import PipelineError
from pipemorph_trainer.transport.channels import direct
from pipemorph_trainer.transport.channels.direct import DirectIncoming
from pipemorph_trainer.transport.control_socket import ArrivedNote
from pipemorph_trainer.transport.link_recorder import LinkRecorder, OpClock, PeerClock
from pipemorph_trainer.transport.message import (
    ALL_PRESENT,
    Direction,
    MessageBatch,
    Note,
    ReceiveLimits,
    TensorMeta,
)

META = TensorMeta((1,), torch.float32)


def reachable(chosen: Plan, stage: int, sent_up: int, sent_down: int) -> tuple[int, int]:
    """Count the F's that come from above and the B's from below, where ``stage`` has sent so many
    messages and sends no more: the other stages run all that they can."""
    n, stages = chosen.schedule.microbatches, chosen.schedule.stage_count
    f, b, at = [0] * stages, [0] * stages, [0] * stages
    f[stage], b[stage] = sent_down, sent_up

    def fits(each: int, kind: OpKind) -> bool:
        if kind is OpKind.F:
            return f[each] < n and (each == 0 or f[each - 1] > f[each])
        below = n if each == stages - 1 else b[each + 1]
        return b[each] < f[each] and below > b[each]

    def run(each: int) -> bool:
        order = chosen.schedule.stages[each]
        if at[each] == len(order):
            return False
        kind = order[at[each]].kind
        if kind is not OpKind.W and not fits(each, kind):
            return False
        at[each] += 1
        f[each] += kind is OpKind.F
        b[each] += kind in (OpKind.B, OpKind.BW)
        return True

    while any(run(each) for each in range(stages) if each != stage):
        pass
    return (f[stage - 1] if stage else 0), (b[stage + 1] if stage < stages - 1 else 0)


def test_a_receive_is_posted_exactly_when_its_message_can_come() -> None:
    """Earlier the receive would depend on this stage; later its message may be on its way."""
    rng = random.Random(5)
    for _ in range(60):
        chosen = random_plan(rng, Dispatch.STATIC)
        n, stages = chosen.schedule.microbatches, chosen.schedule.stage_count
        for stage in range(stages):
            for sent in range(n + 1):
                if stage:
                    due = sum(
                        need <= sent
                        for need in receive_windows.count_sends_before_forward(chosen, stage)
                    )
                    assert due == reachable(chosen, stage, sent, n)[0], (chosen, stage, sent)
                if stage < stages - 1:
                    due = sum(
                        need <= sent
                        for need in receive_windows.count_sends_before_backward(chosen, stage)
                    )
                    assert due == reachable(chosen, stage, n, sent)[1], (chosen, stage, sent)


def test_under_guided_dispatch_receives_are_those_of_the_order_and_no_send_waits() -> None:
    """A stage waits on purpose: an op that could run early does not, and only in the plan's order
    is a message sure to come. There is room for all that the sender may have in flight."""
    rng = random.Random(5)
    for _ in range(60):
        chosen = random_plan(rng, Dispatch.GUIDED)
        static = replace(chosen, dispatch=Dispatch.STATIC, waits=())
        peaks, n = chosen.schedule.count_in_flight_peaks(), chosen.schedule.microbatches
        for stage in range(chosen.schedule.stage_count):
            if stage:
                assert receive_windows.count_sends_before_forward(
                    chosen, stage
                ) == receive_windows.count_sends_before_forward(static, stage)
                window = receive_windows.compute_windows(chosen)[stage - 1]
                assert window == min(n, min(peaks[:stage]) + receive_windows.SPARE_MESSAGES)
            if stage < chosen.schedule.stage_count - 1:
                assert receive_windows.count_sends_before_backward(
                    chosen, stage
                ) == receive_windows.count_sends_before_backward(static, stage)


def test_windows_hold_no_stage_up_for_ever() -> None:
    rng = random.Random(6)
    for _ in range(60):
        chosen = random_plan(rng, Dispatch.STATIC)
        found = receive_windows.compute_windows(chosen)
        assert receive_windows.finishes_without_deadlock(chosen.schedule, found)
        for link, window in enumerate(found):
            slack = max(0, chosen.warmup[link] - chosen.warmup[link + 1])
            assert window == min(
                chosen.schedule.microbatches, slack + receive_windows.SPARE_MESSAGES
            ), chosen
    # All forwards first above a stage that alternates: each waits for the other to take.
    one = StageTimes(forward=1, backward_input=1, backward_weight=1)
    problem = Problem(microbatches=16, stages=(one, one), links=(Link(),))
    orders = [
        plan(problem, policy).to_plan(1, (Route.DIRECT,), Dispatch.STATIC).schedule.stages[stage]
        for stage, policy in enumerate((Policy.GPIPE, Policy.ONE_F_ONE_B))
    ]
    schedule = type(chosen.schedule)(16, tuple(orders))
    assert not receive_windows.finishes_without_deadlock(schedule, (4,))
    assert receive_windows.finishes_without_deadlock(schedule, (16,))


# --- the direct route's receiving end -------------------------------------------------------------


class Wire:
    """Process group in which a message comes when the test lets it."""

    def __init__(self) -> None:
        self.posted = 0
        self.came = 0
        self.woken = 0

    def wake(self) -> None:
        """Count a wake-up: the receiver thread saw a message, and posted what may be posted."""
        self.woken += 1

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Any:
        number = self.posted
        self.posted += 1

        def wait(timeout: timedelta | None = None) -> None:
            until(lambda: self.came > number, f"message {number} comes")

        return SimpleNamespace(wait=wait, exception=lambda: None)


def receiving(
    monkeypatch: pytest.MonkeyPatch,
    batch: MessageBatch,
    posted: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> tuple[Wire, DirectIncoming]:
    """``group``: where messages come from; None: the wire."""
    peer = 0 if group is None else 1
    monkeypatch.setattr(direct.dist, "get_group_rank", lambda group, rank: peer)
    wire = Wire()
    notes = {
        (0, batch.iteration, m): ArrivedNote(
            Note(1, batch.iteration, m, ALL_PRESENT, 0.0, 0.0, 0.0), None
        )
        for m in range(batch.microbatches)
    }
    socket: Any = SimpleNamespace(notes=notes, find_note=notes.get, lost=None)
    poller: Any = SimpleNamespace(wake=wire.wake, awaited=True)
    incoming = DirectIncoming(
        group=group or wire,  # type: ignore[arg-type]
        peer=0,
        direction=Direction.FORWARD,
        socket=socket,
        poller=poller,
        op_clock=OpClock(),
        peer_clock=PeerClock(),
        recorder=LinkRecorder(0, 0, Direction.FORWARD),
        device=torch.device("cpu"),
        posted=posted,
    )
    incoming.begin_batch(batch)
    return wire, incoming


def test_no_more_is_received_early_than_the_plan_has_room_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However far ahead the stage above is."""
    n, window = 64, 5
    wire, incoming = receiving(
        monkeypatch, MessageBatch(1, 0, n, (META,), receives=ReceiveLimits((), window))
    )
    wire.came = n
    for m in range(n):
        until(lambda m=m: incoming.ready_at(m) is not None, f"message {m} is here")
        until(lambda m=m: wire.posted == min(n, m + window), "all that fits is posted")
        assert incoming.held_count <= window
        assert incoming.pop_message(m) is not None
    incoming.close()


def test_on_a_device_a_receive_waits_for_what_its_sender_waits_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch = MessageBatch(1, 0, 4, (META,), receives=ReceiveLimits((0, 0, 1, 3)))
    wire, incoming = receiving(monkeypatch, batch, posted=4)
    wire.came = 4
    seen: deque[int] = deque([wire.posted])
    for sent in (1, 2, 3):
        incoming.record_sent(sent)
        seen.append(wire.posted)
    assert list(seen) == [2, 3, 3, 4]
    incoming.close()


def test_on_the_cpu_receives_are_posted_at_once_and_without_a_take_as_long_as_some_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sender's waits do not matter there. Most are posted by the receiver's thread."""
    batch = MessageBatch(1, 0, 8, (META,), receives=ReceiveLimits((7,) * 8, window=4))
    wire, incoming = receiving(monkeypatch, batch)
    until(lambda: wire.posted == 4, "as many are posted as there is room for")
    wire.came = 1
    until(lambda: wire.woken == 1, "the first message is here")
    assert incoming.pop_message(0) is not None
    assert wire.posted == 4, "three are posted, so the next one is the thread's"
    wire.came = 2
    until(lambda: wire.posted == 5, "it posts it at the next arrival")
    wire.came = 8
    for m in range(1, 8):
        until(lambda m=m: incoming.ready_at(m) is not None, f"message {m} is here")
        assert incoming.pop_message(m) is not None
    incoming.close()


@pytest.mark.parametrize(
    ("receives", "ahead"),
    [
        (ReceiveLimits(()), (2, 3, 4, 5, 6, 6)),
        (ReceiveLimits((0,) * 3 + (1,) * 3), (2, 3, 3, 3)),
        (ReceiveLimits((), 1), (1, 1)),
        (ReceiveLimits((), None, (0, 0, 0, 0, 9, 9)), (2, 3, 4, 4, 4)),
    ],
    ids=["all can come", "three can come", "no room", "others need later ops"],
)
def test_a_device_has_the_next_receive_while_one_is_under_way(
    receives: ReceiveLimits, ahead: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wire then waits for no thread. Earlier the plan does not promise its message."""
    batch = MessageBatch(1, 0, 6, (META,), receives=receives)
    wire, incoming = receiving(monkeypatch, batch, posted=direct.POSTED_ON_DEVICE)
    for came, posted in enumerate(ahead):
        if came:
            wire.came = came
            until(lambda came=came: wire.woken == came, f"message {came - 1} is here")
        assert wire.posted == posted, f"after {came} messages"
    wire.came = 6
    incoming.close()


@contextmanager
def gloo(deadline: float) -> Iterator[list[dist.ProcessGroup]]:
    """Ends of a real group, whose operations end after ``deadline`` by themselves."""
    store = dist.HashStore()

    def made(rank: int) -> dist.ProcessGroup:
        return dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=deadline))

    with ThreadPoolExecutor(2) as pool:
        ends = list(pool.map(made, range(2)))
    yield ends
    ends.clear()


def test_a_receive_outlives_the_deadline_of_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """The receive is posted when the iteration begins; its message may be the last one."""
    deadline = 0.5
    batch = MessageBatch(1, 0, 1, (META,))
    with gloo(deadline) as (ours, peers), gloo(deadline) as (clock, _):
        _, incoming = receiving(monkeypatch, batch, group=ours)
        until(lambda: incoming.held_count == 1, "the receive is posted")
        with pytest.raises(RuntimeError, match="Timed out"):
            clock.recv([torch.zeros(1)], 1, 0).wait()
        assert incoming.error is None
        peers.send([torch.full((1,), 7.0)], 0, int(Direction.FORWARD)).wait()
        until(lambda: incoming.ready_at(0) is not None, "the message is here")
        assert incoming.pop_message(0) == [torch.full((1,), 7.0)]
        incoming.close()


def test_a_message_that_came_before_its_note_is_looked_at_again_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The note wakes no receiver that has just begun to wait."""
    wire, incoming = receiving(monkeypatch, MessageBatch(1, 0, 1, (META,)))
    socket = vars(incoming)["_socket"]
    late = socket.notes.pop((0, 0, 0))
    assert incoming.ready_at(0) is None
    wire.came = 1
    until(lambda: wire.woken == 1, "the message is here")
    began = time.time()
    at = incoming.ready_at(0)
    assert at is not None and began < at < time.time() + 0.01
    socket.lost = "its connection closed"
    with pytest.raises(PipelineError, match="its connection closed"):
        incoming.ready_at(0)
    socket.lost, socket.notes[0, 0, 0] = None, late
    assert incoming.ready_at(0) == 0.0
    assert incoming.pop_message(0) is not None
    incoming.close()


def test_a_message_without_a_waiting_receiver_notifies_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next wait would end at once, in vain."""
    wire, incoming = receiving(monkeypatch, MessageBatch(1, 0, 2, (META,)))

    class Poller:
        waits, looks = False, 0
        wake = staticmethod(wire.wake)

        @property
        def awaited(self) -> bool:
            self.looks += 1
            return self.waits

    vars(incoming)["_poller"] = poller = Poller()
    wire.came = 1
    until(lambda: poller.looks == 1, "the first message is here")
    assert incoming.ready_at(0) is not None
    assert wire.woken == 0
    poller.waits = True
    wire.came = 2
    until(lambda: wire.woken == 1, "the second one rings")
    assert incoming.ready_at(1) is not None
    incoming.close()
