"""A gradient scaler over all stages: one verdict, one scale, and the gradients without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gate import same_bits
from launch import Ranks, run_ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from trainer_jobs import loss_fn, make_batch, make_stage

from pipemorph_trainer import GradScaler, Pipeline, TrainerContext
from pipemorph_trainer.topology.mesh import join_process_group
from pipemorph_trainer.topology.placement import to_local

N, STAGES, ITERATIONS, OVERFLOW, SCALE = 4, 2, 5, 2, 2.0**12


def train(
    context: TrainerContext, scaled: bool, sharded: bool
) -> tuple[list[Tensor], list[Tensor], list[float]]:
    """Losses, parameters and scales. In one iteration a gradient of stage 0 overflows; without a
    scaler that iteration's step is omitted."""
    place, mesh = context.coordinate(STAGES), None
    module = make_stage(place.stage, STAGES, torch.float32)
    if sharded:
        join_process_group(context, torch.device("cpu"))
        shape = (STAGES, context.world_size // STAGES)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp_shard"))
        fully_shard(module, mesh=mesh["dp_shard"])
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    scaler = GradScaler("cpu", init_scale=SCALE, growth_interval=2) if scaled else None
    losses, scales = [], []
    with Pipeline(
        module, context=context, loss_fn=loss_fn, microbatches=N,
        stages=None if sharded else STAGES, mesh=mesh, scaler=scaler,
    ) as pipe:  # fmt: skip
        for iteration in range(ITERATIONS):
            tokens, target = make_batch(iteration, 2 * N)
            losses.append(pipe.step(tokens, target=target))
            overflows, clips = iteration == OVERFLOW, iteration % 2 == 0
            if scaler is not None:
                scales.append(scaler.get_scale())
                if overflows and context.rank == 0:
                    grad: Any = module.norm.weight.grad
                    (grad.to_local() if sharded else grad)[0] = torch.inf
                if clips:
                    scaler.unscale_(optimizer)
            if clips:
                pipe.clip_grad_norm_(0.5)
            if scaler is not None:
                # Unscales gradients that are not unscaled yet.
                scaler.step(optimizer)
                scaler.update()
            elif not overflows:
                optimizer.step()
            optimizer.zero_grad()
    return losses, [to_local(p.detach()).clone() for p in module.parameters()], scales


@pytest.mark.parametrize(
    ("columns", "sharded"),
    [
        pytest.param(1, False, marks=pytest.mark.full, id="one"),
        pytest.param(2, False, marks=pytest.mark.full, id="replicas"),
        pytest.param(2, True, id="sharded"),
    ],
)
def test_a_gradient_that_overflows_on_one_rank_skips_the_step_on_all(
    columns: int, sharded: bool
) -> None:
    plain = run_ranks(STAGES * columns, train, False, sharded)
    scaled = run_ranks(STAGES * columns, train, True, sharded)
    for wanted, found in zip(plain, scaled, strict=True):
        for name, mine, its in zip(("loss", "parameter"), found, wanted, strict=False):
            for index, (value, expected) in enumerate(zip(mine, its, strict=True)):
                same_bits(value, expected, f"{name} {index}")
        assert found[2] == [SCALE, SCALE, 2 * SCALE, SCALE, SCALE], "it grows, and shrinks once"


def other(context: TrainerContext) -> Any:
    scaler: Any = torch.amp.GradScaler("cpu") if context.rank else None
    module = make_stage(context.rank, STAGES, torch.float32)
    return Pipeline(module, context=context, loss_fn=loss_fn, microbatches=N, scaler=scaler)


def test_a_scaler_of_one_rank_alone_is_refused() -> None:
    for result in Ranks(STAGES, other).wait():
        assert "rank 1: scaler is a GradScaler; expected a pipemorph_trainer.GradScaler" in (
            result.error
        )
