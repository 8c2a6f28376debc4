"""The ingest protocol without a transport: authenticated request in, status and body out.

A report is validated (size, schema, job, attempt, sequence), passed to the job's controller, and
answered with the newest directive above the agent's version, and with the snapshot of the
controller if the agent holds another one. A directive is served at once, and status is persisted
through the :class:`~pipemorph.ingest.interfaces.JobStore` after that. If this host ends, the agent
hands the snapshot to the next one.

====== ===============================================================
status meaning
====== ===============================================================
200    a :class:`~pipemorph.wire.DirectiveEnvelope`
400    not JSON, or an invalid query
401    no or wrong token
403    the token, the report or its attempt belongs to another job
404    no such job, or no such path
409    a sequence number that was used before; ``last`` is the highest used one. For a snapshot:
       none is wanted
413    more than ``MAX_REPORT_BYTES`` or ``MAX_HAND_IN_BYTES``
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

from pipemorph.api.spec import JobSpec
from pipemorph.control import JobController, handed_in, snapshot
from pipemorph.control.decide.replan import Replan
from pipemorph.control.observed.reports import (
    ReplayedReport,
    ReportMismatch,
    Superseded,
    WrongAttempt,
)
from pipemorph.errors import InputError, one_line
from pipemorph.ingest.interfaces import JobStore
from pipemorph.ingest.planner_pool import Planner, PlannerLost, plan_here
from pipemorph.ingest.token_bucket import TokenBucket
from pipemorph.wire import (
    MAX_REPORT_BYTES,
    MAX_WAIT_SECONDS,
    PROTOCOL,
    Directive,
    DirectiveEnvelope,
    LinkHealthReport,
    revision_of,
)

log = logging.getLogger("pipemorph.ingest")


LARGE_BYTES = 64 * 1024
"""Snapshots of fewer bytes are checked within a few milliseconds."""
SELDOM_SECONDS = 5.0
"""Longest time between two reports that an agent is told: well below that after which it takes the
ingest for lost, or the ingest its links for unknown."""
LARGE_CELLS = 16_384
"""Plans of fewer stages × microbatches are packed within a millisecond or two."""
PERSIST_AGAIN_SECONDS = 1.0
"""Delay of a retry after a directive that was served could not be persisted."""


class Reply(NamedTuple):
    """A response: HTTP status, JSON body, extra headers, and whether to close the connection."""

    status: int
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()
    hangs_up: bool = False

    @staticmethod
    def error(
        status: int,
        message: str,
        *,
        field: str | None = None,
        last: int | None = None,
    ) -> Reply:
        content: dict[str, str | int] = {"error": " ".join(message.split())[:500]}
        if field is not None:
            content["field"] = field[:200]
        if last is not None:
            content["last"] = last
        headers = (("Retry-After", "1"),) if status in (429, 503) else ()
        return Reply(status, json.dumps(content).encode(), headers)

    @staticmethod
    def envelope(
        answer: DirectiveEnvelope, directive: Directive | None = None, snapshot: str | None = None
    ) -> Reply:
        whole = answer.model_copy(update={"directive": directive, "snapshot": snapshot})
        return Reply(200, whole.model_dump_json().encode())


ReadBody = Callable[[], Awaitable[bytes | Reply]]
"""Reads the body of a request. A reply: why it could not be read."""


@dataclass(frozen=True)
class Limits:
    """Rate limits of one job, but for ``reports_in_all``.

    An agent sends a report every second, and every ~50 ms at most while its links change: the burst
    is two seconds of that. It has one long poll; a few more may be left over from retries.

    ``reports_in_all``: reports a second of all jobs together that have nothing urgent. If there are
    more jobs, their agents are told to report less often, and an alarm waits behind fewer of them.
    """

    reports_in_all: float = 400.0
    reports_per_second: float = 25.0
    burst: int = 50
    polls: int = 8
    max_wait_seconds: float = MAX_WAIT_SECONDS


@dataclass
class _JobSession:
    """State of the ingest per job: the directive to serve, the plan version that is persisted, rate
    limits and waiting polls."""

    served: Directive | None
    persisted: int
    allowed: TokenBucket
    persisting: asyncio.Lock = field(default_factory=asyncio.Lock)
    persists_again_at: float = 0.0
    reading: bool = False
    """Whether a snapshot that was handed in is being read."""
    snapshot: str | None = None
    """For the agent; None: there is none yet, or it is too large."""
    revision: str = ""
    packed: tuple[object, ...] = ()
    """State of the controller of which :attr:`snapshot` is."""
    packing: asyncio.Lock = field(default_factory=asyncio.Lock)
    waiters: set[asyncio.Future[None]] = field(default_factory=set)
    _answered: tuple[DirectiveEnvelope, Reply] | None = None
    """The newest answer without a directive: most are equal to the one before."""

    def above(self, version: int) -> Directive | None:
        return (
            self.served if self.served is not None and self.served.plan_version > version else None
        )

    def reply(self, answer: DirectiveEnvelope, report: LinkHealthReport) -> Reply:
        """``answer``, with the directive and the snapshot that the agent does not have, if any."""
        directive = self.above(report.observed_plan_version)
        # It would replace the one that is asked for.
        held = answer.wants_snapshot or report.snapshot == self.revision
        if directive is not None or not held:
            return Reply.envelope(answer, directive, None if held else self.snapshot)
        if self._answered is None or self._answered[0] != answer:
            self._answered = answer, Reply.envelope(answer)
        return self._answered[1]

    async def pack(self, where: str, job: JobController) -> None:
        """Pack the newest snapshot."""
        async with self.packing:
            if job.state == self.packed:
                return
            self.packed = job.state
            data, stages = job.snapshot(), job.spec.parallelism.stages
            large = stages * job.spec.schedule.microbatches > LARGE_CELLS
            try:
                self.snapshot = (
                    await asyncio.to_thread(snapshot.pack, data) if large else snapshot.pack(data)
                )
            except snapshot.TooLarge as error:
                log.warning("%s: %s: another ingest would not know its state", where, error)
                self.snapshot = None
            self.revision = revision_of(self.snapshot or "")

    def release(self) -> None:
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_result(None)


class _Deciding(NamedTuple):
    """A decision that a job waits for."""

    job: JobController
    asked: Replan
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
        limits: Limits | None = None,
        planner: Planner = plan_here,
    ) -> None:
        self._store = store
        self.on_taken: Callable[[str, str], None] = lambda *_: None
        """Called with the namespace and name of a job whose controller has taken a report."""
        self.clock: Callable[[], float] = time.time
        """Wall clock, seconds."""
        self._planner = planner
        self._limits = limits or Limits()
        self._sessions: WeakKeyDictionary[JobController, _JobSession] = WeakKeyDictionary()
        self._closing = False
        self._deciding: dict[tuple[str, str], _Deciding] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._persists: set[asyncio.Task[None]] = set()

    async def report(self, namespace: str, name: str, body: bytes) -> Reply:
        """Answer ``POST …/reports``. An invalid ``body`` gives an error reply, not an exception."""
        if len(body) > MAX_REPORT_BYTES:
            return Reply.error(
                413, f"the report has {len(body)} bytes; expected at most {MAX_REPORT_BYTES}"
            )
        job = self._store.lookup(namespace, name)
        if job is None:
            return Reply.error(404, f"there is no job {namespace}/{name} here")
        session = self._session(job)
        if not session.allowed.take(time.monotonic()):
            return Reply.error(
                429, f"more than {self._limits.reports_per_second:g} reports per second"
            )
        parsed = parse_report(body)
        if isinstance(parsed, Reply):
            return parsed
        if (parsed.namespace, parsed.job) != (namespace, name):
            return Reply.error(
                403,
                f"the report is for job {parsed.namespace}/{parsed.job}, not {namespace}/{name}",
                field="job",
            )
        try:
            answer = job.report(parsed, self.clock())
        except WrongAttempt as error:
            return Reply.error(403, str(error), field="attempt")
        except Superseded as error:
            # The next connection leads to that one.
            return Reply.error(503, str(error), field="term")._replace(hangs_up=True)
        except ReplayedReport as error:
            return Reply.error(409, str(error), field="sequence", last=error.last)
        except ReportMismatch as error:
            return Reply.error(422, str(error), field=error.field)
        if not parsed.fresh:
            told = {"seldom": self._seldom(job.spec)}
            answer = answer.model_copy(update=told)
        self.on_taken(namespace, name)
        self._plan(namespace, name, job, session)
        await self._publish(namespace, name, job, session)
        # Of a directive that is not served yet, who serves it packs it.
        if session.served is job.directive():
            await session.pack(f"{namespace}/{name}", job)
        return session.reply(answer, parsed)

    def _seldom(self, spec: JobSpec) -> float:
        """Seconds between two reports of an agent that has nothing urgent: whole halves, so that
        most answers stay as they were when a job comes or goes. Several fit in the time after which
        what is known of the job counts as old."""
        wanted = len(self._sessions) / self._limits.reports_in_all
        most = min(SELDOM_SECONDS, spec.adaptation.stale_after_seconds / 3)
        return max(1.0, min(most, math.ceil(2 * wanted) / 2))

    async def hand_in(self, namespace: str, name: str, read: ReadBody) -> Reply:
        """Answer ``POST …/snapshot``: go on from the snapshot of the job's agent. If it is a bad
        one, the controller decides without it. ``read`` is called only if a snapshot is wanted,
        once at a time: it may be large."""
        job = self._store.lookup(namespace, name)
        if job is None:
            return Reply.error(404, f"there is no job {namespace}/{name} here")
        session = self._session(job)
        if not job.wants_snapshot or session.reading:
            return Reply.error(409, "no snapshot is wanted: the job is known, or it was refused")
        if not session.allowed.take(time.monotonic()):
            return Reply.error(
                429, f"more than {self._limits.reports_per_second:g} requests per second"
            )
        session.reading = True
        try:
            body = await read()
            if isinstance(body, Reply):
                return body
            if len(body) > LARGE_BYTES:
                handed = await asyncio.to_thread(handed_in.read, body, job.spec)
            else:
                handed = handed_in.read(body, job.spec)
            message, saved = handed
            if (message.namespace, message.job) != (namespace, name):
                raise WrongAttempt(f"the snapshot is of job {message.namespace}/{message.job}")
            if self._store.lookup(namespace, name) is not job:
                return Reply.error(404, f"job {namespace}/{name} has ended here")
            job.hand_in(message.attempt, saved, self.clock())
        except WrongAttempt as error:
            return Reply.error(403, str(error))
        except InputError as error:
            job.refuse_snapshot()
            why = one_line(str(error), 500)
            log.error("%s/%s: refused the snapshot of the job's agent: %s", namespace, name, why)
            return Reply.error(422, why, field="snapshot")
        finally:
            session.reading = False
        version = saved.directive.plan_version if saved.directive is not None else 0
        log.info("%s/%s: going on from the agent's snapshot, plan v%d", namespace, name, version)
        await self._publish(namespace, name, job, session)
        return Reply.envelope(DirectiveEnvelope(term=job.term))

    async def poll(
        self, namespace: str, name: str, *, attempt: str, after: str, wait: str
    ) -> Reply:
        """Answer ``GET …/directive`` as soon as a directive exists or ``wait`` has passed."""
        job = self._store.lookup(namespace, name)
        if job is None:
            return Reply.error(404, f"there is no job {namespace}/{name} here")
        numbers = {}
        for key, text in (("attempt", attempt), ("after", after)):
            if not (text.isascii() and text.isdigit() and len(text) <= 16):
                return Reply.error(
                    400, f"{key} is {text[:40]!r}; expected an integer of 0 or more", field=key
                )
            numbers[key] = int(text)
        try:
            seconds = float(wait) if len(wait) <= 40 else -1.0
        except ValueError:
            seconds = -1.0
        if not 0 <= seconds <= self._limits.max_wait_seconds:
            return Reply.error(
                400,
                f"wait is {wait[:40]!r}; expected 0 to {self._limits.max_wait_seconds:g} seconds",
                field="wait",
            )
        session = self._session(job)
        wanted_attempt, after_version = numbers["attempt"], numbers["after"]
        if len(session.waiters) >= self._limits.polls:
            return Reply.error(
                429, f"{len(session.waiters)} polls are waiting for this job already"
            )
        deadline = time.monotonic() + seconds
        while (
            wanted_attempt == job.attempt
            and session.above(after_version) is None
            and not self._closing
        ):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            await self._wait(session, left)
            if self._store.lookup(namespace, name) is not job:
                return Reply.error(404, f"job {namespace}/{name} has ended here")
        if wanted_attempt != job.attempt:
            return Reply.error(
                403,
                f"attempt {wanted_attempt} is not the attempt in progress, {job.attempt}",
                field="attempt",
            )
        directive = session.above(after_version)
        snapshot = session.snapshot if directive is not None else None
        return Reply.envelope(DirectiveEnvelope(term=job.term), directive, snapshot)

    async def tick(self, namespace: str, name: str) -> None:
        """Run a job's timers, and publish a directive that results.

        The host calls this about once a second, also for jobs that do not report. Also retries a
        directive that could not be persisted.
        """
        job = self._store.lookup(namespace, name)
        if job is not None:
            job.tick(self.clock())
            session = self._session(job)
            self._plan(namespace, name, job, session)
            await self._publish(namespace, name, job, session)

    def close(self) -> None:
        """Stop planning, and answer waiting and later polls at once."""
        self._closing = True
        for task in self._tasks:
            task.cancel()
        for session in self._sessions.values():
            session.release()

    async def persisted(self, seconds: float) -> None:
        """Wait until what was served is persisted, or ``seconds`` have passed."""
        if self._persists:
            await asyncio.wait(self._persists, timeout=seconds)

    def dropped(self, job: JobController) -> None:
        """Answer the polls of a job that the host has dropped, as when it is another host's now."""
        session = self._sessions.get(job)
        if session is not None:
            session.release()

    def _session(self, job: JobController) -> _JobSession:
        session = self._sessions.get(job)
        if session is None:
            # A directive that exists before the first report comes from a persisted snapshot.
            saved = job.directive()
            session = _JobSession(
                served=saved,
                persisted=saved.plan_version if saved is not None else 0,
                allowed=TokenBucket(
                    self._limits.reports_per_second, self._limits.burst, time.monotonic()
                ),
            )
            self._sessions[job] = session
        return session

    def sweep(self) -> None:
        """Drop decisions of jobs that the host no longer has. The host calls this now and then."""
        for (namespace, name), deciding in list(self._deciding.items()):
            if self._store.lookup(namespace, name) is not deciding.job:
                deciding.task.cancel()

    def _plan(self, namespace: str, name: str, job: JobController, session: _JobSession) -> None:
        """Start the planner if the job waits for a decision; one decision at a time. A decision
        that the job no longer waits for, such as for an earlier attempt, is dropped."""
        key, asked = (namespace, name), job.replan
        deciding = self._deciding.get(key)
        if deciding is not None and deciding.job is job and deciding.asked is asked:
            return
        if deciding is not None:
            deciding.task.cancel()
            del self._deciding[key]
        if asked is None or self._closing:
            return
        task = asyncio.create_task(self._settle(key, job, session, asked))
        self._deciding[key] = _Deciding(job, asked, task)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _settle(
        self, key: tuple[str, str], job: JobController, session: _JobSession, asked: Replan
    ) -> None:
        namespace, name = key
        try:
            proposal = await self._planner(key, asked)
        except (PlannerLost, OSError) as error:
            # The next report or tick retries.
            log.error("%s/%s: %s", namespace, name, error)
            return
        finally:
            # What follows must not be dropped with the decision.
            deciding = self._deciding.get(key)
            if deciding is not None and deciding.task is asyncio.current_task():
                del self._deciding[key]
        job.settle(asked, proposal, self.clock())
        if self._store.lookup(namespace, name) is job:
            await self._publish(namespace, name, job, session)

    async def _publish(
        self, namespace: str, name: str, job: JobController, session: _JobSession
    ) -> None:
        """Serve the job's newest directive to waiting polls, and persist status after that."""
        directive = job.directive()
        if directive is None:
            # A new attempt starts with the initial plan: nothing to serve or persist.
            session.served = None
        elif session.persisted != directive.plan_version:
            if session.served is None or session.served.plan_version < directive.plan_version:
                # Whoever has the plan has the snapshot that explains it.
                await session.pack(f"{namespace}/{name}", job)
                if job.directive() is not directive:
                    return
                session.served = directive
                session.release()
            if not session.persisting.locked() and time.monotonic() >= session.persists_again_at:
                task = asyncio.create_task(self._persist(namespace, name, job, session))
                self._persists.add(task)
                task.add_done_callback(self._persists.discard)

    async def _persist(
        self, namespace: str, name: str, job: JobController, session: _JobSession
    ) -> None:
        """Persist the status of a job whose directive was served."""
        async with session.persisting:
            while True:
                directive = job.directive()
                if directive is None or session.persisted == directive.plan_version:
                    return
                if self._store.lookup(namespace, name) is not job:
                    return
                version = directive.plan_version
                try:
                    await self._store.persist(namespace, name)
                except asyncio.CancelledError:
                    raise
                except Exception as error:  # noqa: BLE001 - whatever the host's storage raises
                    log.error(
                        "%s/%s: plan v%d was served but status was not written; retrying: %s",
                        namespace, name, version, error,
                    )  # fmt: skip
                    session.persists_again_at = time.monotonic() + PERSIST_AGAIN_SECONDS
                    return
                session.persisted = version

    async def _wait(self, session: _JobSession, seconds: float) -> None:
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
            return Reply.error(400, f"the report is not JSON: {first['msg']}")
        where = ""
        for part in first["loc"]:
            where += f"[{part}]" if isinstance(part, int) else f".{part}" if where else str(part)
        where = where.encode("ascii", "backslashreplace").decode()
        if where == "protocol":
            return Reply.error(
                422,
                f"the report is not of protocol {PROTOCOL}, the one of this ingest: run the trainer"
                " and the ingest of one release",
                field=where,
            )
        return Reply.error(422, f"{where or 'report'}: {first['msg']}", field=where or "report")
