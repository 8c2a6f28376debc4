"""An ingest whose jobs are watched, with a viewer and a rank as clients."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
from ingest_client import PATIENCE, TOKEN, body, controller
from pages_here import PagesHere
from watched_jobs import NOW, watched

from pipemorph.api.spec import Metadata, PipeMorphJob
from pipemorph.control import JobController
from pipemorph.ingest import (
    BearerAuthenticator,
    Followed,
    IngestServer,
    MemoryStore,
    Refused,
    Watch,
    WatchDesk,
    WatchProcess,
)
from pipemorph.ingest.app import Timeouts
from pipemorph.ingest.watch import worker as watch_worker
from pipemorph.watch.access import HEADER, path
from pipemorph.watch.document import WatchView
from pipemorph.wire import DirectiveEnvelope, OpsReport, OpsTrace

OTHERS = "another-token"
URL = path("default", "gpt")


class Store(MemoryStore):
    def __init__(self) -> None:
        super().__init__()
        self.recovering, self.uid = "", "uid-1"
        self.left_out: tuple[int, ...] = ()

    def followed(self, namespace: str, job: str) -> Followed | None:
        found = self.lookup(namespace, job)
        if not isinstance(found, JobController):
            return None
        manifest = PipeMorphJob(
            api_version="pipemorph.io/v1alpha1", kind="PipeMorphJob",
            metadata=Metadata(name=job, namespace=namespace), spec=found.spec,
        )  # fmt: skip
        return Followed(manifest, found, self.uid, self.recovering, left_out=self.left_out)


class Viewers(BearerAuthenticator):
    """One token is good, one is somebody's who may not see the job."""

    async def authenticate(self, token: str, namespace: str, job: str, source: str = "") -> Any:
        if token == OTHERS:
            raise Refused(403, "may not get that job")
        return await super().authenticate(token, namespace, job, source)


class Site:
    def __init__(
        self,
        session: aiohttp.ClientSession,
        server: IngestServer,
        store: Store,
        pages: WatchProcess,
    ) -> None:
        self.session, self.url, self.store, self.server = session, server.url, store, server
        self.process = pages
        self.sequence = 0

    async def get(self, what: str = "view", **headers: str) -> tuple[int, bytes, Any]:
        async with self.session.get(
            self.url + URL + what, headers=headers or {HEADER: "viewer"}
        ) as answer:
            return answer.status, await answer.read(), answer.headers

    async def view(self, what: str = "view") -> WatchView:
        status, found, _ = await self.get(what)
        assert status == 200, found
        return WatchView.model_validate_json(found)

    async def report(
        self, *iterations: int, seconds: float = 0.5, **more: Any
    ) -> DirectiveEnvelope:
        self.sequence += 1
        samples = [
            {"index": i, "seconds": seconds, "loss": 1.0, "plan_version": 0,
             "bubble_fraction": 0.2} for i in iterations
        ]  # fmt: skip
        content = body(self.sequence, iterations=samples, **more)
        async with self.session.post(
            f"{self.url}/v1/jobs/default/gpt/reports", json=content,
            headers={"Authorization": f"Bearer {TOKEN}"},
        ) as answer:  # fmt: skip
            assert answer.status == 200, await answer.text()
            return DirectiveEnvelope.model_validate_json(await answer.read())

    @property
    def pages(self) -> PagesHere:
        assert isinstance(self.process, PagesHere)
        return self.process

    @property
    def kept(self) -> watch_worker._Kept:
        """Of the one job that is watched."""
        (found,) = self.pages.viewing._jobs.values()
        return found.kept

    async def ops(self, report: OpsReport | bytes, token: str = TOKEN) -> int:
        content = report if isinstance(report, bytes) else report.body()
        headers = {"Authorization": f"Bearer {token}", "Content-Encoding": "deflate"}
        async with self.session.post(
            f"{self.url}/v1/jobs/default/gpt/ops", data=zlib.compress(content), headers=headers
        ) as answer:
            return answer.status


def ops_of(iteration: int) -> OpsReport:
    """As an agent sends them, of a pipeline of four stages."""
    _, traces = watched(4, 8)
    stages = [
        OpsTrace.of((each.rank, each.stage, 0), iteration, 0, NOW, each.ops) for each in traces
    ]
    values = {"job": "gpt", "namespace": "default", "attempt": 0, "column": 0}
    return OpsReport.model_validate({**values, "iteration": iteration, "stages": stages})


def serve(test: Callable[[Site], Awaitable[None]], *, own_process: bool = False) -> None:
    async def run() -> None:
        store, pages = Store(), WatchProcess() if own_process else PagesHere()
        store.add("default", "gpt", controller())
        server = IngestServer(
            store,
            BearerAuthenticator(TOKEN),
            timeouts=Timeouts(shutdown=PATIENCE, refusal=0.01),
            watch=Watch(WatchDesk(store, pages), Viewers("viewer")),
        )
        try:
            async with server, aiohttp.ClientSession() as session:
                await asyncio.wait_for(test(Site(session, server, store, pages)), 4 * PATIENCE)
        finally:
            await pages.close()

    asyncio.run(run())


SLOW = [{"link": 1, "column": 0, "direction": "forward", "delay": 0.06, "wire_time": 0.061,
         "since_iteration": 3, "confidence": 1.0}]  # fmt: skip
LINKS = [{"link": i, "health": "healthy", "wire_time": 0.001} for i in range(3)]
