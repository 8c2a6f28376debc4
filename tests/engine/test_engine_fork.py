"""Processes that fork, as data loaders make them do: a child does not use the engine."""

import os
import signal
import subprocess
import sys

import pairs
import pytest

SCRIPT = f"""
import gc, multiprocessing, os, signal, sys
sys.path[:0] = {sys.path!r}
import pairs
from pipemorph_trainer._engine import EngineError

fork = multiprocessing.get_context("fork")

def in_child(body):
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        try:
            body()
        except SystemExit:
            raise
        except BaseException as error:
            print("the child failed:", repr(error), flush=True)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0, "the child has not ended well"
"""

ROUNDS = """
def leave():
    sys.exit(0)  # destroys what the child has of the engine

def drop():
    global link, pair
    del link, pair
    gc.collect()
    os._exit(0)

def close():
    pair.dialled.close()
    pair.low.close()
    os._exit(0)

with pairs.in_process(transport=sys.argv[1]) as pair:
    link = pair.dialled
    pair.accepted.reserve(0, 2, 1 << 20)
    for i in range(6):
        key, data = (0, i, 0, 0, 0), pairs.payload(i, 1 << 20)
        ticket = link.send(key, data)  # acknowledged when the children have ended
        pool = fork.Pool(2)
        assert pool.map(abs, [-1, -2]) == [1, 2]
        pool.terminate()
        pool.join()
        process = fork.Process(target=gc.collect)
        process.start()
        process.join(60)
        assert process.exitcode == 0
        for body in (leave, drop, close):
            in_child(body)
        with pair.accepted.receive(key, pairs.TIMEOUT).view() as view:
            assert view == data
        link.wait_sent(ticket, pairs.TIMEOUT)
    stats = link.stats()
    assert (stats.state, stats.reconnects, stats.chunks_resent) == ("up", 0, 0), stats.state
print("trained on")
"""

USE = """
with pairs.in_process(transport="shm") as pair:
    pair.accepted.reserve(0, 3, 1 << 20)
    key, parent = (0, 0, 0, 0, 0), os.getpid()
    pair.dialled.send(key, b"x")
    message = pair.accepted.receive(key, pairs.TIMEOUT)
    pairs.eventually(lambda: pair.dialled.send_slots(0) == 2)
    lease = pair.dialled.lease((0, 1, 0, 0, 0), 1)

    def use():
        for call in (
            lambda: pair.dialled.send(key, b"x"),
            lambda: pair.dialled.receive(key, 1.0),
            lambda: pair.dialled.alive,
            lambda: pair.accepted.stats(),
            lambda: pair.accepted.reserve(0, 1, 1),
            lambda: pair.low.port,
            lambda: pair.low.accept(peer_rank=1, link_id=0, timeout=1.0),
            lambda: message.view(),
            lambda: message.copy_into(bytearray(1)),
            lambda: message.move_to(1, 1, True),
            lambda: memoryview(message),
            lambda: lease.send(),
            lambda: memoryview(lease),
        ):
            try:
                call()
            except (EngineError, BufferError) as error:
                said = str(error)
                assert f"forked off process {parent}" in said and "make an engine here" in said
            else:
                raise AssertionError("no error")
        message.release()
        lease.release()
        with pairs.in_process() as own:  # while what is inherited ends
            own.accepted.reserve(0, 1, 100)
            own.dialled.send(key, b"of its own")
            globals().pop("pair")
            gc.collect()
            assert own.accepted.receive(key, pairs.TIMEOUT).view() == b"of its own"
        os._exit(0)

    in_child(use)
    assert message.view() == b"x" and pair.accepted.stats().slots_in_use == 1
print("trained on")
"""


def run(*command):
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "trained on\n", "")


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_children_that_end_leave_the_link_alone(transport):
    run(sys.executable, "-c", SCRIPT + ROUNDS, transport)


def test_a_child_cannot_use_its_parents_engine_and_may_make_its_own():
    run(sys.executable, "-c", SCRIPT + USE)


def fork_and_wait(link, connection):
    pid = os.fork()
    if pid == 0:
        signal.alarm(120)
        while True:
            signal.pause()
    connection.send((os.getpid(), pid))
    connection.recv()


@pytest.mark.full
def test_a_killed_rank_is_noticed_although_its_child_lives():
    with pairs.with_peer(fork_and_wait, peer_deadline=4.0) as peer:
        rank, child = peer.hear()
        try:
            os.kill(rank, signal.SIGKILL)
            pairs.eventually(lambda: not peer.link.alive)
            assert "no process listens" in peer.link.error
            os.kill(child, 0)  # is there
        finally:
            os.kill(child, signal.SIGKILL)
