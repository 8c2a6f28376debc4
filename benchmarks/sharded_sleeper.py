"""A stage that sleeps in its ops and is sharded by FSDP, for benchmarks on the CPU."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from pipemorph_trainer import register_linear

SAMPLES, WIDTH = 2, 128


class Sleeps(torch.autograd.Function):
    """Takes its time in the forward, and in the backward for its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return grads[0], None


class Sleeper(nn.Module):
    """``weight``: float32 (width, width). Its gradient takes as long again."""

    def __init__(self, seconds: float, width: int) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.eye(width))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(Sleeps.apply(x, self.seconds), self.weight)


def weight_gradient(module: Any, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
    time.sleep(module.seconds)
    return {"weight": grad.t().mm(x)}


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def build(sizes: tuple[int, int, int], seconds: float) -> tuple[nn.Module, DeviceMesh]:
    """This rank's stage and the mesh of pp × dp_replicate × dp_shard."""
    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "dp_replicate", "dp_shard"))
    register_linear(Sleeper, weight_gradient)
    stage = nn.Sequential(Sleeper(seconds, WIDTH))
    return fully_shard(stage, mesh=mesh["dp_shard"]), mesh


def gradient_bytes(stage: nn.Module) -> int:
    """Of this rank's shard."""
    return sum(p.to_local().nbytes for p in stage.parameters())  # type: ignore[attr-defined]


def batch(microbatches: int) -> Tensor:
    """Float32 (batch, width), for all microbatches."""
    return torch.ones(microbatches * SAMPLES, WIDTH)
