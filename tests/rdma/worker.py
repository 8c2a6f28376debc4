"""End of a link, in a guest: commands as JSON lines on stdin, answers on stdout.

    python worker.py ENGINE_MODULE

Every command runs in a thread of its own, so that a test can look at the counters, and break
things, in the middle of a transfer. The engine's module is loaded by its path, without the
package around it, which would bring torch.
"""

import ctypes
import importlib.util
import json
import os
import random
import resource
import sys
import threading
import time
import traceback
from functools import cache
from typing import Any

_say_lock = threading.Lock()


def load(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("_engine", path)
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def _bytes_at_random(size: int) -> bytes:
    return random.Random(0).randbytes(size)


def payload(index: int, size: int) -> bytes:
    """Payload equal at both ends, and different for every message and in every part of it, up to 2
    MiB and 500 messages. Cut out of one piece: to make it takes longer than to send it."""
    begin = index * 4099 % (2 << 20)
    repeats = 1 + size // (2 << 20)
    return (_bytes_at_random(4 << 20) * repeats)[begin : begin + size]


def stats_of(link: Any) -> dict[str, Any]:
    """Counters of a link, for JSON."""
    s = link.stats()
    path = ("kind", "rail", "state", "last_error", "epoch", "chunks", "bytes", "times_lost",
            "bytes_per_second", "rtt_min")  # fmt: skip
    names = [n for n in dir(s) if not n.startswith("_") and n != "paths"]
    return {n: getattr(s, n) for n in names} | {
        "paths": [{n: getattr(p, n) for n in path} for p in s.paths],
        "alive": link.alive,
        "error": link.error,
    }


def respect_limits() -> None:
    """Give up the right to lock memory beyond the limit, CAP_IPC_LOCK, in this thread. Another user
    would not do: the kernel lets it post no more work to the devices that root has opened."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # capabilities(7): version 3, this thread
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; and their upper halves
    if libc.capget(header, sets) == 0:
        sets[0] &= ~(1 << 14)
        if libc.capset(header, sets) == 0:
            return
    raise OSError(ctypes.get_errno(), "cannot give up CAP_IPC_LOCK")


class Worker:
    def __init__(self, module: Any) -> None:
        self.module = module
        self.engine: Any = None
        self.link: Any = None
        self.tickets: list[int] = []

    def open(self, **settings: Any) -> Any:
        self.engine = self.module.Engine(job="guest/1", secret=b"secret", **settings)
        return {
            "port": self.engine.port,
            "rails": self.engine.rails,
            "trouble": self.engine.rails_error,
        }

    def connect(self, peer: int, host: str, port: int, timeout: float = 120.0) -> Any:
        self.link = self.engine.connect(
            peer_rank=peer, link_id=1, host=host, port=port, timeout=timeout
        )
        return self.link.transport

    def accept(self, peer: int, timeout: float = 120.0) -> Any:
        self.link = self.engine.accept(peer_rank=peer, link_id=1, timeout=timeout)
        return self.link.transport

    def reserve(
        self, direction: int, slots: int, size: int, locked_limit: int | None = None
    ) -> Any:
        """Reserve with a limit, as a user who may not lock more bytes of memory than that."""
        if locked_limit is not None:
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (locked_limit, locked_limit))
            respect_limits()
        self.link.reserve(direction, slots, size)

    def send(self, direction: int, first: int, count: int, size: int) -> Any:
        for i in range(first, first + count):
            self.tickets.append(self.link.send((0, 0, i, direction, 0), payload(i, size)))

    def send_leased(self, direction: int, first: int, count: int, size: int) -> Any:
        """Send each from memory of the engine's, when there is some."""
        for i in range(first, first + count):
            end = time.monotonic() + 120.0
            while (lease := self.link.lease((0, 0, i, direction, 0), size)) is None:
                if time.monotonic() > end:
                    raise TimeoutError(f"no memory to lease for message {i}")
                os.sched_yield()
            memoryview(lease)[:] = payload(i, size)
            self.tickets.append(lease.send())

    def wait_sent(self, timeout: float = 120.0) -> Any:
        tickets, self.tickets = self.tickets, []
        for ticket in tickets:
            self.link.wait_sent(ticket, timeout)

    def receive(self, direction: int, first: int, count: int, timeout: float = 120.0) -> Any:
        """Returns the numbers of the messages that differ from those sent."""
        wrong = []
        for i in range(first, first + count):
            message = self.link.receive((0, 0, i, direction, 0), timeout)
            if bytes(message.view()) != payload(i, message.nbytes):
                wrong.append(i)
            message.release()
        return wrong

    def stats(self) -> Any:
        return stats_of(self.link)

    def sever(self, path: int) -> Any:
        self.link.sever_data_path(path)

    def measure(self, direction: int, size: int, count: int, first: int) -> Any:
        """Seconds from the first send to the last acknowledgement."""
        data = payload(0, size)
        begin = time.perf_counter()
        tickets = [self.link.send((0, 0, first + i, direction, 0), data) for i in range(count)]
        for ticket in tickets:
            self.link.wait_sent(ticket, 120.0)
        return time.perf_counter() - begin

    def send_singly(self, direction: int, size: int, count: int, first: int) -> Any:
        """Send each when the one before it has arrived."""
        data = payload(0, size)
        for i in range(first, first + count):
            self.link.wait_sent(self.link.send((0, 0, i, direction, 0), data), 120.0)

    def swallow(self, direction: int, first: int, count: int) -> Any:
        for i in range(first, first + count):
            self.link.receive((0, 0, i, direction, 0), 120.0).release()

    def close(self) -> Any:
        self.engine.close(5.0)


def answer(worker: Worker, number: int, op: str, arguments: dict[str, Any]) -> None:
    try:
        said: dict[str, Any] = {"result": getattr(worker, op)(**arguments)}
    except worker.module.EngineError as error:
        said = {"error": f"{type(error).__name__}: {error}"}
    except Exception:  # noqa: BLE001 - the test shows it
        said = {"error": traceback.format_exc()}
    with _say_lock:
        print(json.dumps({"number": number, **said}), flush=True)


def main() -> None:
    worker = Worker(load(sys.argv[1]))
    print(json.dumps({"number": 0, "result": os.getpid()}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        threading.Thread(
            target=answer,
            args=(worker, request["number"], request["op"], request["arguments"]),
            daemon=True,
        ).start()


if __name__ == "__main__":
    main()
