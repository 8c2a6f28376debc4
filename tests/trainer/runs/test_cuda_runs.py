"""Runs on GPUs: results equal a sequential run on the same GPU to the bit.

One GPU is enough for the delegated route: the ranks share it. NCCL wants one per rank.
"""

from __future__ import annotations

from functools import cache

import pytest
import several_jobs
import torch
from cuda_jobs import (
    ENVIRON,
    gpus,
    reference_on_gpu,
    several_on_gpu,
    several_sequential_on_gpu,
    train_on_gpu,
)
from launch import run_ranks
from trainer_jobs import Job, Record, assert_same, make_plan

from pipemorph.planning import Route

pytestmark = [pytest.mark.gpu, pytest.mark.needs_engine, pytest.mark.timeout(400)]
SECONDS = 300.0


@cache
def sequential(stages: int, microbatches: int, dtype: torch.dtype, iterations: int) -> list[Record]:
    job = Job(stages, microbatches, dtype=dtype, iterations=iterations)
    (records,) = run_ranks(1, reference_on_gpu, job, environ=ENVIRON, timeout=SECONDS)
    return records


def check(job: Job, *, strict: bool = False) -> list[Record]:
    seen = run_ranks(job.stages, train_on_gpu, job, strict, environ=ENVIRON, timeout=SECONDS)
    records = [each.record for each in seen]
    assert_same(records, sequential(job.stages, job.microbatches, job.dtype, job.iterations))
    return records


@pytest.mark.parametrize("engine", ["tcp", "shm"])
@pytest.mark.parametrize("dispatch", ["static", "guided"])
@pytest.mark.parametrize("policy", ["1f1b", "zero-bubble", "pipemorph"])
def test_delegated(policy: str, dispatch: str, engine: str) -> None:
    job = Job(3, 6, policy=policy, dispatch=dispatch, route="delegated", engine=engine)
    records = check(job)
    assert {record.split for record in records} == {"deferred"}


def test_bfloat16() -> None:
    check(Job(2, 4, dtype=torch.bfloat16, route="delegated", engine="tcp"))


def test_no_step_waits_for_the_device_but_at_its_end() -> None:
    """torch raises at a hidden synchronisation: ``.item()``, a pageable copy, a comparison.
    Deliberate waits of the trainer are for events, which it does not count."""
    check(Job(3, 6, route="delegated", engine="tcp", iterations=3), strict=True)


def in_one_process(job: Job) -> list[Record]:
    (records,) = run_ranks(1, several_sequential_on_gpu, job, environ=ENVIRON, timeout=SECONDS)
    return records


@pytest.mark.parametrize("policy", ["1f1b-interleaved", "zero-bubble-v"])
def test_several_stages_per_rank(policy: str) -> None:
    plan = several_jobs.make_plan(policy, 2, 4, 6, routes=(Route.DELEGATED,) * 3)
    several_jobs.check(
        plan, run=several_on_gpu, expected=in_one_process, seconds=SECONDS, engine="tcp",
        route="delegated",
    )  # fmt: skip


needs_two = pytest.mark.skipif(gpus() < 2, reason="NCCL needs a GPU per rank; here are fewer")


@needs_two
@pytest.mark.parametrize("policy", ["1f1b", "pipemorph"])
@pytest.mark.parametrize("dispatch", ["static", "guided"])
def test_direct(policy: str, dispatch: str) -> None:
    check(Job(2, 6, policy=policy, dispatch=dispatch))


@needs_two
def test_switching_between_direct_and_delegated() -> None:
    job = Job(2, 6, policy="1f1b", route="auto", iterations=8)
    there = make_plan(job, 3, "zero-bubble", routes=(Route.DELEGATED,))
    back = make_plan(job, 7, "1f1b", routes=(Route.DIRECT,))
    job = job.with_(switches=((0, there, (0, 1)), (3, back, (0, 1))))
    records = check(job)
    assert all(record.versions == [0, 0, 3, 3, 3, 7, 7, 7] for record in records)


@needs_two
@pytest.mark.parametrize("policy", ["1f1b-interleaved", "zero-bubble-v"])
def test_several_stages_per_rank_direct(policy: str) -> None:
    plan = several_jobs.make_plan(policy, 2, 4, 6)
    several_jobs.check(plan, run=several_on_gpu, expected=in_one_process, seconds=SECONDS)
