"""``AdaptiveSchedule`` over several of torch's stages per rank: the bits of torch's schedules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from gate import same_bits
from launch import run_ranks
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B, ScheduleZBVZeroBubble

from pipemorph_trainer import Options, TrainerContext
from pipemorph_trainer.torch import AdaptiveSchedule

WIDTH, MICROBATCHES, STEPS = 6, 4, 3
THEIRS = {"interleaved": ScheduleInterleaved1F1B, "v": ScheduleZBVZeroBubble}


def train(
    context: TrainerContext, placement: str, policy: str | None, dispatch: str = "static"
) -> list[tuple[list[float], dict[str, Tensor]]]:
    """Train two stages on each of two ranks. ``policy``: None for torch's own schedule."""
    mine = (context.rank, context.rank + 2 if placement == "interleaved" else 3 - context.rank)
    if not dist.is_initialized():
        address = f"tcp://127.0.0.1:{context.master_port}"
        dist.init_process_group("gloo", address, rank=context.rank, world_size=2)
    modules, stages = {}, []
    for index in mine:
        torch.manual_seed(index)
        layers = (nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        modules[index] = nn.Sequential(*layers)
        stages.append(PipelineStage(modules[index], index, 4, torch.device("cpu")))
    loss_fn: Any = nn.functional.mse_loss
    schedule: Any
    if policy in (None, "pipemorph"):
        schedule = THEIRS[placement](stages, MICROBATCHES, loss_fn)
        if policy is not None:
            # The stages are where torch's schedule has them.
            schedule = AdaptiveSchedule.from_schedule(
                schedule,
                context=context,
                policy=policy,
                options=Options(dispatch=dispatch),
                deadline_seconds=30.0,
            )
    else:
        schedule = AdaptiveSchedule(
            stages, MICROBATCHES, loss_fn, placement=placement, context=context, policy=policy,
            deadline_seconds=30.0,
        )  # fmt: skip
    found = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(2 * MICROBATCHES, WIDTH, generator=generator)
        losses: list[Tensor] = []
        args = (x,) if 0 in mine else ()
        last = {"target": x.flip(1), "losses": losses} if 3 in mine else {}
        schedule.step(*args, **last)
        grads = {
            f"{index}.{name}": p.grad.clone()
            for index, module in modules.items()
            for name, p in module.named_parameters()
            if p.grad is not None
        }
        found.append(([float(loss) for loss in losses], grads))
        for module in modules.values():
            for parameter in module.parameters():
                parameter.data -= 0.1 * parameter.grad
                parameter.grad = None
    if policy is not None:
        schedule.close()
    return found


def both(context: TrainerContext, placement: str) -> Any:
    rule = "zero-bubble-v" if placement == "v" else "1f1b-interleaved"
    ran = [train(context, placement, policy) for policy in (None, rule, "pipemorph")]
    return [*ran, train(context, placement, "pipemorph", "guided")]


@pytest.mark.parametrize("placement", ["v", pytest.param("interleaved", marks=pytest.mark.full)])
def test_the_bits_of_torchs_schedule(placement: str) -> None:
    for rank, (theirs, *ours) in enumerate(run_ranks(2, both, placement)):
        assert sum(len(losses) for losses, _ in theirs) in (0, STEPS * MICROBATCHES)
        for steps in ours:
            for step, (mine, wanted) in enumerate(zip(steps, theirs, strict=True)):
                assert mine[0] == wanted[0], f"rank {rank}, step {step}"
                assert mine[1].keys() == wanted[1].keys() and len(mine[1]) == 8
                for name, value in mine[1].items():
                    same_bits(value, wanted[1][name], f"rank {rank}, step {step}: {name}")
