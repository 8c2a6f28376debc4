"""Peers of an agent for tests: ranks that report, and an ingest."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import web
from launch import free_port
from schedule_text import schedule_of

from pipemorph.detection.rank_monitor import RankMonitor
from pipemorph.planning.ir import Plan, Policy, Route
from pipemorph.protocol import (
    Directive,
    DirectiveEnvelope,
    IterationSample,
    LinkHealthReport,
    LinkSample,
    LinkState,
    PlanMessage,
    StageProfile,
    WireTime,
)
from pipemorph.protocol.rank_messages import RankReport
from pipemorph.spec.mesh import MeshShape
from pipemorph_trainer.agent.client import AgentClient
from pipemorph_trainer.agent.messages import RankTelemetry
from pipemorph_trainer.context import TrainerContext

T = TypeVar("T")
DEADLINE = 60.0
ENOUGH = 20
"""Windows of a first iteration from which what is normal for a link is learned."""
MOST_ITERATIONS = 256
"""Iterations in one report."""
SECRET = b"the attempt's secret"


class Ingest:
    """A stand-in for the ingest, on a port of its own that can go away and come back."""

    def __init__(self, token: str = "token") -> None:
        self.token = token
        self.reports: list[LinkHealthReport] = []
        self.sizes: list[int] = []
        self.refusals: list[int] = []
        self.directive: Directive | None = None
        self.on_report: Callable[[LinkHealthReport], None] = lambda report: None
        self.refuses: Callable[[LinkHealthReport], bool] = lambda report: False
        self.loop = asyncio.new_event_loop()
        self._changed = asyncio.Event()
        self._runner: web.AppRunner | None = None
        self.port = free_port()
        """Reserved while the ingest is down, so that a restart finds it free."""
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.up()

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(DEADLINE)

    def up(self) -> None:
        """Start without the state of earlier reports."""
        self.memory = secrets.token_hex(8)
        self._run(self._up())

    def down(self) -> None:
        self._run(self._down())

    def close(self) -> None:
        self.down()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(DEADLINE)

    def issue(self, plan_version: int) -> None:
        self.loop.call_soon_threadsafe(self._issue, plan_version)

    def _issue(self, plan_version: int) -> None:
        self._serve(directive(plan_version))

    def serve(self, newest: Directive) -> None:
        self.loop.call_soon_threadsafe(self._serve, newest)

    def _serve(self, newest: Directive) -> None:
        self.directive = newest
        self._changed.set()

    async def _up(self) -> None:
        app = web.Application()
        app.router.add_post("/v1/jobs/{namespace}/{name}/reports", self._report)
        app.router.add_get("/v1/jobs/{namespace}/{name}/directive", self._poll)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()

    async def _down(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    def _authorized(self, request: web.Request) -> bool:
        if request.headers.get("Authorization") == f"Bearer {self.token}":
            return True
        self.refusals.append(401)
        return False

    async def _report(self, request: web.Request) -> web.Response:
        if not self._authorized(request):
            return web.Response(status=401, text="token refused")
        body = await request.read()
        report = LinkHealthReport.model_validate_json(body)
        if self.refuses(report):
            self.refusals.append(503)
            return web.Response(status=503, text="not now")
        self.sizes.append(len(body))
        self.reports.append(report)
        self.on_report(report)
        return self._answer(report.observed_plan_version)

    async def _poll(self, request: web.Request) -> web.Response:
        if not self._authorized(request):
            return web.Response(status=401, text="token refused")
        after = int(request.query["after"])
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(float(request.query["wait"])):
                while self.directive is None or self.directive.plan_version <= after:
                    self._changed.clear()
                    await self._changed.wait()
        return self._answer(after)

    def _answer(self, after: int) -> web.Response:
        newest = self.directive if self.directive and self.directive.plan_version > after else None
        answer = DirectiveEnvelope(directive=newest, memory=self.memory)
        return web.json_response(text=answer.model_dump_json())

    # what came in

    def iterations(self) -> list[int]:
        return [i.index for report in self.reports for i in report.iterations]

    def links(self) -> list[LinkState]:
        return [link for report in self.reports for link in report.links]


def pumping(line: AgentClient, what: Callable[[], T]) -> Callable[[], T]:
    """Returns ``what``, preceded by a rank's poll of the line for plans between its ops."""

    def look() -> T:
        assert line.pop_newest_plan() is None
        return what()

    return look


def plan(version: int, stages: int = 2, microbatches: int = 2) -> Plan:
    ops = " ".join(f"F{m} B{m} W{m}" for m in range(microbatches))
    return Plan(
        version=version,
        policy=Policy.PIPEMORPH,
        schedule=schedule_of(microbatches, [ops] * stages),
        routes=(Route.DIRECT,) * (stages - 1),
        in_flight_limits=(None,) * stages,
    )


def directive(plan_version: int) -> Directive:
    message = PlanMessage.from_plan(plan(plan_version))
    return Directive(
        plan_version=plan_version, issued_at=time.time(), reason="link 0 is slow", plan=message
    )


def sample(link: int = 0, p50: float = 0.001, iteration: int = 0, replica: int = 0) -> LinkSample:
    wire = WireTime(count=4, exact=4, min=p50, p50=p50, p99=p50, mean=p50)
    return LinkSample(
        link=link,
        replica=replica,
        direction="forward",
        route=Route.DIRECT,
        transport="gloo",
        iteration=iteration,
        bytes=4096,
        wire=wire,
        queue_p50=0.0,
    )


def samples(p50: float, count: int, iteration: int = 0) -> list[LinkSample]:
    """Samples of ``count`` windows: ``ENOUGH`` are enough to know what is normal."""
    return [sample(p50=p50, iteration=iteration)] * count


MONITORS: dict[int, RankMonitor] = {}
"""Monitors of the ranks that have sent telemetry; a fixture forgets them."""


def telemetry(
    rank: int = 0,
    *,
    links: Sequence[LinkSample] = (),
    profile: StageProfile | None = None,
    mesh: MeshShape = MeshShape(2),  # noqa: B008
    **fields: Any,
) -> RankTelemetry:
    """Telemetry of a rank after these windows, with any fields of its report."""
    now = time.monotonic()
    monitor = MONITORS.setdefault(rank, RankMonitor(mesh, rank))
    monitor.observe_windows(links, now, profiles=() if profile is None else (profile,))
    values: dict[str, Any] = {"state": "training", "iteration": 0, "applied_plan_version": 0}
    report = RankReport(rank=rank, **(monitor.take_changes(now) | values | fields))
    return RankTelemetry(
        stage=mesh.find_coordinate(rank).stage,
        state=report.state,
        iteration=report.iteration,
        applied_plan_version=report.applied_plan_version,
        prepared_plan_version=0,
        report=report,
    )


def finished(index: int) -> IterationSample:
    return IterationSample(index=index, seconds=0.5, loss=1.0, plan_version=0, bubble_fraction=0.2)


def context(ingest: Ingest, token_file: Path, rank: int = 0, world_size: int = 2) -> TrainerContext:
    return TrainerContext(
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        master_addr="127.0.0.1",
        master_port=1,
        secret=SECRET,
        ingest_url=f"http://127.0.0.1:{ingest.port}",
        token_file=token_file,
    )
