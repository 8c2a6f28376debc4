"""torch.profiler around iterations of a pipeline, as its users do."""

from __future__ import annotations

import gc

import pytest
import torch
from launch import run_ranks
from trainer_jobs import Job, loss_fn, make_batch, make_stage

from pipemorph_trainer import Options, Pipeline, TrainerContext

pytestmark = pytest.mark.full


def profiled(context: TrainerContext, job: Job) -> list[tuple[int, int]]:
    """Steps with a profiler each; the number of ranges ``PP:…`` and of ends of reductions (the
    loss, and two of the report of the iteration before) in each of them."""
    module = make_stage(context.rank, job.stages, job.dtype)
    counts = []
    with Pipeline(
        module, context=context, loss_fn=loss_fn, microbatches=job.microbatches,
        stages=job.stages, options=Options(route=job.route),  # type: ignore[arg-type]
    ) as pipe:  # fmt: skip
        for iteration in range(job.iterations):
            tokens, target = make_batch(iteration, job.batch * job.microbatches)
            with torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU]
            ) as profile:
                pipe.step(tokens, target=target)
            names = [event.name for event in profile.events()]
            ranges = sum(name.startswith("PP:") for name in names)
            counts.append((ranges, names.count("gloo:all_reduce")))
    del profile
    gc.collect()
    return counts


@pytest.mark.parametrize("route", ["direct", "delegated"])
def test_a_profiler_may_stop_after_any_iteration(route: str) -> None:
    """The profiler's stop lets work under way write, when it is through, to memory that was given
    back: sends of the direct route let the process crash, reductions let records get lost."""
    job = Job(2, 8, route=route, iterations=4)
    for counts in run_ranks(2, profiled, job):
        ranges = 3 * job.microbatches
        assert counts == [(ranges, 1)] + [(ranges, 3)] * (job.iterations - 1)
