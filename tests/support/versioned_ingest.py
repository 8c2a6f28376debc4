"""Ingests that may be killed at every write, and a job whose plans they make: in one process and in
virtual time."""

from __future__ import annotations

import asyncio
import copy
import json
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from observing import Agent
from operator_objects import body
from operator_status import Shared, known
from plant_support import Plant

from pipemorph.api.spec import JobSpec
from pipemorph.api.status import ControlState
from pipemorph.ingest import IngestHandler, Limits
from pipemorph.ingest.plan_versions import AGENT_BLOCK, BLOCK
from pipemorph.ingest.planner_pool import plan_here
from pipemorph.wire import (
    AdaptationRecord,
    Directive,
    DirectiveEnvelope,
    HandIn,
    LinkHealthReport,
)
from pipemorph_operator.ingest.plans import snapshot_codec
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

    def adapts(
        self,
        delays: Sequence[float] | None = None,
        most: int = 60,
        between: Callable[[], None] = lambda: None,
    ) -> None:
        """Train until there is another directive, and it is in force. ``delays``: of the links from
        now on; None: as before. ``between``: called after every iteration."""
        before = self.observed
        if delays is not None:
            self.delays = list(delays)
        for _ in range(most):
            self.step()
            between()
            if self.observed > before and self.plan.version == self.observed:
                return
        raise AssertionError(f"no plan after v{before} in {most} iterations")

    def turns(self) -> Iterator[None]:
        """A link turns slow, then slower, then another one does."""
        for delays in TURNS:
            self.adapts(delays)
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
