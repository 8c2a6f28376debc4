"""A process that ends while its engines are at work."""

import subprocess
import sys

import pytest

# Python's modules first: what they leave to be done at the end comes after what others leave.
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
for kept in (low, high, link, box[0]):
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))  # nobody destroys it
box[0].reserve(0, 2000, 4096)
for i in range(2000):
    link.send((0, 0, i, 0, 0), bytes(4096))
    link.send((0, 1, i, 0, 0), b"")
print(link.stats().sends_in_flight)
"""


@pytest.mark.parametrize("first", ["hashlib, ssl", "sys"])
def test_a_process_may_end_with_messages_under_way(first):
    code = ENDS.format(first=first)
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(6)
    ]
    left = []
    for process in running:
        out, err = process.communicate(timeout=120.0)
        assert (process.returncode, err) == (0, "")
        left.append(int(out))
    assert any(left), "no thread had work left"
