"""A rank that fails alone, inside an op whose collectives others are in, is reported everywhere."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hybrid_models import batch_of, distribute, loss_fn, part_of, whole_model
from launch import Ranks, run_ranks
from pairwise import give_tiers
from torch.distributed.device_mesh import init_device_mesh
from trainer_jobs import Job, make_plan

from pipemorph_trainer import Pipeline, TrainerContext
from pipemorph_trainer.errors import BatchError, PipelineError
from pipemorph_trainer.topology.mesh import join_process_group

N, ROWS, BROKEN, SECONDS = 4, 8, 2, 20.0
"""``SECONDS``: with other tests. A rank knows within 0.5 s, and 3 s later in the first forward of
an iteration; without a report, it would wait for its deadline of 600 s."""


def entry(context: TrainerContext, dimension: str, at: int, folder: str) -> str:
    """Train; the broken rank fails in forward ``at``."""
    join_process_group(context, torch.device("cpu"))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", dimension))
    # Parameters are gathered in each op, so that those of fsdp2 have collectives inside.
    part = distribute(
        part_of(whole_model(), mesh.get_local_rank("pp"), 2), mesh, reshard=(True, True)
    )
    runs = 0

    def fail(*_: Any) -> None:
        nonlocal runs
        runs += torch.is_grad_enabled()
        if runs == at:
            Path(folder, "failed").write_text(str(time.time()))
            raise ArithmeticError("no such number")

    if context.rank == BROKEN:
        # Between the collectives of one block and those of the next.
        [*part.layers.values()][-1].register_forward_pre_hook(fail, prepend=True)
    data = mesh.get_local_rank(dimension) if dimension == "dp_shard" else 0
    try:
        with Pipeline(
            part, context=context, mesh=mesh, loss_fn=loss_fn, deadline_seconds=600,
            split="auto", plan=make_plan(Job(2, N), 0, "zero-bubble"),
        ) as pipe:  # fmt: skip
            for iteration in range(3):
                tokens, target = batch_of(iteration, data, ROWS)
                pipe.step(tokens, target=target)
    except (PipelineError, ArithmeticError) as error:
        if context.rank != BROKEN:
            text = f"{error}"
            Path(folder, f"time-{context.rank}").write_text(f"{time.time()}")
            return text
    # Process and connections stay until the others have ended, as while a script uploads logs.
    while len(list(Path(folder).glob("time-*"))) < 3:
        threading.Event().wait(0.05)
    return ""


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("dimension", "at"),
    # Failures in the first forward, and later.
    give_tiers(
        [("tp", 2 * N - 1), ("dp_shard", 1), ("tp", 1), ("dp_shard", 2 * N - 1)], test=1, full=1
    ),
)
def test_all_ranks_end_soon_and_name_the_rank_and_its_error(
    dimension: str, at: int, tmp_path: Path
) -> None:
    results = Ranks(4, entry, dimension, at, str(tmp_path)).wait(120.0)
    failed = float((tmp_path / "failed").read_text())
    for result in results:
        assert result.exitcode == 0, f"rank {result.rank}:\n{result.error}{result.output}"
        if result.rank != BROKEN:
            assert f"rank {BROKEN} (stage 1" in result.value
            assert "ArithmeticError: no such number" in result.value
            took = float((tmp_path / f"time-{result.rank}").read_text()) - failed
            assert took < SECONDS, f"rank {result.rank}: {result.value}"


def bad_sample(context: TrainerContext) -> str:
    join_process_group(context, torch.device("cpu"))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    part = distribute(part_of(whole_model(), mesh.get_local_rank("pp"), 2), mesh)
    bad = False

    def fail(*_: Any) -> None:
        if bad:
            raise ValueError("a bad sample")

    if mesh.get_local_rank("pp") == 1:
        [*part.layers.values()][-1].register_forward_pre_hook(fail, prepend=True)
    text = ""
    with Pipeline(
        part, context=context, mesh=mesh, loss_fn=loss_fn, microbatches=N, deadline_seconds=60
    ) as pipe:
        for iteration in range(3):
            bad = iteration == 1
            tokens, target = batch_of(iteration, 0, ROWS)
            try:
                pipe.step(tokens, target=target)
            except BatchError as error:
                text = str(error)
        assert pipe.iteration == 2
    return text


@pytest.mark.full
def test_an_error_that_all_ranks_of_a_stage_raise_only_refuses_the_step() -> None:
    for text in run_ranks(4, bad_sample):
        assert "step() of iteration 1 is refused on all ranks: rank 2 (stage 1, tensor 0)" in text
        assert "ValueError: a bad sample" in text
