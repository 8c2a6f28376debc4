"""Random stacks of layers, random orders with several microbatches in flight: split equals
unsplit to the bit, in fp32 and bf16."""

from __future__ import annotations

import random

import pytest
import torch
from split_support import Job, Lambda, assert_equal, random_order, sequential, split
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 6


AROUND = {
    "residual": lambda m, x: x + m.inner(x),
    "twice": lambda m, x: m.inner(torch.tanh(m.inner(x))),
    "recompute": lambda m, x: checkpoint(m.inner, x, use_reentrant=False),
}
"""Uses of a stack."""


def stack(rng: random.Random, depth: int) -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(rng.randint(1, 4)):
        kinds = ["linear", "linear", "norm", "act", "inplace", "gate", "drop"]
        if depth:
            kinds += AROUND
        match rng.choice(kinds):
            case "linear":
                layers.append(nn.Linear(WIDTH, WIDTH, bias=rng.random() < 0.7))
                if rng.random() < 0.15:
                    layers[-1].weight.requires_grad_(False)
            case "norm":
                layers.append(nn.LayerNorm(WIDTH))
            case "act":
                layers.append(rng.choice([nn.GELU(), nn.Tanh(), nn.SiLU()]))
            case "inplace":
                layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)]
            case "gate":
                # A parameter that is no Linear's, used directly.
                scale = nn.Parameter(torch.randn(WIDTH))
                layers.append(Lambda(lambda m, x: x * torch.sigmoid(m.scale), scale=scale))
            case "drop":
                layers.append(nn.Dropout(0.3))
            case kind:
                layers.append(Lambda(AROUND[kind], inner=stack(rng, depth - 1)))
    return nn.Sequential(*layers)


@pytest.mark.parametrize("mode", ["auto", "verify"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("seed", range(25))
def test_random_stacks(mode: str, dtype: torch.dtype, seed: int) -> None:
    rng = random.Random(f"{seed} {mode} {dtype}")
    torch.manual_seed(seed)
    module = nn.Sequential(nn.LayerNorm(WIDTH), stack(rng, 2), nn.Linear(WIDTH, WIDTH)).to(dtype)
    shape = rng.choice([(3, WIDTH), (2, 3, WIDTH), (2, 1, 2, WIDTH)])
    microbatches = rng.randint(2, 5)
    first, last = rng.random() < 0.3, rng.random() < 0.3

    def make_args(k: int) -> tuple[Tensor, ...]:
        return (torch.randn(shape, generator=torch.Generator().manual_seed(k)).to(dtype),)

    job = Job(
        module,
        make_args,
        microbatches,
        is_first=first,
        is_last=last,
        loss_fn=nn.functional.mse_loss if last else None,
        make_target=lambda k: make_args(k + 30)[0],
        mode=mode,
    )
    order = random_order(microbatches, rng)
    got, runner = split(job, order, measures=rng.random() < 0.5)
    assert runner.split == "deferred"
    assert_equal(sequential(job), got)
    assert mode == "auto" or "all are equal" in runner.build_report().format_line()
