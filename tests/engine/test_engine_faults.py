"""Processes with a link, two: connections that are cut, and peers that are killed or stopped."""

import contextlib
import os
import pathlib
import signal
import time

import pairs
import pytest
from gate import same_bits

from pipemorph_trainer._engine import EngineError

MIB = 1 << 20


def echo_rounds(link, connection, count, size):
    """Receives `count` messages per round, for a number of rounds from the parent."""
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
    # A machine that stands still for a moment lengthens measured times, never shortens them.
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
    files = {file.name for file in pathlib.Path("/dev/shm").glob("*pipemorph*")}
    # Jobs that run on this machine keep copies of their state there.
    assert not {name for name in files if not name.startswith("pipemorph-kept-")}


def thread_states(pid):
    """The state of every thread of a process, which comes after its name in parentheses."""
    tasks = pathlib.Path(f"/proc/{pid}/task").iterdir()
    return {(task / "stat").read_text().rpartition(")")[2].split()[0] for task in tasks}


@pytest.mark.full
@pytest.mark.parametrize("cut", [False, True], ids=["silent", "cut"])
@pytest.mark.parametrize("peer_rank", [0, 1], ids=["dialler", "acceptor"])
def test_a_stopped_peer_is_noticed_within_the_deadline(peer_rank, cut):
    """A machine or a cable is gone: no reset, no end of stream, no refusal, since the kernel goes
    on listening for the peer. The control connection is silent, or cut and stays away. Neither end
    may wait for longer than its own deadline says."""
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
