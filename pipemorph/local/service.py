"""Runs the ingest and the controller of one job in a separate thread.

Uses the same code as a cluster. The thread's event loop answers at once, while the main thread
draws, waits or writes files.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import ssl
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple, TypeVar

from pipemorph.api.spec import PipeMorphJob
from pipemorph.api.status import Condition, JobState, JobStatus, TrainingStatus
from pipemorph.control.controller import JobController
from pipemorph.control.decide.forecast import Outlook
from pipemorph.control.decide.layouts.relayout import Network
from pipemorph.ingest import BearerAuthenticator, IngestServer, Join, MemoryStore
from pipemorph.local.clock import now
from pipemorph.local.results.history import Journal
from pipemorph.status.conditions import updated
from pipemorph.status.summary import Source, judge, summarize
from pipemorph.wire import AdaptationRecord, LinkHealthReport, LinkState

T = TypeVar("T")

TICK_SECONDS = 1.0
CALL_SECONDS = 10.0


class ControlState(NamedTuple):
    """How training goes, as a job's status says on a cluster; and what plans can be predicted from,
    see :meth:`JobController.outlook`."""

    training: TrainingStatus
    conditions: list[Condition]
    outlook: Outlook | None

    @staticmethod
    def of(controller: JobController, reported_at: float | None, at: float) -> ControlState:
        source, view = Source(controller, reported_at), controller.view(at)
        return ControlState(
            summarize(source, at, view), judge(source, [], at, view), controller.outlook(at)
        )

    def status(self, state: JobState, why: str = "") -> JobStatus:
        """Status of a job in that state. ``why``: its ranks have ended; empty if they run."""
        conditions = self.conditions
        if why:
            kind = state if state in ("Failed", "Suspended") else "Running"
            conditions = updated(
                conditions, kind, "False" if kind == "Running" else "True", "RanksEnded", why,
                generation=None, now=datetime.now(UTC),
            )  # fmt: skip
        return JobStatus(state=state, conditions=conditions, training=self.training)


class ControlService:
    """A context manager that serves the ingest, and records reports in ``journal``.

    ``token``: of the ranks; by default a new one. ``host``, ``port``: where to listen; by default
    any port of 127.0.0.1. ``join``: answers ranks that ask for the job. Entering it raises OSError
    if the address cannot be used.
    """

    def __init__(
        self,
        job: PipeMorphJob,
        journal: Journal,
        *,
        token: str | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        tls: ssl.SSLContext | None = None,
        join: Join | None = None,
    ) -> None:
        self._job = job
        self._journal = journal
        self.token = token or secrets.token_urlsafe(32)
        self.heard_at: float | None = None
        """Time of the newest report, monotonic; None before the first."""
        self._controller = JobController(job.spec, on_report=self._on_report)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="ingest", daemon=True)
        self._ticking: asyncio.Task[None] | None = None
        name = (job.metadata.namespace, job.metadata.name)
        store = MemoryStore()
        store.add(*name, self._controller)
        self._server = IngestServer(
            store, BearerAuthenticator(self.token), host=host, port=port, tls=tls, join=join
        )
        self._server.handler.clock = now

    @property
    def url(self) -> str:
        return self._server.url

    def __enter__(self) -> ControlService:
        self._thread.start()
        self._call(self._start())
        return self

    def __exit__(self, *_: Any) -> None:
        with contextlib.suppress(TimeoutError):
            self._call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CALL_SECONDS)
        if not self._thread.is_alive():
            # Left to the garbage collector, it is closed after its sockets, with a traceback.
            self._loop.close()

    def begin_attempt(self, attempt: int) -> None:
        """Switch to the ranks of a new attempt. Raises ValueError unless it is a later one."""
        self._do(lambda: self.begin_attempt_here(attempt))

    def begin_attempt_here(self, attempt: int) -> None:
        """Like :meth:`begin_attempt`, in the thread of the ingest."""
        self._controller.begin_attempt(attempt)

    def silence(self) -> float:
        """Seconds since the newest report; 0 before the first."""
        return 0.0 if self.heard_at is None else time.monotonic() - self.heard_at

    def adaptations(self) -> list[AdaptationRecord]:
        """Every adaptation so far, oldest first."""
        return self._do(lambda: [r.model_copy(deep=True) for r in self._controller.records])

    def change_layout(self, slow: Sequence[LinkState] | None, layers: tuple[int, ...]) -> None:
        """See :meth:`JobController.change_layout`."""
        self._do(lambda: self._controller.change_layout(slow, layers))

    def network(self) -> Network | None:
        """What another layout would be judged by, see :meth:`JobController.network`."""
        return self._do(lambda: self._controller.network(now()))

    def state(self) -> ControlState:
        """How training goes. Raises TimeoutError if the ingest does not answer."""

        def read() -> ControlState:
            reported_at = None if self.heard_at is None else now() - self.silence()
            return ControlState.of(self._controller, reported_at, now())

        return self._do(read)

    def _do(self, what: Callable[[], T]) -> T:
        """Call something in the thread of the ingest."""

        async def do() -> T:
            return what()

        return self._call(do())

    def _on_report(self, report: LinkHealthReport) -> None:
        self.heard_at = time.monotonic()
        self._journal.take(report, self._controller, now())

    async def _start(self) -> None:
        await self._server.start()
        self._ticking = asyncio.create_task(self._tick())

    async def _stop(self) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
        await self._server.stop()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            name = self._job.metadata
            await self._server.handler.tick(name.namespace, name.name)

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(CALL_SECONDS)
