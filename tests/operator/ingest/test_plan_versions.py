"""No version is ever two plans, and no plan is lost, whenever an ingest is killed: in one process,
at every write. tests/cluster does it with real ones."""

from __future__ import annotations

import asyncio
import copy
import json
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from observing import Agent
from operator_objects import body
from operator_status import Shared, known
from plant_support import Plant

from pipemorph.api.spec import JobSpec
from pipemorph.api.status import ControlState
from pipemorph.ingest import IngestHandler, Limits, Versions
from pipemorph.ingest.plan_versions import AGENT_BLOCK, BLOCK, LOW
from pipemorph.ingest.planner_pool import plan_here
from pipemorph.wire import (
    AdaptationRecord,
    Directive,
    DirectiveEnvelope,
    HandIn,
    LinkHealthReport,
)
from pipemorph_operator.ingest.plans import snapshot_codec
from pipemorph_operator.ingest.seats.share import Share
from pipemorph_operator.ingest.status.write_budget import SPACING_SECONDS
from pipemorph_operator.ingest.store import ClusterStore
from pipemorph_operator.names import PLAN_KIND
from pipemorph_trainer.agent.uplinks.deputy import Deputy

KEY = ("team", "gpt")
TURNS = ((0.0, 0.06, 0.0), (0.0, 0.15, 0.0), (0.08, 0.0, 0.0))
"""Delays of the links: each asks for another plan."""
RESERVED = BLOCK + AGENT_BLOCK
"""At a time."""
SLOW, SLOWER = list(TURNS[0]), list(TURNS[1])


class Api(Shared):
    """The job in the API server, which many writers reach."""

    def __init__(self) -> None:
        super().__init__()
        trainer = {"module": "x", "iterations": 100_000}
        schedule = self.job["spec"]["schedule"] | {"microbatches": 12}
        # A rank that chooses among ready ops needs no other plan at some of the turns.
        schedule |= {"dispatch": "static"}
        self.job = body(stages=4, trainer=trainer, schedule=schedule)
        self.job["status"] = {"attempt": 0}
        self.saved: dict[int, str] = {}
        """By version: every plan that was saved."""

    def control(self) -> ControlState | None:
        found = self.job["status"].get("control")
        return None if found is None else ControlState.model_validate(found)

    def reserved(self) -> int:
        control = self.control()
        return (control.reserved or 0) if control is not None else 0

    def write(self, status: dict[str, Any]) -> None:
        """As the CRD's rules allow."""
        old, new = self.job["status"].get("control"), status.get("control")
        if old is not None:
            assert new is not None
            assert all(new[name] >= old[name] for name in ("planVersion", "reserved"))
        assert new is None or new["reserved"] >= new["planVersion"]
        super().write(copy.deepcopy(status))

    def put(self, plan: dict[str, Any]) -> dict[str, Any]:
        """As the CRD's rules allow, and never ahead of status."""
        if self.plan is not None:
            assert all(plan[name] >= self.plan[name] for name in ("attempt", "planVersion"))
        assert plan["planVersion"] <= self.job["status"]["control"]["planVersion"]
        saved = snapshot_codec.unpack(plan["snapshot"])["directive"]
        if saved is not None:
            text = json.dumps(saved["plan"])
            assert self.saved.setdefault(saved["plan_version"], text) == text, "two plans"
        return super().put(plan)


class Host:
    """One ingest: until it is killed, at the write with number ``dies_at``: before the API server
    has it, or after (``got_through``)."""

    def __init__(self, api: Api, clock: Callable[[], float], dies_at: int = -1) -> None:
        self.api, self.dies_at, self.got_through = api, dies_at, False
        self.dead = self.away = False
        self.late: asyncio.Event | None = None
        """Until when its writes are on their way."""
        self.writes = 0
        cluster: Any = self
        self.store = ClusterStore(cluster, clock=clock, monotonic=clock)
        self.handler = IngestHandler(self.store, limits=Limits(1e9, 1_000_000_000))

    async def get(self, url: str) -> Any:
        await self._reach()
        return await self.api.get(url)

    async def create(self, obj: dict[str, Any], owner: str) -> Any:
        if obj["kind"] == PLAN_KIND:
            return await self._write(lambda: self.api.create(obj, owner))
        return obj

    async def replace(self, obj: dict[str, Any], owner: str) -> Any:
        return await self._write(lambda: self.api.replace(obj, owner))

    async def apply(self, obj: dict[str, Any], owner: str, *, subresource: str = "") -> Any:
        return await self._write(lambda: self.api.apply(obj, owner, subresource=subresource))

    async def _write(self, write: Callable[[], Awaitable[Any]]) -> Any:
        await self._reach()
        if self.late is not None:
            await self.late.wait()
        self.writes += 1
        dies = self.writes - 1 == self.dies_at
        if dies and self.got_through:
            await write()
        if dies:
            self.dead = True
            await self._reach()
        return await write()

    async def _reach(self) -> None:
        if self.away:
            raise ConnectionResetError("no API server")
        if self.dead:
            await asyncio.Event().wait()  # For ever: nothing happens in a process that is gone.


class Ranks(Plant):
    """The trainer and its agent, which keeps its plan whatever becomes of an ingest."""

    def __init__(self, api: Api, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(JobSpec.model_validate(api.job["spec"]))
        self.api, self.loop = api, loop
        self.hosts: list[Host] = []
        self.plans: dict[int, str] = {}
        """By version: every plan that an ingest gave to anybody."""
        self.loses_replies = False
        self.drops, self.chance = 0.0, random.Random(0)
        """Share of replies that are lost, though the ingest has the reports."""
        self.deaf = False
        """Whether all are once a plan has been handed in."""
        self.newest: Directive | None = None
        self.hands_in, self.hand_in_gets = True, {200}
        self.observes = Agent(self.spec, job="gpt", namespace="team", paced=True)
        self.alone = False
        """Whether the agent reaches no ingest, and has not for a while."""
        self.deputy: Deputy | None = None
        self.records: list[AdaptationRecord] = []
        self.used = 0
        self.own: set[int] = set()
        """The versions of all plans of deputies."""

    def host(self, dies_at: int = -1, *, got_through: bool = False) -> Host:
        host = Host(self.api, lambda: self.now, dies_at)
        host.got_through = got_through
        self.loop.run_until_complete(known(host.store, self.api.job))
        self.hosts = [host]
        return host

    def send(self, **fields: Any) -> None:
        telemetry = {"iteration": self.iteration, "applied_plan_version": self.plan.version}
        if not self.observes.observe(self.now, **telemetry, **fields):
            return
        self.sequence += 1
        observer = self.observes.observer
        report = observer.report(self.sequence, self.now, self.observed)
        host = self.hosts[self.sequence % len(self.hosts)]
        asks = self._ask_deputy(report) if self.alone else self._ask(host, report)
        answer = self.loop.run_until_complete(asks)
        if answer is None:
            return
        observer.delivered(report, answer, self.now)
        directive = answer.directive
        if directive is not None and directive.plan_version > self.observed:
            self.newest, self.observed = directive, directive.plan_version
            if directive.plan_version > max(self.plan.version, self.prepared_version):
                self.prepared = (self.iteration + 1, directive.plan.plan())
        if answer.wants_plan and self.newest is not None and self.hands_in and not self.alone:
            self.loop.run_until_complete(self._hand_in(host, self.newest))

    @property
    def prepared_version(self) -> int:
        return self.prepared[1].version if self.prepared is not None else 0

    def restart_agent(self) -> None:
        """Another process is the agent: it knows nothing."""
        self.observes = Agent(self.spec, job="gpt", namespace="team", paced=True)
        self.observes.observer._fresh = True
        self.newest, self.observed, self.used = None, 0, 0
        self.deputy, self.records = None, []

    def meets(self, *, alone: bool) -> None:
        """From now on the agent reaches an ingest, or none."""
        self.alone = alone
        if self.deputy is not None and not alone:
            self.records, self.used = self.deputy.records, self.deputy.plan_version
            self.deputy = None

    async def _ask_deputy(self, report: LinkHealthReport) -> DirectiveEnvelope | None:
        observer, above = self.observes.observer, max(self.observed, self.used)
        versions = observer.versions
        if self.deputy is None and versions is not None and versions[1] > above:
            assert observer.spec is not None
            self.deputy = Deputy(
                observer.spec, (max(versions[0], above + 1), versions[1]),
                namespace="team", job="gpt", attempt=0, planner=plan_here,
            )  # fmt: skip
        if self.deputy is None:
            return None
        answer = await self.deputy.report(report)
        for _ in range(60):
            await asyncio.sleep(0)
        if answer is None:
            return None
        if answer.directive is not None:
            self._note(answer.directive, self.own)
        if answer.wants_plan and self.newest is not None:
            await self.deputy.hand_in(self._message(self.newest))
        return answer

    def _note(self, directive: Directive, among: set[int]) -> None:
        plan, version = directive.plan.model_dump_json(), directive.plan_version
        assert self.plans.setdefault(version, plan) == plan, "two plans"
        among.add(version)

    def _message(self, directive: Directive) -> HandIn:
        records = [r for r in self.records if r.plan_version <= directive.plan_version]
        return HandIn(job="gpt", namespace="team", attempt=0, directive=directive, records=records)

    async def _hand_in(self, host: Host, directive: Directive) -> None:
        async def body() -> bytes:
            return self._message(directive).body()

        handing = asyncio.ensure_future(host.handler.hand_in(*KEY, body))
        for _ in range(60):
            await asyncio.sleep(0)
        if not handing.done():
            assert host.dead or host.late, "it waits for nothing else"
            return
        # 409: another ingest has overtaken it meanwhile.
        assert handing.result().status in (*self.hand_in_gets, 409), handing.result().body
        self.drops = 1.0 if self.deaf else self.drops

    async def _ask(self, host: Host, report: LinkHealthReport) -> DirectiveEnvelope | None:
        if host.dead:
            return None
        asking = asyncio.ensure_future(host.handler.report(*KEY, report.body()))
        for _ in range(60):
            await asyncio.sleep(0)
        looks = asyncio.gather(host.handler.tick(*KEY), host.store.look(KEY))
        for _ in range(60):
            await asyncio.sleep(0)
        if not asking.done() or not looks.done():
            assert host.dead or host.late, "it waits for nothing else"
        session = next(iter(host.handler._sessions.values()), None)
        served = session.served if session is not None else None
        if served is not None:
            # Whether or not this report brings it: a poll may have.
            self._note(served, set())
        looks.cancel()
        lost = (host.dead and self.loses_replies) or self.chance.random() < self.drops
        if not asking.done() or lost:
            asking.cancel()
            return None
        reply = asking.result()
        assert reply.status in (200, 409), reply.body
        return DirectiveEnvelope.model_validate_json(reply.body)

    def adapts(self, most: int = 60) -> None:
        """Train until there is another directive, and it is in force."""
        before = self.observed
        for _ in range(most):
            self.step()
            if self.observed > before and self.plan.version == self.observed:
                return
        raise AssertionError(f"no plan after v{before} in {most} iterations")

    def turns(self) -> Iterator[None]:
        """A link turns slow, then slower, then another one does."""
        for delays in TURNS:
            self.delays = list(delays)
            self.adapts()
            yield


@contextmanager
def ranks() -> Iterator[Ranks]:
    loop = asyncio.new_event_loop()
    made = Ranks(Api(), loop)
    clock = SimpleNamespace(time=lambda: made.now, monotonic=lambda: made.now)
    try:
        with patch("pipemorph.ingest.handler.time", clock):
            yield made
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


def undisturbed_writes() -> int:
    with ranks() as job:
        host = job.host()
        job.run(4)
        for _ in job.turns():
            job.run(2)
        return host.writes


WRITES = range(9)
"""Of one ingest, of status and of plans, from the first reservation to the third directive and its
figures."""


def test_there_are_as_many_transitions_as_kills() -> None:
    assert len(WRITES) <= undisturbed_writes()


@pytest.mark.parametrize("loses_reply", [False, True], ids=["reply seen", "reply lost"])
@pytest.mark.parametrize("got_through", [False, True], ids=["not written", "written"])
@pytest.mark.parametrize("write", WRITES)
def test_killed_at_any_write(write: int, got_through: bool, loses_reply: bool) -> None:
    with ranks() as job:
        job.loses_replies = loses_reply
        host = job.host(write, got_through=got_through)

        def restarted() -> None:
            nonlocal host
            if host.dead:
                kept = job.observed
                host = job.host()
                assert job.observed == kept

        job.run(4)
        for delays in TURNS:
            restarted()
            before = job.observed
            job.delays = list(delays)
            for _ in range(60):
                job.step()
                restarted()
                if job.observed > before and job.plan.version == job.observed:
                    break
            assert job.observed > before, f"nothing is done about {delays}"
            job.run(2)
        restarted()
        job.run(12)
        assert job.plan.warmup == job.hosts[0].store._tracked[KEY].controller.wanted.warmup
        control = job.api.control()
        assert control is not None and control.plan_version >= job.observed
        saved = job.host().store._tracked[KEY].controller.wanted
        assert saved.version == job.observed, "what is in force is saved at last"


@pytest.mark.parametrize("seed", range(6))
def test_killed_again_and_again(seed: int) -> None:
    chance = random.Random(seed)
    with ranks() as job:
        seen = [0]
        for _ in range(12):
            host = job.host(chance.randrange(6), got_through=chance.random() < 0.5)
            job.loses_replies = chance.random() < 0.5
            job.delays = list(chance.choice(TURNS))
            for _ in range(chance.randrange(4, 16)):
                job.step()
                if host.dead:
                    break
            seen.append(job.observed)
        assert seen == sorted(seen)
        assert len(job.plans) >= 3


def test_a_block_is_reserved_before_the_first_directive_and_with_one_write() -> None:
    with ranks() as job:
        host = job.host()
        job.run(2)
        control = job.api.control()
        assert control is not None
        assert (control.plan_version, control.reserved) == (0, RESERVED)
        assert host.store.reserved(*KEY) == BLOCK
        for _ in job.turns():
            pass
        control = job.api.control()
        assert control is not None and control.reserved == RESERVED, "not with every directive"


def test_the_next_block_is_reserved_while_half_of_the_last_is_left() -> None:
    with ranks() as job:
        host = job.host()
        job.run(2)
        controller = host.store._tracked[KEY].controller
        controller.skip_to(BLOCK - LOW + 1)
        due = job.now + SPACING_SECONDS
        while job.now < due:
            job.run(1)
        control = job.api.control()
        assert control is not None and control.reserved == 2 * RESERVED
        assert host.store.reserved(*KEY) == control.reserved - AGENT_BLOCK
        job.run(2)
        assert controller.plan_version == RESERVED, "the agent may have used the versions below"


def test_a_new_ingest_begins_above_the_block_of_the_last() -> None:
    with ranks() as job:
        job.host()
        job.run(4)
        job.delays = SLOW
        job.adapts()
        assert job.observed == 1
        job.host()
        job.delays = SLOWER
        job.adapts()
        assert job.observed == RESERVED + 1


def test_a_plan_that_was_served_and_not_persisted_is_not_forgotten() -> None:
    """The ranks run it and say so; without that they would keep it when the link is well. An agent
    that has started again cannot hand it in."""
    with ranks() as job:
        job.hands_in = False
        host = job.host()
        job.run(4)
        first, host.away = job.plan, True
        job.delays = SLOW
        job.adapts()
        host.dead = True
        job.delays = [0.0, 0.0, 0.0]
        job.run(12)
        assert job.plan.warmup != first.warmup, "nobody tells the ranks of another plan"
        job.host()
        job.adapts()
        assert job.observed == RESERVED + 1
        assert (job.plan.warmup, job.plan.routes) == (first.warmup, first.routes)


def test_the_next_ingest_goes_on_from_a_plan_that_is_in_no_status() -> None:
    with ranks() as job:
        host = job.host()
        job.run(4)
        first, host.away = job.plan, True
        job.delays = SLOW
        job.adapts()
        reason = host.store._tracked[KEY].controller.records[-1].reason
        host.dead = True
        job.run(2)
        controller = job.host().store._tracked[KEY].controller
        job.run(8)
        assert job.observed == controller.wanted.version == 1, "a needless change"
        assert {each.kind for each in controller.decisions} == {"keep"}
        assert "the ranks run plan v1, which is not saved here" in controller.decisions[0].reason
        training = job.api.job["status"]["training"]
        assert training["wantedPlanVersion"] == training["appliedPlanVersion"] == 1
        assert training["lastAdaptation"]["reason"] == reason
        saved = job.host().store._tracked[KEY].controller
        assert saved.wanted == job.plan, "it is saved now"
        # It knows what the plan is for.
        job.delays = [0.0, 0.0, 0.0]
        job.adapts()
        assert job.observed == 2 * RESERVED + 1
        assert (job.plan.warmup, job.plan.routes) == (first.warmup, first.routes)


def test_a_plan_of_a_version_that_was_never_reserved_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with ranks() as job:
        job.host()
        job.run(4)
        job.delays = SLOW
        job.adapts()
        host = job.host()
        job.run(1)
        assert job.newest is not None and job.newest.record is not None
        above = RESERVED + 1
        plan = job.newest.plan.model_copy(update={"version": above})
        record = job.newest.record.model_copy(update={"plan_version": above})
        forged = {"plan_version": above, "plan": plan, "record": record}
        job.newest, job.observed = job.newest.model_copy(update=forged), above
        job.hand_in_gets = {422}
        job.run(2)
        assert f"plan v{above} was never given: no other ingest" in caplog.text
        assert host.store._tracked[KEY].controller.plan_version > above, "it decided without it"


def test_with_the_api_server_away_jobs_adapt_to_the_end_of_the_block(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipemorph.ingest.handler.PERSIST_AGAIN_SECONDS", 0.0)
    with ranks() as job:
        host = job.host()
        job.run(4)
        host.away = True
        job.delays = SLOW
        job.adapts()
        assert job.observed == 1
        assert "plan v1 was served but not persisted; retrying: no API server" in caplog.text
        control = job.api.control()
        assert control is not None and control.plan_version == 0
        # The end of the block.
        controller = host.store._tracked[KEY].controller
        controller.skip_to(BLOCK)
        job.delays = SLOWER
        job.run(20)
        assert job.observed == 1
        above = RESERVED + 1  # The versions between are the agent's.
        assert controller.plan_version == above
        assert f"v{above} could not be persisted, and no version is reserved" in caplog.text
        host.away = False
        job.run(2)
        assert job.observed == above
        control = job.api.control()
        assert control is not None and control.plan_version == above


@pytest.mark.parametrize("seed", range(2))
def test_two_ingests_at_a_time_give_no_version_to_two_plans(seed: int) -> None:
    """One was cut off from the API server for a while, and the ranks reach both."""
    chance = random.Random(seed)
    with ranks() as job:
        hosts = [job.host()]
        # One that is behind has not reserved what the other one served: it refuses that.
        job.hand_in_gets = {200, 422}
        job.run(4)
        hosts[0].away = True
        hosts.append(job.host())
        for _ in range(8):
            job.hosts = chance.sample(hosts, chance.choice([1, 2]))
            for host in hosts:
                host.away = chance.random() < 0.3
            job.delays = list(chance.choice(TURNS))
            job.run(chance.randrange(3, 9))
        # Whichever is left goes on.
        job.hosts = [chance.choice(hosts)]
        job.hosts[0].away = False
        job.run(12)
        job.delays = [0.1, 0.1, 0.1]
        job.adapts()
        assert job.api.reserved() < 20 * RESERVED, "they drove each other out without end"


def test_an_agent_that_reaches_no_ingest_decides_and_hands_in() -> None:
    with ranks() as job:
        job.host()
        job.run(4)
        assert job.observes.observer.versions == (BLOCK + 1, RESERVED)
        job.delays = SLOW
        job.adapts()
        assert (job.observed, job.own) == (1, set())
        job.meets(alone=True)
        job.delays = SLOWER
        job.adapts()
        assert job.own == {job.observed} == {BLOCK + 1}
        # The one before may come back, or another one.
        for host in (job.hosts[0], job.host()):
            job.hosts = [host]
            job.meets(alone=False)
            before = job.observed
            job.run(6)
            controller = host.store._tracked[KEY].controller
            assert job.observed == controller.wanted.version == before, "a needless change"
            last = job.api.job["status"]["training"]["lastAdaptation"]
            assert last["planVersion"] == before
            assert last["reason"] == controller.records[-1].reason
            assert [r.plan_version for r in controller.records][:2] == [1, BLOCK + 1]
            job.meets(alone=True)
            job.delays = [0.0, 0.0, 0.0] if job.delays == SLOWER else SLOWER
            job.adapts()
            assert job.observed in job.own
        assert len(job.own) == 3


def test_with_the_api_server_away_the_agent_has_versions_too() -> None:
    """It was given them before, and they stay its own when the host's run out."""
    with ranks() as job:
        host = job.host()
        job.run(4)
        host.away = True
        host.store._tracked[KEY].controller.skip_to(BLOCK)
        job.meets(alone=True)
        job.delays = SLOW
        job.adapts()
        assert job.own == {BLOCK + 1}
        job.meets(alone=False)
        job.run(4)
        host.away = False
        job.delays = SLOWER
        job.adapts()
        assert job.observed > RESERVED


def test_an_ingest_gives_no_version_of_the_agent_s() -> None:
    """It goes on from the agent's plan, and the agent gets none of its answers to that."""
    with ranks() as job:
        job.host()
        job.run(4)
        job.meets(alone=True)
        job.delays = SLOW
        job.adapts()
        job.meets(alone=False)
        job.deaf = True
        job.delays = SLOWER
        job.run(8)
        assert job.hosts[0].store._tracked[KEY].controller.wanted.version == RESERVED + 1
        assert job.observed == BLOCK + 1
        job.meets(alone=True)
        job.delays = list(TURNS[2])
        job.adapts()
        assert job.observed == BLOCK + 2


def test_another_agent_gets_other_versions() -> None:
    with ranks() as job:
        job.host()
        job.run(4)
        job.meets(alone=True)
        job.delays = SLOW
        job.adapts()
        assert job.own == {BLOCK + 1}
        job.restart_agent()
        job.delays = SLOWER
        job.run(8)
        assert job.own == {BLOCK + 1}, "none before an ingest has answered"
        job.meets(alone=False)
        job.run(8)
        assert job.observes.observer.versions is not None
        assert job.observes.observer.versions[0] > RESERVED
        # Nor does it get those of one that has given none.
        before = job.observes.observer.versions
        job.restart_agent()
        job.run(4)
        assert job.observes.observer.versions[0] > before[1]


def test_no_versions_for_an_agent_whose_job_does_not_adapt() -> None:
    with ranks() as job:
        job.api.job["spec"]["adaptation"] = {"enabled": False}
        job.host()
        job.run(4)
        assert job.observes.observer.versions is None


@pytest.mark.parametrize("seed", [0, 1, 3, 4, 6])
def test_whoever_decides_no_version_is_two_plans(seed: int) -> None:
    """Ingests are killed at any write, the API server goes away, the agent is cut off from all
    ingests, or starts again, at random."""
    chance = random.Random(seed)
    with ranks() as job:
        job.hand_in_gets = {200, 422}
        host = job.host()
        job.run(4)
        newest = [0]
        for _ in range(12):
            job.meets(alone=chance.random() < 0.5)
            if host.dead or chance.random() < 0.3:
                host = job.host(chance.randrange(2, 8), got_through=chance.random() < 0.5)
            host.away = chance.random() < 0.15
            if chance.random() < 0.1:
                job.restart_agent()
            job.drops = chance.choice([0.0, 0.0, 0.0, 1.0])
            job.delays = list(chance.choice(TURNS))
            job.run(chance.randrange(3, 9))
            newest.append(job.plan.version)
        assert newest == sorted(newest)
        job.drops = 0.0
        job.meets(alone=False)
        job.host()
        job.run(30)
        job.delays = [0.1, 0.1, 0.1]
        job.adapts()
        control = job.api.control()
        assert control is not None and control.plan_version >= job.observed
        assert job.own, "the agent never decided: take another seed"


def test_reserved_versions_are_counted_from_what_was_written() -> None:
    versions = Versions(70)
    assert versions.run_out(70)
    versions.written(70)
    assert versions.granted == 0, "another one's"
    for _ in range(2):
        # The write failed, as far as is known; it may have got through.
        versions.reserve(70)
        assert (versions.reserved, versions.granted) == (70 + RESERVED, 0)
    versions.written(70 + RESERVED)
    assert versions.granted == 70 + BLOCK
    versions.reserve(70 + LOW)
    assert versions.reserved == 70 + RESERVED
    versions.reserve(71 + LOW)
    assert (versions.reserved, versions.granted) == (70 + 2 * RESERVED, 70 + BLOCK)


def test_the_versions_of_an_agent_are_no_host_s_and_no_other_agent_s() -> None:
    versions = Versions(0)
    assert not versions.for_agent(), "none is reserved"
    versions.another_agent()
    versions.reserve(0)
    versions.written(RESERVED)
    first = versions.for_agent()
    assert (first[0], first[-1], versions.granted) == (BLOCK + 1, RESERVED, BLOCK)
    versions.written(RESERVED)
    assert versions.for_agent() == first, "as long as it is the same agent"
    handed_in = [version for version in range(300) if versions.may_have(version)]
    assert handed_in == [0, *first], "its plans may be handed in, and no others"
    versions.another_agent()
    assert not versions.for_agent()
    assert versions.run_out(1)
    versions.written(RESERVED)
    assert not versions.for_agent(), "with any write but that of a reservation"
    versions.reserve(1)
    versions.written(versions.reserved)
    assert versions.for_agent()[0] > RESERVED


class Replica(Host):
    """One of several ingests, to which the job is dealt or not."""

    def __init__(self, api: Api, clock: Callable[[], float]) -> None:
        self.has_it = False
        super().__init__(api, clock)
        cluster: Any = self
        self.share = Share(cluster, self.store, lambda _: self.has_it)
        self.store.on_dropped = lambda job, _: self.handler.dropped(job)
        self.share.changed(KEY, copy.deepcopy(api.job))
        assert self.share.elsewhere(*KEY) == api.job["metadata"]["uid"]

    async def deal(self, has_it: bool) -> None:
        self.has_it = has_it
        self.share.redeal()
        # At once: it says that it has dropped it.
        assert (self.store.lookup(*KEY) is None) or has_it
        await self.share.arrival(*KEY)
        assert (self.store.lookup(*KEY) is not None) == has_it


def moved(job: Ranks, to: Replica, *others: Replica) -> None:
    for each in others:
        job.loop.run_until_complete(each.deal(False))
    job.loop.run_until_complete(to.deal(True))
    job.hosts = [to]


def test_a_job_that_moves_keeps_its_plan() -> None:
    with ranks() as job:
        first, second = (Replica(job.api, lambda: job.now) for _ in range(2))
        moved(job, first, second)
        job.run(4)
        first.away = True  # The plan is in no status.
        job.delays = SLOW
        job.adapts()
        plan = job.plan
        moved(job, second, first)
        job.run(8)
        assert (job.observed, job.plan) == (1, plan), "a needless change"
        controller = second.store._tracked[KEY].controller
        assert controller.wanted == plan
        health = [link.health for link in controller.links(job.now)]
        assert health == ["healthy", "slow", "healthy"], "evidence was lost"
        # And back to one that had an older state of it.
        first.away = False
        job.delays = SLOWER
        job.adapts()
        moved(job, first, second)
        observed, plan = job.observed, job.plan
        job.run(8)
        assert (job.observed, job.plan) == (observed, plan), "a needless change"
        assert first.store._tracked[KEY].controller.wanted == plan


@pytest.mark.parametrize("seed", range(3))
def test_a_job_that_moves_at_any_moment_has_no_version_twice(seed: int) -> None:
    """Also where a write of the one that had it arrives after the other one has read the job."""
    chance = random.Random(seed)
    with ranks() as job:
        both = [Replica(job.api, lambda: job.now) for _ in range(2)]
        moved(job, both[0], both[1])
        job.run(4)
        for delays in TURNS * 2:
            job.delays = list(delays)
            old, new = both
            if chance.random() < 0.7:
                old.late = asyncio.Event()
            job.run(chance.randrange(1, 4))
            moved(job, new, old)
            job.run(chance.randrange(0, 3))
            if old.late is not None:
                old.late.set()
                old.late = None
            job.run(2)
            both.reverse()
        job.delays = [0.0, 0.0, 0.0]
        job.run(30)
        tracked = both[0].store._tracked[KEY]
        assert tracked.controller.wanted == job.plan
        assert both[1].store.lookup(*KEY) is None
        control = job.api.control()
        assert control is not None
        assert control.plan_version == job.observed > 1
        assert job.api.reserved() < 20 * RESERVED


def test_a_poll_of_a_job_that_moves_is_answered() -> None:
    with ranks() as job:
        first = Replica(job.api, lambda: job.now)
        moved(job, first)
        poll = first.handler.poll(*KEY, attempt="0", after="0", wait="25")
        asked = job.loop.create_task(poll)
        job.loop.run_until_complete(asyncio.sleep(0.01))
        assert not asked.done()
        job.loop.run_until_complete(first.deal(False))
        reply = job.loop.run_until_complete(asyncio.wait_for(asked, 5.0))
        assert reply.status == 404


def test_a_job_that_was_lost_while_it_was_read_is_not_taken() -> None:
    with ranks() as job:
        first = Replica(job.api, lambda: job.now)

        async def test() -> None:
            first.has_it = True
            first.share.redeal()
            await first.deal(False)
            assert first.share.elsewhere(*KEY)
            # One that is deleted while it is read stays deleted.
            first.has_it = True
            first.share.redeal()
            first.share.changed(KEY, None)
            await asyncio.sleep(0.01)
            assert first.store.lookup(*KEY) is None
            assert first.share.elsewhere(*KEY) is None

        job.loop.run_until_complete(test())
