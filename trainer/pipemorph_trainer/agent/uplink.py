"""The agent's connection to the ingest: sends reports and receives directives.

There are three loops. One lets the observer look at what ranks have reported, every 50 ms. One
posts a report when the host has to know something at once, at most 20 a second, and else once a
second or as seldom as the host asks for, so that silence indicates a fault. The third keeps a long
poll open, so that a directive arrives as soon as it is made. Both answers may bring a directive;
the higher plan version wins. With it comes a snapshot of the job's controller, which the agent
holds unread: an ingest that does not know the job, as after the crash of another, is handed it.
Answers of a lower term than one before are of an ingest that leads no more, and are refused. If the
ingest is unreachable, the last two retry with backoff forever, and the ranks keep their plan.
A standby of the ingest answers 503
and says when to try again: the next connection leads to the leader.
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

from pipemorph.control.observe.observer import Observer
from pipemorph.errors import PipeMorphError, one_line
from pipemorph.http_client import Answer, HttpClient, NoAnswer, retries
from pipemorph.wire import (
    MAX_SEQUENCE,
    MAX_SNAPSHOT_BYTES,
    MAX_WAIT_SECONDS,
    Directive,
    DirectiveEnvelope,
    HandIn,
    LinkHealthReport,
    revision_of,
)

log = logging.getLogger("pipemorph.agent")

OBSERVE_SECONDS = 0.05
GATHER_SECONDS = 0.003
"""Wait after the first report of a rank, so that ranks that report together are judged together."""
IDLE_SECONDS = 1.0
"""Between two looks when ranks report nothing."""
REPORT_INTERVAL_SECONDS = 0.05
POLL_SECONDS = min(25.0, MAX_WAIT_SECONDS)
REQUEST_SECONDS = 5.0
MOST_ANSWER_BYTES = 64 << 20
"""A plan names every op of every stage."""


class Refused(PipeMorphError):
    """The ingest answered with something that cannot be used."""


FAILURES = (NoAnswer, Refused)
"""What another try may mend."""


class Uplink:
    """Lets ``observer`` look at what it has heard, sends its reports, and calls ``on_directive``
    once per new directive. ``on_observed`` is called after each look, ``on_report`` with each
    report before it is sent."""

    def __init__(
        self,
        *,
        base_url: str,
        namespace: str,
        job: str,
        attempt: int,
        token_file: Path | None,
        observer: Observer,
        on_directive: Callable[[Directive], None],
        on_observed: Callable[[], None] = lambda: None,
        on_report: Callable[[LinkHealthReport], None] = lambda _: None,
    ) -> None:
        url = f"{base_url.rstrip('/')}/v1/jobs/{namespace}/{job}"
        # On a cluster, it trusts the authority of the ingest's certificate.
        self._client = HttpClient(url, token_file, os.environ.get("PIPEMORPH_CA_FILE") or None)
        self._namespace, self._job, self._attempt = namespace, job, attempt
        self._observer = observer
        self._heard = asyncio.Event()
        self._on_directive, self._on_observed = on_directive, on_observed
        self._on_report = on_report
        # Above those of an earlier agent of the attempt, which sent far less than one report per
        # millisecond. The ingest takes no number twice.
        self._sequence = time.time_ns() // 1_000_000
        self._newest: Directive | None = None
        self._term: int | None = None
        """The highest of an ingest that has answered."""
        self._snapshot = ""
        """Of the job's controller, as an ingest has packed it; empty: none."""
        self.lower_terms = 0
        """How many answers of a lower term were refused."""
        self._due = asyncio.Event()
        self._post_lock = asyncio.Lock()

    def notify(self) -> None:
        """Look soon: the observer has heard a rank."""
        self._heard.set()

    def observe(self, *, refresh: bool = False) -> None:
        """Look now, and report soon if that is due. ``refresh``: look at everything."""
        self._heard.clear()
        self._observer.observe(time.time(), refresh=refresh)
        self.observed()

    def observed(self) -> None:
        """Report soon if that is due."""
        self._on_observed()
        if self._observer.due(time.time()):
            self._due.set()

    @property
    def has_news(self) -> bool:
        """Whether anything is left to be reported."""
        return self._heard.is_set() or self._observer.has_news

    async def _observe_loop(self) -> None:
        while True:
            await wait(self._heard, IDLE_SECONDS)
            await asyncio.sleep(GATHER_SECONDS)
            started = time.monotonic()
            self.observe()
            left = OBSERVE_SECONDS - (time.monotonic() - started)
            await asyncio.sleep(max(0.0, left))

    async def run(self) -> None:
        """Report and poll until cancelled."""
        async with self._client, asyncio.TaskGroup() as tasks:
            tasks.create_task(self._observe_loop())
            tasks.create_task(self._report_loop())
            tasks.create_task(self._poll_loop())

    async def flush(self, timeout: float) -> bool:
        """Send the remaining data within ``timeout`` seconds, without retries. Returns whether all
        of it was sent."""
        with contextlib.suppress(TimeoutError, *FAILURES):
            async with asyncio.timeout(timeout), self._client:
                self.observe(refresh=True)
                await self._post()
                while self._observer.has_news:
                    await self._post()
            return True
        return False

    async def _until_done(self, what: str, send: Callable[[], Awaitable[None]]) -> None:
        """Call ``send`` again until it fails no more."""
        down_since: float | None = None

        def failed(error: BaseException, _: float) -> None:
            nonlocal down_since
            if down_since is None:
                down_since = time.monotonic()
                level = logging.WARNING if getattr(error, "pause", None) is None else logging.INFO
                log.log(level, "%s failed (%s); trying again, training goes on", what, error)
                # A poll that breaks tells it before the next report is due: the next host
                # knows nothing yet.
                self._due.set()

        policy = retries(before=failed, on=FAILURES, sleep=asyncio.sleep)
        await AsyncRetrying(**policy)(send)
        if down_since is not None:
            log.info("%s works again after %.1f s", what, time.monotonic() - down_since)

    async def _report_loop(self) -> None:
        while True:
            await wait(self._due, self._observer.pause)
            started = time.monotonic()
            await self._until_done("report", self._post)
            left = REPORT_INTERVAL_SECONDS - (time.monotonic() - started)
            await asyncio.sleep(max(0.0, left))

    async def _poll_loop(self) -> None:
        while True:
            await self._until_done("directive poll", self._poll)

    async def _poll(self) -> None:
        query = {
            "attempt": str(self._attempt),
            "after": str(self._plan_version),
            "wait": str(POLL_SECONDS),
        }
        envelope = _envelope(
            await self._client.request(
                "/directive",
                query=query,
                seconds=POLL_SECONDS + REQUEST_SECONDS,
                most_bytes=MOST_ANSWER_BYTES,
            )
        )
        if envelope.directive is not None:
            self._check_term(envelope)
            self._take(envelope)

    async def _post(self) -> None:
        async with self._post_lock:
            self._due.clear()
            self._sequence += 1
            newest = self._newest
            report = self._observer.report(
                self._sequence,
                time.time(),
                self._plan_version,
                plan_issued_at=newest.issued_at if newest is not None else None,
                term=self._term,
                snapshot=revision_of(self._snapshot),
            )
            self._on_report(report)
            answer = await self._send("reports", report.body())
            if answer.status == HTTPStatus.CONFLICT:
                # The clock of an earlier agent was ahead. This report was refused; the next one
                # counts on from the highest accepted number.
                self._sequence = max(self._sequence, _last_taken(answer.body))
            envelope = _envelope(answer)
            self._check_term(envelope)
            self._observer.delivered(report, envelope)
            self._on_observed()
            if self._observer.due(time.time()):
                self._due.set()
            self._take(envelope)
            if envelope.wants_snapshot and (message := self.message()) is not None:
                await self._hand_in(message)

    async def _hand_in(self, message: HandIn) -> None:
        """Hand the snapshot to an ingest that does not know the job."""
        answer = await self._send("snapshot", message.body())
        if answer.status == HTTPStatus.OK:
            log.info("handed in the snapshot, plan v%d", self._plan_version)
        else:
            # The ingest decides without it.
            log.warning("the snapshot was refused: %s", answer.failed())

    async def _send(self, what: str, body: bytes) -> Answer:
        return await self._client.request(
            f"/{what}", body=body, seconds=REQUEST_SECONDS, most_bytes=MOST_ANSWER_BYTES
        )

    def message(self) -> HandIn | None:
        """What a host needs that does not know the job; None: there is no snapshot."""
        if not self._snapshot:
            return None
        return HandIn(
            job=self._job, namespace=self._namespace, attempt=self._attempt,
            snapshot=self._snapshot,
        )  # fmt: skip

    @property
    def _plan_version(self) -> int:
        """Of the newest directive; 0 before the first."""
        return self._newest.plan_version if self._newest is not None else 0

    def _check_term(self, envelope: DirectiveEnvelope) -> None:
        """Raise :class:`Refused` if an ingest of a higher term has answered before."""
        if self._term is not None and envelope.term < self._term:
            self.lower_terms += 1
            raise Refused(
                f"an ingest of term {envelope.term} has answered, and one of term {self._term}"
                f" before; refused {self.lower_terms} such answers so far"
            )
        self._term = envelope.term

    def _take(self, envelope: DirectiveEnvelope) -> None:
        directive, snapshot = envelope.directive, envelope.snapshot
        if snapshot is not None:
            if len(snapshot) <= MAX_SNAPSHOT_BYTES:
                self._snapshot = snapshot
            else:
                log.warning(
                    "refused a snapshot of %d bytes of at most %d; holding the one before",
                    len(snapshot), MAX_SNAPSHOT_BYTES,
                )  # fmt: skip
        if directive is not None and directive.plan_version > self._plan_version:
            self._newest = directive
            self._on_directive(directive)


def _last_taken(refusal: bytes) -> int:
    """The highest sequence number that the ingest has accepted, from a refusal; 0 if missing."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        last = json.loads(refusal)["last"]
        if isinstance(last, int) and 0 < last < MAX_SEQUENCE:
            return last
    return 0


def _envelope(answer: Answer) -> DirectiveEnvelope:
    """Parse an answer. Raises :class:`NoAnswer` with the server's message, and :class:`Refused`."""
    if answer.status != HTTPStatus.OK:
        raise answer.failed()
    try:
        return DirectiveEnvelope.model_validate_json(answer.body)
    except ValidationError as error:
        raise Refused(f"its answer is of another release: {one_line(str(error))}") from None


async def wait(event: asyncio.Event, seconds: float) -> None:
    """Wait for an event, or so long. Unlike ``asyncio.wait_for`` before Python 3.12, this can be
    cancelled in the very moment in which the event comes."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
