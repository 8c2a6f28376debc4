"""What the system does not give: threads, and shared memory."""

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
import threading
links, unsent = int(sys.argv[1]), sys.argv[2] == "True"
low, high = (pairs.engine(rank, transport="tcp") for rank in (0, 1))
pairs_of_ends = []
for i in range(links):
    box = []
    acceptor = threading.Thread(target=lambda: box.append(
        high.accept(peer_rank=0, link_id=i, timeout=pairs.TIMEOUT)))
    acceptor.start()
    link = low.connect(
        peer_rank=1, link_id=i, host="127.0.0.1", port=high.port, timeout=pairs.TIMEOUT
    )
    acceptor.join()
    pairs_of_ends.append((link, box[0]))
    if unsent:
        link.send((0, 0, 0, 0, 0), bytes(100))
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
