"""10,000 unauthenticated connections to both engines of a link while it carries messages."""

import contextlib
import hashlib
import hmac
import multiprocessing
import os
import pathlib
import random
import re
import socket
import struct
import time
from collections import Counter
from multiprocessing.connection import Connection

import pairs
import pytest
from gate import same_bits

ROOT = pathlib.Path(__file__).resolve().parents[2]
CONNECTIONS = 10_000
MIB = 1 << 20
OPENING_BYTES = 40
REFUSAL = b"\x01\x00\x00"
KINDS = ("random", "http", "half", "wrong secret", "endless hello", "out of turn", "slow", "silent")
STRANGERS_AT_ONCE = 256
LINGERING = 300


def version() -> int:
    found = re.search(r"kVersion = (\d+)", (ROOT / "csrc/wire/handshake.cpp").read_text())
    assert found
    return int(found[1])


def opening(rng: random.Random, purpose: int = 1) -> bytes:
    return b"PMPH" + struct.pack("<HBB", version(), purpose, 0) + rng.randbytes(32)


def forged(first: bytes, answer: bytes, rng: random.Random, purpose: int = 1) -> bytes:
    """A hello of the right shape for the right link, signed with another secret."""
    job = b"test/1"
    hello = struct.pack("<BBH", purpose, 0, len(job)) + job
    hello += struct.pack("<III", 0, 1, pairs.LINK) + rng.randbytes(16 + 9 + 32 + 12)
    key = hmac.digest(b"another job's secret", b"pipemorph engine handshake v1", "sha256")
    said = b"dialler" + first + answer + hello
    return struct.pack("<H", len(hello)) + hello + hmac.digest(key, said, "sha256")


def listened(s: socket.socket) -> bytes:
    """Bytes that it sends until it closes."""
    got = b""
    with contextlib.suppress(ConnectionError, TimeoutError):
        while part := s.recv(4096):
            got += part
    return got


def no_more(s: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it is closed already
        s.shutdown(socket.SHUT_WR)


def strangers(connection: Connection, ports: list[int], seed: int) -> None:
    """Makes the connections and reports, per kind, their number and what they have learnt."""
    rng = random.Random(seed)
    made: Counter[str] = Counter()
    refused = 0
    nonces: set[bytes] = set()
    lingering: list[tuple[socket.socket, bytes]] = []
    last_hello = opening(rng), b""

    def learnt(what: bytes, first: bytes) -> None:
        """Check that a stranger learns only a nonce, never the same, and a bare refusal."""
        nonlocal refused
        if not what:
            return
        assert what[:8] == first[:8], f"an answer that is no opening: {what!r}"
        assert what[OPENING_BYTES:] in (b"", REFUSAL), f"sent a stranger {what!r}"
        if len(what) >= OPENING_BYTES:
            assert what[8:40] not in nonces, "a nonce was used twice"
            nonces.add(what[8:40])
        refused += what.endswith(REFUSAL) and len(what) == OPENING_BYTES + len(REFUSAL)

    def visit(kind: str, s: socket.socket) -> None:
        nonlocal last_hello
        purpose = rng.choice((1, 2))
        first = opening(rng, purpose)
        if kind == "random":
            s.sendall(rng.randbytes(rng.randrange(1, 400)))
            no_more(s)
            learnt(listened(s), first)
        elif kind == "http":
            s.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" + bytes(64))
            learnt(listened(s), first)
        elif kind == "half":
            s.sendall(first[: rng.randrange(1, OPENING_BYTES + 1)])
            no_more(s)
            learnt(listened(s), first)
        elif kind == "wrong secret":
            s.sendall(first)
            answer = s.recv(OPENING_BYTES, socket.MSG_WAITALL)
            if len(answer) == OPENING_BYTES:
                hello = forged(first, answer, rng, purpose)
                s.sendall(hello)
                last_hello = first, hello
            learnt(answer + listened(s), first)
        elif kind == "endless hello":
            s.sendall(first + struct.pack("<H", rng.choice((1025, 0xFFFF))) + bytes(2000))
            learnt(listened(s), first)
        elif kind == "out of turn":
            s.sendall(b"".join(last_hello) or first)
            no_more(s)
            learnt(listened(s), last_hello[0])
        elif kind == "slow":
            s.sendall(first[:1])
            lingering.append((s, first))
        else:
            lingering.append((s, b""))

    for i in range(CONNECTIONS):
        kind = KINDS[i % len(KINDS)]
        s = socket.socket()
        s.settimeout(pairs.TIMEOUT)
        s.connect(("127.0.0.1", ports[i // len(KINDS) % len(ports)]))
        with contextlib.suppress(ConnectionError):  # it may be shown the door at any time
            visit(kind, s)
        made[kind] += 1
        if lingering and lingering[-1][0] is s:
            # Another byte from one of those that send slowly.
            old, rest = lingering[rng.randrange(len(lingering))]
            with contextlib.suppress(OSError):
                old.send(rest[1:2])
            if len(lingering) > LINGERING:
                lingering.pop(0)[0].close()
        else:
            s.close()
    connection.send((dict(made), refused, len(nonces)))
    for s, _ in lingering:
        s.close()


def serve(link, connection, count, size):
    """Receives `count` messages per round, and reports them and the state of its engine."""
    link.reserve(0, 4, size)
    while (number := connection.recv()) is not None:
        said = []
        for i in range(count):
            m = link.receive((0, number, i, 0, 0), pairs.TIMEOUT * 2)
            said.append(hashlib.sha256(m.view()).hexdigest())
            m.release()
        connection.send((said, vitals(link, os.getpid())))
    connection.send("done")


def vitals(link, pid: int) -> dict[str, object]:
    s = link.stats()
    open_files = list_descriptors(pid)
    return {
        "link": (s.state, s.reconnects, s.chunks_resent, s.duplicate_chunks, s.stale_chunks),
        "granted": s.slots_granted,
        "in_use": s.slots_in_use,
        "descriptors": len(open_files),
        "sockets": {name for name in open_files if name.startswith("socket:")},
        "memory": anonymous_bytes(pid),
    }


def list_descriptors(pid: int) -> list[str]:
    """List what each descriptor of a process refers to, such as ``socket:[INODE]``."""
    found = []
    for path in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
            found.append(str(path.readlink()))
    return found


def describe_sockets(names: set[str]) -> str:
    """TCP sockets as the kernel lists them: addresses, state, queues, timers."""
    rows = pathlib.Path("/proc/net/tcp").read_text().splitlines()
    inodes = {name[len("socket:[") : -1] for name in names}
    return "\n".join(row for row in rows if set(row.split()) & inodes) or repr(names)


def anonymous_bytes(pid: int) -> int:
    """Resident memory that no file can give back: pages of libraries come and go."""
    [line] = [
        line
        for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith("RssAnon:")
    ]
    return int(line.split()[1]) * 1024


UNDISTURBED = ("up", 0, 0, 0, 0)


@pytest.mark.full
@pytest.mark.timeout(400)
def test_ten_thousand_strangers_disturb_nothing_and_learn_nothing():
    count, size = 8, 2 * MIB
    with pairs.with_peer(serve, count, size, transport="tcp") as peer:
        data = [pairs.payload(i, size) for i in range(count)]
        expected = [pairs.digest(d) for d in data]
        number = 0

        def play_round():
            nonlocal number
            tickets = [peer.link.send((0, number, i, 0, 0), d) for i, d in enumerate(data)]
            peer.tell(number)
            digests, theirs = peer.hear()
            same_bits(digests, expected, "digests")
            for t in tickets:
                peer.link.wait_sent(t, pairs.TIMEOUT)
            number += 1
            return vitals(peer.link, os.getpid()), theirs

        deadline = time.monotonic() + pairs.TIMEOUT
        while any(path.state != "UP" for path in peer.link.stats().paths):
            assert time.monotonic() < deadline, "not all data connections come up"
            os.sched_yield()
        play_round()
        calm = play_round()  # descriptors, buffers and slots are as many as they get
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        ports = [peer.engine.port, peer.port]
        crowd = context.Process(target=strangers, args=(theirs, ports, 1), daemon=True)
        crowd.start()
        theirs.close()
        rounds_before, most = number, 0
        deadline = time.monotonic() + 180
        while not ours.poll(0):
            assert time.monotonic() < deadline, "the strangers do not come to an end"
            assert crowd.is_alive() or ours.poll(0), "the strangers' process has died"
            for now, before in zip(play_round(), calm, strict=True):
                assert now["link"] == UNDISTURBED
                # Strangers have no slots: there are as many as before.
                assert now["granted"] == before["granted"]
                assert now["in_use"] <= before["granted"]
                most = max(most, now["descriptors"] - before["descriptors"])
                assert now["descriptors"] <= before["descriptors"] + STRANGERS_AT_ONCE + 64
                assert now["memory"] <= before["memory"] + 24 * MIB
        made, refused, nonces = ours.recv()
        crowd.join(pairs.TIMEOUT)
        crowd.close()
        ours.close()
        assert number > rounds_before + 3, "there was hardly a transfer to disturb"
        assert sum(made.values()) == CONNECTIONS
        assert min(made.values()) == CONNECTIONS // len(KINDS)
        # Their messages were read, not just dropped: that would be no test of the handshake.
        assert refused > CONNECTIONS // len(KINDS) / 2
        assert nonces > CONNECTIONS / 4
        assert most > 20, "hardly a stranger was connected while messages were under way"

        # When they have gone, none of their sockets remains. The engines end them within two
        # seconds in which they run: on a busy machine that takes longer. Slots are free at once.
        deadline = time.monotonic() + pairs.HEAR_TIMEOUT
        while True:
            after = play_round()
            assert not any(now["in_use"] for now in after), after
            held = [
                now["sockets"] - before["sockets"]
                for now, before in zip(after, calm, strict=True)
                if now["descriptors"] > before["descriptors"]
            ]
            if not any(held):
                break
            assert time.monotonic() < deadline, (
                "sockets of strangers are still held by this process or its peer:\n"
                + "\n".join(map(describe_sockets, held))
            )
        reasons = peer.engine.refused()
        assert len(reasons) < 20  # counted, not listed one by one
        assert any("authentication failed" in r and "times" in r for r in reasons)
        assert not any("link" in r for r in reasons), reasons  # none got so far as a link
        peer.tell(None)
        assert peer.hear() == "done"
