"""Losses and gradients equal a sequential run to the bit, whatever moves the messages."""

from __future__ import annotations

import pytest
import torch
from launch import run_ranks
from pairwise import parametrize_product
from trainer_jobs import Job, Record, assert_same, make_plan, reference, train

from pipemorph.planning import Route
from pipemorph.spec.sections.faults import Fault

POLICIES = ("gpipe", "1f1b", "zero-bubble", "pipemorph")
DISPATCHES = ("static", "guided")
LINKS = ("direct", "tcp", "shm")
DTYPES = (torch.float32, torch.bfloat16)
FAULTS = {
    "on time": (),
    "late": (
        Fault(link=0, delay_ms=5.0, from_iteration=1),
        Fault(link=1, delay_ms=10.0, to_iteration=2),
        Fault(link=1, bandwidth_mbps=1.0),
    ),
}


def over(links: str) -> dict[str, str]:
    """The route of a job's links, and the engine of delegated ones."""
    if links == "direct":
        return {"route": "direct"}
    return {"route": "delegated", "engine": links}


def check(job: Job) -> list[Record]:
    records = run_ranks(job.stages, train, job)
    plain = Job(job.stages, job.microbatches, dtype=job.dtype, iterations=job.iterations)
    assert_same(records, reference(plain))
    return records


@pytest.mark.needs_engine
@pytest.mark.parametrize(
    ("policy", "dispatch", "links", "dtype", "messages"),
    parametrize_product(POLICIES, DISPATCHES, LINKS, DTYPES, tuple(FAULTS), test=6),
)
def test_every_policy_has_the_bits_of_one_process(
    policy: str, dispatch: str, links: str, dtype: torch.dtype, messages: str
) -> None:
    job = Job(4, 6, policy=policy, dispatch=dispatch, dtype=dtype, **over(links))  # type: ignore[arg-type]
    records = check(job.with_(faults=FAULTS[messages]))
    # The split is what makes this worth testing: B and W ran apart.
    assert {record.split for record in records} == {"deferred"}


@pytest.mark.needs_engine
@pytest.mark.parametrize(
    ("stages", "dtype", "links"), parametrize_product((1, 2, 3), DTYPES, LINKS, test=2, full=2)
)
def test_few_stages(stages: int, dtype: torch.dtype, links: str) -> None:
    check(Job(stages, 4, dtype=dtype, **over(links)))  # type: ignore[arg-type]


@pytest.mark.needs_engine
@pytest.mark.parametrize(
    ("engine", "dtype"), parametrize_product(("tcp", "shm"), DTYPES, test=1, full=1)
)
def test_plan_and_route_switch_in_mid_run(engine: str, dtype: torch.dtype) -> None:
    job = Job(3, 6, policy="1f1b", route="auto", engine=engine, iterations=8, dtype=dtype)
    second = make_plan(
        job, 3, "zero-bubble", routes=(Route.DIRECT, Route.DELEGATED), dispatch="guided"
    )
    third = make_plan(job, 7, "gpipe", routes=(Route.DELEGATED, Route.DIRECT))
    job = job.with_(switches=((0, second, (0, 2)), (1, second, (1,)), (3, third, (0, 1, 2))))
    records = check(job)
    # Installed by all right before iterations 1 and 3: in force there or in the next one.
    versions = records[0].versions
    assert all(record.versions == versions for record in records)
    assert versions[:1] + versions[2:3] + versions[4:] == [0, 3, 7, 7, 7, 7], versions
