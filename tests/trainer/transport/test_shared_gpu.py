"""Ranks that share a GPU: NCCL refuses them, so their links have the delegated route alone.

Played on the CPU by a UUID that both ranks say; ``test_cuda_runs.py`` has it on a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import trainer_jobs
from launch import run_ranks
from trainer_jobs import Job, Record, assert_same, reference

from pipemorph.errors import InputError
from pipemorph_trainer import TrainerContext
from pipemorph_trainer.transport import rendezvous

pytestmark = [pytest.mark.needs_engine]


def train_sharing(context: TrainerContext, job: Job, pairs: int) -> Record | str:
    """Ranks take a GPU in turn, ``pairs`` ranks each."""
    rendezvous.get_gpu_uuid = lambda device: f"GPU-{context.rank // pairs}"
    try:
        return trainer_jobs.train(context, job)
    except InputError as error:
        return str(error)


def test_their_link_is_delegated_and_others_keep_both_routes() -> None:
    job = Job(4, 6, route="delegated", engine="tcp")
    records: list[Any] = run_ranks(4, train_sharing, job, 2)
    assert_same(records, reference(job))


@pytest.mark.full
def test_a_plan_with_the_direct_route_is_refused_in_words() -> None:
    said = run_ranks(2, train_sharing, Job(2, 4, route="auto"), 2)
    for text in said:
        assert "plan 0 has link 0 on the direct route, but ranks" in text
        assert "share GPU GPU-0, and NCCL needs one for each rank" in text
        assert 'Pipeline(options=Options(route="delegated"))' in text
