"""Workers with a link between the guests, from the test's side."""

import importlib.util
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from guests import Fabric, Guest, GuestError, Task

WORKER = Path(__file__).with_name("worker.py")
# Limit for what must come, mostly within a second: a longer one costs nothing.
PATIENCE = 120.0


def engine_module() -> str:
    spec = importlib.util.find_spec("pipemorph_trainer._engine")
    assert spec is not None, "the engine is not built: pip install -e ."
    assert spec.origin is not None
    return spec.origin


class Remote:
    """A program in a guest that answers commands, several at a time: see worker.py."""

    def __init__(self, name: str, task: Task) -> None:
        self.name, self.task = name, task
        self._numbers = itertools.count(1)
        self._answers: dict[int, dict[str, Any]] = {}
        self._lock = threading.Lock()

    def await_ready(self, deadline: float = PATIENCE) -> int:
        """Wait for its first word, which is its process number."""
        return int(self._wait(0, deadline)["result"])

    def start(self, op: str, **arguments: Any) -> int:
        """Begin a command; :meth:`result` waits for its end."""
        number = next(self._numbers)
        self.task.tell({"number": number, "op": op, "arguments": arguments})
        return number

    def result(self, number: int, deadline: float = PATIENCE * 2) -> Any:
        said = self._wait(number, deadline)
        if "error" in said:
            raise GuestError(f"{self.name}: {said['error']}")
        return said["result"]

    def do(self, op: str, *, deadline: float = PATIENCE * 2, **arguments: Any) -> Any:
        return self.result(self.start(op, **arguments), deadline)

    def error_of(self, number: int, deadline: float = PATIENCE * 2) -> str:
        """Error of a command that must fail."""
        said = self._wait(number, deadline)
        assert "error" in said, f"it succeeded: {said}"
        return str(said["error"])

    def _wait(self, number: int, deadline: float) -> dict[str, Any]:
        end = time.monotonic() + deadline
        while True:
            with self._lock:
                if number in self._answers:
                    return self._answers.pop(number)
            rest = end - time.monotonic()
            if rest <= 0:
                raise GuestError(f"{self.name} did not answer within {deadline} s")
            said = self.task.hear(min(rest, 5.0)) if rest < 5 else self.task.hear(rest)
            with self._lock:
                self._answers[said["number"]] = said


class Peer(Remote):
    """End of a link: a worker process in a guest."""

    def __init__(self, guest: Guest, rank: int) -> None:
        super().__init__(f"worker {rank}", guest.python("-S", str(WORKER), engine_module()))
        self.guest, self.rank = guest, rank
        self.pid = 0

    def stats(self) -> dict[str, Any]:
        found: dict[str, Any] = self.do("stats")
        return found


class Link:
    """Rank 0 in guest a, which dials and sends, and rank 1 in guest b."""

    def __init__(self, fabric: Fabric, **settings: Any) -> None:
        self.fabric = fabric
        given: dict[str, Any] = {
            "transport": "rdma", "chunk_bytes": 1 << 16, "peer_deadline": 10.0,
        }  # fmt: skip
        given |= settings
        self.slots = 0
        self._next = 0
        self.a, self.b = Peer(fabric.a, 0), Peer(fabric.b, 1)
        try:
            # The two start at the same time.
            for peer in (self.a, self.b):
                peer.pid = peer.await_ready()
            self._connect(given)
        except BaseException:
            # Their queue pairs would be counted as the next test's.
            self.kill()
            raise

    def _connect(self, given: dict[str, Any]) -> None:
        deadlines = given.pop("peer_deadlines", (given["peer_deadline"],) * 2)
        self.opened = self.a.do("open", rank=0, **given | {"peer_deadline": deadlines[0]})
        port = self.b.do("open", rank=1, **given | {"peer_deadline": deadlines[1]})["port"]
        accepting = self.b.start("accept", peer=0)
        self.transport = self.a.do("connect", peer=1, host=self.fabric.CONTROL["b"], port=port)
        assert self.b.result(accepting) == self.transport

    def reserve(self, slots: int, size: int, **more: Any) -> None:
        self.b.do("reserve", direction=0, slots=slots, size=size, **more)
        self.slots = slots

    def transfer(self, count: int, size: int, *, leased: bool = False) -> "Transfer":
        first, self._next = self._next, self._next + count
        return Transfer(self, first, count, size, "send_leased" if leased else "send")

    def times_lost(self, path: int) -> dict[str, int]:
        """Number of losses of a path at each end: a new link may try more than once."""
        return {
            peer.guest.name: peer.stats()["paths"][path]["times_lost"] for peer in (self.a, self.b)
        }

    def rails_up(self, count: int, deadline: float = PATIENCE) -> None:
        """Wait until a number of rails are up at both ends."""

        def up() -> bool:
            return all(
                sum(p["kind"] == "rdma" and p["state"] == "UP" for p in peer.stats()["paths"])
                >= count
                for peer in (self.a, self.b)
            )

        until(f"{count} rails up", up, deadline, lambda: paths_text(self.a.stats()))

    def kill(self) -> None:
        for peer in (self.a, self.b):
            peer.task.signal(signal.SIGKILL)
            peer.task.reap()


class Transfer:
    """Messages on their way from a to b.

    However fast they are, the last one is not sent before :meth:`finish`: it finds no slot, since
    the receiver leaves those before it in theirs. So a fault always has something to befall.
    """

    def __init__(self, link: Link, first: int, count: int, size: int, send: str) -> None:
        self.link, self.count = link, count
        # Before the first is sent: a fast transfer is half done when it is looked at.
        self._before = [path["chunks"] for path in link.a.stats()["paths"]]
        early = max(0, count - link.slots - 1)
        self._receiving = [link.b.start("receive", direction=0, first=first, count=early)]
        self._rest = (first + early, count - early)
        link.a.do(send, direction=0, first=first, count=count, size=size)
        self._sending = link.a.start("wait_sent")

    def finish(self) -> None:
        """Finish the transfer: every message arrived once and whole, and the sender knows."""
        first, count = self._rest
        self._receiving.append(self.link.b.start("receive", direction=0, first=first, count=count))
        for number in self._receiving:
            assert self.link.b.result(number) == []
        self.link.a.result(self._sending)

    def until_chunks(self, more: int, path: int = 0) -> None:
        """Wait until a path has carried a number of chunks of this transfer."""
        before = self._before[path]
        until(
            f"{more} chunks on path {path}",
            lambda: self.link.a.stats()["paths"][path]["chunks"] >= before + more,
            PATIENCE,
            lambda: paths_text(self.link.a.stats()),
        )


def until(
    what: str, check: Callable[[], bool], deadline: float, details: Callable[[], str] = str
) -> None:
    end = time.monotonic() + deadline
    while not check():
        assert time.monotonic() < end, f"never: {what}; {details()}"
        os.sched_yield()


def until_stopped(guest: Guest, pid: int) -> None:
    """Wait until none of a process's threads runs any more; each is stopped for itself."""
    until(
        f"every thread of {pid} stopped",
        lambda: set(guest.thread_states(pid)) == {"T"},
        PATIENCE,
        lambda: " ".join(guest.thread_states(pid)),
    )


def paths_text(stats: dict[str, Any]) -> str:
    return "; ".join(
        f"{p['rail'] or p['kind']} {p['state']} epoch {p['epoch']} {p['last_error']}"
        for p in stats["paths"]
    )


@contextmanager
def linked(fabric: Fabric, **settings: Any) -> Iterator[Link]:
    link = Link(fabric, **settings)
    try:
        yield link
    finally:
        link.kill()
        fabric.restore()
