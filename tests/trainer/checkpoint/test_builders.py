"""A stage that is built by the pipeline, for the part of the model that this rank holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gate import same_bits
from launch import Ranks, run_ranks
from torch import Tensor, nn
from trainer_jobs import Job, loss_fn, make_batch, make_stage, reference

from pipemorph.errors import InputError
from pipemorph_trainer import EmulatedStage, ModelShard, Pipeline, TrainerContext

N, STAGES = 4, 2


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def built(context: TrainerContext) -> dict[str, Tensor]:
    def build_stage(part: ModelShard) -> nn.Module:
        assert (part.is_first, part.is_last) == (context.rank == 0, context.rank == 1)
        return make_stage(part.stage, part.stages, torch.float32)

    with Pipeline(
        build_stage, context=context, loss_fn=loss_fn, microbatches=N, optimizer=sgd
    ) as pipe:
        for iteration in range(2):
            tokens, target = make_batch(iteration, 2 * N)
            pipe.step(tokens, target=target)
            pipe.optimizer.step()
            pipe.optimizer.zero_grad()
        parameters = {n: p.detach().clone() for n, p in pipe.module.named_parameters()}
    with Pipeline(EmulatedStage(0.001, 0.001, 0.001, 64), context=context, microbatches=N) as pipe:
        for missing in ("module", "optimizer"):
            with pytest.raises(InputError, match=r"emulated|no optimizer"):
                getattr(pipe, missing)
    return parameters


def test_a_stage_is_built_where_it_runs() -> None:
    expected = reference(Job(STAGES, N, iterations=2))
    for record, parameters in zip(expected, run_ranks(STAGES, built), strict=True):
        assert parameters.keys() == record.parameters.keys()
        for name, value in parameters.items():
            same_bits(value, record.parameters[name], name)


def broken(context: TrainerContext) -> Any:
    def build_stage(part: ModelShard) -> nn.Module:
        if part.is_last:
            raise KeyError("lm_head.weight")
        return make_stage(part.stage, part.stages, torch.float32)

    return Pipeline(build_stage, context=context, loss_fn=loss_fn, microbatches=N)


def test_a_builder_that_fails_is_reported_on_every_rank() -> None:
    first, second = Ranks(STAGES, broken).wait()
    for result in (first, second):
        expected = "InputError: rank 1: it cannot be built: KeyError: 'lm_head.weight'"
        assert expected in result.error
    assert 'raise KeyError("lm_head.weight")' in second.error


def test_layers_are_split_in_order() -> None:
    parts = [ModelShard(stage, 3) for stage in range(3)]
    assert [list(part.layers(7)) for part in parts] == [[0, 1, 2], [3, 4], [5, 6]]
    assert [len(part.layers(2)) for part in parts] == [1, 1, 0]
