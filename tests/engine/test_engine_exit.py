"""A process that ends while its engines are at work."""

import subprocess
import sys

import pairs
import pytest

# Python's modules first: their handlers at exit run after those of others.
ENDS = """
import {first}
import ctypes, sys, threading
from pipemorph_trainer._engine import Engine

low, high = (
    Engine(job="test", rank=rank, secret=b"s", host="127.0.0.1", transport="tcp")
    for rank in (0, 1)
)
box = []
acceptor = threading.Thread(
    target=lambda: box.append(high.accept(peer_rank=0, link_id=0, timeout=60.0))
)
acceptor.start()
link = low.connect(peer_rank=1, link_id=0, host="127.0.0.1", port=high.port, timeout=60.0)
acceptor.join()
for each in (low, high, link, box[0]):
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))  # never destroyed
box[0].reserve(0, 2000, 4096)
for i in range(2000):
    link.send((0, 0, i, 0, 0), bytes(4096))
    link.send((0, 1, i, 0, 0), b"")
print(link.stats().sends_in_flight)
"""


# Threads that are inside of a call, or come and go, when the main thread ends the process.
IN_CALLS = """
import atexit, sys, threading, time
sys.path[:0] = {path!r}
import pairs

kind, transport = sys.argv[1:]
with_link = pairs.in_process(transport=transport)
pair = with_link.__enter__()
low, high, link, other = pair.low, pair.high, pair.dialled, pair.accepted
other.reserve(0, 2, 1 << 20)
big = bytearray(1 << 20)

def fill():
    for k in range(3):
        ticket = link.send((0, 5, k, 0, 0), bytes(1 << 20))
    return ticket

def exchange(payload):
    i = 0
    while True:
        link.send((0, 0, i, 0, 0), payload)
        message = other.receive((0, 0, i, 0, 0), 60)
        if payload:
            message.copy_into(bytearray(len(payload)))
        message.release()
        i += 1

CALLS = dict(
    receive=lambda: other.receive((0, 9, 0, 0, 0), 1e6),
    wait_sent=lambda: link.wait_sent(fill(), 1e6),
    accept=lambda: high.accept(peer_rank=7, link_id=9, timeout=1e6),
    connect=lambda: low.connect(peer_rank=7, link_id=9, host="127.0.0.1", port=1, timeout=1e6),
    close=lambda: (fill(), low.close(1e6)),
    close_link=lambda: (fill(), link.close()),
    reserve=lambda: [high.close(0.0)] + [link.reserve(1, 1 + i, 1 << 22) for i in range(200)],
    exchange=lambda: exchange(big),
    small=lambda: exchange(b"x"),
    poll=lambda: [other.try_receive((0, 9, 0, 0, 0)) for _ in iter(int, 1)],
)
entered = threading.Event()

def run():
    entered.set()
    CALLS[kind]()

for _ in range(1 if kind in ("accept", "close", "close_link", "exchange", "small") else 3):
    threading.Thread(target=run, daemon=True).start()
entered.wait()
time.sleep(0.3)  # for all of them to be inside
atexit.register(lambda: low.close(0.0))  # the main thread may still use it
sys.exit(3)
"""


@pairs.TRANSPORTS
@pytest.mark.parametrize(
    "call",
    [
        "receive", "wait_sent", "accept", "connect", "close", "close_link", "reserve", "exchange",
        "small", "poll",
    ],
)  # fmt: skip
def test_threads_inside_of_calls_leave_the_exit_code_alone(call, transport):
    code = IN_CALLS.format(path=sys.path)
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code, call, transport],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for process in running:
        out, err = process.communicate(timeout=120.0)
        assert (process.returncode, out) == (3, ""), err
        assert "Fatal" not in err and "terminate" not in err, err


@pytest.mark.parametrize("first", ["hashlib, ssl", "sys"])
def test_a_process_may_end_with_messages_under_way(first):
    code = ENDS.format(first=first)
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(6)
    ]
    working = []
    for process in running:
        out, err = process.communicate(timeout=120.0)
        assert (process.returncode, err) == (0, "")
        working.append(int(out))
    assert any(working), "no thread still had work"
