"""Plain torch pipeline with a link that is late from a step on, for tests that observe it.

A program: ``torchrun … slow_link_pipelines.py FOLDER [--option value …]``, with the fields of
:class:`SlowLinkRun` as options.
Stages sleep for the time of their ops, so that ranks need no processor.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import threading
import time
from dataclasses import dataclass, fields
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from profiled_pipelines import make_schedule
from torch import Tensor, nn

WIDTH = 16


@dataclass(frozen=True)
class SlowLinkRun:
    """Training with one late link. ``forward``: seconds of a forward; a backward takes twice as
    long. ``link``, ``delay``, ``late_from``: link that is late, by how many seconds each way, and
    from which step on."""

    schedule: str = "1F1B"
    microbatches: int = 4
    steps: int = 20
    forward: float = 0.002
    link: int = 0
    delay: float = 0.02
    late_from: int = 8


class _LateWork:
    """Receive that ends ``delay`` seconds after its message came."""

    def __init__(self, work: Any, delay: float) -> None:
        self.work, self._delay = work, delay
        self._ends = 0.0
        self._came = threading.Event()

    def complete(self) -> None:
        self.work.wait()
        self._ends = time.monotonic() + self._delay
        self._came.set()

    def wait(self) -> None:
        self._came.wait()
        time.sleep(max(0.0, self._ends - time.monotonic()))


class LateLink:
    """Delays what one rank receives from another, as a slow network does: messages follow each
    other, and each takes longer."""

    def __init__(self, peers: set[int], delay: float) -> None:
        self.delay = 0.0
        self._peers, self._late = peers, delay
        self._queues: dict[int, SimpleQueue[_LateWork]] = {}
        module: Any = dist
        original = module.batch_isend_irecv

        def send_and_receive(ops: list[Any]) -> list[Any]:
            return [self._delay_work(op, work) for op, work in zip(ops, original(ops), strict=True)]

        module.batch_isend_irecv = send_and_receive

    def begin(self) -> None:
        """Begin to delay messages."""
        self.delay = self._late

    def _delay_work(self, op: Any, work: Any) -> Any:
        if op.op is not dist.irecv or op.peer not in self._peers or not self.delay:
            return work
        late = _LateWork(work, self.delay)
        if op.peer not in self._queues:
            queue: SimpleQueue[_LateWork] = SimpleQueue()
            self._queues[op.peer] = queue

            def complete_works() -> None:
                while True:
                    queue.get().complete()

            threading.Thread(target=complete_works, daemon=True).start()
        self._queues[op.peer].put(late)
        return late


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        time.sleep(2 * ctx.seconds)
        return grads[0], None


class _Stage(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = _Sleep.apply(self.layer(x), self._seconds)
        return found


def train_slow_link(run: SlowLinkRun) -> str:
    """Train in the process group that there is. Returns a hash of gradients and parameters."""
    rank, size = dist.get_rank(), dist.get_world_size()
    peers = {run.link, run.link + 1} - {rank} if rank in (run.link, run.link + 1) else set()
    link = LateLink(peers, run.delay)
    torch.manual_seed(rank)
    stage = _Stage(run.forward)
    schedule = make_schedule(run.schedule, [stage], dist.group.WORLD, run.microbatches)
    optimizer = torch.optim.AdamW(stage.parameters(), 1e-2)
    hashed = hashlib.sha256()
    torch.manual_seed(99)
    samples = torch.randn(run.microbatches, WIDTH)
    for step in range(run.steps):
        if step == run.late_from:
            link.begin()
        args = (samples,) if rank == 0 else ()
        losses: list[Tensor] = []
        kwargs = {"target": samples.sin(), "losses": losses} if rank == size - 1 else {}
        schedule.step(*args, **kwargs)
        for parameter in stage.parameters():
            assert parameter.grad is not None
            hashed.update(parameter.grad.numpy().tobytes())
        optimizer.step()
        optimizer.zero_grad()
    for parameter in stage.parameters():
        hashed.update(parameter.detach().numpy().tobytes())
    dist.barrier()
    return hashed.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    for each in fields(SlowLinkRun):
        parser.add_argument(f"--{each.name}", type=type(each.default), default=each.default)
    options = vars(parser.parse_args())
    folder = options.pop("folder")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    result = train_slow_link(SlowLinkRun(**options))
    Path(folder, f"hash{os.environ['RANK']}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
