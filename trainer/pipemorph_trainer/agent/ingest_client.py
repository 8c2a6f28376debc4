"""Client of the agent to the ingest: sends reports and receives directives.

It runs three loops. The first evaluates the reports of the ranks every 50 ms. The second posts a
report: at most 20 a second when the host must react at once, else once a second or at the host's
interval, so that silence indicates a fault. The third holds a long poll open, so that a directive
arrives as soon as it is made. The answers to both may contain a directive; the higher plan version
wins. A directive comes with a snapshot of the job's controller, which the agent stores unread and
sends to an ingest that does not have the job, as after the crash of another one.

Answers with a lower term than an earlier answer come from a former leader and are refused. If the
ingest is unreachable, posts and polls retry with backoff forever, and the ranks run their plan. A
standby answers 503 with the time of the next try: the next connection leads to the leader.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from pathlib import Path

from pydantic import ValidationError
from tenacity import AsyncRetrying

from pipemorph.detection.job_observer import JobObserver
from pipemorph.errors import PipeMorphError, one_line
from pipemorph.http_client import HttpClient, HttpResponse, NoResponseError, make_retry_options
from pipemorph.protocol import (
    MAX_SEQUENCE,
    MAX_SNAPSHOT_BYTES,
    MAX_WAIT_SECONDS,
    Directive,
    DirectiveEnvelope,
    LinkHealthReport,
    SnapshotMessage,
    compute_revision,
)

log = logging.getLogger("pipemorph.agent")

OBSERVE_SECONDS = 0.05
GATHER_SECONDS = 0.003
"""Wait after the first report of a rank, so that simultaneous reports are evaluated together."""
IDLE_SECONDS = 1.0
"""Interval of evaluations when ranks report nothing."""
REPORT_INTERVAL_SECONDS = 0.05
POLL_SECONDS = min(25.0, MAX_WAIT_SECONDS)
REQUEST_SECONDS = 5.0
MOST_ANSWER_BYTES = 64 << 20
"""Largest answer: a plan names every op of every stage."""


class UnusableAnswerError(PipeMorphError):
    """Unusable answer of the ingest."""


FAILURES = (NoResponseError, UnusableAnswerError)
"""Errors after which a request is retried."""


class IngestClient:
    """Client of the ingest: runs ``observer``, sends its reports, and calls ``on_directive`` once
    per new directive. ``on_observed`` is called after each evaluation, ``on_report`` with each
    report before it is sent."""

    def __init__(
        self,
        *,
        base_url: str,
        namespace: str,
        job: str,
        attempt: int,
        token_file: Path | None,
        observer: JobObserver,
        on_directive: Callable[[Directive], None],
        on_observed: Callable[[], None] = lambda: None,
        on_report: Callable[[LinkHealthReport], None] = lambda _: None,
    ) -> None:
        url = f"{base_url.rstrip('/')}/v1/jobs/{namespace}/{job}"
        # On a cluster, the client trusts the authority of the ingest's certificate.
        self._client = HttpClient(url, token_file, os.environ.get("PIPEMORPH_CA_FILE") or None)
        self._namespace, self._job, self._attempt = namespace, job, attempt
        self._observer = observer
        self._rank_reported = asyncio.Event()
        self._on_directive, self._on_observed = on_directive, on_observed
        self._on_report = on_report
        # Numbers must exceed those of an earlier agent of the attempt, which sent far less than one
        # report per millisecond: the ingest accepts no number twice.
        self._sequence = time.time_ns() // 1_000_000
        self._newest: Directive | None = None
        self._term: int | None = None
        """Highest term of an ingest that has answered."""
        self._snapshot = ""
        """Snapshot of the job's controller, as packed by an ingest; empty: none."""
        self.lower_terms = 0
        """Number of refused answers of a lower term."""
        self._report_due = asyncio.Event()
        self._post_lock = asyncio.Lock()

    def schedule_observation(self) -> None:
        """Schedule an evaluation: the observer has a new report of a rank."""
        self._rank_reported.set()

    def observe_ranks(self, *, refresh: bool = False) -> None:
        """Evaluate now, and schedule a due report. ``refresh``: evaluate all states."""
        self._rank_reported.clear()
        self._observer.update_states(time.time(), refresh=refresh)
        self.report_if_due()

    def report_if_due(self) -> None:
        """Schedule a report if one is due."""
        self._on_observed()
        if self._observer.is_report_due(time.time()):
            self._report_due.set()

    @property
    def has_unsent_changes(self) -> bool:
        """True if the observer has unreported changes."""
        return self._rank_reported.is_set() or self._observer.has_changes

    async def _observe_loop(self) -> None:
        while True:
            await wait_for_event(self._rank_reported, IDLE_SECONDS)
            await asyncio.sleep(GATHER_SECONDS)
            started = time.monotonic()
            self.observe_ranks()
            rest = OBSERVE_SECONDS - (time.monotonic() - started)
            await asyncio.sleep(max(0.0, rest))

    async def run(self) -> None:
        """Report and poll until cancelled."""
        async with self._client, asyncio.TaskGroup() as tasks:
            tasks.create_task(self._observe_loop())
            tasks.create_task(self._report_loop())
            tasks.create_task(self._poll_loop())

    async def flush_reports(self, timeout: float) -> bool:
        """Send the unreported changes within ``timeout`` seconds, without retries. Returns true if
        all were sent."""
        with contextlib.suppress(TimeoutError, *FAILURES):
            async with asyncio.timeout(timeout), self._client:
                self.observe_ranks(refresh=True)
                await self._post_report()
                while self._observer.has_changes:
                    await self._post_report()
            return True
        return False

    async def _retry_until_done(self, what: str, send: Callable[[], Awaitable[None]]) -> None:
        """Call ``send`` until it succeeds."""
        down_since: float | None = None

        def log_failure(error: BaseException, _: float) -> None:
            nonlocal down_since
            if down_since is None:
                down_since = time.monotonic()
                level = logging.WARNING if getattr(error, "pause", None) is None else logging.INFO
                log.log(level, "%s failed (%s); trying again, training goes on", what, error)
                # A broken poll may be the first sign of a new host, which has no state yet.
                self._report_due.set()

        policy = make_retry_options(before=log_failure, on=FAILURES, sleep=asyncio.sleep)
        await AsyncRetrying(**policy)(send)
        if down_since is not None:
            log.info("%s works again after %.1f s", what, time.monotonic() - down_since)

    async def _report_loop(self) -> None:
        while True:
            await wait_for_event(self._report_due, self._observer.report_seconds)
            started = time.monotonic()
            await self._retry_until_done("report", self._post_report)
            rest = REPORT_INTERVAL_SECONDS - (time.monotonic() - started)
            await asyncio.sleep(max(0.0, rest))

    async def _poll_loop(self) -> None:
        while True:
            await self._retry_until_done("directive poll", self._poll_directive)

    async def _poll_directive(self) -> None:
        query = {
            "attempt": str(self._attempt),
            "after": str(self._plan_version),
            "wait": str(POLL_SECONDS),
        }
        envelope = _parse_envelope(
            await self._client.request(
                "/directive",
                query=query,
                seconds=POLL_SECONDS + REQUEST_SECONDS,
                most_bytes=MOST_ANSWER_BYTES,
            )
        )
        if envelope.directive is not None:
            self._check_term(envelope)
            self._handle_envelope(envelope)

    async def _post_report(self) -> None:
        async with self._post_lock:
            self._report_due.clear()
            self._sequence += 1
            newest = self._newest
            report = self._observer.build_report(
                self._sequence,
                time.time(),
                self._plan_version,
                plan_issued_at=newest.issued_at if newest is not None else None,
                term=self._term,
                snapshot=compute_revision(self._snapshot),
            )
            self._on_report(report)
            answer = await self._send_request("reports", report.to_json())
            if answer.status == HTTPStatus.CONFLICT:
                # The clock of an earlier agent was ahead, so this report was refused. The next one
                # continues from the highest accepted number.
                self._sequence = max(self._sequence, _read_last_accepted(answer.body))
            envelope = _parse_envelope(answer)
            self._check_term(envelope)
            self._observer.record_delivery(report, envelope)
            self._on_observed()
            if self._observer.is_report_due(time.time()):
                self._report_due.set()
            self._handle_envelope(envelope)
            if envelope.wants_snapshot and (message := self.make_snapshot_message()) is not None:
                await self._post_snapshot(message)

    async def _post_snapshot(self, message: SnapshotMessage) -> None:
        """Send the snapshot to an ingest that does not have the job."""
        answer = await self._send_request("snapshot", message.to_json())
        if answer.status == HTTPStatus.OK:
            log.info("sent the snapshot to the ingest, plan v%d", self._plan_version)
        else:
            # The ingest decides without it.
            log.warning("the snapshot was refused: %s", answer.to_error())

    async def _send_request(self, what: str, body: bytes) -> HttpResponse:
        return await self._client.request(
            f"/{what}", body=body, seconds=REQUEST_SECONDS, most_bytes=MOST_ANSWER_BYTES
        )

    def make_snapshot_message(self) -> SnapshotMessage | None:
        """Message with the snapshot for a host that does not have the job; None without one."""
        if not self._snapshot:
            return None
        return SnapshotMessage(
            job=self._job, namespace=self._namespace, attempt=self._attempt,
            snapshot=self._snapshot,
        )  # fmt: skip

    @property
    def _plan_version(self) -> int:
        """Plan version of the newest directive; 0 before the first."""
        return self._newest.plan_version if self._newest is not None else 0

    def _check_term(self, envelope: DirectiveEnvelope) -> None:
        """Record the term. Raises :class:`UnusableAnswerError` if an earlier answer had a higher
        one."""
        if self._term is not None and envelope.term < self._term:
            self.lower_terms += 1
            raise UnusableAnswerError(
                f"an ingest of term {envelope.term} has answered, after one of term {self._term};"
                f" refused {self.lower_terms} such answers so far"
            )
        self._term = envelope.term

    def _handle_envelope(self, envelope: DirectiveEnvelope) -> None:
        directive, snapshot = envelope.directive, envelope.snapshot
        if snapshot is not None:
            if len(snapshot) <= MAX_SNAPSHOT_BYTES:
                self._snapshot = snapshot
            else:
                log.warning(
                    "refused a snapshot of %d bytes, more than %d; using the previous one",
                    len(snapshot), MAX_SNAPSHOT_BYTES,
                )  # fmt: skip
        if directive is not None and directive.plan_version > self._plan_version:
            self._newest = directive
            self._on_directive(directive)


def _read_last_accepted(refusal: bytes) -> int:
    """Highest sequence number that the ingest has accepted, from a refusal; 0 if missing."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        last = json.loads(refusal)["last"]
        if isinstance(last, int) and 0 < last < MAX_SEQUENCE:
            return last
    return 0


def _parse_envelope(answer: HttpResponse) -> DirectiveEnvelope:
    """Parse an answer. Raises :class:`NoResponseError` or :class:`UnusableAnswerError`."""
    if answer.status != HTTPStatus.OK:
        raise answer.to_error()
    try:
        return DirectiveEnvelope.model_validate_json(answer.body)
    except ValidationError as error:
        raise UnusableAnswerError(
            f"its answer is of another release: {one_line(str(error))}"
        ) from None


async def wait_for_event(event: asyncio.Event, seconds: float) -> None:
    """Wait for ``event``, at most ``seconds``. Unlike ``asyncio.wait_for`` before Python 3.12, the
    wait can be cancelled at the moment in which the event is set."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
