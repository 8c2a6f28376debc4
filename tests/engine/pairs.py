"""Engines for the tests, two: in one process, or with the peer in a process of its own."""

import contextlib
import hashlib
import inspect
import multiprocessing
import os
import random
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import pytest

from pipemorph_trainer._engine import Engine, Link

SECRET = b"the job's secret"
LINK = 3
TIMEOUT = 30.0
"""Limit for what takes no time, and for the silence of a peer, so that a machine which stands
still for some seconds breaks no link: where a test is about a peer's silence, it says how long."""
HEAR_TIMEOUT = 3 * TIMEOUT
"""Limit for the output of a process, which may be started from a cold disk."""


TRANSPORTS = pytest.mark.parametrize("transport", ["tcp", "shm"])

Key = tuple[int, int, int, int, int]


def engine(rank: int, **settings: Any) -> Engine:
    given: dict[str, Any] = {"job": "test/1", "secret": SECRET, "host": "127.0.0.1"}
    given["peer_deadline"] = TIMEOUT
    return Engine(rank=rank, **(given | settings))


def payload(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


def eventually(condition: Callable[[], bool], timeout: float = TIMEOUT) -> None:
    """Wait on a condition that no call can wait for. Each check yields the processor."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"never within {timeout} s: {inspect.getsource(condition)}")
        os.sched_yield()


def digest(data: Any) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass
class Pair:
    low: Engine
    high: Engine
    dialled: Link
    accepted: Link


def join(a: Engine, b: Engine, link_id: int = LINK, port: int | None = None) -> tuple[Link, Link]:
    """A link between two engines, as both have it. ``port``: dialled instead of the acceptor's."""
    box: list[Link] = []
    acceptor = threading.Thread(
        target=lambda: box.append(b.accept(peer_rank=0, link_id=link_id, timeout=TIMEOUT))
    )
    acceptor.start()
    where = {"host": "127.0.0.1", "port": b.port if port is None else port}
    try:
        dialled = a.connect(peer_rank=1, link_id=link_id, timeout=TIMEOUT, **where)
    finally:
        acceptor.join()
    return dialled, box[0]


@contextlib.contextmanager
def in_process(
    low: dict[str, Any] | None = None, high: dict[str, Any] | None = None, **both: Any
) -> Iterator[Pair]:
    a = engine(0, **(both | (low or {})))
    b = engine(1, **(both | (high or {})))
    try:
        yield Pair(a, b, *join(a, b))
    finally:
        a.close(0.0)
        b.close(0.0)


def _peer_main(
    connection: Connection,
    body: Callable[..., None],
    rank: int,
    settings: dict[str, Any],
    args: tuple[Any, ...],
) -> None:
    try:
        own = engine(rank, **settings)
        connection.send(own.port)
        if rank == 1:
            link = own.accept(peer_rank=0, link_id=LINK, timeout=TIMEOUT)
        else:
            port = connection.recv()
            link = own.connect(
                peer_rank=1, link_id=LINK, host="127.0.0.1", port=port, timeout=TIMEOUT
            )
        body(link, connection, *args)
        own.close(TIMEOUT)
    except BaseException:
        connection.send(("failed", traceback.format_exc()))
        raise


class Child:
    """A process with an end of a link, which runs ``body(link, connection, *args)``."""

    def __init__(self, process: Any, connection: Connection) -> None:
        self.process = process
        self.connection = connection

    @property
    def pid(self) -> int:
        return int(self.process.pid)

    def hear(self) -> Any:
        if not self.connection.poll(HEAR_TIMEOUT):
            raise TimeoutError(f"the peer process has said nothing for {HEAR_TIMEOUT} s")
        said = self.connection.recv()
        if isinstance(said, tuple) and said and said[0] == "failed":
            raise AssertionError(f"the peer process failed:\n{said[1]}")
        return said

    def tell(self, what: Any) -> None:
        self.connection.send(what)


class Peer(Child):
    """The child at the other end of a link of this process."""

    def __init__(self, child: Child, own: Engine, link: Link, port: int) -> None:
        super().__init__(child.process, child.connection)
        self.port = port
        self.engine = own
        self.link = link


@contextlib.contextmanager
def child(
    body: Callable[..., None], rank: int, settings: dict[str, Any], *args: Any
) -> Iterator[Child]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(
        target=_peer_main, args=(theirs, body, rank, settings, args), daemon=True
    )
    process.start()
    theirs.close()
    try:
        yield Child(process, ours)
    finally:
        process.join(10.0)
        if process.is_alive():
            process.kill()
            process.join()
        ours.close()


@contextlib.contextmanager
def with_peer(
    body: Callable[..., None], *args: Any, peer_rank: int = 1, **settings: Any
) -> Iterator[Peer]:
    """Rank 0 dials and rank 1 accepts; ``peer_rank`` is the one in the other process."""
    with child(body, peer_rank, settings, *args) as peer:
        own = engine(1 - peer_rank, **settings)
        try:
            port = peer.hear()
            if peer_rank == 1:
                link = own.connect(
                    peer_rank=1, link_id=LINK, host="127.0.0.1", port=port, timeout=TIMEOUT
                )
            else:
                peer.tell(own.port)
                link = own.accept(peer_rank=0, link_id=LINK, timeout=TIMEOUT)
            yield Peer(peer, own, link, port)
        finally:
            own.close(0.0)
