"""Decisions made in another process: the same ones, without holding up anybody's reports."""

from __future__ import annotations

import asyncio
import os
import pickle
import re
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from observing import report, tell

from pipemorph.api.layout import Layout
from pipemorph.api.sections.schedule import ScheduleSpec
from pipemorph.api.spec import JobSpec
from pipemorph.control import Health, JobController
from pipemorph.control.decide.findings import NoPlan
from pipemorph.control.decide.layouts.beside import Beside
from pipemorph.control.decide.layouts.layers import Split
from pipemorph.control.decide.layouts.moves import Question, search
from pipemorph.control.decide.layouts.relayout import SEARCH_SECONDS, Network
from pipemorph.control.decide.replan import Proposal, Replan, propose
from pipemorph.control.first_plan import (
    initial_problem,
    initial_schedule,
    schedule_for_others,
    share,
)
from pipemorph.errors import InputError
from pipemorph.ingest import (
    Decided,
    FirstPlanner,
    IngestHandler,
    MemoryStore,
    PlannerLost,
    PlannerPool,
)
from pipemorph.ingest.planner_pool import plan_here
from pipemorph.ingest.planner_processes import NICE, Answer, PlannerProcesses
from pipemorph.planning import StageTimes
from pipemorph.wire import DirectiveEnvelope, LinkSample

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
        send(job, sequence, 0.002, first=0.09)
    assert job.replan is asked
    links = [link.health for link in job.links(1000.0)]
    assert links == [Health.SLOW, Health.HEALTHY, Health.HEALTHY]
    assert asked is not None
    job.settle(asked, propose(asked), 1000.0)
    assert job.plan_version == 1
    # What came meanwhile is the next one's cause.
    send(job, last + 30, 0.002, first=0.09)
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
    job.settle(job.replan, asyncio.run(plan_here(JOB, job.replan)), 1000.0)
    assert job.plan_version == 0
    assert job.decisions[-1].kind == "keep"
    assert "ZeroDivisionError: by a delay" in job.decisions[-1].reason


class Held:
    """A planner that waits for the test."""

    def __init__(self) -> None:
        self.asked: list[Replan] = []
        self.go = asyncio.Event()
        self.lost = False

    async def __call__(self, key: tuple[str, str], asked: Replan) -> Proposal:
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


async def post(handler: IngestHandler, sequence: int) -> DirectiveEnvelope:
    await asyncio.sleep(0)  # As a socket would.
    body = report(sequence, job="gpt").body()
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
            assert (await post(handler, sequence)).directive is None
        assert len(planner.asked) == 1, "one decision at a time"
        planner.go.set()
        envelope = DirectiveEnvelope.model_validate_json((await poll).body)
        assert envelope.directive is not None
        assert envelope.directive.plan_version == 1
        assert (await post(handler, last + 10)).directive == envelope.directive

    with_handler(planner, test)


def test_a_decision_whose_planner_was_lost_is_asked_for_again() -> None:
    planner = Held()

    async def test(handler: IngestHandler, job: JobController) -> None:
        last = slow_down(job)
        planner.lost = True
        await post(handler, last + 1)
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


async def with_pool(pool: PlannerPool, test: Callable[[PlannerPool], Awaitable[None]]) -> None:
    try:
        await asyncio.wait_for(test(pool), 60)
    finally:
        await pool.close()


def test_a_process_proposes_the_same_as_this_one() -> None:
    async def test(pool: PlannerPool) -> None:
        asked = asked_of_one()
        assert asked.spec.template is None, "a pod template travels with every decision"  # type: ignore[attr-defined]
        proposals = await asyncio.gather(*(pool(("d", f"{i}"), asked) for i in range(5)))
        assert proposals == [propose(asked)] * 5
        assert proposals[0].chosen is not None

    asyncio.run(with_pool(PlannerPool(2), test))


def test_a_fault_in_a_process_is_told_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(pool: PlannerPool) -> None:
        monkeypatch.setattr("pipemorph.ingest.planner_pool.propose", int)
        for _ in range(2):
            (finding,) = (await pool(JOB, asked_of_one())).found
            assert isinstance(finding, NoPlan)
            assert finding.why.startswith("the planner failed: TypeError: int() argument")
        assert len(pool.running) == 1, "it goes on"
        monkeypatch.undo()
        assert (await pool(JOB, asked_of_one())).chosen is not None, "a fault is not remembered"

    asyncio.run(with_pool(PlannerPool(1), test))


def test_a_process_makes_the_same_first_plan_as_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        planner = FirstPlanner(limit_seconds=60)
        spec = controller().spec
        assert await planner(spec) == initial_schedule(spec)
        assert await planner(spec, wanted=False) is None
        schedule = {"warmup": [4] * STAGES, "inFlightLimit": 1}
        fixed = spec.model_copy(
            update={"schedule": ScheduleSpec(microbatches=12, **schedule)}  # type: ignore[arg-type]
        )
        with pytest.raises(InputError, match="in_flight_limit allows 1") as refused:
            initial_schedule(fixed)
        with pytest.raises(InputError, match=f"^{re.escape(str(refused.value))}$"):
            await planner(fixed)
        monkeypatch.setattr("pipemorph.ingest.planner_processes.schedule_for_others", int)
        with pytest.raises(InputError, match="the planner failed: TypeError"):
            await planner(spec)
        await planner.close()

    asyncio.run(run())


def test_a_first_plan_that_takes_too_long_is_asked_for_again() -> None:
    async def run() -> None:
        planner = FirstPlanner(limit_seconds=0.001)
        with pytest.raises(PlannerLost, match=r"no plan was found within 0\.001 s"):
            await planner(controller().spec)
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
    async def test(pool: PlannerPool) -> None:
        await pool(JOB, asked_of_one())
        (process,) = pool.running
        asked = replace(asked_of_one(), remaining=1000)
        await pool(JOB, asked)
        assert pool.running == [process], "the one that is warm is used"
        process.kill()
        asked = replace(asked, remaining=2000)
        with pytest.raises(PlannerLost, match=r"exited \(-9\)"):
            await pool(JOB, asked)
        assert (await pool(JOB, asked)).chosen is not None
        (other,) = pool.running
        assert other.pid != process.pid
        await pool.close()
        assert other.returncode is not None

    asyncio.run(with_pool(PlannerPool(1), test))


@pytest.mark.full
def test_only_processes_that_make_long_plans_are_nicer_than_their_host() -> None:
    async def run() -> None:
        pool = PlannerPool(1)
        try:
            await pool.warm_up()
            nice = {
                lane: [os.getpriority(os.PRIO_PROCESS, process.pid) for process in each.running]
                for lane, each in pool.processes.items()
            }
            assert nice == {"any": [os.nice(0) + NICE], "short": [os.nice(0)]}
        finally:
            await pool.close()

    asyncio.run(run())


def test_a_plan_that_takes_too_long_is_none() -> None:
    async def test(pool: PlannerPool) -> None:
        proposal = await pool(JOB, asked_of_one())
        assert proposal == Proposal(None, None, (NoPlan("it took longer than 0.001 s"),))
        assert not pool.running, "it would still be at it"

    asyncio.run(with_pool(PlannerPool(1, limit_seconds=0.001), test))


# --- other layers -----------------------------------------------------------------------------


def slow_stage() -> Question:
    """Of a job whose stage 1 takes twice as long as the others."""
    spec = {
        "parallelism": {"stages": 3, "layers": 12},
        "schedule": {"microbatches": 8},
        "trainer": {"module": "x", "iterations": 100},
        "failurePolicy": {"maxRestarts": 1},
        "adaptation": {"relayout": True},
    }
    job = JobSpec.model_validate(spec)
    layout, ops = Layout.of(job.parallelism), (0.01, 0.02, 0.01)
    stages = tuple(StageTimes(forward=t, backward_input=t, backward_weight=t) for t in ops)
    network = Network(stages, (), (), True, 90, Beside(12, (0.03,) * 3))
    split = Split(job, layout, stages, network.beside)
    return Question("it is slow", job, layout, network, {}, 2.0, split)


def test_a_process_finds_the_same_split_as_this_one() -> None:
    async def test(pool: PlannerPool) -> None:
        asked = slow_stage()
        found = await asyncio.gather(pool.search(JOB, asked), pool.search(("d", "2"), asked))
        assert found == [search(asked)] * 2
        assert found[0] is not None and found[0].layout.layers == (5, 2, 5)
        assert not pool._runs and pool._memo.taken == 0, "nothing is kept of it"

    asyncio.run(with_pool(PlannerPool(1), test))


def test_a_search_that_fails_or_takes_too_long_is_told_to_who_asked() -> None:
    async def test(pool: PlannerPool) -> None:
        with pytest.raises(InputError, match="the planner failed: AttributeError"):
            await pool.search(JOB, replace(slow_stage(), network=None))  # type: ignore[arg-type]
        pool._limit = 0.0
        with pytest.raises(InputError, match="it took longer than 0 s"):
            await pool.search(JOB, slow_stage())

    asyncio.run(with_pool(PlannerPool(1), test))


def test_a_search_waits_for_its_turn_and_is_not_short() -> None:
    async def test(pool: PlannerPool) -> None:
        pool._free = {"any": 0, "short": 1}
        waiting = asyncio.create_task(pool.search(JOB, slow_stage()))
        await asyncio.sleep(0)
        assert pool.waiting == 1 and not pool.running
        (run,) = pool._runs.values()
        assert run.estimate == SEARCH_SECONDS and not run.short
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert pool.waiting == 0 and not pool._runs, "nobody waits for it"

    asyncio.run(with_pool(PlannerPool(1), test))


# --- in turn, and once ------------------------------------------------------------------------


class Workers:
    """In place of the processes: each decision ends when the test says so."""

    def __init__(self, pool: PlannerPool) -> None:
        self.working: dict[int, asyncio.Future[float]] = {}
        """By the number of remaining iterations, which tells the decisions apart here."""
        workers: Any = self
        pool.processes = dict.fromkeys(pool.processes, workers)

    async def answer(self, function: Any, asked: Replan, limit: float) -> Answer[Proposal]:
        mine = self.working[asked.remaining] = asyncio.get_running_loop().create_future()
        try:
            seconds = await mine
        finally:
            del self.working[asked.remaining]
        made = Proposal(None, None, (NoPlan(f"for {asked.remaining}"),))
        return Answer(pickle.dumps(made), seconds)

    async def close(self) -> None: ...

    async def settled(self) -> list[int]:
        """The decisions in progress, once nothing else happens."""
        for _ in range(20):
            await asyncio.sleep(0)
        return list(self.working)


def long_one(number: int) -> Replan:
    """A decision of a large problem, unlike that of any other number."""
    asked = asked_of_one()
    schedule = asked.spec.schedule.model_copy(update={"microbatches": 100_000})
    spec = asked.spec.model_copy(update={"schedule": schedule})  # type: ignore[attr-defined]
    return replace(asked, spec=spec, remaining=number)


def short_one(number: int) -> Replan:
    return replace(asked_of_one(), remaining=number)


def test_a_short_decision_does_not_wait_behind_long_ones() -> None:
    async def test(pool: PlannerPool) -> None:
        workers = Workers(pool)
        asks = [asyncio.create_task(pool(("a", f"{i}"), long_one(i))) for i in range(4)]
        assert await workers.settled() == [0, 1]
        quick = asyncio.create_task(pool(("a", "quick"), short_one(10)))
        assert await workers.settled() == [0, 1, 10]
        workers.working[10].set_result(0.01)
        assert (await quick).found == (NoPlan("for 10"),)
        assert await workers.settled() == [0, 1], "no third long one"
        workers.working[1].set_result(3.0)
        assert await workers.settled() == [0, 2]
        for ask in asks:
            ask.cancel()

    asyncio.run(with_pool(PlannerPool(2), test))


def test_a_short_decision_that_is_urgent_does_not_wait_behind_those_that_may_wait() -> None:
    """All jobs that a host has just met ask for those at the same time."""

    async def test(pool: PlannerPool) -> None:
        workers = Workers(pool)
        asks = [
            asyncio.create_task(pool(("a", f"{i}"), replace(short_one(i), cause="profile")))
            for i in range(4)
        ]
        assert await workers.settled() == [0, 1], "a third one would be in the way"
        asks += [asyncio.create_task(pool(("a", "slow"), short_one(10)))]
        assert await workers.settled() == [0, 1, 10]
        asks += [asyncio.create_task(pool(("a", "too"), short_one(11)))]
        workers.working[1].set_result(0.01)
        assert await workers.settled() == [0, 10, 11], "it comes before those, whoever is free"
        for ask in asks:
            ask.cancel()

    asyncio.run(with_pool(PlannerPool(2), test))


@pytest.mark.full
def test_equal_decisions_are_made_once_and_remembered() -> None:
    seen: list[Decided] = []

    async def test(pool: PlannerPool) -> None:
        workers = Workers(pool)
        # The versions of plans tell nothing, and differ between jobs.
        asked = [short_one(7) for _ in range(100)]
        asked = [replace(a, current=replace(a.current, version=i)) for i, a in enumerate(asked)]
        asks = [asyncio.create_task(pool(("a", f"{i}"), a)) for i, a in enumerate(asked)]
        assert await workers.settled() == [7]
        assert pool.waiting == 0
        workers.working[7].set_result(0.01)
        assert {(await ask).found for ask in asks} == {(NoPlan("for 7"),)}
        assert (await pool(("b", "later"), short_one(7))).found == (NoPlan("for 7"),)
        hows = [each.how for each in seen]
        assert [hows.count(how) for how in ("planned", "shared", "known")] == [1, 99, 1]

    asyncio.run(with_pool(PlannerPool(2, on_decided=seen.append), test))


def test_a_decision_that_nobody_waits_for_is_dropped_from_the_queue() -> None:
    async def test(pool: PlannerPool) -> None:
        workers = Workers(pool)
        asks = [asyncio.create_task(pool(("a", f"{i}"), long_one(i))) for i in (0, 1)]
        same = asyncio.create_task(pool(("b", "1"), long_one(1)))
        assert await workers.settled() == [0]
        assert pool.waiting == 2
        asks[1].cancel()
        await workers.settled()
        assert pool.waiting == 1, "the other job still waits for it"
        same.cancel()
        await workers.settled()
        assert pool.waiting == 0
        asks[0].cancel()
        workers.working[0].set_result(1.0)
        assert await workers.settled() == []
        assert (await pool(("c", "0"), long_one(0))).found == (NoPlan("for 0"),), "not for nothing"

    asyncio.run(with_pool(PlannerPool(1), test))


class SetTime(asyncio.SelectorEventLoop):
    """A loop on which time passes when the test says so."""

    now = 1000.0

    def time(self) -> float:
        return self.now


def test_a_job_over_its_budget_waits_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    over: list[tuple[str, str]] = []
    loop = SetTime()

    async def test(pool: PlannerPool) -> None:
        workers = Workers(pool)
        first = asyncio.create_task(pool(JOB, short_one(0)))
        await workers.settled()
        workers.working[0].set_result(6060.0)
        await first
        asks = [asyncio.create_task(pool(JOB, short_one(i))) for i in (1, 2)]
        asks.append(asyncio.create_task(pool(("default", "other"), short_one(3))))
        assert await workers.settled() == [3], "others go on"
        assert over == [JOB]
        assert caplog.text.count("default/gpt: its decisions took more than 6000 s") == 1
        # 0.6 s give it as much as it owes.
        loop.now += 0.59
        assert await workers.settled() == [3]
        loop.now += 0.02
        assert await workers.settled() == [3, 1]
        for ask in asks:
            ask.cancel()

    pool = PlannerPool(1, budget_seconds=6000.0, on_over_budget=over.append)
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(with_pool(pool, test))


def test_the_decision_of_a_job_that_is_gone_is_dropped() -> None:
    async def run() -> None:
        pool = PlannerPool(1)
        workers = Workers(pool)
        store = MemoryStore()
        handler = IngestHandler(store, planner=pool)
        busy = asyncio.create_task(pool(("a", "busy"), long_one(0)))
        jobs = [controller() for _ in range(3)]
        for i, job in enumerate(jobs):
            slow_down(job)
            store.add("default", f"{i}", job)
            pool._free["short"] = 0
            await handler.tick("default", f"{i}")
        assert await workers.settled() == [0]
        assert pool.waiting == 3
        store.remove("default", "0")
        handler.sweep()
        await workers.settled()
        assert pool.waiting == 2
        jobs[1].begin_attempt(1)
        await handler.tick("default", "1")
        await workers.settled()
        assert pool.waiting == 1, "what the ranks of the last attempt were to do"
        again = controller()
        slow_down(again)
        store.add("default", "2", again)
        await handler.tick("default", "2")
        await workers.settled()
        assert pool.waiting == 1, "that of the one in its place"
        handler.close()
        busy.cancel()
        await pool.close()

    asyncio.run(asyncio.wait_for(run(), 30))


def test_a_process_collects_garbage_between_its_answers() -> None:
    """While it decides the collector would take a tenth of its time."""

    async def ask() -> tuple[bool, int, int]:
        processes = PlannerProcesses()

        async def evaluate(text: str) -> Any:
            return (await processes.answer(eval, text, 60.0)).read()

        try:
            collects = await evaluate("__import__('gc').isenabled()")
            before = await evaluate("len(__import__('gc').get_objects())")
            await evaluate("len([(each := [], each.append(each)) for _ in range(50_000)])")
            return collects, before, await evaluate("len(__import__('gc').get_objects())")
        finally:
            await processes.close()

    collects, before, after = asyncio.run(ask())
    assert not collects
    assert after < before + 5_000
