"""Slots: where messages are received."""

import ctypes
import weakref

import pairs
import pytest

from pipemorph_trainer._engine import EngineError


def test_a_message_is_held_by_whatever_shows_its_memory():
    with pairs.in_process(transport="shm") as p:
        p.accepted.reserve(0, 1, 100)
        data = pairs.payload(1, 100)
        p.dialled.send((0, 0, 0, 0, 0), data)
        message = p.accepted.receive((0, 0, 0, 0, 0), pairs.TIMEOUT)
        known, view = weakref.ref(message), memoryview(message)
        del message
        assert view == data and not view.readonly
        assert p.accepted.stats().slots_in_use == 1 and known() is not None
        view.release()
        assert p.accepted.stats().slots_in_use == 0 and known() is None
        p.dialled.send((0, 0, 1, 0, 0), b"x")
        message = p.accepted.receive((0, 0, 1, 0, 0), pairs.TIMEOUT)
        message.release()
        with pytest.raises(BufferError, match="released already"):
            memoryview(message)


AHEAD = 16 << 10
"""Bytes that may have been read from a socket before it was known where they go."""
SHARED = "shm", "crc"
"""Transports with memory to lease."""
WAYS = {"leased": 0, "view": 0, "copy_into": 1, "move_to": 1}
"""Copies of a byte after it came, for each way to receive."""
COPIES = {("shm", "crc"): 1, ("shm", "mac"): 1, ("tcp", "crc"): 0, ("tcp", "aead"): 1}
"""The same before it leaves, by transport and integrity."""


@pytest.mark.parametrize(("transport", "integrity"), COPIES)
def test_what_the_engine_copies_is_counted(transport, integrity):
    out = COPIES[transport, integrity]
    size = 300_000
    with pairs.in_process(transport=transport, integrity=integrity) as p:
        p.accepted.reserve(0, 2, size)
        pairs.eventually(lambda: p.dialled.send_slots(0) == 2)
        pairs.eventually(lambda: p.dialled.stats().paths[0].state == "UP")
        into = bytearray(size)
        address = ctypes.addressof((ctypes.c_char * size).from_buffer(into))
        for i, (way, copied_in) in enumerate(WAYS.items()):
            key, data = (0, 0, i, 0, 0), pairs.payload(i, size)
            before = p.dialled.stats().bytes_copied_out, p.accepted.stats().bytes_copied_in
            lease = p.dialled.lease(key, size) if way == "leased" else None
            assert (lease is not None) == (way == "leased" and (transport, integrity) == SHARED)
            if lease is not None:
                memoryview(lease)[:] = data
                ticket = lease.send(b"a note")
            else:
                ticket = p.dialled.send(key, data, b"a note")
            message = p.accepted.receive(key, pairs.TIMEOUT)
            if way == "copy_into":
                message.copy_into(into)
            elif way == "move_to":
                message.move_to(address, size, True)
            assert (message.view() if way in ("leased", "view") else into) == data
            assert message.note == b"a note"
            message.release()
            p.dialled.wait_sent(ticket, pairs.TIMEOUT)
            after = p.dialled.stats().bytes_copied_out, p.accepted.stats().bytes_copied_in
            assert after[0] - before[0] == (out * size if lease is None else 0), way
            ahead = AHEAD if transport == "tcp" else 0
            assert 0 <= after[1] - before[1] - copied_in * size <= ahead, way
            pairs.eventually(lambda: p.dialled.send_slots(0) == 2)


def test_a_lease_that_is_over_shows_no_memory_and_is_not_sent_again():
    with pairs.in_process(transport="shm") as p:
        p.accepted.reserve(0, 2, 100)
        pairs.eventually(lambda: p.dialled.send_slots(0) == 2)
        sent = p.dialled.lease((0, 0, 0, 0, 0), 100)
        sent.send()
        with pytest.raises(BufferError, match="sent already"):
            memoryview(sent)
        with pytest.raises(EngineError, match="sent already"):
            sent.send()
        p.accepted.receive((0, 0, 0, 0, 0), pairs.TIMEOUT).release()
        pairs.eventually(lambda: p.dialled.send_slots(0) == 2)
        unsent = p.dialled.lease((0, 0, 1, 0, 0), 100)
        assert p.dialled.send_slots(0) == 1
        view = memoryview(unsent)
        del unsent  # its view keeps it
        assert p.dialled.send_slots(0) == 1
        view.release()
        assert p.dialled.send_slots(0) == 2
        released = p.dialled.lease((0, 0, 2, 0, 0), 100)
        released.release()
        released.release()
        assert p.dialled.send_slots(0) == 2
        with pytest.raises(EngineError, match="released already"):
            released.send()
        with pytest.raises(ValueError, match="nbytes"):
            p.dialled.lease((0, 0, 4, 0, 0), -1)


@pairs.TRANSPORTS
def test_tens_of_thousands_of_slots_can_be_reserved_at_once(transport):
    with pairs.in_process(transport=transport) as p:
        p.accepted.reserve(0, 32_000, 64)
        pairs.eventually(lambda: not p.dialled.alive or p.dialled.send_slots(0) == 32_000)
        assert p.dialled.alive, p.dialled.error


PAGE = 4096
PAGES = {
    # In iteration i; and how many times the memory of the largest reservation they may take.
    "growing": (lambda i: i + 1, 4),
    "to and fro": (lambda i: 40 + i % 2, 2),
    "varying": (lambda i: 1 + i * 7919 % 200, 4),
}


def sent(link, key, data):
    try:
        link.send(key, data)
    except EngineError as error:  # a moment later the sender knows of larger slots
        assert "reserve larger slots" in str(error)
        return False
    return True


@pairs.TRANSPORTS
@pytest.mark.parametrize("shapes", PAGES)
def test_slots_for_shapes_that_change_for_ever_stay_in_proportion(transport, shapes):
    pages, times = PAGES[shapes]
    slots, iterations = 2, 200
    with pairs.in_process(transport=transport) as p:
        for i in range(iterations):
            data = pairs.payload(i, PAGE * pages(i))
            p.accepted.reserve(0, slots, len(data))
            keys = [(0, i, microbatch, 0, 0) for microbatch in range(slots)]
            for key in keys:
                pairs.eventually(lambda key=key, data=data: sent(p.dialled, key, data))
            for key in keys:
                message = p.accepted.receive(key, pairs.TIMEOUT)
                assert message.view() == data
                message.release()
        stats = p.accepted.stats()
        assert (stats.state, stats.slots_in_use) == ("up", 0)
        there = sum(nbytes for _, nbytes in p.accepted.slot_memory())
        largest = slots * PAGE * max(map(pages, range(iterations)))
        rounded = 2 << 20  # what is that much or more is rounded up to a multiple of it
        assert largest <= there < times * largest + rounded, there / largest


class Owner:
    """Owns memory, and can be seen to be let go of."""

    def __init__(self, data: bytes) -> None:
        self.memory = ctypes.create_string_buffer(data, len(data))
        self.address = ctypes.addressof(self.memory)


@pairs.TRANSPORTS
def test_memory_is_sent_and_received_by_its_address(transport):
    key, size = (0, 0, 0, 0, 0), 100_000
    data = pairs.payload(1, size)
    with pairs.in_process(transport=transport) as p:
        p.accepted.reserve(0, 2, size)
        owner, into = Owner(data), Owner(bytes(size))
        gone = weakref.ref(owner)
        ticket = p.dialled.send_memory(key, owner.address, size, owner, b"a note")
        del owner
        message = p.accepted.receive(key, pairs.TIMEOUT)
        assert message.note == b"a note"
        with pytest.raises(ValueError, match=f"has {size} bytes, the destination 7"):
            message.move_to(into.address, 7, True)
        began, came = message.move_to(into.address, size, True)
        assert (began, came) == (message.started_at, message.arrived_at)
        assert bytes(into.memory) == data
        with pytest.raises(EngineError, match="released already"):
            message.move_to(into.address, size, True)
        p.dialled.wait_sent(ticket, pairs.TIMEOUT)

        def let_go():
            p.dialled.send_slots(0)  # any call gives back what is acknowledged
            return gone() is None

        pairs.eventually(let_go)


@pairs.TRANSPORTS
@pytest.mark.parametrize("released", range(1, 6))
def test_a_grant_that_may_wait_is_not_forgotten(transport, released):
    """Grant that goes out although nothing else is sent."""
    slots, into = 8, Owner(bytes(4))
    with pairs.in_process(transport=transport) as p:
        p.accepted.reserve(0, slots, 4)
        pairs.eventually(lambda: p.dialled.send_slots(0) == slots)
        for m in range(released):
            p.dialled.wait_sent(p.dialled.send((0, 0, m, 0, 0), b"AAAA"), pairs.TIMEOUT)
        for m in range(released):
            message = p.accepted.receive((0, 0, m, 0, 0), pairs.TIMEOUT)
            message.move_to(into.address, 4, False)
        pairs.eventually(lambda: p.dialled.send_slots(0) == slots)
        assert p.accepted.stats().slots_in_use == 0


def test_nothing_is_read_or_written_at_the_address_0():
    into = Owner(bytes(4))
    with pairs.in_process() as p:
        p.accepted.reserve(0, 1, 4)
        with pytest.raises(ValueError, match="the payload has no memory"):
            p.dialled.send_memory((0, 0, 0, 0, 0), 0, 4, into, b"")
        p.dialled.send((0, 0, 0, 0, 0), b"AAAA")
        message = p.accepted.receive((0, 0, 0, 0, 0), pairs.TIMEOUT)
        with pytest.raises(ValueError, match="the destination has no memory"):
            message.move_to(0, 4, True)
        message.move_to(into.address, 4, True)
