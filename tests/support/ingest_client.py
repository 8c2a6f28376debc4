"""A client of an ingest on loopback, and a job whose directives a test sets."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from pipemorph.control import JobController
from pipemorph.control.decide.plan_choice import DecisionRequest, PlanProposal
from pipemorph.control.snapshot import Snapshot
from pipemorph.ingest import BearerAuthenticator, IngestServer, InMemoryJobStore, RateLimits
from pipemorph.ingest.app import ClientTimeouts
from pipemorph.protocol import Directive, DirectiveEnvelope, LinkHealthReport, PlanMessage
from pipemorph.spec.job_spec import JobSpec

TOKEN = "correct horse"
PATIENCE = 15.0
"""Seconds for what takes milliseconds: a machine may stall. Less than :data:`LONG`."""
LONG = 30
"""Seconds a poll waits that is to be answered before."""
OP = {"forward": 10.0, "backwardInput": 10.0, "backwardWeight": 10.0}


def controller() -> JobController:
    return JobController(
        JobSpec.model_validate(
            {
                "parallelism": {"stages": 4},
                "schedule": {"microbatches": 8, "stageTimes": [OP] * 4},
                "trainer": {"module": "x", "iterations": 10},
            }
        )
    )


def body(sequence: int = 1, **changes: Any) -> dict[str, Any]:
    return {
        "protocol": 7,
        "job": "gpt",
        "namespace": "default",
        "attempt": 0,
        "sequence": sequence,
        "sent_at": 1.0,
        "state": "training",
        "iteration": 0,
        "observed_plan_version": 0,
        "applied_plan_version": 0,
    } | changes


class Scripted:
    """A job whose directives a test sets."""

    def __init__(self) -> None:
        self.attempt = 0
        self.plan_version = 0
        self.sequences: list[int] = []
        self.on_report: Callable[[LinkHealthReport], None] = lambda report: None
        self._directive: Directive | None = None
        self._plan = PlanMessage.from_plan(controller().wanted_plan)

    def process_report(self, report: LinkHealthReport, now: float) -> DirectiveEnvelope:
        self.sequences.append(report.sequence)
        self.on_report(report)
        return DirectiveEnvelope(memory="m")

    def check_silence(self, now: float) -> None:
        pass

    def want(self, plan_version: int) -> None:
        self.plan_version = plan_version
        self._directive = Directive(
            plan_version=plan_version, issued_at=1.0, reason="test", plan=self._plan
        )

    def get_directive(self, after: int = 0) -> Directive | None:
        wanted = self._directive
        return wanted if wanted is not None and wanted.plan_version > after else None

    pending_request = None

    def apply_proposal(self, request: DecisionRequest, proposal: PlanProposal, now: float) -> None:
        raise AssertionError("nothing was requested")

    def take_snapshot(self) -> dict[str, Any]:
        return {"plan_version": self.plan_version}

    spec = controller().spec
    accepts_snapshot = False
    term = 0

    @property
    def snapshot_key(self) -> tuple[object, ...]:
        return (self.plan_version,)

    def adopt_plan(self, attempt: int, saved: Snapshot, now: float) -> None:
        raise AssertionError("no snapshot is wanted")

    def refuse_snapshot(self) -> None:
        raise AssertionError("no snapshot is wanted")


class Client:
    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.session, self.url = session, url

    async def post(
        self, data: bytes | dict[str, Any], *, token: str = TOKEN, job: str = "gpt"
    ) -> tuple[int, Any]:
        content = data if isinstance(data, bytes) else json.dumps(data).encode()
        return await self.put("reports", content, token, job)

    async def put(
        self, what: str, content: bytes, token: str = TOKEN, job: str = "gpt"
    ) -> tuple[int, Any]:
        async with self.session.post(
            f"{self.url}/v1/jobs/default/{job}/{what}",
            data=content,
            headers={"Authorization": f"Bearer {token}"},
        ) as answer:
            return answer.status, json.loads(await answer.text())

    async def poll(self, query: str, *, token: str = TOKEN) -> tuple[int, Any]:
        async with self.session.get(
            f"{self.url}/v1/jobs/default/gpt/directive?{query}",
            headers={"Authorization": f"Bearer {token}"},
        ) as answer:
            return answer.status, json.loads(await answer.text())


@asynccontextmanager
async def serve(
    job: Any,
    *,
    store: InMemoryJobStore | None = None,
    limits: RateLimits | None = None,
    timeouts: ClientTimeouts | None = None,
    authenticator: Any = None,
) -> AsyncIterator[tuple[Client, IngestServer]]:
    """A server on loopback that has ``job``, and a client."""
    jobs = store or InMemoryJobStore()
    jobs.add_job("default", "gpt", job)
    server = IngestServer(
        jobs,
        authenticator or BearerAuthenticator(TOKEN),
        limits=limits,
        timeouts=timeouts or ClientTimeouts(shutdown=PATIENCE),
    )
    async with server, aiohttp.ClientSession() as session:
        yield Client(session, server.url), server


def waiting(server: IngestServer, job: Any) -> int:
    session = server.handler._sessions.get(job)
    return len(session.waiters) if session else 0
