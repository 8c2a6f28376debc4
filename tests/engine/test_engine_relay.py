"""An attacker on the way between two engines, without the secret, can cut, and forge nothing:
neither control nor chunks, nor payloads where they have a MAC and no mere checksum."""

import contextlib
import os
import random
import socket
import struct
import threading

import pairs
import pytest
import relays

from pipemorph_trainer._engine import EngineError

COUNT = 12
SIZE = relays.SLOT_BYTES
AT = 5
"""The frame that is attacked: the dialler's first says that the link is up."""
SEALED = "was altered or added on the way: its MAC is wrong"
BYE = 10


def exchange(low, high, iteration=0):
    """Messages both ways: each arrives once, and as it was."""
    sent = []
    for i in range(COUNT):
        for link, direction in ((low, 0), (high, 1)):
            data = pairs.payload(2 * i + direction, SIZE - i)
            sent.append((link, link.send((0, iteration, i, direction, 0), data)))
    for i in range(COUNT):
        for link, direction in ((high, 0), (low, 1)):
            m = link.receive((0, iteration, i, direction, 0), pairs.TIMEOUT)
            assert bytes(m.view()) == pairs.payload(2 * i + direction, SIZE - i)
            m.release()
    for link, ticket in sent:
        link.wait_sent(ticket, pairs.TIMEOUT)


def flipped(at):
    def change(frame):
        altered = bytearray(frame)
        altered[at] ^= 1
        return [bytes(altered)]

    return change


def goodbye(frame):
    """Make a goodbye in the peer's name, with the next numbers, and a MAC of the right size."""
    body = struct.pack("<BH", 1, 4) + b"over"
    return [struct.pack("<IIQQ", len(body), BYE, 0, 0) + body + os.urandom(relays.SEAL), frame]


ATTACKS = {
    "altered length": flipped(0),
    "altered kind": flipped(4),
    "no such kind": flipped(7),
    "altered number": flipped(8),
    "altered acknowledgement": flipped(16),
    "altered body": flipped(relays.FRAME_HEADER),
    "altered seal": flipped(-1),
    "injected": goodbye,
    "repeated": lambda frame: [frame, frame],
    "omitted": lambda frame: [],
}


def once(attack, at=AT):
    return lambda number, frame: attack(frame) if number == at else [frame]


@pytest.mark.parametrize("to_acceptor", [True, False])
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_control_frame_that_is_not_the_peers_costs_one_connection(attack, to_acceptor):
    def control(connection, towards):
        return once(ATTACKS[attack]) if (connection, towards) == (0, to_acceptor) else None

    with relays.linked(lambda port: relays.relay(port, control=control)) as (low, high, _, relay):
        hit, other = (high, low) if to_acceptor else (low, high)
        exchange(low, high)
        pairs.eventually(lambda: hit.stats().frames_refused > 0)
        pairs.eventually(lambda: relay.connections == 2)
        exchange(low, high, 1)
        after = hit.stats()
        assert (after.frames_refused, other.stats().frames_refused) == (1, 0)
        assert after.last_error == (
            f"a frame on the control connection from rank {0 if to_acceptor else 1} {SEALED}"
        )
        assert (after.messages_sent, after.messages_received) == (2 * COUNT, 2 * COUNT)
        assert after.state == "up" and low.alive and high.alive


def test_frames_of_one_connection_are_nothing_on_the_next():
    recorded = []

    def control(connection, towards):
        def change(number, frame):
            if connection == 0:
                recorded.append(frame)
                return [frame] if number < 2 * AT else flipped(-1)(frame)
            return [recorded[number]] if connection == 1 and number == AT else [frame]

        return change if towards else None

    with relays.linked(lambda port: relays.relay(port, control=control)) as (low, high, _, relay):
        pairs.eventually(lambda: high.stats().frames_refused == 2)
        pairs.eventually(lambda: relay.connections == 3)
        exchange(low, high)
        assert high.stats().frames_refused == 2
        assert low.alive and high.alive


def test_a_recorded_connection_is_refused_as_a_strangers():
    with relays.linked(relays.relay) as (low, high, acceptor, relay):
        exchange(low, high)
        before = high.stats()
        with socket.create_connection(("127.0.0.1", acceptor.port)) as again:
            again.sendall(relay.received[0])
            again.settimeout(pairs.TIMEOUT)
            with contextlib.suppress(ConnectionResetError):
                while again.recv(4096):
                    pass
        assert any("authentication failed" in why for why in acceptor.refused())
        exchange(low, high, 1)
        after = high.stats()
        assert (after.reconnects, after.frames_refused) == (before.reconnects, 0)


class Impostor:
    """Passes on until it is set to answer in the acceptor's stead, for some connections."""

    def __init__(self, port, connections):
        self._real = relays.Relay(port)
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.remaining = 0
        self.connections = connections
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        with contextlib.suppress(OSError):
            while True:
                dialler, _ = self._listener.accept()
                if self.remaining > 0:
                    self.remaining -= 1
                    with contextlib.suppress(relays.Gone, OSError), dialler:
                        self._pretend(dialler)
                    continue
                acceptor = socket.create_connection(("127.0.0.1", self._real.port))
                for ends in ((dialler, acceptor), (acceptor, dialler)):
                    threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    def _pass_on(self, source, sink):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)

    def _pretend(self, dialler):
        opening = relays.read(dialler, relays.OPENING)
        dialler.sendall(opening[:8] + os.urandom(32))
        size = relays.read(dialler, 2)
        relays.read(dialler, int.from_bytes(size, "little") + relays.MAC)
        reply = struct.pack("<BHHHQB", 1, 0, 1, self._to, 0, 0)
        dialler.sendall(struct.pack("<BH", 0, len(reply)) + reply + os.urandom(relays.MAC))
        with contextlib.suppress(OSError):
            dialler.recv(1)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._listener.close()
        self._real.close()


def test_an_impostor_at_the_peers_address_is_not_believed():
    with relays.linked(lambda port: Impostor(port, 3)) as (low, high, _, impostor):
        exchange(low, high)
        said = set()
        impostor.remaining = 3
        low.sever_control()
        while impostor.remaining > 0 or low.stats().state != "up":
            said.add(low.stats().last_error)
            os.sched_yield()
        assert "the peer could not prove that it has the job's secret" in said
        exchange(low, high, 1)
        assert low.alive and high.alive


@pytest.mark.parametrize("to_acceptor", [True, False])
def test_a_chunk_header_that_is_not_the_peers_costs_one_path(to_acceptor):
    # The slot and what follows.
    rng = random.Random(1)
    attacked = []

    def data(_, towards):
        def change(number, head):
            if towards != to_acceptor or attacked or number != 1:
                return [head]
            attacked.append(number)
            return flipped(16 + rng.randrange(20))(head)

        return change

    with relays.linked(lambda port: relays.relay(port, data=data)) as (low, high, _, _relay):
        hit = high if to_acceptor else low
        exchange(low, high)
        pairs.eventually(lambda: hit.stats().frames_refused == 1)
        assert SEALED in hit.stats().last_error
        exchange(low, high, 1)
        assert low.alive and high.alive


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc = CRC_TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def of_byte(crc):
    for _ in range(8):
        crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc


CRC_TABLE = [of_byte(byte) for byte in range(256)]


@pytest.mark.parametrize("integrity", ["crc", "mac", "aead"])
@pytest.mark.parametrize("to_acceptor", [True, False])
def test_a_payload_that_was_altered_with_its_checksum(to_acceptor, integrity):
    """A checksum needs no key: only a MAC excludes an attacker on the way."""
    attacked, read = [], []

    def payload(_, towards):
        def change(number, said):
            if towards != to_acceptor or attacked or number != 1:
                return [said]
            attacked.append(number)
            data, tail = bytearray(said[: -relays.TRAILER]), said[-relays.TRAILER :]
            read.append(bytes(data))
            data[len(data) // 2] ^= 1
            if integrity == "crc":
                assert tail == crc32c(read[0]).to_bytes(4, "little") + bytes(12)
            return [bytes(data), crc32c(data).to_bytes(4, "little"), tail[4:]]

        return change

    with relays.linked(lambda port: relays.relay(port, payload=payload), integrity=integrity) as (
        low,
        high,
        _,
        _relay,
    ):
        hit = high if to_acceptor else low
        if integrity == "crc":
            with pytest.raises(AssertionError, match="At index"):
                exchange(low, high)
            assert hit.stats().frames_refused == 0
            return
        exchange(low, high)
        assert attacked and hit.stats().frames_refused == 1
        assert "payload was altered on the way: its MAC is wrong" in hit.stats().last_error
        sent = [pairs.payload(2 * i + (not to_acceptor), SIZE - i) for i in range(COUNT)]
        known = [data for data in sent if read[0] in data]
        assert bool(known) == (integrity == "mac"), "only aead hides it"
        exchange(low, high, 1)
        assert low.alive and high.alive


def test_engines_of_different_integrity_name_both():
    with (
        contextlib.closing(pairs.engine(0, transport="tcp", integrity="mac")) as a,
        contextlib.closing(pairs.engine(1, transport="tcp")) as b,
    ):

        def wait():
            with pytest.raises(EngineError):
                b.accept(peer_rank=0, link_id=pairs.LINK, timeout=1.0)

        acceptor = threading.Thread(target=wait)
        acceptor.start()
        where = {"peer_rank": 1, "link_id": pairs.LINK, "host": "127.0.0.1", "port": b.port}
        with pytest.raises(EngineError, match="integrity differs: rank 0 has mac, rank 1 has crc"):
            a.connect(timeout=pairs.TIMEOUT, **where)
        acceptor.join()


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"integrity": "md5"}, "crc, mac or aead, not 'md5'"),
        ({"integrity": "mac", "transport": "rdma"}, "contradicts transport rdma"),
        ({"integrity": "aead", "require": "rdma"}, "contradicts transport rdma"),
    ],
)
def test_an_integrity_that_cannot_be_is_refused(settings, error):
    with pytest.raises((ValueError, EngineError), match=error):
        pairs.engine(0, **settings)


def test_with_a_mac_rails_are_unused_and_that_is_reported():
    with contextlib.closing(pairs.engine(0, transport="auto", integrity="mac")) as engine:
        assert not engine.rails
        assert "no MAC, and integrity is mac" in engine.rails_error


@pytest.mark.full
def test_a_frame_that_never_ends_counts_as_silence():
    def control(connection, towards):
        long = once(lambda frame: [frame[:2] + b"\x0f" + frame[3:]])
        return long if connection == 0 and towards else None

    with relays.linked(lambda port: relays.relay(port, control=control), peer_deadline=2.0) as (
        low,
        high,
        _,
        relay,
    ):
        pairs.eventually(lambda: relay.connections == 2)
        exchange(low, high)
        assert low.alive and high.alive


@pytest.mark.full
def test_a_relay_that_passes_only_handshakes_ends_the_link_as_a_cut_does():
    broken = threading.Event()

    def control(_, __):
        return lambda number, frame: flipped(-1)(frame) if broken.is_set() else [frame]

    with relays.linked(lambda port: relays.relay(port, control=control), peer_deadline=2.0) as (
        low,
        high,
        _,
        relay,
    ):
        exchange(low, high)
        broken.set()
        for link in (low, high):
            pairs.eventually(lambda link=link: not link.alive)
        with pytest.raises(EngineError, match="no control connection"):
            low.send((0, 9, 0, 0, 0), b"too late")
        errors = [e for e in (low.error, high.error) if "refused for a wrong MAC" in e]
        assert errors, (low.error, high.error)
        # Connections pause, and do not follow each other for two seconds.
        assert relay.connections < 30
