"""What crosses a stage boundary: only the gradients that are needed come back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gate import same_bits
from launch import run_ranks
from torch import Tensor, nn

from pipemorph_trainer import Pipeline, TrainerContext
from pipemorph_trainer.agent.messages import NoControl, RankTelemetry

pytestmark = pytest.mark.multiprocess

N, STAGES, WIDTH = 4, 3, 6


class Received(NoControl):
    """Bytes that came from the stage below."""

    def __init__(self) -> None:
        self.bytes = 0

    def publish(self, telemetry: RankTelemetry) -> None:
        self.bytes += sum(link.bytes for link in telemetry.links if link.direction == "backward")


class Rotated(nn.Module):
    """Passes a table of floats on that is no parameter, as rotary embeddings do."""

    def __init__(self, index: int) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.index, self.linear = index, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, table: Tensor | None = None) -> Any:
        if table is None:
            table = torch.cos(torch.arange(x.numel() * 10.0)).view(-1, *x.shape)
        x = torch.tanh(self.linear(x)) * table[0]
        return x if self.index == STAGES - 1 else (x, table)


def make_batch(iteration: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(iteration)
    x = torch.randn(2 * N, WIDTH, generator=generator)
    return x, x.flip(1)


TRAINED_FROM = (2, 1, 0)
"""Iteration from which on each stage is trained. It is frozen before."""


def rotated(context: TrainerContext) -> tuple[list[Tensor], list[dict[str, Tensor]], list[int]]:
    module, received = Rotated(context.rank), Received()
    losses, grads, sizes = [], [], []
    with Pipeline(
        module, context=context, loss_fn=nn.functional.mse_loss, microbatches=N,
        policy="1f1b", route="direct", control=received,
    ) as pipe:  # fmt: skip
        for iteration in range(4):
            module.requires_grad_(iteration >= TRAINED_FROM[context.rank])
            x, target = make_batch(iteration)
            before = received.bytes
            losses.append(pipe.step(x, target=target))
            sizes.append(received.bytes - before)
            grads.append({n: p.grad.clone() for n, p in named(module)})
            module.zero_grad()
    return losses, grads, sizes


def named(module: nn.Module) -> list[tuple[str, Any]]:
    return [(n, p) for n, p in module.named_parameters() if p.grad is not None]


def test_only_gradients_that_are_needed_come_back() -> None:
    found = run_ranks(STAGES, rotated)
    modules = [Rotated(index) for index in range(STAGES)]
    for iteration in range(4):
        for module in modules:
            module.requires_grad_(iteration >= TRAINED_FROM[module.index])
        x, target = make_batch(iteration)
        total = 0.0
        for a, b in zip(x.chunk(N), target.chunk(N), strict=True):
            value: Any = (a,)
            for module in modules:
                value = module(*value)
            loss = nn.functional.mse_loss(value, b)
            total += float(loss.detach())
            (loss / N).backward()
        for module, (losses, grads, sizes) in zip(modules, found, strict=True):
            same_bits(losses[iteration], torch.tensor(total / N))
            expected = dict(named(module))
            assert grads[iteration].keys() == expected.keys()
            for name, parameter in expected.items():
                same_bits(grads[iteration][name], parameter.grad, f"{iteration}: {name}")
            module.zero_grad()
            # The gradient of x only, and none while this stage and those above are frozen.
            needed = module.index < STAGES - 1 and iteration >= TRAINED_FROM[module.index]
            float32 = 4
            assert sizes[iteration] == needed * x.numel() * float32, (module.index, iteration)
