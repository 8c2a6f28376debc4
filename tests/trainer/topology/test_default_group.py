"""A pipeline beside the default process group that the script has made."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launch import run_ranks
from torch import nn
from trainer_jobs import Job, Record, assert_same, train

from pipemorph.api.sections.trainer import Checkpoint
from pipemorph_trainer import Pipeline, TrainerContext


def beside(context: TrainerContext, backend: str, folder: str) -> Record:
    dist.init_process_group(
        backend,
        init_method=f"tcp://127.0.0.1:{context.master_port}",
        rank=context.rank,
        world_size=context.world_size,
    )
    record = train(context, Job(2, 4))
    pipe = Pipeline(
        nn.Linear(4, 4), context=context, loss_fn=nn.functional.mse_loss, microbatches=2,
        stages=2, deadline_seconds=30.0, checkpoint=Checkpoint(directory=folder, every=9),
        optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.1),
    )  # fmt: skip
    with pipe:
        pipe.step(torch.ones(4, 4), target=torch.zeros(4, 4))
        record.norms.append(pipe.clip_grad_norm_(1.0))
        record.losses.append(pipe.evaluate(torch.ones(4, 4), target=torch.zeros(4, 4)))
        pipe.save()
    alone = backend == "cuda:gloo"
    with pytest.raises(RuntimeError, match="device type cpu") if alone else nullcontext():
        dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()
    return record


def test_a_default_group_for_the_device_alone(tmp_path: Path) -> None:
    """As ``init_process_group("nccl")`` makes it; here gloo that takes no tensors of the host."""
    found = run_ranks(4, beside, "cuda:gloo", str(tmp_path / "a"), timeout=100.0)
    assert_same(found, run_ranks(4, beside, "gloo", str(tmp_path / "b"), timeout=100.0))
    assert len({float(norm) for record in found for norm in record.norms}) == 1
    for name in "ab":
        assert list((tmp_path / name).glob("*/.metadata")), f"no checkpoint in {name}"
