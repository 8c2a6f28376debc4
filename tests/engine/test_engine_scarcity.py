"""Resources that the system refuses: threads, and shared memory."""

import subprocess
import sys

import pytest

WITHOUT = f"""
import os, resource, signal, sys
sys.path[:0] = {sys.path!r}
import pairs
from pipemorph_trainer._engine import Engine, EngineError

def no_more_threads():
    # A limit counts for no root, and for all of a user's processes.
    if os.getuid() == 0:
        os.setgid(65534)
        os.setuid(54321 + os.getpid() % 1000)
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))

def no_shared_memory():
    # A memfd is a file: it cannot be of any size. Python ignores SIGXFSZ.
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

def threads():
    return len(os.listdir("/proc/self/task"))

def blocked():
    return signal.pthread_sigmask(signal.SIG_BLOCK, [])
"""


def run(code, *arguments):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT + code, *arguments],
        check=False, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_engine_without_threads_is_an_error_that_changes_nothing():
    said = run("""
no_more_threads()
for transport in ("tcp", "shm", "auto"):
    before = threads()
    try:
        pairs.engine(0, transport=transport)
    except EngineError as error:
        print(error)
    assert (threads(), blocked()) == (before, set()), (threads(), blocked())
""")
    for line in said.splitlines():
        assert line.startswith("thread pm-control cannot be started: "), said
    assert said.count("ulimit -u") == 3


@pytest.mark.parametrize("links", [1, 2, 5])
@pytest.mark.parametrize("unsent", [False, True], ids=["all sent", "unsent"])
def test_an_engine_is_closed_without_another_thread(links, unsent):
    run(
        """
links, unsent = int(sys.argv[1]), sys.argv[2] == "True"
low, high = (pairs.engine(rank, transport="tcp") for rank in (0, 1))
pairs_of_ends = []
for i in range(links):
    pairs_of_ends.append(pairs.join(low, high, i))
    if unsent:
        pairs_of_ends[-1][0].send((0, 0, 0, 0, 0), bytes(100))
no_more_threads()
low.close(0.5)
for link, other in pairs_of_ends:
    assert not link.alive and "is closed" in link.error, link.error
    pairs.eventually(lambda: not other.alive)
    said = "closed it with 1 messages unsent" if unsent else "closed it"
    assert said in other.error, other.error
high.close(0.5)
""",
        str(links),
        str(unsent),
    )


def test_auto_takes_tcp_where_there_is_no_shared_memory():
    said = run("""
no_shared_memory()
with pairs.in_process() as pair:
    assert (pair.dialled.transport, pair.accepted.transport) == ("tcp", "tcp")
    print(pair.dialled.stats().last_error, pair.accepted.stats().last_error)
    pair.accepted.reserve(0, 2, 4096)
    pair.dialled.send((0, 0, 0, 0, 0), b"x" * 4096)
    assert pair.accepted.receive((0, 0, 0, 0, 0), pairs.TIMEOUT).view() == b"x" * 4096
""")
    assert "shared memory of 4096 bytes for slots failed: File too large" in said


def test_shared_memory_that_is_required_and_not_there_is_said_at_once():
    said = run("""
import threading
no_shared_memory()
low, high = (pairs.engine(rank, transport="shm") for rank in (0, 1))
refused = []
def accept():
    try:
        high.accept(peer_rank=0, link_id=0, timeout=5.0)
    except EngineError as error:
        refused.append(error)
acceptor = threading.Thread(target=accept)
acceptor.start()
try:
    low.connect(peer_rank=1, link_id=0, host="127.0.0.1", port=high.port, timeout=pairs.TIMEOUT)
except EngineError as error:
    print(error)
high.close(0.0)
low.close(0.0)
acceptor.join()
""")
    assert "shm is required, but rank 1 has no shared memory: allocating" in said


def test_a_forked_child_gets_no_copy_of_slots():
    """The kernel would copy each page of a slot, for each child, when the next message comes."""
    run("""
with pairs.in_process(transport="tcp") as pair:
    pair.accepted.reserve(0, 4, 1 << 20)
    for address, size in pair.accepted.slot_memory():
        with open("/proc/self/smaps") as smaps:
            flags, inside = [], False
            for line in smaps:
                first, _, rest = line.partition("-")
                if rest and " " in rest and all(c in "0123456789abcdef" for c in first):
                    end = int(rest.split()[0], 16)
                    inside = int(first, 16) < address + size and address < end
                elif inside and line.startswith("VmFlags:"):
                    flags.append(line.split()[1:])
        assert flags and all("wf" in f for f in flags), flags
    # The parent's messages are there, whatever its children do.
    key = (0, 0, 0, 0, 0)
    pair.dialled.send(key, b"x" * (1 << 20))
    with pair.accepted.receive(key, pairs.TIMEOUT) .view() as view:
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        assert view == b"x" * (1 << 20)
""")
