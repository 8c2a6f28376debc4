"""Ingests that may be killed at every moment, and a job whose plans they make: in one process and
in virtual time."""

from __future__ import annotations

import asyncio
import copy
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

from pipemorph.ingest import IngestHandler, RateLimits
from pipemorph.protocol import (
    Directive,
    DirectiveEnvelope,
    LinkHealthReport,
    SnapshotMessage,
    compute_revision,
)
from pipemorph.spec.job_spec import JobSpec
from pipemorph.spec.job_status import ControlStatus
from pipemorph_operator.ingest.job_store import ClusterJobStore

KEY = ("team", "gpt")
TURNS = ((0.0, 0.06, 0.0), (0.0, 0.15, 0.0), (0.08, 0.0, 0.0))
"""Delays of the links: each requires another plan."""
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

    def control(self) -> ControlStatus | None:
        found = self.job["status"].get("control")
        return None if found is None else ControlStatus.model_validate(found)

    def write(self, status: dict[str, Any]) -> None:
        """Write as the CRD's rules allow."""
        old, new = self.job["status"].get("control"), status.get("control")
        if old is not None:
            assert new is not None and new["planVersion"] >= old["planVersion"]
        super().write(copy.deepcopy(status))


class Host:
    """Ingest until it is killed, at the write with number ``dies_at``: before the API server has
    it, or after (``got_through``). ``term``: of its Lease."""

    def __init__(
        self, api: Api, clock: Callable[[], float], dies_at: int = -1, term: int = 0
    ) -> None:
        self.api, self.dies_at, self.got_through = api, dies_at, False
        self.dead = self.away = False
        self.late: asyncio.Event | None = None
        """Event until which its writes are on their way."""
        self.writes = 0
        cluster: Any = self
        self.store = ClusterJobStore(cluster, clock=clock, monotonic=clock, term=lambda: term)
        self.handler = IngestHandler(self.store, limits=RateLimits(1e9, 1_000_000_000))

    @property
    def controller(self) -> Any:
        return self.store._tracked[KEY].controller

    async def get(self, url: str) -> Any:
        await self._reach()
        return await self.api.get(url)

    async def create(self, obj: dict[str, Any], owner: str) -> Any:
        return obj  # Events.

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
            await asyncio.Event().wait()  # Waits for ever: the process is gone.


class Ranks(Plant):
    """The trainer and its agent, which holds what an ingest has answered."""

    def __init__(self, api: Api, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(JobSpec.model_validate(api.job["spec"]))
        self.api, self.loop = api, loop
        self.hosts: list[Host] = []
        self.plans: dict[int, str] = {}
        """Plans that the ranks were given, by version."""
        self.loses_replies = False
        self.drops, self.chance = 0.0, random.Random(0)
        """Share of replies that are lost, though the ingest has the reports."""
        self.hand_in_gets = {200}
        self.observes = Agent(self.spec, job="gpt", namespace="team", paced=True)
        self.forget()

    def forget(self) -> None:
        """Know nothing of what an ingest has answered."""
        self.newest: Directive | None = None
        self.observed = 0
        self.term: int | None = None
        self.snapshot = ""
        self.refused = 0
        """Answers of a lower term."""

    def host(self, dies_at: int = -1, *, got_through: bool = False, term: int = 0) -> Host:
        host = Host(self.api, lambda: self.now, dies_at, term)
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
        report = observer.build_report(
            self.sequence,
            self.now,
            self.observed,
            plan_issued_at=self.newest.issued_at if self.newest is not None else None,
            term=self.term,
            snapshot=compute_revision(self.snapshot),
        )
        host = self.hosts[self.sequence % len(self.hosts)]
        answer = self.loop.run_until_complete(self._ask(host, report))
        if answer is not None and self.takes(answer):
            observer.record_delivery(report, answer)
            if answer.wants_snapshot and self.snapshot:
                self.loop.run_until_complete(self._hand_in(host))

    def takes(self, answer: DirectiveEnvelope) -> bool:
        """Take an answer as the agent does. Returns whether its term is not a lower one."""
        if self.term is not None and answer.term < self.term:
            self.refused += 1
            return False
        self.term = answer.term
        self.snapshot = answer.snapshot or self.snapshot
        directive = answer.directive
        if directive is not None and directive.plan_version > self.observed:
            self.newest, self.observed = directive, directive.plan_version
            plan = directive.plan.model_dump_json()
            assert self.plans.setdefault(self.observed, plan) == plan, "two plans"
            if directive.plan_version > max(self.plan.version, self.prepared_version):
                self.prepared = (self.iteration + 1, directive.plan.to_plan())
        return True

    @property
    def prepared_version(self) -> int:
        return self.prepared[1].version if self.prepared is not None else 0

    def restart_agent(self) -> None:
        """Replace the agent by another process, without its state."""
        self.observes = Agent(self.spec, job="gpt", namespace="team", paced=True)
        self.observes.observer._is_first_report = True
        self.forget()

    async def _hand_in(self, host: Host) -> None:
        async def body() -> bytes:
            message = SnapshotMessage(
                job="gpt", namespace="team", attempt=0, snapshot=self.snapshot
            )
            return message.to_json()

        handing = asyncio.ensure_future(host.handler.handle_snapshot(*KEY, body))
        for _ in range(60):
            await asyncio.sleep(0)
        if not handing.done():
            assert host.dead or host.late, "it waits for nothing else"
            return
        # 409: another ingest has overtaken it meanwhile.
        assert handing.result().status in (*self.hand_in_gets, 409), handing.result().body

    async def _ask(self, host: Host, report: LinkHealthReport) -> DirectiveEnvelope | None:
        if host.dead:
            return None
        asking = asyncio.ensure_future(host.handler.handle_report(*KEY, report.to_json()))
        for _ in range(60):
            await asyncio.sleep(0)
        looks = asyncio.gather(host.handler.tick_job(*KEY), host.store.write_status_if_due(KEY))
        for _ in range(60):
            await asyncio.sleep(0)
        if not asking.done() or not looks.done():
            assert host.dead or host.late, "it waits for nothing else"
        looks.cancel()
        lost = (host.dead and self.loses_replies) or self.chance.random() < self.drops
        if not asking.done() or lost:
            asking.cancel()
            return None
        reply = asking.result()
        assert reply.status in (200, 409, 503), reply.body
        if reply.status == 503:
            self.refused += 1
            return None
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
