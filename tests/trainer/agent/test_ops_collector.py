"""Ops of iterations, from ranks to their agent: of all columns, about once a second."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from agents import DEADLINE, Ingest, context, finished, telemetry
from launch import Ranks
from page_client import PageClient, page_of_agents
from torch import nn
from waiting import until

from pipemorph.planning.ir import OpKind
from pipemorph.protocol import OpsTrace
from pipemorph.protocol.op_traces import MOST_OPS
from pipemorph.protocol.page_messages import OpsWanted
from pipemorph.spec.mesh import MeshShape
from pipemorph_trainer import Pipeline, TrainerContext
from pipemorph_trainer.agent import AgentClient, connect_to_agent, start_agent
from pipemorph_trainer.agent.messages import NullControlClient
from pipemorph_trainer.agent.ops_collector import (
    ITERATIONS_AHEAD,
    PATIENCE_SECONDS,
    REQUEST_INTERVAL_SECONDS,
    OpsCollector,
)
from pipemorph_trainer.executor.device_times import MeasuredOp

F, B, W, BW = OpKind.F, OpKind.B, OpKind.W, OpKind.BW


def times(rank: int, stage: int, column: int, iteration: int) -> OpsTrace:
    ops = [
        MeasuredOp(F, 0, 100.0 + stage, 100.5 + stage),
        MeasuredOp(BW, 0, 101.0 + stage, 102.0 + stage),
    ]
    found = OpsTrace.from_ops((rank, stage, column), iteration, 0, 100.0, ops)
    assert found is not None
    return found


def test_ops_come_back_as_they_were() -> None:
    ops = [MeasuredOp(F, 0, 100.0015, 100.25), MeasuredOp(B, 0, 100.3, 100.5),
           MeasuredOp(W, 0, 100.5, 101.0), MeasuredOp(BW, 1, 101.0, 101.25)]  # fmt: skip
    trace = OpsTrace.from_ops((3, 1, 1), 7, 2, 100.0, ops)
    assert trace is not None and trace.kinds == "FIWB"
    back = OpsTrace.model_validate_json(trace.to_json())
    assert back.column == 1 and [op[:2] for op in back.ops] == [op[:2] for op in ops]
    for one, other in zip(back.ops, ops, strict=True):
        assert one[2:4] == pytest.approx(other[2:], abs=1e-6)
    assert OpsTrace.from_ops((0, 0, 0), 7, 2, 100.0, []) is None
    assert OpsTrace.from_ops((0, 0, 0), 7, 2, 100.0, ops[:1] * (MOST_OPS + 1)) is None


class RecordedRequests:
    def __init__(self, mesh: MeshShape) -> None:
        self.requests: list[tuple[set[int], int]] = []
        self.whole: list[list[OpsTrace]] = []
        self.jobs: list[list[OpsTrace]] = []
        self.collector = OpsCollector(
            mesh,
            lambda ranks, i: self.requests.append((ranks, i)),
            self.whole.append,
            self.jobs.append,
        )

    def answer(self, iteration: int, now: float, mesh: MeshShape) -> None:
        """Send the ops of an iteration if they were requested, from all ranks that should."""
        ranks, requested = self.requests[-1] if self.requests else (set(), -1)
        for rank in sorted(ranks, reverse=True) if requested == iteration else ():
            at = mesh.find_coordinate(rank)
            self.collector.record_ops(times(rank, at.stage, at.column, iteration), now)


MESH = MeshShape(stages=2, replicas=2)
"""Ranks 0 and 1 have stage 0, ranks 2 and 3 stage 1."""


def test_one_iteration_a_second_is_requested_from_all_ranks() -> None:
    """The page gets its column, while it watches."""
    record = RecordedRequests(MESH)
    record.collector.extend_watch(OpsWanted(column=1, seconds=5.0), 0.0)
    for tick in range(100):
        record.collector.record_progress(tick, 0.1, tick / 10)
        record.answer(tick, tick / 10, MESH)
    assert len(record.requests) in (9, 10) and len(record.jobs) in (9, 10)
    assert all(ranks == {0, 1, 2, 3} for ranks, _ in record.requests)
    for traces in record.jobs:
        assert [(t.column, t.stage) for t in traces] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert len(record.whole) in (4, 5)
    assert all([(t.column, t.stage) for t in ts] == [(1, 0), (1, 1)] for ts in record.whole)


def test_a_large_job_is_sampled_less_often_and_the_page_is_not() -> None:
    mesh = MeshShape(stages=2, replicas=80)
    record = RecordedRequests(mesh)
    record.collector.extend_watch(OpsWanted(column=1, seconds=5.0), 0.0)
    for tick in range(100):
        record.collector.record_progress(tick, 0.1, tick / 10)
        record.answer(tick, tick / 10, mesh)
    whole = [len(ranks) for ranks, _ in record.requests if len(ranks) > 2]
    assert whole == [160, 160], "160 ranks at 32 a second"
    assert len(record.jobs) == 2 and len(record.whole) in (4, 5)


def test_the_requested_iteration_is_ahead_of_all_ranks() -> None:
    for seconds, least in ((2.0, ITERATIONS_AHEAD), (0.01, 30)):
        record = RecordedRequests(MESH)
        record.collector.extend_watch(OpsWanted(column=0, seconds=5.0), 0.0)
        record.collector.record_progress(10, seconds, 0.0)
        ((_, iteration),) = record.requests
        assert iteration >= 10 + least


def test_incomplete_ops_are_given_up_and_unrequested_ones_dropped() -> None:
    record = RecordedRequests(MESH)
    collector = record.collector
    collector.extend_watch(OpsWanted(column=0, seconds=100.0), 0.0)
    collector.extend_watch(OpsWanted(column=9, seconds=100.0), 0.0)  # The job has no such column.
    collector.record_progress(0, 1.0, 0.0)
    ((ranks, first),) = record.requests
    assert ranks == {0, 1, 2, 3}
    collector.record_ops(times(0, 0, 0, first), 1.0)
    collector.record_ops(times(0, 0, 0, first), 1.0)
    collector.record_ops(times(2, 1, 0, first + 1), 1.0)
    collector.record_ops(times(3, 1, 1, first), 1.0)
    collector.record_progress(1, 1.0, 1.0 + REQUEST_INTERVAL_SECONDS)
    assert len(record.requests) == 1 and record.whole == record.jobs == []
    collector.record_progress(9, 1.0, 20.0 + PATIENCE_SECONDS)
    assert len(record.requests) == 2
    collector.record_ops(times(2, 1, 0, first), 21.0)
    assert record.whole == record.jobs == []
    # Ranks that start again begin anew.
    collector.record_progress(1, 1.0, 60.0)
    assert record.requests[-1][1] <= 1 + ITERATIONS_AHEAD


def test_without_an_agent_nothing_is_requested() -> None:
    assert NullControlClient().requested_ops_iteration == -1


# --- real agents --------------------------------------------------------------------------------


class Job:
    """The agent of a job, and lines of its ranks."""

    def __init__(self, ingest: Ingest, token_file: Path, stack: contextlib.ExitStack) -> None:
        self.ingest, self._token_file, self._stack = ingest, token_file, stack
        self.agent = start_agent(self.context(0), MESH)
        stack.callback(lambda: self.agent.close(1.0))

    def context(self, rank: int) -> TrainerContext:
        return context(self.ingest, self._token_file, rank, world_size=4)

    def line(self, rank: int) -> AgentClient:
        agent = self.agent
        client = connect_to_agent(self.context(rank), agent.host, agent.port, wait=DEADLINE)
        self._stack.callback(client.close)
        return client


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Iterator[PageClient]:
    with page_of_agents(monkeypatch) as made:
        yield made


@pytest.fixture
def job(ingest: Ingest, token_file: Path, page: PageClient) -> Iterator[Job]:
    with contextlib.ExitStack() as stack:
        yield Job(ingest, token_file, stack)


def test_ranks_get_requests_and_their_ops_reach_the_page(job: Job, page: PageClient) -> None:
    """Ranks of the other column stay off the page."""
    page.connect()
    page.want(column=0, seconds=30.0)
    lines = [job.line(rank) for rank in range(4)]
    now = 0

    def step() -> bool:
        nonlocal now
        now += 1
        for rank, line in enumerate(lines):
            stage, column = divmod(rank, 2)
            line.pop_newest_plan()
            ops = times(rank, stage, column, now) if line.requested_ops_iteration == now else None
            done = finished(now) if rank == 0 else None
            line.publish(
                telemetry(rank, mesh=MESH, iteration=now, ops=ops, finished_iteration=done)
            )  # fmt: skip
        return bool(page.ops)

    until(step, "ops at the page")
    seen = page.ops[0].ops
    assert [(each.column, each.rank) for each in seen] == [(0, 0), (0, 2)]
    assert {line.requested_ops_iteration for line in lines} == {lines[0].requested_ops_iteration}
    assert lines[0].requested_ops_iteration >= seen[0].iteration


# --- a real job ---------------------------------------------------------------------------------


def train(context: TrainerContext, done: str) -> list[str]:
    """Train until a file says that it is enough. Returns the iterations that sent ops."""
    received: list[str] = []
    stage = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    with Pipeline(
        stage, context=context, loss_fn=nn.functional.mse_loss, microbatches=4, policy="1f1b"
    ) as pipe:
        line = pipe._parts.control
        publish = line.publish

        def look(message: Any) -> None:
            ops = message.report.ops if message.report is not None else None
            if ops is not None:
                received.append(f"{ops.iteration}:{ops.kinds}")
            publish(message)

        line.publish = look  # type: ignore[method-assign]
        for i in range(100_000):
            pipe.step(torch.ones(8, 4), target=torch.zeros(8, 4))
            over = torch.tensor(int(i % 50 == 49 and Path(done).exists()))
            if i % 50 == 49:
                torch.distributed.all_reduce(over)
                if over:
                    return received
    raise AssertionError("it was not ended")


@pytest.mark.full
def test_a_real_job_sends_ops_about_once_a_second_and_to_the_page_while_it_watches(
    ingest: Ingest, token_file: Path, tmp_path: Path, page: PageClient
) -> None:
    enough = tmp_path / "enough"
    where = {
        "ingest_url": f"http://127.0.0.1:{ingest.port}",
        "token_file": token_file,
        "secret": b"secret",
    }
    # The server that forks ranks may have begun before these variables were set.
    ranks = Ranks(2, train, str(enough), environ=page.environ, context=where)
    until(lambda: len(ingest.iterations()) > 100, "iterations")
    page.connect()

    def reported() -> bool:
        page.read()
        return any(each.report is not None for each in page.feed)

    until(reported, "a report")
    assert page.ops == []
    hello, *others = page.feed
    assert hello.hello is not None and len(hello.hello.iterations) > 50
    whole = next(each.report for each in others if each.report is not None)
    assert len(whole.stages) == 2 and len(whole.links) == 1, "the whole state comes first"
    first = max(ingest.iterations())
    page.want(column=0, seconds=3.0)
    until(lambda: len(page.ops) >= 2, "ops of two iterations")
    ops = page.ops[0].ops
    page.close()
    assert ops[0].iteration > first and [each.stage for each in ops] == [0, 1]
    for each in ops:
        assert sorted(each.microbatches) == sorted([*range(4)] * (len(each.kinds) // 4))
        assert each.kinds.count("F") == 4
        assert all(one.end <= other.start + 1e-6 for one, other in pairwise(each.ops))
    # An activation is there before it is used, by the clock of one machine.
    sent = {op.microbatch: op.end for op in ops[0].ops if op.kind is F}
    assert all(op.start >= sent[op.microbatch] for op in ops[1].ops if op.kind is F)
    enough.touch()
    for result in ranks.wait():
        assert result.exitcode == 0, result.error
        # A handful of all those iterations.
        assert 2 <= len(result.value) <= 30, result.value
