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

from pipemorph.control.controller import JobController
from pipemorph.control.decide.forecast import Outlook
from pipemorph.control.decide.layouts.layout_search import NetworkMeasurements
from pipemorph.ingest import BearerAuthenticator, IngestServer, InMemoryJobStore, Join
from pipemorph.local.clock import now
from pipemorph.local.observed.followed_job import AttributeIdle, FollowedJob
from pipemorph.local.results.journal import RunJournal
from pipemorph.protocol import AdaptationRecord, LinkHealthReport, LinkState
from pipemorph.spec.job_spec import PipeMorphJob
from pipemorph.spec.job_status import Condition, JobState, JobStatus, TrainingStatus
from pipemorph.views.status.conditions import update_condition
from pipemorph.views.status.summary import StatusInput, summarize_training, update_conditions

T = TypeVar("T")

TICK_SECONDS = 1.0
CALL_SECONDS = 10.0


class ControlSnapshot(NamedTuple):
    """State of the training as in a job's status on a cluster, and the input of predictions of
    plans, see :meth:`JobController.get_outlook`."""

    training: TrainingStatus
    conditions: list[Condition]
    outlook: Outlook | None

    @staticmethod
    def from_controller(
        controller: JobController, reported_at: float | None, at: float
    ) -> ControlSnapshot:
        source, view = StatusInput(controller, reported_at), controller.get_job_view(at)
        return ControlSnapshot(
            summarize_training(source, at, view),
            update_conditions(source, [], at, view),
            controller.get_outlook(at),
        )

    def to_status(self, state: JobState, why: str = "") -> JobStatus:
        """Status of a job in that state. ``why``: cause of its ranks' end; empty if they run."""
        conditions = self.conditions
        if why:
            kind = state if state in ("Failed", "Suspended") else "Running"
            conditions = update_condition(
                conditions, kind, "False" if kind == "Running" else "True", "RanksEnded", why,
                generation=None, now=datetime.now(UTC),
            )  # fmt: skip
        return JobStatus(state=state, conditions=conditions, training=self.training)


class ControlService:
    """Context manager that serves the ingest, and records reports in ``journal``.

    ``job``: None for a job that is observed, and begins when its ranks have reported.
    ``token``: of the ranks; by default a new one. ``host``, ``port``: address to listen at; by
    default any port of 127.0.0.1. ``join``: answers ranks that request the job.
    ``attribute_idle``: of an observed job. Entering it raises OSError if the address cannot be
    used.
    """

    def __init__(
        self,
        job: PipeMorphJob | None,
        journal: RunJournal,
        *,
        token: str | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        tls: ssl.SSLContext | None = None,
        join: Join | None = None,
        attribute_idle: AttributeIdle = lambda _: None,
    ) -> None:
        self._journal = journal
        self.token = token or secrets.token_urlsafe(32)
        self.update_metrics: Callable[..., None] | None = None
        """Updates metrics of the job, see :func:`job_metrics.update_job_metrics`; None: nothing
        does."""
        self.reported_at: float | None = None
        """Time of the newest report, monotonic; None before the first."""
        self.observed: FollowedJob | None = None
        if job is None:
            self.observed = FollowedJob(
                "observed", clock=now, on_report=self._on_report, on_started=self._host_job,
                on_attempt=lambda _: journal.reset_view(), attribute_idle=attribute_idle,
            )  # fmt: skip
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="ingest", daemon=True)
        self._ticking: asyncio.Task[None] | None = None
        self._store = InMemoryJobStore()
        if job is not None:
            self._host_job(job, JobController(job.spec, on_report=self._on_report))
        observe = self.observed.handle_report if self.observed is not None else None
        self._server = IngestServer(
            self._store, BearerAuthenticator(self.token), host=host, port=port, tls=tls, join=join,
            observe=observe,
        )  # fmt: skip
        self._server.handler.clock = now

    def _host_job(self, job: PipeMorphJob, controller: JobController) -> None:
        self._job, self._controller = job, controller
        self._store.add_job(job.metadata.namespace, job.metadata.name, controller)

    @property
    def url(self) -> str:
        return self._server.url

    def __enter__(self) -> ControlService:
        self._thread.start()
        self._run_coroutine(self._start_server())
        return self

    def __exit__(self, *_: Any) -> None:
        with contextlib.suppress(TimeoutError):
            self._run_coroutine(self._stop_server())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CALL_SECONDS)
        if not self._thread.is_alive():
            # The garbage collector would close it after its sockets, with a traceback.
            self._loop.close()

    def begin_attempt(self, attempt: int) -> None:
        """Switch to the ranks of a new attempt. Raises ValueError unless it is a later one."""
        self._call_in_loop(lambda: self.begin_attempt_in_loop(attempt))

    def begin_attempt_in_loop(self, attempt: int) -> None:
        """Switch to a new attempt, in the thread of the ingest, see :meth:`begin_attempt`."""
        self._controller.begin_attempt(attempt)

    def seconds_since_report(self) -> float:
        """Seconds since the newest report; 0 before the first."""
        return 0.0 if self.reported_at is None else time.monotonic() - self.reported_at

    def list_adaptations(self) -> list[AdaptationRecord]:
        """Every adaptation so far, oldest first."""
        return self._call_in_loop(
            lambda: [r.model_copy(deep=True) for r in self._controller.records]
        )

    def change_layout(self, slow: Sequence[LinkState] | None, layers: tuple[int, ...]) -> None:
        """Change the layout, see :meth:`JobController.change_layout`."""
        self._call_in_loop(lambda: self._controller.change_layout(slow, layers))

    def read_network(self) -> NetworkMeasurements | None:
        """Input for the choice of another layout, see :meth:`JobController.measure_network`."""
        return self._call_in_loop(lambda: self._controller.measure_network(now()))

    def read_state(self) -> ControlSnapshot:
        """State of the training. Raises TimeoutError if the ingest does not answer."""

        def read_controller() -> ControlSnapshot:
            return ControlSnapshot.from_controller(self._controller, self._get_report_time(), now())

        return self._call_in_loop(read_controller)

    def _get_report_time(self) -> float | None:
        """Wall clock of the newest report; None before the first. The host of an observed job
        reports to its controller without an end, so there it is that of a rank."""
        if self.observed is not None:
            return self.observed.reported_at
        return None if self.reported_at is None else now() - self.seconds_since_report()

    def _call_in_loop(self, what: Callable[[], T]) -> T:
        """Call a function in the thread of the ingest."""

        async def call_function() -> T:
            return what()

        return self._run_coroutine(call_function())

    def _on_report(self, report: LinkHealthReport) -> None:
        self.reported_at = time.monotonic()
        self._journal.record_report(report, self._controller, now())

    async def _start_server(self) -> None:
        await self._server.start()
        self._ticking = asyncio.create_task(self._tick_forever())

    async def _stop_server(self) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
        await self._server.stop()

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            if self.observed is not None:
                self.observed.tick()
                if self.observed.job is None:
                    continue
            name = self._job.metadata
            await self._server.handler.tick_job(name.namespace, name.name)
            if self.update_metrics is not None:
                at, controller = now(), self._controller
                source = StatusInput(controller, self._get_report_time())
                view = controller.get_job_view(at)
                self.update_metrics(
                    (name.namespace, name.name),
                    summarize_training(source, at, view),
                    update_conditions(source, [], at, view),
                    source.reported_at,
                    recoveries=controller.attempt, links=view.links, idle=view.idle_totals,
                )  # fmt: skip

    def _run_coroutine(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(CALL_SECONDS)
