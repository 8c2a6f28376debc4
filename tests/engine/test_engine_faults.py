"""Two processes: every size, many messages, cut connections, killed peers, strangers."""

import contextlib
import os
import pathlib
import random
import signal
import socket
import threading
import time

import pairs
import pytest
import test_engine_strangers as strangers
from gate import same_bits

from pipemorph_trainer._engine import EngineError

MIB = 1 << 20
SIZES = [0, 1, 4095, 4096, MIB - 1, MIB, MIB + 1, 5 * MIB + 17, 16 * MIB, 40 * 10**6]


def echo_digests(link, connection, count, size):
    """Receives `count` messages in an order of its own and says what they were."""
    link.reserve(0, 4, size)
    order = list(range(count))
    # Out of order, but never further ahead than there are slots.
    for start in range(0, count, 4):
        block = order[start : start + 4]
        random.Random(start).shuffle(block)
        order[start : start + 4] = block
    said = {}
    for i in order:
        m = link.receive((0, 0, i, 0, 0), pairs.TIMEOUT * 2)
        said[i] = pairs.digest(m.view())
        m.release()
    connection.send(said)
    s = link.stats()
    connection.send({"received": s.messages_received, "duplicates": s.duplicate_chunks})
    assert connection.recv() == "done"


@pairs.TRANSPORTS
def test_every_size_arrives_unharmed(transport):
    sizes = SIZES + [random.Random(1).randrange(3 * MIB) for _ in range(10)]
    with pairs.with_peer(echo_digests, len(sizes), max(sizes), transport=transport) as peer:
        assert peer.link.transport == transport
        data = [pairs.payload(i, size) for i, size in enumerate(sizes)]
        tickets = [peer.link.send((0, 0, i, 0, 0), d) for i, d in enumerate(data)]
        same_bits(peer.hear(), {i: pairs.digest(d) for i, d in enumerate(data)}, "digests")
        for t in tickets:
            peer.link.wait_sent(t, pairs.TIMEOUT)
        assert peer.hear() == {"received": len(sizes), "duplicates": 0}
        peer.tell("done")


def echo_rounds(link, connection, count, size):
    """Receives `count` messages per round, for as many rounds as it is told to."""
    link.reserve(0, 4, size)
    while (number := connection.recv()) is not None:
        said = []
        for i in range(count):
            m = link.receive((0, number, i, 0, 0), pairs.TIMEOUT * 2)
            said.append(pairs.digest(m.view()))
            m.release()
        connection.send(said)
    connection.send(link.stats().messages_received)


@pairs.TRANSPORTS
def test_cut_connections_in_mid_transfer_lose_and_repeat_nothing(transport):
    count, size = 8, 4 * MIB
    with pairs.with_peer(echo_rounds, count, size, transport=transport) as peer:
        link = peer.link
        paths = 4 if transport == "tcp" else 1
        data = [pairs.payload(i, size - i) for i in range(count)]
        expected = [pairs.digest(d) for d in data]
        deadline = time.monotonic() + 2 * pairs.TIMEOUT
        number = 0
        # Until the faults have happened with chunks in them: a cut may fall between two chunks,
        # and over shared memory it nearly always does.
        while number < 6 or (transport == "tcp" and link.stats().chunks_resent == 0):
            assert time.monotonic() < deadline, f"no chunk was sent again in {number} rounds"
            tickets = [link.send((0, number, i, 0, 0), d) for i, d in enumerate(data)]
            peer.tell(number)
            for i, t in enumerate(tickets):
                if i % 4 == number % 4:
                    link.sever_data_path(i % paths)
                if i == number:
                    link.sever_control()
                link.wait_sent(t, pairs.TIMEOUT)
            same_bits(peer.hear(), expected, "digests")
            number += 1
        peer.tell(None)
        assert peer.hear() == number * count
        stats = link.stats()
        assert stats.messages_sent == number * count
        assert stats.reconnects > 3


def test_a_cut_control_connection_alone_is_survived():
    with pairs.in_process(transport="tcp") as p:
        p.accepted.reserve(0, 1, 100)
        for i in range(20):
            p.dialled.send((0, 0, i, 0, 0), bytes([i]))
            (p.dialled if i % 2 else p.accepted).sever_control()
            m = p.accepted.receive((0, 0, i, 0, 0), pairs.TIMEOUT)
            assert bytes(m.view()) == bytes([i])
            m.release()
        assert p.dialled.stats().reconnects > 5
        assert p.dialled.alive
        assert p.accepted.alive


def cut_when_up(link, before):
    """Cut all four data connections, once they are there, and those cut before are back."""
    deadline = time.monotonic() + pairs.TIMEOUT
    # The first message may have come over the first connection while the others were dialled.
    while (s := link.stats()).reconnects < before or any(p.state != "UP" for p in s.paths):
        assert time.monotonic() < deadline, (s.reconnects, [p.state for p in s.paths])
        os.sched_yield()
    for path in range(4):
        link.sever_data_path(path)


def test_all_data_connections_cut_at_once():
    with pairs.in_process(transport="tcp") as p:
        p.accepted.reserve(0, 4, 8 * MIB)
        data = [pairs.payload(i, 8 * MIB) for i in range(8)]
        tickets = [p.dialled.send((0, 0, i, 0, 0), d) for i, d in enumerate(data)]
        for i, d in enumerate(data):
            if i in (1, 4):
                cut_when_up(p.dialled, before=4 * (i == 4))
            m = p.accepted.receive((0, 0, i, 0, 0), pairs.TIMEOUT)
            assert m.view() == d
            m.release()
        for t in tickets:
            p.dialled.wait_sent(t, pairs.TIMEOUT)
        # Both cuts were made good on all sockets, in the background and for as long as it takes.
        pairs.eventually(lambda: p.dialled.stats().reconnects >= 8)


def hold_still(link, connection, direction):
    link.reserve(direction, 2, MIB)
    connection.send("ready")
    link.receive((0, 0, 0, 1 - direction, 0), 60.0)  # never sent


def unix_sockets():
    """Abstract unix sockets on this machine: inode → name."""
    rows = [row.split() for row in pathlib.Path("/proc/net/unix").read_text().splitlines()[1:]]
    return {row[6]: row[7] for row in rows if len(row) > 7 and row[7].startswith("@")}


def listening_names(pid):
    """The engine's unix names that a process holds. (Other engines may run on this machine.)"""
    inodes = set()
    for fd in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed while we looked
            target = str(fd.readlink())
            if target.startswith("socket:["):
                inodes.add(target[len("socket:[") : -1])
    return {name for inode, name in unix_sockets().items() if inode in inodes}


def named_memory(pid):
    """Files in /dev/shm that a process has mapped, and whether it has mapped our memfd."""
    maps = pathlib.Path(f"/proc/{pid}/maps").read_text()
    return "/dev/shm/" in maps, "/memfd:pipemorph-slots" in maps


@pytest.mark.full
@pairs.TRANSPORTS
@pytest.mark.parametrize("peer_rank", [0, 1])
def test_a_killed_peer_is_noticed_within_the_deadline(transport, peer_rank):
    deadline = 3.0
    # A machine that stands still for a moment lengthens what is measured on it, never shortens it.
    took = [seconds_until_noticed(transport, peer_rank, deadline)]
    while took[-1] >= deadline and len(took) < 3:
        took.append(seconds_until_noticed(transport, peer_rank, deadline))
    assert took[-1] < deadline, f"noticed after {took} s"


def seconds_until_noticed(transport, peer_rank, deadline):
    """Kills a peer, and checks all that must hold of its link then."""
    direction = 0 if peer_rank == 1 else 1
    with pairs.with_peer(
        hold_still, direction, peer_rank=peer_rank, transport=transport, peer_deadline=deadline
    ) as peer:
        assert peer.hear() == "ready"
        tickets = [peer.link.send((0, 0, i, direction, 0), bytes(MIB)) for i in range(10)]
        peer.link.wait_sent(tickets[0], pairs.TIMEOUT)
        names = listening_names(peer.pid)
        if transport == "shm":
            assert names
            assert named_memory(peer.pid) == (False, True)
        start = time.monotonic()
        os.kill(peer.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match=rf"link 3 \(rank 0 <-> 1\).*rank {peer_rank}"):
            peer.link.receive((0, 0, 0, 1 - direction, 0), 60.0)
        took = time.monotonic() - start
        assert not peer.link.alive
        assert f"rank {peer_rank}" in peer.link.error
        with pytest.raises(EngineError, match=f"rank {peer_rank}"):
            peer.link.wait_sent(tickets[-1], 60.0)
        with pytest.raises(EngineError, match=f"rank {peer_rank}"):
            peer.link.send((0, 1, 0, direction, 0), b"x")
        assert peer.link.sent(tickets[0])  # that one had arrived
    assert not names & set(unix_sockets().values())
    return took


def kill_self_in_mid_transfer(link, connection):
    link.reserve(0, 4, 16 * MIB)
    for i in range(8):
        link.send((0, 0, i, 1, 0), bytes(16 * MIB))
    connection.send("ready")
    assert connection.recv() == "die"
    link.receive((0, 0, 1, 0, 0), 60.0)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.full
def test_shared_memory_leaves_nothing_behind_when_killed_in_mid_transfer():
    with pairs.with_peer(kill_self_in_mid_transfer, transport="shm", peer_deadline=2.0) as peer:
        peer.link.reserve(1, 4, 16 * MIB)
        for i in range(8):
            peer.link.send((0, 0, i, 0, 0), bytes(16 * MIB))
        assert peer.hear() == "ready"
        names = listening_names(peer.pid) | listening_names(os.getpid())
        assert len(names) >= 2
        assert named_memory(peer.pid) == (False, True)
        peer.tell("die")
        with pytest.raises(EngineError, match="rank 1"):
            peer.link.receive((9, 9, 9, 1, 0), 60.0)
        peer.process.join(pairs.TIMEOUT)
        assert peer.process.exitcode == -signal.SIGKILL
        peer.engine.close()
        assert not names & set(unix_sockets().values())
    left = {file.name for file in pathlib.Path("/dev/shm").glob("*pipemorph*")}
    # Jobs that run on this machine keep copies of their state there.
    assert not {name for name in left if not name.startswith("pipemorph-kept-")}


def thread_states(pid):
    """The state of every thread of a process, which comes after its name in parentheses."""
    tasks = pathlib.Path(f"/proc/{pid}/task").iterdir()
    return {(task / "stat").read_text().rpartition(")")[2].split()[0] for task in tasks}


@pytest.mark.full
@pytest.mark.parametrize("cut", [False, True], ids=["silent", "cut"])
@pytest.mark.parametrize("peer_rank", [0, 1], ids=["dialler", "acceptor"])
def test_a_stopped_peer_is_noticed_within_the_deadline(peer_rank, cut):
    """As when a machine or a cable is gone: no reset, no end of stream, no refusal, since the
    kernel goes on listening for the peer. The control connection is silent, or cut and stays away.
    Neither end may wait for longer than its own deadline says."""
    deadline = 1.5
    direction = 0 if peer_rank == 1 else 1
    with pairs.with_peer(
        hold_still, direction, peer_rank=peer_rank, transport="tcp", peer_deadline=deadline
    ) as peer:
        assert peer.hear() == "ready"
        before = time.monotonic()
        os.kill(peer.pid, signal.SIGSTOP)
        try:
            pairs.eventually(lambda: thread_states(peer.pid) == {"T"})
            start = time.monotonic()
            if cut:
                peer.link.sever_control()
            with pytest.raises(EngineError, match=f"no control connection to rank {peer_rank} "):
                peer.link.receive((0, 0, 0, 1 - direction, 0), 60.0)
            # Silence counts from half of the deadline on.
            assert time.monotonic() - before > 0.9 * deadline
            assert time.monotonic() - start < 5 * deadline
            assert not peer.link.alive
        finally:
            os.kill(peer.pid, signal.SIGCONT)


def flood(port, stop, count):
    rng = random.Random(7)
    while not stop.is_set():
        s = socket.socket()
        try:
            s.settimeout(5.0)
            s.connect(("127.0.0.1", port))
            kind = rng.randrange(4)
            if kind == 0:
                s.sendall(rng.randbytes(rng.randrange(200)))
            elif kind == 1:
                first = strangers.opening(rng)
                s.sendall(first)
                answer = s.recv(strangers.OPENING_BYTES, socket.MSG_WAITALL)
                assert answer[:8] in (first[:8], b"")
                s.sendall(strangers.forged(first, answer, rng))
            elif kind == 2:
                s.sendall(b"GET / HTTP/1.1\r\n\r\n")
        except OSError:
            pass  # it may be shown the door at any time
        finally:
            s.close()
        count[0] += 1


@pytest.mark.full
def test_thousands_of_strangers_do_not_disturb_a_transfer():
    count, size = 100, 2 * MIB
    with pairs.with_peer(echo_digests, count, size, transport="tcp") as peer:
        # At our own listener, which the transfer does not need, and in our own process, whose
        # control thread it does need.
        stop, made = threading.Event(), [0]
        thread = threading.Thread(target=flood, args=(peer.engine.port, stop, made))
        thread.start()
        # Some that say nothing at all and stay.
        silent = [socket.create_connection(("127.0.0.1", peer.engine.port)) for _ in range(300)]
        try:
            data = [pairs.payload(i, size) for i in range(count)]
            for i, d in enumerate(data):
                peer.link.send((0, 0, i, 0, 0), d)
            same_bits(peer.hear(), {i: pairs.digest(d) for i, d in enumerate(data)}, "digests")
            pairs.eventually(lambda: made[0] >= 2000 or not thread.is_alive(), 2 * pairs.TIMEOUT)
            assert thread.is_alive(), "a stranger was told what it must not be"
        finally:
            stop.set()
            thread.join()
            for s in silent:
                s.close()
        assert peer.hear()["received"] == count
        stats = peer.link.stats()
        assert stats.state == "up"
        assert stats.reconnects == 0
        refused = peer.engine.refused()
        assert 0 < len(refused) < 20  # counted, not listed one by one
        for reason in ("not a PipeMorph connection", "authentication failed"):
            assert any(reason in r and "times" in r for r in refused), refused
        peer.tell("done")


def test_a_link_comes_up_through_a_crowd_of_strangers():
    low, high = pairs.engine(0), pairs.engine(1)
    silent = [socket.create_connection(("127.0.0.1", high.port)) for _ in range(400)]
    box = []
    acceptor = threading.Thread(
        target=lambda: box.append(
            high.accept(peer_rank=0, link_id=pairs.LINK, timeout=pairs.TIMEOUT)
        )
    )
    acceptor.start()
    link = low.connect(
        peer_rank=1, link_id=pairs.LINK, host="127.0.0.1", port=high.port, timeout=pairs.TIMEOUT
    )
    acceptor.join()
    link.send((0, 0, 0, 0, 0), b"", b"through")
    assert box[0].receive((0, 0, 0, 0, 0), pairs.TIMEOUT).note == b"through"
    low.close()
    high.close()
    for s in silent:
        s.close()
