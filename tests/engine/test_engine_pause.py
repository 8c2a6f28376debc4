"""A job that is stopped as a whole and goes on: suspended by its scheduler, or with its machine."""

import contextlib
import os
import signal
import time

import pairs
import pytest
from test_engine_faults import thread_states

DEADLINE = 1.0
STOPPED = 2.2 * DEADLINE
"""Longer than any silence that a link survives: half of the deadline, and the deadline."""


def talk(link, connection):
    """Says how its link is, as often as it is asked, and at last sends or receives a message."""
    connection.send("up")
    while connection.recv() == "how are you?":
        connection.send((link.alive, link.error))
    if link.peer_rank == 1:
        link.wait_sent(link.send((0, 0, 0, 0, 0), b"", b"still here"), pairs.TIMEOUT)
    else:
        connection.send(link.receive((0, 0, 0, 0, 0), pairs.TIMEOUT).note)


@pytest.mark.times
def test_ends_that_were_stopped_do_not_blame_each_other():
    """The first to go on has heard nothing for longer than it may, and the other one goes on a
    little later."""
    took = []
    while len(took) < 5:
        with contextlib.ExitStack() as stack:
            settings = {"transport": "tcp", "peer_deadline": DEADLINE}
            low, high = (stack.enter_context(pairs.child(talk, rank, settings)) for rank in (0, 1))
            low.hear()
            low.tell(high.hear())
            assert (low.hear(), high.hear()) == ("up", "up")
            seconds, (alive, error) = stop_both_and_look(early=high, late=low)
            took.append(seconds)
            if seconds > DEADLINE:  # of running alone: held up here, and so rightly given up there
                low.process.kill()
                high.process.kill()
                continue
            assert alive, error
            for end in (high, low):
                end.tell("enough")
            assert high.hear() == b"still here"
            return
    raise AssertionError(f"held up for too long to tell, each time: {took} s")


def stop_both_and_look(early, late):
    """For how long the early one ran alone, after both had been stopped, and how its link was."""
    for end in (early, late):
        os.kill(end.pid, signal.SIGSTOP)
    pairs.eventually(lambda: {*thread_states(early.pid), *thread_states(late.pid)} == {"T"})
    time.sleep(STOPPED)
    began = time.monotonic()
    os.kill(early.pid, signal.SIGCONT)
    link = (True, None)
    # It looks after its links every 50 ms.
    while time.monotonic() - began < 0.4 * DEADLINE and link[0]:
        early.tell("how are you?")
        link = early.hear()
    os.kill(late.pid, signal.SIGCONT)
    return time.monotonic() - began, link
