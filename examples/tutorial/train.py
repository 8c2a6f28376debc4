"""The script of docs/tutorial.md: a stack of layers learns to shift its input by one place."""

import torch
from torch import nn
from torch.nn.functional import mse_loss

from pipemorph_trainer import Pipeline, TrainerContext

WIDTH, LAYERS, BATCH = 1024, 8, 512


def build_stage(part):
    """The layers that this rank holds; ``part`` says which."""
    torch.manual_seed(part.stage)  # other weights on each stage
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in part.layers(LAYERS))
    )


def make_optimizer(stage):
    return torch.optim.AdamW(stage.parameters(), lr=1e-3)


context = TrainerContext.from_env()
with Pipeline(build_stage, context=context, loss_fn=mse_loss, optimizer=make_optimizer) as pipe:
    for iteration in range(pipe.start_iteration, context.iterations):
        torch.manual_seed(iteration)
        x = torch.randn(BATCH, WIDTH)
        loss = pipe.step(x, target=x.roll(1, dims=1))  # every rank returns the loss
        pipe.clip_grad_norm_(1.0)
        pipe.optimizer.step()
        pipe.optimizer.zero_grad()
