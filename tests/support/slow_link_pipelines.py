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
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from delayed_group import make_delayed_group
from profiled_pipelines import make_schedule
from sleeping_stages import Sleep
from torch import Tensor, nn

WIDTH = 16
BYTES = 4 * WIDTH
"""Size of a message of one tensor."""


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
    narrow: bool = False
    """Whether the link is narrow instead: a message of its size takes the delay."""
    tensors: int = 1
    """Tensors of a message: two are a small one and the usual one."""


class _Stage(nn.Module):
    def __init__(self, seconds: float, tensors: int) -> None:
        super().__init__()
        self._seconds, self._tensors = seconds, tensors
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, *tensors: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = tensors[-1]
        if len(tensors) == 2:
            x = x + tensors[0]
        apply: Any = Sleep.apply
        found: Tensor = apply(self.layer(x), self._seconds, 2 * self._seconds)
        return found if self._tensors == 1 else (found[:, :1], found)


def train_slow_link(run: SlowLinkRun) -> str:
    """Train in the process group that there is. Returns a hash of gradients and parameters."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = make_delayed_group(run.link, 0.0)
    torch.manual_seed(rank)
    stage = _Stage(run.forward, run.tensors if rank < size - 1 else 1)
    schedule = make_schedule(run.schedule, [stage], group, run.microbatches)
    optimizer = torch.optim.AdamW(stage.parameters(), 1e-2)
    hashed = hashlib.sha256()
    torch.manual_seed(99)
    samples = torch.randn(run.microbatches, WIDTH)
    for step in range(run.steps):
        if step == run.late_from:
            group.delay = 0.0 if run.narrow else run.delay
            group.byte_seconds = run.delay / BYTES if run.narrow else 0.0
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
