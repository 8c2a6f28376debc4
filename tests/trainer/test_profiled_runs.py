"""torch.profiler around iterations of a pipeline, as its users do."""

from __future__ import annotations

import gc

import pytest
import torch
from jobs import Job, loss_fn, make_batch, make_stage
from launch import run_ranks

from pipemorph_trainer import Pipeline, TrainerContext

pytestmark = pytest.mark.multiprocess


def profiled(context: TrainerContext, job: Job) -> list[int]:
    """Steps with a profiler each; how many ranges ``PP:…`` each of them saw."""
    module = make_stage(context.rank, job.stages, job.dtype)
    counts = []
    with Pipeline(
        module, context=context, loss_fn=loss_fn, microbatches=job.microbatches,
        stages=job.stages, path=job.path,  # type: ignore[arg-type]
    ) as pipe:  # fmt: skip
        for iteration in range(job.iterations):
            tokens, target = make_batch(iteration, job.batch * job.microbatches)
            with torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU]
            ) as profile:
                pipe.step(tokens, target=target)
            counts.append(sum(event.name.startswith("PP:") for event in profile.events()))
    del profile
    gc.collect()
    return counts


@pytest.mark.parametrize("path", ["direct", "delegated"])
def test_a_profiler_may_stop_after_any_iteration(path: str) -> None:
    """With sends of the direct path still under way, torch crashes when they are through."""
    job = Job(2, 8, path=path, iterations=4)
    for counts in run_ranks(2, profiled, job):
        assert counts == [3 * job.microbatches] * job.iterations
