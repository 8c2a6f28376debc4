"""Slots and destinations: where messages are received."""

import pairs
import pytest

from pipemorph_trainer._engine import EngineError

TRANSPORTS = pytest.mark.parametrize("transport", ["tcp", "shm"])


@TRANSPORTS
def test_a_destination_for_the_next_message_of_a_key_waits_until_the_first_is_received(transport):
    with pairs.in_process(transport=transport) as p:
        p.accepted.reserve(0, 2, 100)
        key = (0, 0, 0, 0, 0)
        first, second = bytearray(4), bytearray(4)
        p.accepted.post_receive(key, first)
        p.dialled.wait_sent(p.dialled.send(key, b"AAAA"), pairs.TIMEOUT)
        with pytest.raises(EngineError, match=r"F microbatch 0 .* has not been received yet"):
            p.accepted.post_receive(key, second)
        p.accepted.receive(key, pairs.TIMEOUT).release()
        p.accepted.post_receive(key, second)
        p.dialled.send(key, b"BBBB")
        assert p.accepted.receive(key, pairs.TIMEOUT).view() == b"BBBB"
        assert (first, second) == (b"AAAA", b"BBBB")


@TRANSPORTS
def test_tens_of_thousands_of_slots_can_be_reserved_at_once(transport):
    with pairs.in_process(transport=transport) as p:
        p.accepted.reserve(0, 32_000, 64)
        pairs.eventually(lambda: not p.dialled.alive or p.dialled.send_slots(0) == 32_000)
        assert p.dialled.alive, p.dialled.error
