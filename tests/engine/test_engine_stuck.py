"""Faults that do not pass: a message is delivered, or its link ends in time with the reason."""

import itertools
import time

import pairs
import pytest
import relays

from pipemorph_trainer._engine import EngineError

PEER_DEADLINE = 4.0
CHUNK_BYTES = 16384
IN_TIME = 2.0 * PEER_DEADLINE + 2.0
"""Seconds: one and a half deadlines, what the bytes under way may take, and a busy machine."""


def cut(connection, to_acceptor):
    """Break every data connection with its first chunk."""

    def change(number, part):
        raise relays.Cut

    return change


def swallow(connection, to_acceptor):
    """Chunks are taken and dropped."""
    return lambda number, part: []


def corrupt(connection, to_acceptor):
    """Replace every payload."""
    return lambda number, part: [bytes([part[0] ^ 1]) + part[1:]]


def one_way(fault, upwards):
    return lambda connection, to_acceptor: (
        fault(connection, to_acceptor) if to_acceptor is upwards else None
    )


def die(link):
    """Reason that a link has ended, and after how many seconds."""
    began = time.monotonic()
    pairs.eventually(lambda: not link.alive)
    return link.error, time.monotonic() - began


FAST = [(cut, 10 * CHUNK_BYTES, True), (swallow, 1000, False)]
CASES = [
    pytest.param(*case, marks=[] if case in FAST else pytest.mark.full)
    for case in itertools.product(
        (cut, swallow), (1000, CHUNK_BYTES + 1, 10 * CHUNK_BYTES), (True, False)
    )
]


@pytest.mark.parametrize(("fault", "size", "upwards"), CASES)
def test_a_path_that_gets_nothing_through_ends_the_link(fault, size, upwards):
    faulty = one_way(fault, upwards)

    def between(port):
        return relays.relay(port, data=faulty, payload=faulty)

    settings = {"peer_deadline": PEER_DEADLINE, "chunk_bytes": CHUNK_BYTES}
    with relays.linked(between, **settings) as (low, high, _, _):
        sender, receiver, direction = (low, high, 0) if upwards else (high, low, 1)
        key = (0, 0, 7, direction, 0)
        ticket = sender.send(key, bytes(size))
        # The other direction works.
        back = (0, 0, 8, 1 - direction, 0)
        receiver.send(back, b"x" * size)
        assert sender.receive(back, pairs.TIMEOUT).view() == b"x" * size
        why, took = die(sender)
        assert took < IN_TIME
        assert "microbatch 7" in why
        assert "lost with a chunk of it (last: data path " in why
        assert "path MTU" in why
        with pytest.raises(EngineError, match=r"nothing of .* has got through in"):
            sender.wait_sent(ticket, pairs.TIMEOUT)
        with pytest.raises(EngineError, match=r"gave it up: nothing of .* has got through in"):
            receiver.receive(key, pairs.TIMEOUT)


@pytest.mark.parametrize("upwards", [True, False])
def test_a_receiver_that_refuses_every_payload_says_why(upwards):
    def between(port):
        return relays.relay(port, payload=one_way(corrupt, upwards))

    with relays.linked(between, peer_deadline=2.0) as (low, high, _, _):
        sender, receiver = (low, high) if upwards else (high, low)
        sender.send((0, 0, 7, 0 if upwards else 1, 0), bytes(1000))
        why, took = die(receiver)
        assert took < IN_TIME
        assert "gave it up: nothing of" in why
        assert "at this end data paths were lost" in why
        assert "a chunk's checksum is wrong" in why


def test_waits_and_counters_say_what_is_wrong_with_the_paths():
    def between(port):
        return relays.relay(port, data=one_way(cut, True))

    with relays.linked(between, peer_deadline=60.0) as (low, high, _, _):
        for link in (low, high):  # as soon as all paths are connected
            pairs.eventually(lambda link=link: link.stats().path_errors == "")
        ticket = low.send((0, 0, 7, 0, 0), bytes(1000))
        pairs.eventually(lambda: sum(path.times_lost for path in low.stats().paths) >= 3)
        stats = low.stats()
        assert "microbatch 7" in stats.path_errors
        assert "were lost with a chunk of it" in stats.path_errors
        assert any(path.last_error for path in stats.paths)
        with pytest.raises(EngineError, match=r"not acknowledged .* were lost with a chunk of it"):
            low.wait_sent(ticket, 0.2)
        with pytest.raises(EngineError, match=r"nothing arrived .* data paths were lost \d+ time"):
            high.receive((0, 0, 7, 0, 0), 0.2)
