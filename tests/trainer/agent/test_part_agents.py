"""Agents of parts of a job, between their ranks and the job's agent: real processes and sockets."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from agents import (
    DEADLINE,
    ENOUGH,
    SECRET,
    Ingest,
    context,
    finished,
    sample,
    telemetry,
)
from launch import Ranks
from torch import nn
from waiting import until

from pipemorph.api.mesh import MeshShape
from pipemorph.control.observe.merge import Parts
from pipemorph_trainer import Pipeline, TrainerContext
from pipemorph_trainer.agent import (
    AgentClient,
    AgentHandle,
    connect,
    launch,
    start_agent,
    start_part_agent,
)
from pipemorph_trainer.agent.launch import AgentConfig, part_ranks

MESH = MeshShape(stages=2, replicas=2)
"""Ranks 0 and 1 have stage 0, ranks 2 and 3 stage 1: two parts."""
USUAL, LATE = 0.001, 0.03


class Job:
    """The agents of both parts, and lines of their ranks."""

    def __init__(self, ingest: Ingest, token_file: Path, stack: contextlib.ExitStack) -> None:
        self.ingest, self._token_file, self._stack = ingest, token_file, stack
        self.zero = start_agent(self.context(0), MESH, part_ranks=2)
        stack.callback(lambda: self.zero.close(1.0))
        self.one = start_part_agent(
            self.context(2), MESH, part_ranks=2, upstream=("127.0.0.1", self.zero.port)
        )
        stack.callback(lambda: self.one.close(1.0))

    def context(self, rank: int) -> TrainerContext:
        return context(self.ingest, self._token_file, rank, world_size=4)

    def line(self, rank: int, agent: AgentHandle | None = None) -> AgentClient:
        agent = agent or (self.zero if rank < 2 else self.one)
        client = connect(self.context(rank), agent.host, agent.port, wait=DEADLINE)
        self._stack.callback(client.close)
        return client

    def told(self) -> list[Any]:
        return [row for report in self.ingest.reports for row in report.directions]


@pytest.fixture
def job(ingest: Ingest, token_file: Path) -> Iterator[Job]:
    with contextlib.ExitStack() as stack:
        yield Job(ingest, token_file, stack)


def windows(client: AgentClient, wire: float, count: int, column: int = 0) -> None:
    """Stage 1 tells of so many windows of activations that it has received."""
    rank = 2 + column
    rows = [sample(p50=wire, replica=column)] * count
    client.publish(telemetry(rank, stage=1, replica=column, links=rows))


def replaced(agent: AgentHandle) -> None:
    """Kill an agent; another follows."""
    agent.process.kill()
    agent.process.wait(DEADLINE)

    def tended() -> bool:
        agent.tend()
        return agent.alive

    until(tended, "another agent")


def test_what_ranks_of_a_part_tell_reaches_the_ingest(job: Job) -> None:
    lines = [job.line(rank) for rank in range(4)]
    assert all(line.ready for line in lines)
    lines[0].publish(telemetry(0, iteration=4, finished_iteration=finished(3)))
    windows(lines[2], USUAL, ENOUGH)
    until(lambda: job.ingest.iterations() == [3] and job.ingest.links(), "link 0 and iteration 3")
    (link,) = job.ingest.links()
    assert (link.link, link.health, link.wire_time) == (0, "healthy", USUAL)
    windows(lines[2], LATE, 4)
    slow = until(job.told, "that link 0 is slow")[0]
    assert (slow.link, slow.column, slow.direction, slow.health) == (0, 0, "forward", "slow")
    assert slow.delay == pytest.approx(LATE - USUAL, rel=0.05)


@pytest.mark.times
def test_a_slow_link_of_a_part_is_known_within_200_ms(job: Job) -> None:
    line = job.line(2)
    windows(line, USUAL, ENOUGH)
    until(job.ingest.links, "link 0")
    windows(line, LATE, 3)
    began = time.monotonic()
    until(job.told, "that link 0 is slow")
    assert time.monotonic() - began < 0.2


def test_a_directive_reaches_the_ranks_of_all_parts(job: Job) -> None:
    lines = [job.line(rank) for rank in range(3)]
    job.ingest.issue(3)
    for rank, line in enumerate(lines):
        plan = until(line.newest_plan, f"the plan at rank {rank}")
        assert (plan.version, [mine.stage for mine in plan.stages]) == (3, [rank // 2])
    late = job.line(3)
    assert until(late.newest_plan, "the plan at a rank that comes late").version == 3


@pytest.mark.full
def test_a_part_goes_on_with_another_agent_of_the_job(job: Job) -> None:
    line = job.line(2)
    windows(line, USUAL, ENOUGH)
    windows(line, LATE, 4)
    until(job.told, "that link 0 is slow")
    replaced(job.zero)
    job.ingest.reports.clear()
    job.line(0).publish(telemetry(0))
    until(job.told, "that link 0 is slow, from another agent of the job")
    job.ingest.issue(5)
    assert until(line.newest_plan, "a plan from it").version == 5


def test_a_part_goes_on_with_another_agent_of_its_own(job: Job) -> None:
    """Which learns that a link is slow: by itself it would take that for normal."""
    job.ingest.issue(3)
    line = job.line(2)
    windows(line, USUAL, ENOUGH)
    windows(line, LATE, 4)
    until(job.told, "that link 0 is slow")
    until(line.newest_plan, "plan 3")
    replaced(job.one)
    other = job.line(3)
    assert until(other.newest_plan, "plan 3 from the new agent").version == 3
    assert line.wait_until_ready(DEADLINE), "no line to it"
    job.ingest.reports.clear()
    for _ in range(30):
        windows(line, LATE, 1)
    windows(line, USUAL, 30)
    until(lambda: [row for row in job.told() if row.health == "healthy"], "that link 0 is well")


def test_what_is_not_of_a_part_is_refused(job: Job, token_file: Path) -> None:
    assert job.line(0).ready and job.line(2).ready, "both agents run"
    stranger = connect(
        replace(job.context(2), secret=b"another"), job.one.host, job.one.port, wait=1.0
    )
    assert not stranger.ready
    lost = connect(job.context(2), job.zero.host, job.zero.port, wait=1.0)
    assert not lost.ready, "it is of the other part"
    third = start_part_agent(
        replace(job.context(3), secret=b"another"), MESH, part_ranks=2,
        upstream=("127.0.0.1", job.zero.port),
    )  # fmt: skip
    try:
        line = job.line(2)
        windows(line, USUAL, ENOUGH)
        until(job.ingest.links, "link 0, from the part with the secret")
    finally:
        third.close(1.0)


def test_the_last_words_of_a_part_are_heard(job: Job) -> None:
    lines = [job.line(rank) for rank in range(4)]
    for rank, line in enumerate(lines):
        line.publish(telemetry(rank, stage=rank // 2, state="finished"))
        line.close()
    job.one.close()
    job.zero.close()
    assert job.ingest.reports[-1].state == "finished"


def test_the_agent_of_a_part_dies_with_its_rank(job: Job) -> None:
    job.line(2)
    assert job.one.process.stdin is not None
    job.one.process.stdin.close()
    assert job.one.process.wait(DEADLINE) == 0
    assert job.zero.alive


def test_parts_are_pods_of_several_ranks() -> None:
    assert part_ranks([(rank % 2, 2) for rank in range(6)]) == 2
    assert part_ranks([(rank, 4) for rank in range(4)]) == 0, "one pod"


@pytest.mark.parametrize(
    "place",
    [
        pytest.param(lambda rank: (0, 1), id="pods of one rank"),
        pytest.param(lambda rank: (rank % 3, 3) if rank < 3 else (0, 1), id="pods that differ"),
        pytest.param(lambda rank: (rank // 3, 2), id="ranks that alternate"),
    ],
)
def test_other_pods_share_agents(place: Callable[[int], tuple[int, int]]) -> None:
    few = [place(rank) for rank in range(launch.SHARED_RANKS)]
    assert part_ranks(few) == 0, "as few ranks as one agent judges"
    many = [place(rank) for rank in range(64 * 160)]
    assert part_ranks(many) == launch.SHARED_RANKS


def test_no_agent_judges_more_ranks_in_a_larger_job() -> None:
    """What it costs is by the ranks that connect to it, and by the parts' states."""
    for world in (launch.SHARED_RANKS + 1, 1000, 64 * 160):
        mesh, ranks = MeshShape(stages=1, replicas=world), part_ranks([(0, 1)] * world)
        found = [
            AgentConfig(
                job="j", namespace="n", attempt=0, mesh=mesh, secret_hex="", listen_fd=0, parent=0,
                part=number, part_ranks=ranks,
            ).ranks
            for number in range(1 + len(Parts(mesh, ranks)))
        ]  # fmt: skip
        assert max(map(len, found)) == launch.SHARED_RANKS
        assert [rank for each in found for rank in each] == list(range(world))


def train(context: TrainerContext, pod: int) -> tuple[bool, bool, int]:
    """An iteration, and others until all ranks have lines. Returns whether this rank has an agent,
    and a line to it, and the agent's number of the part. ``pod``: ranks of each."""
    context = replace(context, local_rank=context.rank % pod, local_world_size=pod)
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    with Pipeline(
        module, context=context, loss_fn=nn.functional.mse_loss, microbatches=4, policy="1f1b"
    ) as pipe:
        line, agent = pipe._parts.control, pipe._parts.agent
        assert isinstance(line, AgentClient)
        deadline = time.monotonic() + DEADLINE
        while True:
            pipe.step(torch.ones(8, 4), target=torch.zeros(8, 4))
            up = torch.tensor(int(line.ready))
            dist.all_reduce(up, dist.ReduceOp.MIN)
            if up:
                break
            assert time.monotonic() < deadline, f"no line within {DEADLINE} s"
        port = line._address[1]
        return agent is not None, agent is not None and agent.port == port, port


SEATS = {"secret": SECRET, "ingest_url": "http://127.0.0.1:9"}


@pytest.mark.full
def test_every_rank_connects_to_the_agent_of_its_part() -> None:
    ranks = Ranks(4, train, 2, context=SEATS).wait(100)
    assert [rank.exitcode for rank in ranks] == [0] * 4, "".join(rank.error for rank in ranks)
    found = [rank.value for rank in ranks]
    assert [each[:2] for each in found] == [(True, True), (False, False)] * 2
    ports = [each[2] for each in found]
    assert ports[0] == ports[1] != ports[2] == ports[3]


def train_alone(context: TrainerContext) -> tuple[bool, bool, int]:
    """As :func:`train` in a pod of one rank, where two ranks are as many as one agent judges."""
    launch.SHARED_RANKS = 2
    return train(context, pod=1)


@pytest.mark.full
def test_pods_of_one_rank_connect_to_the_agents_that_they_share() -> None:
    """The last part has one rank, as five leave it."""
    ranks = Ranks(5, train_alone, context=SEATS).wait(100)
    assert [rank.exitcode for rank in ranks] == [0] * 5, "".join(rank.error for rank in ranks)
    found = [rank.value for rank in ranks]
    assert [each[0] for each in found] == [True, False, True, False, True]
    ports = [each[2] for each in found]
    assert ports[0] == ports[1] != ports[2] == ports[3] != ports[4]
