"""GPT of :mod:`pipemorph_trainer.examples.gpt`, with torch's own pipeline stages.

Only ``AdaptiveSchedule(…)`` is PipeMorph's; it replaces ``Schedule1F1B(stage, …)``. Run it with
``pipemorph run examples/gpt-torch.yaml --out out/gpt-torch``. ``spec.trainer.args`` are the same,
but ``clip`` has no effect.
"""

from __future__ import annotations

import sys

import torch
from torch.distributed.pipelining import PipelineStage

from pipemorph.errors import InputError
from pipemorph_trainer import ModelShard, TrainerContext, make_mesh
from pipemorph_trainer.devices import choose_device
from pipemorph_trainer.examples.gpt import (
    GPTArguments,
    GPTStage,
    load_corpus,
    loss_fn,
    sample_batch,
)
from pipemorph_trainer.torch import AdaptiveSchedule


def train(context: TrainerContext) -> None:
    if context.job is None:
        raise InputError("start this example with: pipemorph run examples/gpt-torch.yaml --out DIR")
    spec = context.job.spec
    if spec.parallelism.world_size != spec.parallelism.stages:
        raise InputError("spec.parallelism: this example has one rank per stage")
    arguments = GPTArguments.from_context(context)
    stage, stages = context.coordinate().stage, spec.parallelism.stages
    torch.manual_seed(spec.trainer.seed * 1000 + stage)
    device = choose_device(context.local_rank)
    module = GPTStage(arguments, ModelShard(stage, stages), spec.parallelism.layers or stages).to(
        device
    )
    optimizer = torch.optim.AdamW(module.parameters(), lr=arguments.learning_rate)
    corpus = load_corpus()
    mesh = make_mesh(context, device)
    pipeline_stage = PipelineStage(module, stage, stages, device, group=mesh.get_group("pp"))
    with AdaptiveSchedule([pipeline_stage], spec.schedule.microbatches, loss_fn) as schedule:
        for iteration in range(spec.trainer.iterations):
            tokens, target = sample_batch(
                corpus,
                seed=spec.trainer.seed,
                iteration=iteration,
                replica=0,
                batch=arguments.microbatch_size * spec.schedule.microbatches,
                sequence=arguments.sequence,
            )
            inputs = (tokens.to(device),) if pipeline_stage.is_first else ()
            schedule.step(*inputs, target=target.to(device) if pipeline_stage.is_last else None)
            optimizer.step()
            optimizer.zero_grad()


def main() -> int:
    try:
        train(TrainerContext.from_env())
    except InputError as error:
        print(f"gpt_torch: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
