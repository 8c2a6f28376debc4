"""The ingest protocol without a transport: authenticated request in, status and body out.

A report is validated (size, schema, job, attempt, sequence), passed to the job's controller, and
answered with the newest directive above the agent's version, and with the snapshot of the
controller if the agent holds another one. A directive is served at once, and status is persisted
through the :class:`~pipemorph.ingest.interfaces.JobStore` after that. If this host ends, the agent
hands the snapshot to the next one.

====== ===============================================================
status meaning
====== ===============================================================
200    a :class:`~pipemorph.protocol.DirectiveEnvelope`
400    not JSON, or an invalid query
401    no or wrong token
403    the token, the report or its attempt belongs to another job
404    no such job, or no such path
409    a sequence number that was used before; ``last`` is the highest used one. For a snapshot:
       no snapshot is wanted
413    more than ``MAX_REPORT_BYTES`` or ``MAX_SNAPSHOT_MESSAGE_BYTES``
415    a compressed report or snapshot
422    JSON that is not a report of this job, or no snapshot of it; ``field`` names the field
429    more reports or polls than the limits allow
503    this process stands by, does not know the job yet, or controls the job no more: try again,
       after ``Retry-After`` seconds if that is given
====== ===============================================================

Every error is one line of JSON: ``{"error": "...", "field": "links[0].wire.p50"}``.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakKeyDictionary

from pydantic import ValidationError

from pipemorph.control import JobController, adopted_plan, snapshot
from pipemorph.control.decide.plan_choice import DecisionRequest
from pipemorph.control.job_state.reports import (
    ReplayedReport,
    ReportMismatch,
    SupersededIngest,
    WrongAttempt,
)
from pipemorph.errors import InputError, one_line
from pipemorph.ingest.interfaces import JobStore
from pipemorph.ingest.planner_pool import Planner, PlannerLostError, plan_in_process
from pipemorph.ingest.token_bucket import TokenBucket
from pipemorph.protocol import (
    MAX_REPORT_BYTES,
    MAX_WAIT_SECONDS,
    PROTOCOL,
    Directive,
    DirectiveEnvelope,
    LinkHealthReport,
    compute_revision,
)
from pipemorph.spec.job_spec import JobSpec

log = logging.getLogger("pipemorph.ingest")


LARGE_BYTES = 64 * 1024
"""Size from which snapshots are checked in a thread: smaller ones take a few milliseconds."""
LONGEST_REPORT_INTERVAL_SECONDS = 5.0
"""Longest interval of reports that is requested of an agent: well below the time after which it
takes the ingest for lost, or the ingest its links for unknown."""
LARGE_CELLS = 16_384
"""Stages × microbatches from which plans are packed in a thread: smaller ones take 1-2 ms."""
PERSIST_RETRY_SECONDS = 1.0
"""Delay of a retry after a directive that was served could not be persisted."""


class Reply(NamedTuple):
    """A response: HTTP status, JSON body, extra headers, and whether to close the connection."""

    status: int
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()
    closes_connection: bool = False

    @staticmethod
    def from_error(
        status: int,
        message: str,
        *,
        field: str | None = None,
        last: int | None = None,
    ) -> Reply:
        """Error response. ``field``: that is wrong; ``last``: highest sequence number."""
        content: dict[str, str | int] = {"error": " ".join(message.split())[:500]}
        if field is not None:
            content["field"] = field[:200]
        if last is not None:
            content["last"] = last
        headers = (("Retry-After", "1"),) if status in (429, 503) else ()
        return Reply(status, json.dumps(content).encode(), headers)

    @staticmethod
    def from_envelope(
        answer: DirectiveEnvelope, directive: Directive | None = None, snapshot: str | None = None
    ) -> Reply:
        """Response with ``answer``, completed by a directive and a snapshot."""
        whole = answer.model_copy(update={"directive": directive, "snapshot": snapshot})
        return Reply(200, whole.model_dump_json().encode())


ReadBody = Callable[[], Awaitable[bytes | Reply]]
"""Reads the body of a request, or returns the error to send."""


@dataclass(frozen=True)
class RateLimits:
    """Rate limits of one job, but for ``total_reports_per_second``.

    An agent sends a report every second, and every ~50 ms at most while its links change: the burst
    is two seconds of that. It has one long poll; a few more may remain from retries.

    ``total_reports_per_second``: reports a second of all jobs together that have nothing urgent.
    With more jobs, their agents get a longer interval, and an alarm waits behind fewer reports.
    """

    total_reports_per_second: float = 400.0
    reports_per_second: float = 25.0
    burst: int = 50
    waiting_polls: int = 8
    max_wait_seconds: float = MAX_WAIT_SECONDS


@dataclass
class _JobSession:
    """State of the ingest per job: the directive to serve, the plan version that is persisted, rate
    limits and waiting polls."""

    served_directive: Directive | None
    persisted_version: int
    report_bucket: TokenBucket
    persisting: asyncio.Lock = field(default_factory=asyncio.Lock)
    persist_retry_at: float = 0.0
    reading_snapshot: bool = False
    """True while a snapshot of the agent is being read."""
    snapshot: str | None = None
    """Packed snapshot for the agent; None if there is none yet, or if it is too large."""
    revision: str = ""
    packed_state: tuple[object, ...] = ()
    """State of the controller in :attr:`snapshot`."""
    packing: asyncio.Lock = field(default_factory=asyncio.Lock)
    waiters: set[asyncio.Future[None]] = field(default_factory=set)
    _last_reply: tuple[DirectiveEnvelope, Reply] | None = None
    """The newest answer without a directive: most answers equal the one before."""

    def get_newer_directive(self, version: int) -> Directive | None:
        """The served directive, if its plan is newer than ``version``."""
        return (
            self.served_directive
            if self.served_directive is not None and self.served_directive.plan_version > version
            else None
        )

    def make_reply(self, answer: DirectiveEnvelope, report: LinkHealthReport) -> Reply:
        """``answer``, with the directive and the snapshot that the agent does not have, if any."""
        directive = self.get_newer_directive(report.observed_plan_version)
        # A snapshot would replace the requested one.
        held = answer.wants_snapshot or report.snapshot == self.revision
        if directive is not None or not held:
            return Reply.from_envelope(answer, directive, None if held else self.snapshot)
        if self._last_reply is None or self._last_reply[0] != answer:
            self._last_reply = answer, Reply.from_envelope(answer)
        return self._last_reply[1]

    async def pack_snapshot(self, where: str, job: JobController) -> None:
        """Pack the newest snapshot."""
        async with self.packing:
            if job.snapshot_key == self.packed_state:
                return
            self.packed_state = job.snapshot_key
            data, stages = job.take_snapshot(), job.spec.parallelism.stages
            large = stages * job.spec.schedule.microbatches > LARGE_CELLS
            try:
                self.snapshot = (
                    await asyncio.to_thread(snapshot.pack_snapshot, data)
                    if large
                    else snapshot.pack_snapshot(data)
                )
            except snapshot.SnapshotTooLarge as error:
                log.warning("%s: %s: another ingest could not continue from it", where, error)
                self.snapshot = None
            self.revision = compute_revision(self.snapshot or "")

    def release_waiters(self) -> None:
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_result(None)


class _PendingDecision(NamedTuple):
    """Decision that a job waits for."""

    job: JobController
    request: DecisionRequest
    task: asyncio.Task[None]


class IngestHandler:
    """Answers all requests of the ingest. For use in one event loop.

    ``planner`` makes the controllers' decisions. Reports are answered without waiting for it; polls
    and the next report return the result.
    """

    def __init__(
        self,
        store: JobStore,
        *,
        limits: RateLimits | None = None,
        planner: Planner = plan_in_process,
    ) -> None:
        self._store = store
        self.on_report: Callable[[str, str], None] = lambda *_: None
        """Callback with the namespace and name of a job whose controller has taken a report."""
        self.clock: Callable[[], float] = time.time
        """Wall clock, seconds."""
        self._planner = planner
        self._limits = limits or RateLimits()
        self._sessions: WeakKeyDictionary[JobController, _JobSession] = WeakKeyDictionary()
        self._closing = False
        self._deciding: dict[tuple[str, str], _PendingDecision] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._persists: set[asyncio.Task[None]] = set()

    async def handle_report(self, namespace: str, name: str, body: bytes) -> Reply:
        """Answer ``POST …/reports``. An invalid ``body`` gives an error reply, not an exception."""
        if len(body) > MAX_REPORT_BYTES:
            return Reply.from_error(
                413, f"the report has {len(body)} bytes; expected at most {MAX_REPORT_BYTES}"
            )
        job = self._store.find_job(namespace, name)
        if job is None:
            return Reply.from_error(404, f"there is no job {namespace}/{name} here")
        session = self._get_session(job)
        if not session.report_bucket.take_token(time.monotonic()):
            return Reply.from_error(
                429, f"more than {self._limits.reports_per_second:g} reports per second"
            )
        parsed = parse_report(body)
        if isinstance(parsed, Reply):
            return parsed
        if (parsed.namespace, parsed.job) != (namespace, name):
            return Reply.from_error(
                403,
                f"the report is for job {parsed.namespace}/{parsed.job}, not {namespace}/{name}",
                field="job",
            )
        try:
            answer = job.process_report(parsed, self.clock())
        except WrongAttempt as error:
            return Reply.from_error(403, str(error), field="attempt")
        except SupersededIngest as error:
            # The next connection leads to the other ingest.
            return Reply.from_error(503, str(error), field="term")._replace(closes_connection=True)
        except ReplayedReport as error:
            return Reply.from_error(409, str(error), field="sequence", last=error.last)
        except ReportMismatch as error:
            return Reply.from_error(422, str(error), field=error.field)
        if not parsed.fresh:
            answer = answer.model_copy(update={"seldom": self._choose_report_interval(job.spec)})
        self.on_report(namespace, name)
        self._start_decision(namespace, name, job, session)
        await self._publish_directive(namespace, name, job, session)
        # A directive that is not served yet is packed when it is served.
        if session.served_directive is job.get_directive():
            await session.pack_snapshot(f"{namespace}/{name}", job)
        return session.make_reply(answer, parsed)

    def _choose_report_interval(self, spec: JobSpec) -> float:
        """Seconds between two reports of an agent that has nothing urgent: whole halves, so that
        most answers do not change when a job comes or goes. Several intervals fit into the time
        after which a job's state counts as stale."""
        wanted = len(self._sessions) / self._limits.total_reports_per_second
        most = min(LONGEST_REPORT_INTERVAL_SECONDS, spec.adaptation.stale_after_seconds / 3)
        return max(1.0, min(most, math.ceil(2 * wanted) / 2))

    async def handle_snapshot(self, namespace: str, name: str, read: ReadBody) -> Reply:
        """Answer ``POST …/snapshot``: continue from the snapshot of the job's agent. After an
        invalid one the controller decides without it. ``read`` is called only if a snapshot is
        wanted, once at a time: it may be large."""
        job = self._store.find_job(namespace, name)
        if job is None:
            return Reply.from_error(404, f"there is no job {namespace}/{name} here")
        session = self._get_session(job)
        if not job.accepts_snapshot or session.reading_snapshot:
            return Reply.from_error(
                409, "no snapshot is wanted: the job is known, or its snapshot was refused"
            )
        if not session.report_bucket.take_token(time.monotonic()):
            return Reply.from_error(
                429, f"more than {self._limits.reports_per_second:g} requests per second"
            )
        session.reading_snapshot = True
        try:
            body = await read()
            if isinstance(body, Reply):
                return body
            if len(body) > LARGE_BYTES:
                handed = await asyncio.to_thread(adopted_plan.parse_message, body, job.spec)
            else:
                handed = adopted_plan.parse_message(body, job.spec)
            message, saved = handed
            if (message.namespace, message.job) != (namespace, name):
                raise WrongAttempt(f"the snapshot is of job {message.namespace}/{message.job}")
            if self._store.find_job(namespace, name) is not job:
                return Reply.from_error(404, f"job {namespace}/{name} has ended here")
            job.adopt_plan(message.attempt, saved, self.clock())
        except WrongAttempt as error:
            return Reply.from_error(403, str(error))
        except InputError as error:
            job.refuse_snapshot()
            why = one_line(str(error), 500)
            log.error("%s/%s: refused the snapshot of the job's agent: %s", namespace, name, why)
            return Reply.from_error(422, why, field="snapshot")
        finally:
            session.reading_snapshot = False
        version = saved.directive.plan_version if saved.directive is not None else 0
        log.info("%s/%s: continuing from the agent's snapshot, plan v%d", namespace, name, version)
        await self._publish_directive(namespace, name, job, session)
        return Reply.from_envelope(DirectiveEnvelope(term=job.term))

    async def handle_directive_poll(
        self, namespace: str, name: str, *, attempt: str, after: str, wait: str
    ) -> Reply:
        """Answer ``GET …/directive`` as soon as a directive exists or ``wait`` has passed."""
        job = self._store.find_job(namespace, name)
        if job is None:
            return Reply.from_error(404, f"there is no job {namespace}/{name} here")
        numbers = {}
        for key, text in (("attempt", attempt), ("after", after)):
            if not (text.isascii() and text.isdigit() and len(text) <= 16):
                return Reply.from_error(
                    400, f"{key} is {text[:40]!r}; expected an integer of 0 or more", field=key
                )
            numbers[key] = int(text)
        try:
            seconds = float(wait) if len(wait) <= 40 else -1.0
        except ValueError:
            seconds = -1.0
        if not 0 <= seconds <= self._limits.max_wait_seconds:
            return Reply.from_error(
                400,
                f"wait is {wait[:40]!r}; expected 0 to {self._limits.max_wait_seconds:g} seconds",
                field="wait",
            )
        session = self._get_session(job)
        wanted_attempt, after_version = numbers["attempt"], numbers["after"]
        if len(session.waiters) >= self._limits.waiting_polls:
            return Reply.from_error(
                429, f"{len(session.waiters)} polls are waiting for this job already"
            )
        deadline = time.monotonic() + seconds
        while (
            wanted_attempt == job.attempt
            and session.get_newer_directive(after_version) is None
            and not self._closing
        ):
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                break
            await self._wait_for_release(session, remaining)
            if self._store.find_job(namespace, name) is not job:
                return Reply.from_error(404, f"job {namespace}/{name} has ended here")
        if wanted_attempt != job.attempt:
            return Reply.from_error(
                403,
                f"attempt {wanted_attempt} is not the attempt in progress, {job.attempt}",
                field="attempt",
            )
        directive = session.get_newer_directive(after_version)
        snapshot = session.snapshot if directive is not None else None
        return Reply.from_envelope(DirectiveEnvelope(term=job.term), directive, snapshot)

    async def tick_job(self, namespace: str, name: str) -> None:
        """Run a job's timers, and publish a directive that results.

        The host calls this about once a second, also for jobs that do not report. Also retries a
        directive that could not be persisted.
        """
        job = self._store.find_job(namespace, name)
        if job is not None:
            job.check_silence(self.clock())
            session = self._get_session(job)
            self._start_decision(namespace, name, job, session)
            await self._publish_directive(namespace, name, job, session)

    def close(self) -> None:
        """Stop planning, and answer waiting and later polls at once."""
        self._closing = True
        for task in self._tasks:
            task.cancel()
        for session in self._sessions.values():
            session.release_waiters()

    async def wait_until_persisted(self, seconds: float) -> None:
        """Wait until the served state is persisted, or ``seconds`` have passed."""
        if self._persists:
            await asyncio.wait(self._persists, timeout=seconds)

    def drop_job(self, job: JobController) -> None:
        """Answer the polls of a job that the host has dropped, as when another host owns it now."""
        session = self._sessions.get(job)
        if session is not None:
            session.release_waiters()

    def _get_session(self, job: JobController) -> _JobSession:
        session = self._sessions.get(job)
        if session is None:
            # A directive that exists before the first report comes from a persisted snapshot.
            saved = job.get_directive()
            session = _JobSession(
                served_directive=saved,
                persisted_version=saved.plan_version if saved is not None else 0,
                report_bucket=TokenBucket(
                    self._limits.reports_per_second, self._limits.burst, time.monotonic()
                ),
            )
            self._sessions[job] = session
        return session

    def drop_stale_decisions(self) -> None:
        """Drop decisions of jobs that the host no longer has. The host calls this regularly."""
        for (namespace, name), deciding in list(self._deciding.items()):
            if self._store.find_job(namespace, name) is not deciding.job:
                deciding.task.cancel()

    def _start_decision(
        self, namespace: str, name: str, job: JobController, session: _JobSession
    ) -> None:
        """Start the planner if the job waits for a decision; one decision at a time. A decision
        that the job no longer waits for, such as for an earlier attempt, is dropped."""
        key, request = (namespace, name), job.pending_request
        deciding = self._deciding.get(key)
        if deciding is not None and deciding.job is job and deciding.request is request:
            return
        if deciding is not None:
            deciding.task.cancel()
            del self._deciding[key]
        if request is None or self._closing:
            return
        task = asyncio.create_task(self._complete_decision(key, job, session, request))
        self._deciding[key] = _PendingDecision(job, request, task)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _complete_decision(
        self,
        key: tuple[str, str],
        job: JobController,
        session: _JobSession,
        request: DecisionRequest,
    ) -> None:
        namespace, name = key
        try:
            proposal = await self._planner(key, request)
        except (PlannerLostError, OSError) as error:
            # The next report or tick retries.
            log.error("%s/%s: %s", namespace, name, error)
            return
        finally:
            # Publishing must not be cancelled with the decision.
            deciding = self._deciding.get(key)
            if deciding is not None and deciding.task is asyncio.current_task():
                del self._deciding[key]
        job.apply_proposal(request, proposal, self.clock())
        if self._store.find_job(namespace, name) is job:
            await self._publish_directive(namespace, name, job, session)

    async def _publish_directive(
        self, namespace: str, name: str, job: JobController, session: _JobSession
    ) -> None:
        """Serve the job's newest directive to waiting polls, and persist status after that."""
        directive = job.get_directive()
        if directive is None:
            # A new attempt starts with the initial plan: nothing to serve or persist.
            session.served_directive = None
        elif session.persisted_version != directive.plan_version:
            if (
                session.served_directive is None
                or session.served_directive.plan_version < directive.plan_version
            ):
                # An agent that has the plan also has its snapshot.
                await session.pack_snapshot(f"{namespace}/{name}", job)
                if job.get_directive() is not directive:
                    return
                session.served_directive = directive
                session.release_waiters()
            if not session.persisting.locked() and time.monotonic() >= session.persist_retry_at:
                task = asyncio.create_task(self._persist_status(namespace, name, job, session))
                self._persists.add(task)
                task.add_done_callback(self._persists.discard)

    async def _persist_status(
        self, namespace: str, name: str, job: JobController, session: _JobSession
    ) -> None:
        """Persist the status of a job whose directive was served."""
        async with session.persisting:
            while True:
                directive = job.get_directive()
                if directive is None or session.persisted_version == directive.plan_version:
                    return
                if self._store.find_job(namespace, name) is not job:
                    return
                version = directive.plan_version
                try:
                    await self._store.persist_status(namespace, name)
                except asyncio.CancelledError:
                    raise
                except Exception as error:  # noqa: BLE001 - whatever the host's storage raises
                    log.error(
                        "%s/%s: plan v%d was served but status was not written; retrying: %s",
                        namespace, name, version, error,
                    )  # fmt: skip
                    session.persist_retry_at = time.monotonic() + PERSIST_RETRY_SECONDS
                    return
                session.persisted_version = version

    async def _wait_for_release(self, session: _JobSession, seconds: float) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        session.waiters.add(waiter)
        try:
            await asyncio.wait((waiter,), timeout=seconds)
        finally:
            session.waiters.discard(waiter)


def parse_report(body: bytes) -> LinkHealthReport | Reply:
    """Parse a report; an error reply (400 not JSON, 422 not a report) if it is invalid."""
    try:
        return LinkHealthReport.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        if first["type"] == "json_invalid":
            return Reply.from_error(400, f"the report is not JSON: {first['msg']}")
        where = ""
        for part in first["loc"]:
            where += f"[{part}]" if isinstance(part, int) else f".{part}" if where else str(part)
        where = where.encode("ascii", "backslashreplace").decode()
        if where == "protocol":
            return Reply.from_error(
                422,
                f"the report is not of protocol {PROTOCOL}, which this ingest uses: run the trainer"
                " and the ingest of one release",
                field=where,
            )
        return Reply.from_error(
            422, f"{where or 'report'}: {first['msg']}", field=where or "report"
        )
