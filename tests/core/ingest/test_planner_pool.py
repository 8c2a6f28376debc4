"""Decisions made in another process: the same ones, without holding up anybody's reports."""

from __future__ import annotations

import asyncio
import pickle
import re
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from pipemorph.api.spec import JobSpec, ScheduleSpec
from pipemorph.control import Health, JobController
from pipemorph.control.decide.findings import NoPlan
from pipemorph.control.decide.replan import Proposal, Replan, propose
from pipemorph.control.first_plan import (
    initial_problem,
    initial_schedule,
    schedule_for_others,
    share,
)
from pipemorph.errors import InputError
from pipemorph.ingest import IngestHandler, MemoryStore, PlannerLost, ProcessPlanner
from pipemorph.ingest.planner_pool import plan_here
from pipemorph.wire import DirectiveEnvelope, LinkHealthReport

OP = {"forward": 10.0, "backwardInput": 10.0, "backwardWeight": 10.0}
STAGES = 4


def controller() -> JobController:
    spec = {
        "parallelism": {"stages": STAGES},
        "schedule": {"microbatches": 12, "stageTimes": [OP] * STAGES},
        "trainer": {"module": "x", "iterations": 100},
        "template": {"spec": {"containers": [{"name": "trainer", "image": "i"}]}},
    }
    return JobController(JobSpec.model_validate(spec))


def report(sequence: int, wire: float, *, first: float = 0.002, **changes: Any) -> LinkHealthReport:
    """Link 1 takes ``wire`` seconds, link 0 ``first``, the other 2 ms."""
    times = [dict.fromkeys(("min", "p50", "p99", "mean"), w) for w in (first, wire, 0.002)]
    links = [
        {
            "link": link, "direction": direction, "route": "direct", "transport": "gloo",
            "iteration": sequence, "bytes": 1, "queue_p50": 0.0,
            "wire": {"count": 2, "exact": 2, **times[link]},
        }
        for link in range(STAGES - 1)
        for direction in ("forward", "backward")
    ]  # fmt: skip
    values = {
        "job": "gpt", "namespace": "default", "attempt": 0, "sequence": sequence, "sent_at": 1.0,
        "state": "training", "iteration": sequence, "observed_plan_version": 0,
        "applied_plan_version": 0,
        "links": links,
    }  # fmt: skip
    return LinkHealthReport.model_validate(values | changes)


def slow_down(job: JobController) -> int:
    """Report a healthy link, then a slow one, until a decision is due. Returns the sequence."""
    for sequence in range(1, 40):
        wire = 0.002 if sequence < 12 else 0.08
        job.report(report(sequence, wire, attempt=job.attempt), 1000.0)
        if job.replan is not None or job.plan_version:
            return sequence
    raise AssertionError("no decision was due in 40 reports")


def test_a_decision_waits_for_its_host() -> None:
    job = controller()
    slow_down(job)
    asked = job.replan
    assert asked is not None
    assert job.directive() is None
    job.settle(asked, propose(asked), 1000.0)
    assert job.directive() is not None
    assert len(job.records) == 1
    assert job.replan is None


def test_reports_are_taken_while_a_decision_is_made_and_no_second_one_is_asked_for() -> None:
    job = controller()
    last = slow_down(job)
    asked = job.replan
    for sequence in range(last + 1, last + 30):
        job.report(report(sequence, 0.002, first=0.09), 1000.0)
    assert job.replan is asked
    links = [link.health for link in job.links(1000.0)]
    assert links == [Health.SLOW, Health.HEALTHY, Health.HEALTHY]
    assert asked is not None
    job.settle(asked, propose(asked), 1000.0)
    assert job.plan_version == 1
    # What came meanwhile is the next one's cause.
    job.report(report(last + 30, 0.002, first=0.09), 1000.0)
    assert job.replan not in (None, asked)


def test_a_decision_for_ranks_that_are_gone_is_dropped() -> None:
    job = controller()
    slow_down(job)
    asked = job.replan
    assert asked is not None
    job.begin_attempt(1)
    assert job.replan is None
    job.settle(asked, propose(asked), 1000.0)
    assert job.directive() is None
    # Nor does it pass for the answer to what the new ranks wait for.
    slow_down(job)
    waits_for = job.replan
    job.settle(asked, propose(asked), 1000.0)
    assert job.plan_version == 0
    assert job.replan is waits_for is not None


def test_a_fault_of_the_planner_keeps_the_plan_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(_: Replan) -> Proposal:
        raise ZeroDivisionError("by a delay")

    job = controller()
    slow_down(job)
    assert job.replan is not None
    monkeypatch.setattr("pipemorph.ingest.planner_pool.propose", broken)
    job.settle(job.replan, asyncio.run(plan_here(job.replan)), 1000.0)
    assert job.plan_version == 0
    assert job.decisions[-1].kind == "keep"
    assert "ZeroDivisionError: by a delay" in job.decisions[-1].reason


class Held:
    """A planner that waits for the test."""

    def __init__(self) -> None:
        self.asked: list[Replan] = []
        self.go = asyncio.Event()
        self.lost = False

    async def __call__(self, asked: Replan) -> Proposal:
        self.asked.append(asked)
        if self.lost:
            raise PlannerLost("the planner exited (-9)")
        await self.go.wait()
        return propose(asked)


def with_handler(
    planner: Any, test: Callable[[IngestHandler, JobController], Awaitable[None]]
) -> None:
    async def run() -> None:
        store, job = MemoryStore(), controller()
        store.add("default", "gpt", job)
        await asyncio.wait_for(test(IngestHandler(store, planner=planner), job), 30)

    asyncio.run(run())


async def post(handler: IngestHandler, sequence: int, wire: float) -> DirectiveEnvelope:
    await asyncio.sleep(0)  # As a socket would.
    body = report(sequence, wire).model_dump_json().encode()
    reply = await handler.report("default", "gpt", body)
    assert reply.status == 200, reply.body
    return DirectiveEnvelope.model_validate_json(reply.body)


def test_a_report_does_not_wait_for_the_planner_and_the_poll_brings_what_it_decides() -> None:
    planner = Held()

    async def test(handler: IngestHandler, job: JobController) -> None:
        last = slow_down(job)
        poll = asyncio.create_task(
            handler.poll("default", "gpt", attempt="0", after="0", wait="20")
        )
        for sequence in range(last + 1, last + 10):
            assert (await post(handler, sequence, 0.08)).directive is None
        assert len(planner.asked) == 1, "one decision at a time"
        planner.go.set()
        envelope = DirectiveEnvelope.model_validate_json((await poll).body)
        assert envelope.directive is not None
        assert envelope.directive.plan_version == 1
        assert (await post(handler, last + 10, 0.08)).directive == envelope.directive

    with_handler(planner, test)


def test_a_decision_whose_planner_was_lost_is_asked_for_again() -> None:
    planner = Held()

    async def test(handler: IngestHandler, job: JobController) -> None:
        last = slow_down(job)
        planner.lost = True
        await post(handler, last + 1, 0.08)
        while job.replan is None or not planner.asked:
            await asyncio.sleep(0)
        planner.lost = False
        planner.go.set()
        while job.plan_version == 0:
            await handler.tick("default", "gpt")
            await asyncio.sleep(0)
        assert len(planner.asked) >= 2

    with_handler(planner, test)


def asked_of_one() -> Replan:
    job = controller()
    slow_down(job)
    assert job.replan is not None
    return job.replan


def test_a_process_proposes_the_same_as_this_one() -> None:
    async def run() -> None:
        planner = ProcessPlanner()
        asked = asked_of_one()
        assert asked.spec.template is None, "a pod template travels with every decision"
        proposals = await asyncio.gather(*(planner(asked) for _ in range(5)))
        assert proposals == [propose(asked)] * 5
        assert proposals[0].chosen is not None
        await planner.close()

    asyncio.run(run())


def test_a_fault_in_a_process_is_told_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        planner = ProcessPlanner(1)
        asked = asked_of_one()
        monkeypatch.setattr("pipemorph.ingest.planner_pool.propose", int)
        monkeypatch.setattr("pipemorph.ingest.planner_pool.schedule_for_others", int)
        (finding,) = (await planner(asked)).found
        assert isinstance(finding, NoPlan)
        assert finding.why.startswith("the planner failed: TypeError: int() argument")
        with pytest.raises(InputError, match="the planner failed: TypeError"):
            await planner.first_plan(asked.spec)
        assert len(planner.running) == 1, "it goes on"
        await planner.close()

    asyncio.run(run())


def test_a_process_makes_the_same_first_plan_as_this_one() -> None:
    async def run() -> None:
        planner = ProcessPlanner(1)
        spec = controller().spec
        assert await planner.first_plan(spec) == initial_schedule(spec)
        assert await planner.first_plan(spec, wanted=False) is None
        schedule = {"warmup": [4] * STAGES, "inFlightLimit": 1}
        fixed = spec.model_copy(
            update={"schedule": ScheduleSpec(microbatches=12, **schedule)}  # type: ignore[arg-type]
        )
        with pytest.raises(InputError, match="in_flight_limit allows 1") as refused:
            initial_schedule(fixed)
        with pytest.raises(InputError, match=f"^{re.escape(str(refused.value))}$"):
            await planner.first_plan(fixed)
        await planner.close()

    asyncio.run(run())


def test_a_first_plan_that_takes_too_long_is_asked_for_again() -> None:
    async def run() -> None:
        planner = ProcessPlanner(1, limit_seconds=0.001)
        with pytest.raises(PlannerLost, match=r"no plan was found within 0\.001 s"):
            await planner.first_plan(controller().spec)
        await planner.close()

    asyncio.run(run())


def test_jobs_of_one_kind_share_a_plan_made_elsewhere() -> None:
    spec = controller().spec.model_copy(update={"schedule": ScheduleSpec(microbatches=13)})
    problem, made = initial_problem(spec), schedule_for_others(spec)
    kept = share(problem, made)
    again = schedule_for_others(spec)
    assert share(problem, pickle.loads(pickle.dumps(again))) is kept
    assert initial_schedule(spec) is kept


def test_a_process_that_dies_is_replaced() -> None:
    async def run() -> None:
        planner = ProcessPlanner(1)
        asked = asked_of_one()
        await planner.warm_up()
        (process,) = planner.running
        await planner(asked)
        assert planner.running == [process], "the one that is warm is used"
        process.kill()
        with pytest.raises(PlannerLost, match=r"exited \(-9\)"):
            await planner(asked)
        assert (await planner(asked)).chosen is not None
        (other,) = planner.running
        assert other.pid != process.pid
        await planner.close()
        assert other.returncode is not None

    asyncio.run(run())


def test_a_plan_that_takes_too_long_is_none() -> None:
    async def run() -> None:
        planner = ProcessPlanner(1, limit_seconds=0.001)
        proposal = await planner(asked_of_one())
        assert proposal == Proposal(None, None, (NoPlan("it took longer than 0.001 s"),))
        assert not planner.running, "it would still be at it"
        await planner.close()

    asyncio.run(run())
