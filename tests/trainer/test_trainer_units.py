"""Pure parts of the trainer: fault bookkeeping, windows, the line."""

from __future__ import annotations

import errno
import json
import re
import resource
import select
import signal
import socket
import threading
import time
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import Ranks

from pipemorph.diagnose.formats.rank_traces import TraceIndex
from pipemorph.planning import OpKind, Route
from pipemorph.protocol import StageProfile
from pipemorph.spec.mesh import MeshShape
from pipemorph.spec.sections.faults import Fault
from pipemorph_trainer.backward.stage_measurements import StageMeasurements
from pipemorph_trainer.context import TrainerContext
from pipemorph_trainer.errors import PeerLostError, PipelineError, ShapeError, first_sentence
from pipemorph_trainer.executor.device_times import MeasuredCopy, MeasuredOp
from pipemorph_trainer.executor.emulated_stage import EmulatedDevice, EmulatedStage
from pipemorph_trainer.executor.inputs import shape_signature, split_batch
from pipemorph_trainer.executor.local_stage import (
    LocalStage,
    StageFootprint,
    StageMemory,
    build_footprint,
    build_stage_profile,
    read_peak_memory,
    sum_offload_copies,
)
from pipemorph_trainer.executor.stage_executor import StageRecord
from pipemorph_trainer.executor.waiting import CollectiveWaiter, CurrentWait
from pipemorph_trainer.signals import SigtermHandler
from pipemorph_trainer.telemetry.trace import TraceWriter
from pipemorph_trainer.topology import addresses
from pipemorph_trainer.transport import control_socket
from pipemorph_trainer.transport.fault_injection import LinkFaults
from pipemorph_trainer.transport.link_recorder import LinkRecorder, PeerClock, record_wire_time
from pipemorph_trainer.transport.message import (
    ALL_PRESENT,
    DIRECT_QUEUE,
    Direction,
    HoldTimes,
    MessageContents,
    Note,
    SenderLoad,
    TensorMeta,
)
from pipemorph_trainer.transport.poller import Poller

# --- faults ---------------------------------------------------------------------------------


def test_a_delay_holds_each_message_on_its_queue() -> None:
    faults = LinkFaults([Fault(link=0, delay_ms=60.0, from_iteration=2)], Direction.FORWARD)
    faults.begin_iteration(1, 0.0)
    assert faults.hold_message(DIRECT_QUEUE, 100, 10.0) == HoldTimes(10.0, 0.0)
    faults.begin_iteration(2, 0.0)
    assert faults.hold_message(DIRECT_QUEUE, 100, 10.0)[:3] == pytest.approx((10.0, 10.06, 0.06))
    # The direct route has one queue: the next message starts when the first is through.
    assert faults.hold_message(DIRECT_QUEUE, 100, 10.01)[:3] == pytest.approx((10.06, 10.12, 0.06))
    # Another queue is free.
    assert faults.hold_message(3, 100, 10.02)[:3] == pytest.approx((10.02, 10.08, 0.06))
    (record,) = faults.report_effects()
    assert record["messages_held"] == 3
    assert record["hold_seconds"] == pytest.approx(0.18)
    assert (record["first_iteration"], record["last_iteration"]) == (2, 2)


def test_a_delay_in_forwards_is_computed_when_it_begins(caplog: pytest.LogCaptureFixture) -> None:
    load, forwards = SenderLoad(), Fault(link=0, delay_forwards=3.0, from_iteration=2)
    faults = LinkFaults([forwards], Direction.FORWARD, load=load)
    assert faults.has_delays
    load.forwards.extend((0.9, 0.02, 0.02, 0.021, 0.02, 0.5))
    faults.begin_iteration(1, 0.0)
    assert faults.hold_message(3, 100, 10.0)[:2] == (10.0, 0.0)
    for iteration in (2, 3):
        faults.begin_iteration(iteration, 0.0)
        held = faults.hold_message(3, 100, 10.0 * iteration)[:3]
        assert held == pytest.approx((10.0 * iteration, 10.0 * iteration + 0.06, 0.06))
        load.forwards.extend([0.1] * 5)  # Under the fault ops may take longer: it stays.
    (record,) = faults.report_effects()
    assert (record["delay_forwards"], record["delay_ms"]) == (3.0, 60.0)
    unmeasured = LinkFaults([forwards], Direction.FORWARD)
    unmeasured.begin_iteration(2, 0.0)
    assert unmeasured.hold_message(3, 100, 20.0)[:3] == (20.0, 20.0, 0.0)
    assert "no forward was measured before delayForwards began" in caplog.text


def test_what_is_queued_stays_queued_when_the_fault_ends() -> None:
    faults = LinkFaults([Fault(link=0, delay_ms=60.0, to_iteration=1)], Direction.FORWARD)
    faults.begin_iteration(0, 0.0)
    faults.hold_message(0, 100, 10.0)
    faults.begin_iteration(1, 0.0)
    assert faults.hold_message(0, 100, 10.01)[:3] == pytest.approx((10.06, 10.06, 0.0))
    assert faults.hold_message(0, 100, 10.2) == HoldTimes(10.2, 0.0)


def test_bandwidth_is_shared_by_all_queues() -> None:
    faults = LinkFaults([Fault(link=0, bandwidth_mbps=8.0)], Direction.BACKWARD)
    faults.begin_iteration(0, 0.0)
    assert faults.hold_message(0, 100_000, 5.0)[:3] == pytest.approx((5.0, 5.1, 0.0)), (
        "its first byte is not late"
    )
    assert faults.hold_message(1, 100_000, 5.0)[:3] == pytest.approx((5.1, 5.2, 0.0))


def test_faults_by_seconds_are_looked_up_per_message() -> None:
    faults = LinkFaults(
        [Fault(link=0, delay_ms=10.0, from_seconds=1.0, to_seconds=2.0)], Direction.FORWARD
    )
    faults.begin_iteration(0, 100.0)
    assert faults.hold_message(0, 1, 100.5)[1] == 0.0
    assert faults.hold_message(0, 1, 101.5)[1] == pytest.approx(101.51)
    assert faults.hold_message(0, 1, 102.5)[1] == 0.0


# --- windows --------------------------------------------------------------------------------


def test_a_window_prefers_what_was_seen_when_it_happened() -> None:
    recorder = LinkRecorder(2, 0, Direction.FORWARD)
    assert recorder.drain_window() is None
    for late in (0.009, 0.010, 0.011, 0.012, 0.013):
        recorder.add_message(late, 0.0, 10, exact=False)
    sample = recorder.drain_window()
    assert (sample.wire.count, sample.wire.exact) == (5, 0)
    assert sample.wire.p50 == 0.011
    for exact in (0.001, 0.002, 0.003):
        recorder.add_message(exact, 0.0, 10, exact=True)
        recorder.add_message(0.010, 0.0, 10, exact=False)
    sample = recorder.drain_window()
    assert (sample.wire.count, sample.wire.exact) == (6, 3)
    assert (sample.wire.min, sample.wire.p50, sample.wire.p99) == (0.001, 0.002, 0.003)
    assert sample.bytes == 60
    recorder.add_message(0.060, 0.0, 10, exact=True)
    sample = recorder.drain_window()
    assert sample is not None and sample.wire.exact == 1


def test_messages_that_waited_show_how_far_apart_they_arrive() -> None:
    recorder = LinkRecorder(2, 0, Direction.FORWARD)
    spacings = []
    # The first waited for one that was not seen; the third came when nothing was on the way.
    for at, queue in ((1.0, 0.5), (1.05, 0.04), (3.0, 0.0), (3.052, 0.04), (3.104, 0.09)):
        recorder.record_arrival_time(at, queue)
        recorder.add_message(0.05, queue, 10, exact=True)
        if at in (1.0, 1.05, 3.104):
            sample = recorder.drain_window()
            spacings.append(sample.spacing)
    assert spacings == [None, pytest.approx(0.05), pytest.approx(0.052)]
    recorder.begin_iteration(Route.DELEGATED, "tcp", 1)
    recorder.record_arrival_time(4.0, 0.5)
    recorder.add_message(0.05, 0.5, 10, exact=True)
    sample = recorder.drain_window()
    assert sample is not None and sample.spacing is None, "the last one took another route"


def test_the_latency_of_a_window_is_that_of_its_quickest_note() -> None:
    recorder = LinkRecorder(2, 0, Direction.FORWARD)
    note = Note(1, 2, 3, ALL_PRESENT, 4.0, 5.0, 0.0)
    for noted_at, arrived_at in ((6.012, 6.05), (6.002, 6.05), (None, 6.05)):
        record_wire_time(
            recorder, note, PeerClock(1.0), arrived_at, 10, exact=True, noted_at=noted_at
        )
    sample = recorder.drain_window()
    assert sample is not None and sample.latency == pytest.approx(0.002)
    assert sample.wire.p50 == pytest.approx(0.05)
    # A fault's delay holds back the first byte, a bandwidth limit does not.
    for held_back in (0.06, 0.0):
        late = note._replace(not_before=5.06, held_back=held_back)
        record_wire_time(recorder, late, PeerClock(), 5.001, 10, exact=False, noted_at=5.001)
        sample = recorder.drain_window()
        assert sample is not None and sample.wire.p50 == pytest.approx(0.06)
        assert sample.latency == pytest.approx(max(held_back, 0.001))
    record_wire_time(recorder, note, PeerClock(), 6.0, 10, exact=True)
    sample = recorder.drain_window()
    assert sample is not None and sample.latency is None


def test_a_message_that_is_held_takes_at_least_as_long_as_it_is_held() -> None:
    """The bytes leave while the message is held, and may arrive after that."""
    recorder = LinkRecorder(2, 0, Direction.FORWARD)
    note = Note(1, 2, 3, ALL_PRESENT, 4.0, 5.0, 5.03)
    for arrived_at, expected in ((5.029, 0.03), (5.031, 0.031)):
        record_wire_time(recorder, note, PeerClock(), arrived_at, 10, exact=False, started_at=5.02)
        sample = recorder.drain_window()
        assert sample is not None and sample.wire.min == pytest.approx(expected)


@pytest.mark.parametrize("faults", [[], [Fault(link=0, delay_ms=1.0)]])
def test_notes_tell_the_load_of_their_sender(faults: list[Fault]) -> None:
    load, recorder = SenderLoad(), LinkRecorder(0, 0, Direction.FORWARD)
    sends = LinkFaults(faults, Direction.FORWARD, load=load)

    def arrived() -> None:
        held = sends.hold_message(DIRECT_QUEUE, 10, 5.0)
        note = Note.unpack(Note(1, 2, 3, ALL_PRESENT, 5.0, *held).pack())
        record_wire_time(recorder, note, PeerClock(), 5.5, 10, exact=True)

    for waited, inflated in ((0.25, False), (0.5, True), (0.125, False)):
        load.waited, load.inflated = waited, inflated
        arrived()
    sample = recorder.drain_window(0.0)
    assert sample is not None and (sample.sender_waited, sample.sender_inflated) == (0.5, True)
    arrived()
    sample = recorder.drain_window(0.0)
    assert sample is not None and (sample.sender_waited, sample.sender_inflated) == (0.125, False)


def test_a_change_of_route_closes_the_window() -> None:
    recorder = LinkRecorder(0, 0, Direction.BACKWARD)
    recorder.add_message(0.001, 0.0, 1, exact=True)
    window = recorder.begin_iteration(Route.DELEGATED, "shm", 4)
    assert window is not None and window.route is Route.DIRECT
    recorder.add_message(0.001, 0.0, 1, exact=True)
    sample = recorder.drain_window()
    assert (sample.route, sample.transport, sample.iteration) == (Route.DELEGATED, "shm", 4)
    assert not sample.failed_over


def test_samples_say_that_the_direct_route_broke() -> None:
    recorder = LinkRecorder(0, 0, Direction.BACKWARD)
    recorder.begin_iteration(Route.DIRECT, "gloo", 4)
    recorder.add_message(0.001, 0.0, 1, exact=True)
    window = recorder.begin_iteration(Route.DELEGATED, "tcp", 4, failed_over=True)
    assert window is not None and not window.failed_over
    recorder.add_message(0.001, 0.0, 1, exact=True)
    sample = recorder.drain_window()
    assert sample is not None and sample.failed_over


# --- the control socket --------------------------------------------------------------------


def test_notes_tokens_and_shapes_cross_a_line() -> None:
    with control_socket.open_listener("127.0.0.1") as listener:
        port = listener.getsockname()[1]
        made: list[control_socket.ControlSocket] = []
        thread = threading.Thread(
            target=lambda: made.append(
                control_socket.accept_peer(listener, rank=1, peer_rank=0, secret=b"s", timeout=10)
            )
        )
        thread.start()
        # A stranger does not know the secret and is turned away; the neighbour comes after.
        with pytest.raises(PipelineError, match="if it has refused it, its log says why"):
            control_socket.connect_to_peer(
                "127.0.0.1", port, rank=0, peer_rank=1, secret=b"wrong", timeout=10
            )
        here = control_socket.connect_to_peer(
            "127.0.0.1", port, rank=0, peer_rank=1, secret=b"s", timeout=10
        )
        thread.join(10)
    (there,) = made
    note = Note(1, 2, 3, ALL_PRESENT, 4.0, 5.0, 6.0, 7.0, 0.25, True)
    metas = (TensorMeta((2, 3), torch.bfloat16, gradient=True), TensorMeta((), torch.bool))
    here.send_token(control_socket.StepToken(7, 8, 9))
    here.send_shapes(MessageContents(metas, "structure"))
    here.send_note(Direction.BACKWARD, note)
    here.close(goodbye=True)
    deadline = time.monotonic() + 10
    while there.lost is None and time.monotonic() < deadline:
        there.read_arrived()
    assert there.tokens.popleft() == control_socket.StepToken(7, 8, 9)
    assert there.shapes.popleft() == MessageContents(metas, "structure")
    assert there.notes[1, 2, 3].note == note
    assert there.goodbye and there.lost == "it closed its end"


def test_the_kernel_says_when_a_note_arrived() -> None:
    """However late it is read, as by a rank that computes."""
    with control_socket.open_listener("127.0.0.1") as listener:
        here = control_socket.ControlSocket(socket.create_connection(listener.getsockname()), 1)
        there = control_socket.ControlSocket(listener.accept()[0], 0)
    deadline = time.monotonic() + 10
    # The kernel begins to take times a moment after the request.
    for microbatch in range(10_000):
        assert time.monotonic() < deadline, "the kernel takes no times"
        before = time.time()
        here.send_note(Direction.FORWARD, Note(1, 2, microbatch, ALL_PRESENT, 4.0, 5.0, 0.0))
        assert select.select([there], [], [], 10)[0], "the note does not arrive"
        late = time.time()
        while time.time() < late + 0.005:
            pass
        there.read_arrived()
        at = there.notes[0, 2, microbatch].arrived_at
        if at is not None:
            break
    assert before <= at <= late, "not the kernel's time"
    here.close(goodbye=True)
    there.close(goodbye=True)


def test_a_neighbour_that_does_not_dial_is_named() -> None:
    with (
        control_socket.open_listener("127.0.0.1") as listener,
        pytest.raises(PipelineError, match=r"rank 1 waited 0 s for rank 0 to connect"),
    ):
        control_socket.accept_peer(listener, rank=1, peer_rank=0, secret=b"s", timeout=0.05)


def test_a_peer_refused_at_a_control_socket_is_logged_and_gets_the_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def strangers(listener: socket.socket) -> None:
        socket.create_connection(listener.getsockname()).close()
        port = listener.getsockname()[1]
        for rank, peer_rank, secret in ((2, 1, b"s"), (0, 3, b"s"), (0, 1, b"wrong")):
            with pytest.raises(PipelineError, match=f"rank {rank} cannot reach rank {peer_rank}"):
                control_socket.connect_to_peer(
                    "127.0.0.1", port,
                    rank=rank, peer_rank=peer_rank, secret=secret, timeout=10,
                )  # fmt: skip

    with control_socket.open_listener("127.0.0.1") as listener:
        thread = threading.Thread(target=strangers, args=[listener], daemon=True)
        thread.start()
        with pytest.raises(
            PipelineError,
            match=r"rank 1 waited 3 s for rank 0 to connect; refused 4 connections, "
            r"the last one from 127\.0\.0\.1:\d+: wrong secret: it says it is rank 0",
        ):
            control_socket.accept_peer(listener, rank=1, peer_rank=0, secret=b"s", timeout=3.0)
        thread.join(10)
    logged = [message for message in caplog.messages if "rank 1 refused a connection" in message]
    assert len(logged) == 4
    for said, why in zip(
        logged,
        (
            "closed the connection|broke",
            "is rank 2, dialling rank 1",
            "dialling rank 3",
            "wrong secret",
        ),
        strict=True,
    ):
        assert re.search(why, said)


@pytest.mark.ipv6
def test_the_own_address_is_of_the_kind_that_rank_0_has() -> None:
    assert addresses.find_own_address("::1") == "::1"


def test_other_machines_get_no_loopback_address() -> None:
    for_others = addresses.find_reachable_address
    # Whatever is no loopback address stays, and nothing is looked up for it.
    for address in ("10.1.2.3", "fd00::7", "fe80::1%eth0"):
        assert for_others(address, ["127.0.0.1"]) == address
    # /etc/hosts may have a machine's own name at 127.0.1.1.
    for loopback in ("127.0.0.1", "127.0.1.1", "::1"):
        for peers in ([], ["127.0.1.1"], ["192.0.2.7"], ["127.0.1.1", "192.0.2.7"]):
            try:
                found = for_others(loopback, peers)
            except PipelineError as error:  # a machine without any network
                assert loopback in str(error)
                assert "/etc/hosts" in str(error)
                continue
            assert not ip_address(found).is_loopback


def test_a_machine_without_a_route_says_which_address_leads_nowhere(monkeypatch) -> None:
    def no_route(*_: object) -> None:
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr(socket.socket, "connect", no_route)
    with pytest.raises(PipelineError, match=r"MASTER_ADDR leads to 127\.0\.1\.1 on this machine"):
        addresses.find_reachable_address("127.0.1.1", ["10.0.0.2"])


def test_a_rank_0_that_is_nowhere_is_named() -> None:
    assert addresses.find_own_address("127.0.0.1") == "127.0.0.1"
    with pytest.raises(
        PipelineError,
        match=r"MASTER_ADDR is no\.invalid, .* reached over IPv4: \w.*, nor over IPv6: \w",
    ):
        addresses.find_own_address("no.invalid")


def test_a_line_that_ends_a_moment_after_another_connection_is_waited_for() -> None:
    with (
        control_socket.open_listener("127.0.0.1") as listener,
        socket.create_connection(listener.getsockname()) as mine,
    ):
        theirs, _ = listener.accept()
        line = control_socket.ControlSocket(mine, 1)
        theirs.sendall(b"part of a note")
        assert not line.wait_for_end(0.02)
        threading.Timer(0.05, theirs.close).start()
        assert line.wait_for_end(10.0)
        assert line.lost == "its connection closed"


def test_a_collective_that_fails_names_who_is_gone() -> None:
    class Work:
        def wait(self, _: object) -> None:
            raise RuntimeError("[/pair.cc:547] Connection closed by peer [127.0.0.1]:4. Or so.")

    waiting = CurrentWait("rank 0 (stage 0)")
    wait = CollectiveWaiter(waiting, 20.0)
    waiting.begin_wait("the loss")
    with pytest.raises(PipelineError, match=r"a connection failed: Connection closed by peer"):
        wait(Work())
    wait.find_lost_peer = lambda: "rank 1 (stage 1) is gone: it was killed"
    with pytest.raises(PeerLostError, match=r"for the loss; rank 1 \(stage 1\) is gone"):
        wait(Work())


# --- time -----------------------------------------------------------------------------------


def test_a_bell_wakes_at_a_ring_and_at_a_moment() -> None:
    poller = Poller()
    began = time.monotonic()
    poller.wait(0.02)
    assert time.monotonic() - began >= 0.02
    threading.Timer(0.02, poller.wake).start()
    began = time.monotonic()
    poller.wait(10.0)
    assert time.monotonic() - began < 5
    poller.wake()
    poller.wake()
    poller.wait(10.0)  # woken twice, returns once and is quiet again
    began = time.monotonic()
    poller.wait(0.02)
    assert time.monotonic() - began >= 0.02
    poller.close()


def test_a_wait_for_a_message_ends_with_a_neighbour_and_not_with_its_input() -> None:
    """Notes come before their messages, and would wake the executor in vain."""
    poller = Poller()
    mine, other = socket.socketpair()
    poller.watch_socket(mine.fileno())
    other.send(b"a note")
    assert poller.wait(10.0), "input is news where one waits for it"
    began = time.monotonic()
    assert not poller.wait(0.02, watch_input=False), "who does not listen need not read, either"
    assert time.monotonic() - began >= 0.02
    poller.wake()
    assert not poller.wait(10.0, watch_input=False), "a message has come; no socket is to be read"
    # All that a close on another machine shows at first.
    other.shutdown(socket.SHUT_WR)
    began = time.monotonic()
    assert poller.wait(10.0, watch_input=False)
    assert time.monotonic() - began < 5.0
    assert mine.recv(16) == b"a note"
    poller.stop_watching(mine.fileno())
    mine.close()
    other.close()
    poller.close()


def test_an_emulated_op_takes_its_time_without_using_the_cpu() -> None:
    accelerator = EmulatedDevice()
    began, cpu = time.monotonic(), time.thread_time()
    for _ in range(10):
        accelerator.hold_interpreter(0.005)
    elapsed = time.monotonic() - began
    assert elapsed >= 0.0495
    assert time.thread_time() - cpu < 0.5 * elapsed


def test_a_full_disk_ends_the_traces_and_not_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("ops-rank1.jsonl", "faults-rank1.json"):
        (tmp_path / name).symlink_to("/dev/full")
    trace = TraceWriter(tmp_path, MeshShape(2).find_coordinate(1), emulated=False)
    for iteration in range(3):
        trace.write_iteration(iteration, 0, 0.0, StageRecord())
    trace.close([])
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2, lines
    assert lines[0].startswith("rank 1 (stage 1): no more traces of ops: ")
    assert all("No space left on device" in line for line in lines)


def test_a_folder_that_cannot_be_made_ends_no_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    trace = TraceWriter(tmp_path / "file/trace", MeshShape(2).find_coordinate(1), emulated=False)
    trace.write_iteration(0, 0, 0.0, StageRecord())
    trace.close([])
    assert "no traces of ops in" in caplog.records[0].getMessage()


def test_a_trace_has_a_bound_and_says_what_it_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limit = 1 << 16
    trace = TraceWriter(tmp_path, MeshShape(2).find_coordinate(1), emulated=False, limit=limit)
    path = tmp_path / "ops-rank1.jsonl"
    outcome = StageRecord(ops=[MeasuredOp(OpKind.F, m, 1.0, 2.0) for m in range(8)])
    last = 2000
    for iteration in range(last + 1):
        trace.write_iteration(iteration, 0, 0.0, outcome)
        if iteration % 50 == 0:
            assert path.stat().st_size <= limit
    trace.close([])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    (record,) = [line for line in lines if "dropped" in line]
    assert record == {"rank": 1, "dropped": record["dropped"], "limit": limit}
    indices = [line["iteration"] for line in lines if line is not record]
    first = next(i for i, each in enumerate(indices) if each != i)
    assert first > 20, "its first iterations are there"
    assert indices[first:] == list(range(indices[first], last + 1)), "and its newest"
    assert lines.index(record) == first
    assert record["dropped"] == last + 1 - len(indices)
    assert sorted(TraceIndex.from_folder(tmp_path).list_iterations()) == indices
    (message,) = [each.getMessage() for each in caplog.records if "keeps its first" in each.msg]
    assert "PIPEMORPH_TRACE_BYTES" in message
    assert [each.name for each in tmp_path.glob("ops-*")] == ["ops-rank1.jsonl"]


def last_word_with_a_full_disk(context: TrainerContext) -> None:
    def leave_traces() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    SigtermHandler(lambda: "rank 0 (stage 0) was waiting for nothing", leave_traces).install()
    print("READY", flush=True)
    threading.Event().wait()


def test_sigterm_ends_a_rank_whose_traces_cannot_be_written() -> None:
    ranks = Ranks(1, last_word_with_a_full_disk)
    ranks.wait_for_output(0, "READY")
    ranks.signal(0, signal.SIGTERM)
    (result,) = ranks.wait()
    assert result.exitcode == 128 + signal.SIGTERM
    assert "terminated: rank 0 (stage 0) was waiting for nothing" in result.output
    assert "No space left on device" in result.output


def test_torchs_errors_are_quoted_without_place_and_advice() -> None:
    gloo = RuntimeError(
        "[/build/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:46299. "
        "This is typically caused by a remote worker crashing."
    )
    assert first_sentence(gloo) == "Connection closed by peer [127.0.0.1]:46299"
    assert first_sentence(RuntimeError()) == "RuntimeError"


def timed(kind: OpKind, microbatch: int, took: float) -> MeasuredOp:
    return MeasuredOp(kind, microbatch, 10.0, 10.0 + took)


def test_a_profile_names_the_column_of_its_rank() -> None:
    """Ranks of a stage in several columns are compared with each other, and each pod's agent
    reports its own columns alone."""
    last = MeshShape(stages=2, replicas=3, order=("dp_replicate", "pp")).find_coordinate(5)
    stage = LocalStage(
        EmulatedStage(0.01, 0.01, 0.01, 64), last, loss_fn=None, microbatches=2, split="auto",
        device=torch.device("cpu"), accelerator=None, memory=StageMemory(None, "", ""),
    )  # fmt: skip
    profile = stage.profile_iteration(StageRecord([timed(OpKind.F, 0, 0.5)]))
    assert (profile.stage, profile.replica) == (1, 2)


def profile_of(ops: list[MeasuredOp], **options: Any) -> StageProfile:
    return build_stage_profile(1, ops, "deferred", column=0, peak_memory=7, **options)


def test_op_times_are_those_at_the_mean_cost() -> None:
    """A kind of op that only the longest microbatch has looks no longer than the others."""
    costs = (1.0, 3.0, 2.0, 2.0)
    ops = [timed(OpKind.F, m, cost) for m, cost in enumerate(costs)]
    ops += [timed(OpKind.BW, 1, 6.0)]
    ops += [timed(OpKind.B, m, 1.5 * costs[m]) for m in (0, 2, 3)]
    ops += [timed(OpKind.W, m, 0.5 * costs[m]) for m in (0, 2, 3)]
    footprint = StageFootprint(fused_ratio=0.5)
    profile = profile_of(ops, costs=costs, footprint=footprint)
    assert (profile.forward, profile.backward_input, profile.backward_weight) == (2.0, 3.0, 1.0)
    assert (profile.fused_backward, profile.cost) == (4.0, 2.0)
    plain = profile_of(ops, footprint=footprint)
    assert (plain.backward_input, plain.fused_backward, plain.cost) == (2.5, 6.0, None)


def test_copies_do_not_count_as_forward_and_backward() -> None:
    """Whichever microbatches a plan sends to host memory, the controller sees the same ops."""
    ops = [timed(OpKind.F, m, 0.5 if m else 1.5) for m in range(2)]
    ops += [timed(OpKind.B, m, 0.75 if m else 2.75) for m in range(2)]
    ops += [timed(OpKind.W, m, 0.25) for m in range(2)]
    copies = [MeasuredCopy(OpKind.F, 0, 11.0, 12.0, 64), MeasuredCopy(OpKind.B, 0, 10.0, 12.0, 64)]
    footprint = StageFootprint(activation_bytes=64, offload_copy=9.0, fused_ratio=0.5)
    profile = profile_of(ops, footprint=footprint, copies=copies)
    assert (profile.forward, profile.backward_input, profile.backward_weight) == (0.5, 0.75, 0.25)
    assert (profile.offload_copy, profile.activation_bytes) == (2.0, 64), "the longer way"
    assert profile.fused_backward == 0.5, "B + W of now, by the ratio of the first iterations"
    assert profile_of(ops, footprint=footprint).offload_copy == 9.0, "as it was at the start"
    assert profile_of(ops).offload_copy is None
    moved = sum_offload_copies(copies, 4096)
    assert (moved.microbatches, moved.bytes, moved.seconds) == (1, 64, 3.0)
    assert sum_offload_copies([], 4096) is None


def test_forwards_that_run_again_do_not_count_as_backward_or_copies() -> None:
    ops = [timed(OpKind.F, 0, 1.0), timed(OpKind.B, 0, 3.0), timed(OpKind.W, 0, 1.0)]
    runs = [MeasuredCopy(OpKind.B, 0, 10.0, 11.25, 0, recomputed=True)]
    profile = profile_of(ops, footprint=StageFootprint(input_bytes=8), copies=runs)
    assert (profile.forward, profile.backward_input, profile.input_bytes) == (1.0, 1.75, 8)
    assert profile.offload_copy is None
    assert sum_offload_copies(runs, 0) is None


def test_a_fused_backward_that_ran_is_its_own_measure() -> None:
    ops = [timed(OpKind.F, 0, 1.0), timed(OpKind.BW, 0, 3.0)]
    profile = profile_of(ops, footprint=StageFootprint(fused_ratio=0.5))
    assert (profile.backward_input, profile.fused_backward) == (3.0, 3.0)
    assert profile_of(ops).fused_backward is None, "not where B and W were never measured apart"


def test_peak_memory_is_read_and_never_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 1000 + device.index)
    monkeypatch.delattr(torch.cuda, "reset_peak_memory_stats")
    assert read_peak_memory(torch.device("cuda", 3)) == 1003
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    assert read_peak_memory(torch.device("cpu")) >= used > 1 << 20


def test_what_the_first_iterations_measured_is_what_a_plan_may_count_on() -> None:
    measured = StageMeasurements(torch.nn.Linear(2, 2))
    nothing = build_footprint(measured, None, recomputes=False)
    assert nothing == StageFootprint()
    measured.activation_bytes, measured.input_bytes, measured.copy_seconds = 64, 8, 0.5
    found = build_footprint(measured, 0.9, recomputes=True)
    assert found == StageFootprint(64, offload_copy=0.5, fused_ratio=0.9, input_bytes=8)
    assert build_footprint(measured, None, recomputes=False).input_bytes is None


def test_nested_arguments_are_split_and_distinguished_by_shape() -> None:
    nested = {"x": [torch.arange(4), (torch.ones(4, 2), "same")]}
    args, kwargs = split_batch((nested,), {"mask": torch.arange(4)}, 2)
    assert args[1][0]["x"][0].tolist() == [2, 3] and args[1][0]["x"][1][1] == "same"
    assert [k["mask"].tolist() for k in kwargs] == [[0, 1], [2, 3]]
    assert shape_signature(args[0]) == shape_signature(args[1])
    assert shape_signature({"a": torch.ones(2)}) != shape_signature({"b": torch.ones(2)})
    assert shape_signature({"a": torch.ones(2)}) != shape_signature({"a": torch.ones(3)})
    for bad, named in (
        (((torch.ones(3),), {}), r"input 0 has shape \[3\]"),
        (((), {"mask": [torch.ones(())]}), r"input 'mask' has shape \[\]"),
    ):
        with pytest.raises(ShapeError, match=named):
            split_batch(*bad, 2)  # type: ignore[arg-type]
