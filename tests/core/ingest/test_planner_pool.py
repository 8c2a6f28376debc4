"""Decisions made in another process: the same ones, without delays of reports."""

from __future__ import annotations

import asyncio
import os
import pickle
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from observing import report, tell

from pipemorph.control import Health, JobController
from pipemorph.control.decide.layouts.layer_split import LayerSplit
from pipemorph.control.decide.layouts.layout_changes import LayoutSearchRequest, search_layout
from pipemorph.control.decide.layouts.layout_search import NetworkMeasurements
from pipemorph.control.decide.layouts.stage_overhead import StageOverhead
from pipemorph.control.decide.plan_choice import DecisionRequest, NoPlanFound, PlanProposal, decide
from pipemorph.control.first_plan import (
    build_initial_problem,
    make_initial_schedule,
    make_schedule_for_others,
    share_schedule,
)
from pipemorph.control.planner_worker import WORKER_NICENESS
from pipemorph.errors import InputError
from pipemorph.ingest import (
    FirstPlanner,
    IngestHandler,
    InMemoryJobStore,
    PlannerLostError,
    PlannerPool,
)
from pipemorph.ingest.planner_pool import PlannerProcess, make_empty_proposal, plan_in_process
from pipemorph.planning import StageTimes
from pipemorph.protocol import DirectiveEnvelope, LinkSample
from pipemorph.spec.job_spec import JobSpec
from pipemorph.spec.layout import Layout
from pipemorph.spec.sections.schedule import ScheduleSpec

OP = {"forward": 10.0, "backwardInput": 10.0, "backwardWeight": 10.0}
STAGES = 4
JOB = ("default", "gpt")


def controller() -> JobController:
    spec = {
        "parallelism": {"stages": STAGES},
        "schedule": {"microbatches": 12, "stageTimes": [OP] * STAGES},
        "trainer": {"module": "x", "iterations": 100},
        "template": {"spec": {"containers": [{"name": "trainer", "image": "i"}]}},
    }
    return JobController(JobSpec.model_validate(spec))


def windows(iteration: int, wire: float, first: float = 0.002) -> list[LinkSample]:
    """Link 1 takes ``wire`` seconds, link 0 ``first``, the other 2 ms."""
    times = [dict.fromkeys(("min", "p50", "p99", "mean"), w) for w in (first, wire, 0.002)]
    return [
        LinkSample.model_validate(
            {
                "link": link, "direction": direction, "route": "direct", "transport": "gloo",
                "iteration": iteration, "bytes": 1, "queue_p50": 0.0,
                "wire": {"count": 2, "exact": 2, **times[link]},
            }
        )
        for link in range(STAGES - 1)
        for direction in ("forward", "backward")
    ]  # fmt: skip


def send(job: JobController, iteration: int, wire: float, *, first: float = 0.002) -> None:
    tell(job, 1000.0, iteration=iteration, links=windows(iteration, wire, first))


def slow_down(job: JobController) -> int:
    """Report a healthy link, then a slow one, until a decision is due. Returns the sequence."""
    for sequence in range(1, 40):
        wire = 0.002 if sequence < 12 else 0.08
        send(job, sequence, wire)
        if job.pending_request is not None or job.plan_version:
            return sequence
    raise AssertionError("no decision was due in 40 reports")


def test_a_decision_waits_for_its_host() -> None:
    job = controller()
    slow_down(job)
    request = job.pending_request
    assert request is not None
    assert job.get_directive() is None
    job.apply_proposal(request, decide(request), 1000.0)
    assert job.get_directive() is not None
    assert len(job.records) == 1
    assert job.pending_request is None


def test_reports_are_processed_during_a_decision_and_no_second_one_is_requested() -> None:
    job = controller()
    last = slow_down(job)
    request = job.pending_request
    for sequence in range(last + 1, last + 30):
        send(job, sequence, 0.002, first=0.09)
    assert job.pending_request is request
    links = [link.health for link in job.get_link_states(1000.0)]
    assert links == [Health.SLOW, Health.HEALTHY, Health.HEALTHY]
    assert request is not None
    job.apply_proposal(request, decide(request), 1000.0)
    assert job.plan_version == 1
    # Reports that came meanwhile are the next one's cause.
    send(job, last + 30, 0.002, first=0.09)
    assert job.pending_request not in (None, request)


def test_a_decision_for_ranks_that_are_gone_is_dropped() -> None:
    job = controller()
    slow_down(job)
    request = job.pending_request
    assert request is not None
    job.begin_attempt(1)
    assert job.pending_request is None
    job.apply_proposal(request, decide(request), 1000.0)
    assert job.get_directive() is None
    # Nor does it pass for the answer to what the new ranks wait for.
    slow_down(job)
    waits_for = job.pending_request
    job.apply_proposal(request, decide(request), 1000.0)
    assert job.plan_version == 0
    assert job.pending_request is waits_for is not None


def test_a_fault_of_the_planner_keeps_the_plan_and_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(_: DecisionRequest) -> PlanProposal:
        raise ZeroDivisionError("by a delay")

    job = controller()
    slow_down(job)
    assert job.pending_request is not None
    monkeypatch.setattr("pipemorph.ingest.planner_pool.decide", broken)
    job.apply_proposal(
        job.pending_request, asyncio.run(plan_in_process(JOB, job.pending_request)), 1000.0
    )
    assert job.plan_version == 0
    assert job.decisions[-1].kind == "keep"
    assert "ZeroDivisionError: by a delay" in job.decisions[-1].reason


class Held:
    """A planner that waits for the test."""

    def __init__(self) -> None:
        self.requests: list[DecisionRequest] = []
        self.go = asyncio.Event()
        self.lost = False

    async def __call__(self, key: tuple[str, str], request: DecisionRequest) -> PlanProposal:
        self.requests.append(request)
        if self.lost:
            raise PlannerLostError("the planner exited (-9)")
        await self.go.wait()
        return decide(request)


def with_handler(planner: Any) -> tuple[IngestHandler, JobController]:
    store, job = InMemoryJobStore(), controller()
    store.add_job("default", "gpt", job)
    return IngestHandler(store, planner=planner), job


async def post(handler: IngestHandler, sequence: int) -> DirectiveEnvelope:
    await asyncio.sleep(0)  # Yields as a socket would.
    body = report(sequence, job="gpt").to_json()
    reply = await handler.handle_report("default", "gpt", body)
    assert reply.status == 200, reply.body
    return DirectiveEnvelope.model_validate_json(reply.body)


async def test_a_report_does_not_wait_for_the_planner_and_the_poll_brings_its_decision() -> None:
    planner = Held()
    handler, job = with_handler(planner)
    last = slow_down(job)
    poll = asyncio.create_task(
        handler.handle_directive_poll("default", "gpt", attempt="0", after="0", wait="20")
    )
    for sequence in range(last + 1, last + 10):
        assert (await post(handler, sequence)).directive is None
    assert len(planner.requests) == 1, "one decision at a time"
    planner.go.set()
    envelope = DirectiveEnvelope.model_validate_json((await poll).body)
    assert envelope.directive.plan_version == 1
    assert (await post(handler, last + 10)).directive == envelope.directive


async def test_a_decision_whose_planner_was_lost_is_requested_again() -> None:
    planner = Held()
    handler, job = with_handler(planner)
    last = slow_down(job)
    planner.lost = True
    await post(handler, last + 1)
    while job.pending_request is None or not planner.requests:
        await asyncio.sleep(0)
    planner.lost = False
    planner.go.set()
    while job.plan_version == 0:
        await handler.tick_job("default", "gpt")
        await asyncio.sleep(0)
    assert len(planner.requests) >= 2


def make_request() -> DecisionRequest:
    job = controller()
    slow_down(job)
    assert job.pending_request is not None
    return job.pending_request


@asynccontextmanager
async def with_pool(pool: PlannerPool) -> AsyncIterator[PlannerPool]:
    try:
        async with asyncio.timeout(60):
            yield pool
    finally:
        await pool.close()


async def test_a_process_proposes_the_same_as_this_one() -> None:
    async with with_pool(PlannerPool(1)) as pool:
        request = make_request()
        assert request.spec.template is None, "a pod template travels with every decision"  # type: ignore[attr-defined]
        proposals = await asyncio.gather(*(pool(("d", f"{i}"), request) for i in range(3)))
        assert proposals == [decide(request)] * 3
        assert proposals[0].chosen is not None
        (pid,) = pool.worker_pids  # The one that is warm is used again.
        assert os.getpriority(os.PRIO_PROCESS, pid) == os.nice(0) + WORKER_NICENESS


async def test_a_fault_in_a_process_is_the_reason_to_keep_the_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with with_pool(PlannerPool(1)) as pool:
        monkeypatch.setattr("pipemorph.ingest.planner_pool.decide", int)
        for _ in range(2):
            (finding,) = (await pool(JOB, make_request())).findings
            assert isinstance(finding, NoPlanFound)
            assert finding.why.startswith("the planner failed: TypeError: int() argument")
        assert len(pool.worker_pids) == 1, "the process goes on"


async def test_a_process_makes_the_same_first_plan_as_this_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planner = FirstPlanner(limit_seconds=60)
    spec = controller().spec
    assert await planner(spec) == make_initial_schedule(spec)
    assert await planner(spec, wanted=False) is None
    schedule = {"warmup": [4] * STAGES, "inFlightLimit": 1}
    fixed = spec.model_copy(
        update={"schedule": ScheduleSpec(microbatches=12, **schedule)}  # type: ignore[arg-type]
    )
    with pytest.raises(InputError, match="in_flight_limit allows 1") as refused:
        make_initial_schedule(fixed)
    with pytest.raises(InputError, match=f"^{re.escape(str(refused.value))}$"):
        await planner(fixed)
    monkeypatch.setattr("pipemorph.ingest.planner_pool.make_schedule_for_others", int)
    with pytest.raises(InputError, match="the planner failed: TypeError"):
        await planner(spec)
    await planner.close()


async def test_a_first_plan_that_takes_too_long_is_requested_again() -> None:
    planner = FirstPlanner(limit_seconds=0.001)
    with pytest.raises(PlannerLostError, match=r"no plan was found within 0\.001 s"):
        await planner(controller().spec)
    await planner.close()


def test_jobs_of_one_kind_share_a_plan_made_elsewhere() -> None:
    spec = controller().spec.model_copy(update={"schedule": ScheduleSpec(microbatches=13)})
    problem, made = build_initial_problem(spec), make_schedule_for_others(spec)
    shared = share_schedule(problem, made)
    again = make_schedule_for_others(spec)
    assert share_schedule(problem, pickle.loads(pickle.dumps(again))) is shared
    assert make_initial_schedule(spec) is shared


def die_once(mark: str) -> str:
    """Kill this process, but return if another one has been killed here."""
    path = Path(mark)
    if not path.exists():
        path.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def die(_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


async def test_the_work_of_a_process_that_dies_is_repeated_once(tmp_path: Path) -> None:
    process = PlannerProcess()
    try:
        assert await process.run(die_once, str(tmp_path / "died"), 60) == "alive"
        pid = process.pid
        assert pid is not None
        with pytest.raises(PlannerLostError, match="died twice"):
            await process.run(die, None, 60)
    finally:
        await process.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_worker_ends_with_its_host() -> None:
    host = """
import asyncio, os, signal
from pipemorph.ingest.planner_pool import PlannerProcess

async def main():
    process = PlannerProcess()
    await process.run(bool, None, 60)
    print(process.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    asyncio.run(main())
"""
    # The worker has the pipe, too: it ends once both have exited.
    done = subprocess.run(
        [sys.executable, "-c", host], check=False, stdout=subprocess.PIPE, timeout=60
    )
    assert done.returncode == -signal.SIGKILL and done.stdout.strip().isdigit()


async def test_a_plan_that_takes_too_long_is_none_and_others_are_made(tmp_path: Path) -> None:
    async with with_pool(PlannerPool(1, limit_seconds=0.001)) as pool:
        others = asyncio.create_task(pool.search_layout(("other", "gpt"), slow_stage()))
        proposal = await pool(JOB, make_request())
        assert proposal == PlanProposal(
            None, None, (NoPlanFound("planning took longer than 0.001 s"),)
        )
        with pytest.raises(InputError, match=r"planning took longer than 0\.001 s"):
            await others
        assert not pool.worker_pids, "they would still be at it"
        pool._limit = 60.0
        assert (await pool(JOB, make_request())).chosen is not None


# --- other layers -----------------------------------------------------------------------------


def slow_stage() -> LayoutSearchRequest:
    """Request of a job whose stage 1 takes twice as long as the others."""
    spec = {
        "parallelism": {"stages": 3, "layers": 12},
        "schedule": {"microbatches": 8},
        "trainer": {"module": "x", "iterations": 100},
        "failurePolicy": {"maxRestarts": 1},
        "adaptation": {"relayout": True},
    }
    job = JobSpec.model_validate(spec)
    layout, ops = Layout.from_parallelism(job.parallelism), (0.01, 0.02, 0.01)
    stages = tuple(StageTimes(forward=t, backward_input=t, backward_weight=t) for t in ops)
    network = NetworkMeasurements(stages, (), (), True, 90, StageOverhead(12, (0.03,) * 3))
    split = LayerSplit(job, layout, stages, network.stage_overhead)
    return LayoutSearchRequest("it is slow", job, layout, network, {}, 2.0, split)


async def test_a_process_finds_the_same_split_as_this_one() -> None:
    async with with_pool(PlannerPool(1)) as pool:
        request = slow_stage()
        found = await pool.search_layout(JOB, request)
        assert found == search_layout(request)
        assert found is not None and found.layout.layers == (5, 2, 5)
        with pytest.raises(InputError, match="the planner failed: AttributeError"):
            await pool.search_layout(JOB, replace(request, network=None))  # type: ignore[arg-type]


# --- in turn ----------------------------------------------------------------------------------


class Workers:
    """Fake of the processes: each decision ends when the test says so."""

    def __init__(self, pool: PlannerPool) -> None:
        self.working: dict[int, asyncio.Future[PlanProposal]] = {}
        """Decisions by the number of remaining iterations, which is unique here."""
        pool._workers = pool._idle = [self for _ in pool._workers]  # type: ignore[misc]
        pool._idle = [*pool._workers]

    async def run(self, function: Any, request: DecisionRequest, limit: float) -> PlanProposal:
        mine = self.working[request.iterations_remaining or 0] = (
            asyncio.get_running_loop().create_future()
        )
        try:
            return await mine
        finally:
            del self.working[request.iterations_remaining or 0]

    async def close(self) -> None: ...

    def finish(self, number: int) -> None:
        self.working[number].set_result(make_empty_proposal(f"for {number}"))

    async def settled(self) -> list[int]:
        """The decisions in progress, once nothing else happens."""
        for _ in range(20):
            await asyncio.sleep(0)
        return list(self.working)


def numbered(number: int) -> DecisionRequest:
    return replace(make_request(), iterations_remaining=number)


async def test_namespaces_take_turns_and_one_alone_never_has_all_workers() -> None:
    seen: list[tuple[float, float]] = []
    async with with_pool(PlannerPool(2, on_decided=lambda *each: seen.append(each))) as pool:
        workers = Workers(pool)
        asks = [asyncio.create_task(pool(("many", f"{i}"), numbered(i))) for i in range(1, 6)]
        assert await workers.settled() == [1, 2], "the third worker is for other namespaces"
        assert pool.waiting_count == 3
        asks += [asyncio.create_task(pool(("few", f"{i}"), numbered(i))) for i in (11, 12)]
        assert await workers.settled() == [1, 2, 11], "at once"
        workers.finish(1)
        assert await workers.settled() == [2, 11, 3], "its turn, in the order of the requests"
        workers.finish(2)
        assert await workers.settled() == [11, 3, 12], "the turn of the other namespace"
        workers.finish(11)
        workers.finish(3)
        assert await workers.settled() == [12, 4, 5]
        assert (await asks[0]).findings == (NoPlanFound("for 1"),)
        assert len(seen) == 4 and all(waited >= 0 and took >= 0 for waited, took in seen)
        assert not pool.waiting_count
        for number in (12, 4, 5):
            workers.finish(number)
        await asyncio.gather(*asks)
        assert not pool._queues and not pool._running, "nothing remains of them"


async def test_a_decision_whose_caller_is_cancelled_is_not_made() -> None:
    async with with_pool(PlannerPool(1)) as pool:
        workers = Workers(pool)
        asks = [asyncio.create_task(pool(("a", f"{i}"), numbered(i))) for i in (1, 2, 3)]
        assert await workers.settled() == [1]
        for ask in asks[:2]:
            ask.cancel()
        await workers.settled()
        assert pool.waiting_count == 1
        workers.finish(1)
        assert await workers.settled() == [3]
        workers.finish(3)
        assert (await asks[2]).findings == (NoPlanFound("for 3"),)


async def test_the_decision_of_a_job_that_is_gone_is_dropped() -> None:
    pool = PlannerPool(1)
    workers = Workers(pool)
    store = InMemoryJobStore()
    handler = IngestHandler(store, planner=pool)
    busy = asyncio.create_task(pool(("default", "busy"), numbered(0)))
    jobs = [controller() for _ in range(3)]
    for i, job in enumerate(jobs):
        slow_down(job)
        store.add_job("default", f"{i}", job)
        await handler.tick_job("default", f"{i}")
    assert await workers.settled() == [0]
    assert pool.waiting_count == 3
    store.remove_job("default", "0")
    handler.drop_stale_decisions()
    await workers.settled()
    assert pool.waiting_count == 2
    jobs[1].begin_attempt(1)
    await handler.tick_job("default", "1")
    await workers.settled()
    assert pool.waiting_count == 1, "what the ranks of the last attempt were to do"
    again = controller()
    slow_down(again)
    store.add_job("default", "2", again)
    await handler.tick_job("default", "2")
    await workers.settled()
    assert pool.waiting_count == 1, "that of the one in its place"
    handler.close()
    busy.cancel()
    await pool.close()
