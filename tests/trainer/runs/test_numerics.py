"""Losses and gradients equal a sequential run to the bit, whatever moves the messages."""

from __future__ import annotations

import pytest
import torch
from gate import same_bits
from launch import run_ranks
from trainer_jobs import Job, Record, assert_same, make_plan, reference, train

from pipemorph.api.sections.faults import Fault
from pipemorph.planning import Route

pytestmark = pytest.mark.full

POLICIES = ("gpipe", "1f1b", "zero-bubble", "pipemorph")
ROUTES = [
    pytest.param("direct", "auto", id="direct"),
    pytest.param("delegated", "tcp", id="tcp", marks=pytest.mark.needs_engine),
    pytest.param("delegated", "shm", id="shm", marks=pytest.mark.needs_engine),
]


def check(job: Job) -> list[Record]:
    records = run_ranks(job.stages, train, job)
    plain = Job(job.stages, job.microbatches, dtype=job.dtype, iterations=job.iterations)
    assert_same(records, reference(plain))
    return records


@pytest.mark.parametrize(("route", "engine"), ROUTES)
@pytest.mark.parametrize("dispatch", ["static", "online"])
@pytest.mark.parametrize("policy", POLICIES)
def test_policies(policy: str, dispatch: str, route: str, engine: str) -> None:
    records = check(Job(4, 6, policy=policy, dispatch=dispatch, route=route, engine=engine))
    # The split is what makes this worth testing: B and W ran apart.
    assert {record.split for record in records} <= {"module", "graph"}


@pytest.mark.parametrize(("route", "engine"), ROUTES)
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_bfloat16(stages: int, route: str, engine: str) -> None:
    check(Job(stages, 4, dtype=torch.bfloat16, route=route, engine=engine))


@pytest.mark.parametrize("dispatch", ["static", "online"])
@pytest.mark.parametrize("policy", POLICIES)
def test_policies_in_bfloat16(policy: str, dispatch: str) -> None:
    check(Job(3, 6, policy=policy, dispatch=dispatch, dtype=torch.bfloat16))


@pytest.mark.parametrize(("route", "engine"), ROUTES)
@pytest.mark.parametrize("dispatch", ["static", "online", "guided"])
def test_under_delays(dispatch: str, route: str, engine: str) -> None:
    faults = [
        Fault(link=0, delay_ms=5.0, from_iteration=1),
        Fault(link=1, delay_ms=10.0, to_iteration=2),
        Fault(link=1, bandwidth_mbps=1.0),
    ]
    job = Job(3, 6, policy="zero-bubble", dispatch=dispatch, route=route, engine=engine)
    check(job.with_(faults=faults))


@pytest.mark.needs_engine
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("engine", ["tcp", "shm"])
def test_plan_and_route_switch_in_mid_run(engine: str, dtype: torch.dtype) -> None:
    job = Job(3, 6, policy="1f1b", route="auto", engine=engine, iterations=8, dtype=dtype)
    second = make_plan(job, 3, "zero-bubble", routes=(Route.DIRECT, Route.DELEGATED))
    third = make_plan(job, 7, "gpipe", routes=(Route.DELEGATED, Route.DIRECT), dispatch="online")
    job = job.with_(switches=((0, second, (0, 2)), (1, second, (1,)), (3, third, (0, 1, 2))))
    records = check(job)
    # Installed by all right before iterations 1 and 3: in force there or in the next one.
    versions = records[0].versions
    assert all(record.versions == versions for record in records)
    assert versions[:1] + versions[2:3] + versions[4:] == [0, 3, 7, 7, 7, 7], versions


def test_plan_switch_in_mid_run() -> None:
    job = Job(3, 6, policy="1f1b", iterations=6)
    second = make_plan(job, 1, "zero-bubble")
    job = job.with_(switches=((0, second, (0, 1, 2)),))
    records = check(job)
    versions = records[0].versions
    assert all(record.versions == versions for record in records)
    assert versions[1:] == [1, 1, 1, 1, 1], versions


def test_replicas_average_their_gradients() -> None:
    job = Job(2, 4, iterations=1)
    records = run_ranks(4, train, job)
    for stage in range(2):
        wanted = [reference(job, replica)[stage] for replica in range(2)]
        for replica in range(2):
            mine = records[2 * stage + replica]
            mean = (wanted[0].losses[0].double() + wanted[1].losses[0].double()) / 2
            torch.testing.assert_close(mine.losses[0].double(), mean)
            for name, grad in mine.grads[0].items():
                both = (wanted[0].grads[0][name] + wanted[1].grads[0][name]) / 2
                same_bits(grad, both, name)
