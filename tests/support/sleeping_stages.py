"""Stages of torch's pipelines that sleep for their ops: several ranks need few processors."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage


class Sleep(torch.autograd.Function):
    """Identity whose forward and backward take times of their own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.backward_seconds = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_seconds)
        return grads[0].clone(), None, None


class _SleepingModule(nn.Module):
    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self._seconds = forward, backward
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        apply: Any = Sleep.apply
        output: Tensor = apply(x * self.scale, *self._seconds)
        return output


def make_sleeping_stage(
    rank: int,
    stages: int,
    *,
    forward: float,
    backward: float,
    weight: float,
    group: Any = None,
) -> Any:
    """Stage whose F, B and W take as many seconds. A whole backward takes the last two."""
    return PipelineStage(
        _SleepingModule(forward, backward), rank, stages, torch.device("cpu"), group=group,
        dw_builder=lambda: lambda: time.sleep(weight),
    )  # fmt: skip
