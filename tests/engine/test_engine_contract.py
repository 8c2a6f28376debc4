"""Promises of `_engine.pyi`, with both engines in one process."""

import ast
import contextlib
import gc
import math
import os
import pathlib
import select
import subprocess
import sys
import threading
import time

import pairs
import pytest

from pipemorph_trainer import _engine
from pipemorph_trainer._engine import EngineError, EngineTimeout

MIB = 1 << 20


def all_up(link):
    """Paths come up in the background, after the link itself."""
    return all(path.state == "UP" for path in link.stats().paths)


def resizable(link, data):
    """True if the engine has let go of a bytearray. It grows by a byte then. The last to hold it
    may be one of the engine's threads, a moment longer than what was to be done took."""
    link.stats()  # any call lets go of what is finished
    try:
        data.append(0)
    except BufferError:
        return False
    return True


def test_the_module_has_what_its_contract_names():
    # In the sources: an editable installation keeps the compiled module elsewhere.
    root = pathlib.Path(__file__).resolve().parents[2]
    stub = root / "trainer" / "pipemorph_trainer" / "_engine.pyi"
    contract = ast.parse(stub.read_text(encoding="utf-8"))
    for cls in (node for node in contract.body if isinstance(node, ast.ClassDef)):
        real = getattr(_engine, cls.name)
        for member in cls.body:
            if isinstance(member, ast.FunctionDef):
                assert hasattr(real, member.name), f"{cls.name}.{member.name}"
            elif isinstance(member, ast.AnnAssign):
                assert hasattr(real, member.target.id), f"{cls.name}.{member.target.id}"
    assert issubclass(EngineError, RuntimeError)
    assert issubclass(EngineTimeout, EngineError)


@pairs.TRANSPORTS
def test_slots_go_to_the_requested_node(transport):
    """Node 0 there is everywhere; numa_test.cpp checks which one is requested from the kernel."""
    with pairs.in_process(transport=transport, high={"numa_node": 0}) as p:
        assert (p.low.memory_node, p.high.memory_node) == (None, 0)
        p.accepted.reserve(0, 2, MIB)
        p.dialled.send((1, 0, 0, 0, 0), b"x" * MIB)
        with p.accepted.receive((1, 0, 0, 0, 0), pairs.TIMEOUT).view() as view:
            assert view == b"x" * MIB
    with pytest.raises(ValueError, match="numa_node must be between 0 and 1023, not 1024"):
        pairs.engine(0, numa_node=1024)


@pairs.TRANSPORTS
def test_a_message_carries_its_key_note_and_times(transport):
    with pairs.in_process(transport=transport) as p:
        assert p.dialled.transport == p.accepted.transport == transport
        assert (p.dialled.peer_rank, p.dialled.link_id) == (1, pairs.LINK)
        assert (p.accepted.peer_rank, p.accepted.link_id) == (0, pairs.LINK)
        p.accepted.reserve(0, 2, MIB)
        key = (1, 2, 3, 0, 4)
        data = pairs.payload(1, 1000)
        before = time.time()
        ticket = p.dialled.send(key, data, b"n" * 64)
        m = p.accepted.receive(key, pairs.TIMEOUT)
        after = time.time()
        assert (m.key, m.note, m.nbytes) == (key, b"n" * 64, 1000)
        assert before - 1e-3 <= m.posted_at <= m.started_at <= m.arrived_at <= after + 1e-3
        assert m.view() == data
        into = bytearray(1000)
        m.copy_into(into)
        assert into == data
        p.dialled.wait_sent(ticket, pairs.TIMEOUT)
        assert p.dialled.sent(ticket)
        assert p.accepted.stats().slots_in_use == 1
        m.release()
        m.release()
        assert p.accepted.stats().slots_in_use == 0


@pairs.TRANSPORTS
def test_an_empty_message_needs_no_slot(transport):
    with pairs.in_process(transport=transport) as p:
        ticket = p.dialled.send((0, 0, 0, 1, 0), b"", b"only a note")
        m = p.accepted.receive((0, 0, 0, 1, 0), pairs.TIMEOUT)
        assert (m.note, m.nbytes, bytes(m.view())) == (b"only a note", 0, b"")
        m.copy_into(bytearray(0))
        m.release()
        p.dialled.wait_sent(ticket, pairs.TIMEOUT)


def test_messages_are_found_by_key_in_any_order():
    with pairs.in_process() as p:
        p.accepted.reserve(0, 8, 100)
        keys = [(g, 0, m, 0, t) for g in (0, 1) for m in (0, 1) for t in (0, 1)]
        for i, key in enumerate(keys):
            p.dialled.send(key, bytes([i]))
        for i, key in reversed(list(enumerate(keys))):
            m = p.accepted.receive(key, pairs.TIMEOUT)
            assert bytes(m.view()) == bytes([i])
            m.release()
        assert p.accepted.try_receive(keys[0]) is None
        assert not p.accepted.arrived(keys[0])


def test_send_never_blocks_and_directions_do_not_wait_for_each_other():
    with pairs.in_process() as p:
        p.accepted.reserve(0, 1, MIB)
        p.accepted.reserve(1, 1, MIB)
        data = bytes(MIB)
        for i in range(100):
            p.dialled.send((0, 0, i, 0, 0), data)
        assert p.dialled.stats().sends_in_flight >= 99
        p.dialled.send((0, 0, 0, 1, 0), data)
        p.accepted.receive((0, 0, 0, 1, 0), pairs.TIMEOUT).release()
        for i in range(100):
            p.accepted.receive((0, 0, i, 0, 0), pairs.TIMEOUT).release()


def test_a_slot_is_not_used_again_before_it_is_released():
    with pairs.in_process() as p:
        p.accepted.reserve(0, 2, 100)
        for i in range(3):
            p.dialled.send((0, 0, i, 0, 0), bytes([i]) * 100)
        first = p.accepted.receive((0, 0, 0, 0, 0), pairs.TIMEOUT)
        second = p.accepted.receive((0, 0, 1, 0, 0), pairs.TIMEOUT)
        with pytest.raises(EngineTimeout, match="0 of 2 slots free"):
            p.accepted.receive((0, 0, 2, 0, 0), 0.2)
        assert bytes(first.view()) == b"\0" * 100
        first.release()
        third = p.accepted.receive((0, 0, 2, 0, 0), pairs.TIMEOUT)
        assert bytes(third.view()) == b"\2" * 100
        assert bytes(second.view()) == b"\1" * 100


def test_a_dropped_message_gives_its_slot_back():
    with pairs.in_process() as p:
        p.accepted.reserve(0, 1, 100)
        for i in range(5):
            p.dialled.send((0, 0, i, 0, 0), b"x")
        for i in range(5):
            p.accepted.receive((0, 0, i, 0, 0), pairs.TIMEOUT)  # and let go of


def test_a_view_outlives_release_and_engine_without_a_fault():
    with pairs.in_process(transport="shm") as p:
        p.accepted.reserve(0, 1, MIB)
        p.dialled.send((0, 0, 0, 0, 0), b"z" * MIB)
        m = p.accepted.receive((0, 0, 0, 0, 0), pairs.TIMEOUT)
        view = m.view()
        m.release()
        with pytest.raises(EngineError, match="released"):
            m.view()
        with pytest.raises(EngineError, match="released"):
            m.copy_into(bytearray(MIB))
    del p, m
    gc.collect()
    assert len(bytes(view)) == MIB


def test_timeout_names_link_key_and_what_is_missing():
    with pairs.in_process() as p:
        p.accepted.reserve(0, 8, 100)
        pairs.eventually(lambda: all_up(p.accepted))  # it would be said of a path that is not
        start = time.monotonic()
        with pytest.raises(EngineTimeout) as e:
            p.accepted.receive((1, 7, 3, 0, 0), 0.25)
        assert 0.2 < time.monotonic() - start < 30
        assert str(e.value) == (
            "link 3 (rank 0 <-> 1): nothing arrived for F microbatch 3 of iteration 7 "
            "(tensor 0, generation 1) within 0.2 s; link is up, 8 of 8 slots free"
        )
        ticket = p.dialled.send((1, 7, 3, 1, 0), b"x")  # nothing is reserved in this direction
        with pytest.raises(EngineTimeout, match=r"B microbatch 3.*waiting for a slot.*rank 1"):
            p.dialled.wait_sent(ticket, 0.1)


def test_mistakes_are_named():
    with pairs.in_process() as p:
        p.accepted.reserve(0, 1, 1000)
        pairs.eventually(lambda: p.dialled.send_slots(0) == 1)
        with pytest.raises(EngineError, match=r"1001 bytes.*1000 bytes"):
            p.dialled.send((0, 0, 0, 0, 0), bytes(1001))
        with pytest.raises(ValueError, match="65 bytes"):
            p.dialled.send((0, 0, 0, 0, 0), b"x", b"n" * 65)
        with pytest.raises(ValueError, match="direction"):
            p.dialled.send((0, 0, 0, 2, 0), b"x")
        with pytest.raises(ValueError, match="direction"):
            p.accepted.reserve(2, 1, 1)
        p.dialled.send((0, 0, 0, 1, 0), b"x")
        with pytest.raises(EngineError, match=r"B microbatch 0 .* in flight"):
            p.dialled.send((0, 0, 0, 1, 0), b"x")
        with pytest.raises(EngineError, match="no ticket 99"):
            p.dialled.sent(99)
        with pytest.raises(EngineError, match="data paths, not 99"):
            p.dialled.sever_data_path(98)
        p.dialled.send((0, 0, 1, 0, 0), b"xy")
        m = p.accepted.receive((0, 0, 1, 0, 0), pairs.TIMEOUT)
        with pytest.raises(ValueError, match=r"2 bytes, the destination 3"):
            m.copy_into(bytearray(3))
        with pytest.raises(BufferError):
            m.copy_into(b"ro")


@pytest.mark.parametrize(
    ("setting", "match"),
    [
        ({"transport": "pigeon"}, "transport"),
        ({"secret": b""}, "secret"),
        ({"sockets": 0}, "sockets"),
        ({"queues": 0}, "queues"),
        ({"chunk_bytes": 1}, "chunk_bytes"),
        ({"peer_deadline": 0.0}, "peer_deadline"),
        ({"peer_deadline": float("nan")}, "peer_deadline"),
        ({"port": 70000}, "port"),
        ({"host": "no such host"}, "no such host"),
    ],
)
def test_bad_settings_are_named(setting, match):
    with pytest.raises((ValueError, EngineError), match=match):
        pairs.engine(0, **setting)


def test_a_message_posted_before_slots_are_known_to_be_too_small_fails_by_its_ticket():
    with pairs.in_process() as p:
        ticket = p.dialled.send((0, 0, 0, 0, 0), bytes(500))
        p.accepted.reserve(0, 1, 100)
        with pytest.raises(EngineError, match=r"500 bytes.*100 bytes"):
            p.dialled.wait_sent(ticket, pairs.TIMEOUT)


@pairs.TRANSPORTS
def test_the_payload_is_held_until_acknowledged_and_then_let_go(transport):
    with pairs.in_process(transport=transport) as p:
        data = bytearray(b"x" * 1000)
        ticket = p.dialled.send((0, 0, 0, 0, 0), data)
        with pytest.raises(BufferError):
            data.append(0)
        p.accepted.reserve(0, 1, 1000)
        p.dialled.wait_sent(ticket, pairs.TIMEOUT)
        pairs.eventually(lambda: resizable(p.dialled, data))


def test_reserve_adds_and_never_shrinks():
    with pairs.in_process() as p:
        for slots, size, total in ((2, 100, 2), (1, 50, 2), (4, 100, 4), (2, 200, 6), (4, 100, 6)):
            p.accepted.reserve(0, slots, size)
            assert p.accepted.stats().slots_granted == total
        pairs.eventually(lambda: p.dialled.send_slots(0) == 6)
        p.dialled.send((0, 0, 0, 0, 0), bytes(200))
        p.accepted.receive((0, 0, 0, 0, 0), pairs.TIMEOUT)


def test_the_bell_rings_for_arrivals_acknowledgements_and_ends():
    with pairs.in_process() as p:

        def wait_for(fd, condition):
            while not condition():
                assert select.select([fd], [], [], pairs.TIMEOUT)[0]
                os.read(fd, 8)

        p.accepted.reserve(0, 1, 100)
        ticket = p.dialled.send((0, 0, 0, 0, 0), b"x")
        wait_for(p.high.notifier_fd, lambda: p.accepted.arrived((0, 0, 0, 0, 0)))
        wait_for(p.low.notifier_fd, lambda: p.dialled.sent(ticket))
        p.dialled.close()
        wait_for(p.high.notifier_fd, lambda: not p.accepted.alive)
        assert "rank 0 closed it" in p.accepted.error


def test_the_notifier_is_set_when_it_is_first_requested():
    with pairs.in_process() as p:
        p.dialled.send((0, 0, 0, 0, 0), b"")
        pairs.eventually(lambda: p.accepted.arrived((0, 0, 0, 0, 0)))
        # The event came before the notifier was requested.
        bell = p.high.notifier_fd
        assert select.select([bell], [], [], 0.0)[0]
        os.read(bell, 8)
        assert p.high.notifier_fd == bell
        assert not select.select([bell], [], [], 0.0)[0]


def test_what_arrived_before_the_end_is_still_good():
    with pairs.in_process() as p:
        p.accepted.reserve(0, 1, 100)
        p.dialled.send((0, 0, 0, 0, 0), b"last words")
        p.dialled.close()
        m = p.accepted.receive((0, 0, 0, 0, 0), pairs.TIMEOUT)
        assert bytes(m.view()) == b"last words"
        for call in (
            lambda: p.accepted.receive((0, 0, 1, 0, 0), pairs.TIMEOUT),
            lambda: p.accepted.try_receive((0, 0, 1, 0, 0)),
            lambda: p.accepted.send((0, 0, 1, 1, 0), b"x"),
        ):
            with pytest.raises(EngineError, match=r"link 3 \(rank 0 <-> 1\).*rank 0"):
                call()


def test_telemetry():
    with pairs.in_process() as p:
        p.accepted.reserve(0, 2, MIB)
        for i in range(5):
            ticket = p.dialled.send((0, 0, i, 0, 0), bytes(MIB))
            p.accepted.receive((0, 0, i, 0, 0), pairs.TIMEOUT).release()
            p.dialled.wait_sent(ticket, pairs.TIMEOUT)
        pairs.eventually(lambda: p.dialled.stats().rtt_p99 is not None)
        s = p.dialled.stats()
        assert 0 < s.rtt_min <= s.rtt_mean <= s.rtt_p99 < pairs.TIMEOUT
        assert abs(s.clock_offset) <= s.rtt_p99 + 1e-4  # one machine, one clock
        assert (s.messages_sent, s.bytes_sent, s.state) == (5, 5 * MIB, "up")
        assert p.accepted.stats().messages_received == 5


def test_a_message_starts_when_there_is_a_slot():
    with pairs.in_process() as p:
        ticket = p.dialled.send((0, 0, 0, 0, 0), b"x")
        with contextlib.suppress(EngineTimeout):
            p.dialled.wait_sent(ticket, 0.5)
        p.accepted.reserve(0, 1, 100)
        p.dialled.wait_sent(ticket, pairs.TIMEOUT)
        m = p.accepted.receive((0, 0, 0, 0, 0), pairs.TIMEOUT)
        assert m.started_at - m.posted_at > 0.45


def tasks():
    return {t.name for t in pathlib.Path("/proc/self/task").iterdir()}


def descriptors():
    return {f.name for f in pathlib.Path("/proc/self/fd").iterdir()}


@pairs.TRANSPORTS
def test_nothing_remains_after_close(transport):
    def use():
        with pairs.in_process(transport=transport) as p:
            p.accepted.reserve(0, 2, MIB)
            p.dialled.send((0, 0, 0, 0, 0), bytes(MIB))
            p.accepted.receive((0, 0, 0, 0, 0), pairs.TIMEOUT).release()

    use()
    gc.collect()
    threads, fds = tasks(), descriptors()
    for _ in range(5):
        use()
    gc.collect()
    pairs.eventually(lambda: tasks() <= threads)
    assert len(descriptors()) <= len(fds)


def test_an_engine_that_is_only_dropped_ends_too():
    threads, fds = tasks(), descriptors()
    e = pairs.engine(0)
    assert tasks() - threads
    del e
    gc.collect()
    pairs.eventually(lambda: tasks() <= threads)
    assert descriptors() <= fds


@pytest.mark.times
def test_idle_links_cost_next_to_nothing():
    with pairs.in_process() as p:
        p.accepted.reserve(0, 1, 100)
        p.dialled.send((0, 0, 0, 0, 0), b"x")
        p.accepted.receive((0, 0, 0, 0, 0), pairs.TIMEOUT).release()
        cpu, wall = time.process_time(), time.monotonic()
        with pytest.raises(EngineTimeout):
            p.accepted.receive((0, 0, 1, 0, 0), 2.0)
        used = (time.process_time() - cpu) / (time.monotonic() - wall)
        assert used < 0.05  # both engines and their echoes together


def test_interrupt_ends_a_wait_at_once():
    script = f"""
import sys
sys.path[:0] = {sys.path!r}
import pairs
with pairs.in_process() as p:
    try:
        print("ready", flush=True)
        p.accepted.receive((0, 0, 0, 0, 0), 60.0)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as c:
        assert c.stdout.readline() == "ready\n"
        start = time.monotonic()
        c.send_signal(2)
        assert c.stdout.readline() == "interrupted\n"
        assert time.monotonic() - start < 30
        assert c.wait(30) == 0


def test_close_ends_waits_in_other_threads():
    with pairs.in_process() as p:
        errors = []

        def wait(link):
            try:
                link.receive((0, 0, 0, 0, 0), 60.0)
            except EngineError as e:
                errors.append(str(e))

        threads = [threading.Thread(target=wait, args=(x,)) for x in (p.dialled, p.accepted)]
        for t in threads:
            t.start()
        p.low.close()
        for t in threads:
            t.join(pairs.TIMEOUT)
        assert len(errors) == 2
        with pytest.raises(EngineError, match="closed"):
            p.low.accept(peer_rank=1, link_id=0, timeout=1.0)
        p.low.close()


@pytest.mark.parametrize("forever", [math.inf, 1e12])
def test_a_timeout_may_be_infinite(forever):
    with pairs.in_process(transport="tcp") as p:
        p.dialled.send((0, 0, 0, 0, 0), b"x" * (8 << 20))
        p.accepted.reserve(0, 1, 8 << 20)
        p.low.close(forever)  # sends the rest first
        assert len(memoryview(p.accepted.receive((0, 0, 0, 0, 0), forever))) == 8 << 20
