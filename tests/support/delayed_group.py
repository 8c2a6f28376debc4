"""Process group over gloo whose messages between two ranks take longer, as on a slow network."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch.distributed as dist
from torch import Tensor

DEADLINE_SECONDS = 100


class _DelayedSend(dist.Work):  # type: ignore[misc]
    """Send that is over when its message has been passed on."""

    def __init__(self, call: Callable[[], Any], at: float, occupied: float) -> None:
        super().__init__()
        self._call, self._at, self._occupied = call, at, occupied
        self._over = threading.Event()

    def pass_on(self) -> None:
        time.sleep(max(0.0, self._at - time.monotonic()) + self._occupied)
        self._call().wait()
        self._over.set()

    def wait(self, timeout: Any = None) -> bool:
        if not self._over.wait(DEADLINE_SECONDS):
            raise TimeoutError(f"a send was not over after {DEADLINE_SECONDS} s")
        return True


class DelayedGroup(dist.ProcessGroup):
    """Group of all ranks. Messages between ranks ``link`` and ``link + 1`` follow each other, and
    each takes ``delay`` seconds longer, from now on. With ``byte_seconds`` each occupies the link
    for as many seconds per byte."""

    def __init__(self, link: int, delay: float) -> None:
        self._gloo: Any = dist.group.WORLD
        super().__init__(self._gloo.rank(), self._gloo.size())
        self.delay, self.byte_seconds = delay, 0.0
        self._ends = {link, link + 1}
        self._queue: SimpleQueue[_DelayedSend] = SimpleQueue()
        threading.Thread(target=self._pass_on, daemon=True).start()

    def _pass_on(self) -> None:
        while True:
            self._queue.get().pass_on()

    def send(self, tensors: list[Tensor], target: int, tag: int = 0) -> Any:
        if not (self.delay or self.byte_seconds) or {self.rank(), target} != self._ends:
            return self._gloo.send(tensors, target, tag)
        at = time.monotonic() + self.delay
        occupied = self.byte_seconds * sum(tensor.nbytes for tensor in tensors)
        work = _DelayedSend(lambda: self._gloo.send(tensors, target, tag), at, occupied)
        self._queue.put(work)
        return work

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Any:
        return self._gloo.recv(tensors, source, tag)

    def allreduce(self, *args: Any) -> Any:
        return self._gloo.allreduce(*args)

    def getBackendName(self) -> str:
        return "delayed"

    def getGroupName(self) -> str:
        return "delayed"

    def _get_backend(self, device: Any) -> Any:
        return self._gloo._get_backend(device)


def make_delayed_group(link: int, delay: float) -> DelayedGroup:
    """Make the group on all ranks; the default group is gloo's."""
    group = DelayedGroup(link, delay)
    dist.Backend.register_backend("delayed", lambda *_: group, devices=["cpu"])
    dist.new_group(backend="delayed")
    return group
