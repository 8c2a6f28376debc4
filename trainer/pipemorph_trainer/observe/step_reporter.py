"""Reports the steps of an observation to ``pipemorph serve --observe``, from a thread of its own.

The training thread only appends to a bounded queue. Whatever the host does, the training goes on:
one line is logged, requests are repeated with growing pauses, and steps that do not fit into the
queue are dropped.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from time import monotonic

from pydantic import ValidationError

from pipemorph.errors import InputError, one_line
from pipemorph.http_client import BlockingResolver, HttpClient, NoResponseError, validate_url
from pipemorph.protocol.observed_steps import (
    MAX_STEPS_BYTES,
    MOST_ROWS,
    MOST_STEPS,
    ObservedPlace,
    ObservedStep,
    StepsReply,
    StepsReport,
)
from pipemorph_trainer.observe.observed_rank import FinishedStep, ObservedRank
from pipemorph_trainer.telemetry.run_queue import compute_crowding

_log = logging.getLogger("pipemorph_trainer.observe")

REQUEST_SECONDS = 5.0
LONGEST_PAUSE = 5.0
"""Longest pause between two requests that fail."""
REFUSED_PAUSE = 15.0
"""Pause after a refusal, which another request alone does not change."""
CLOCK_READINGS = 64
"""Newest requests, of which the one with the shortest round trip measures the clock."""
FIRST_READINGS = 4
"""Requests at once at the start: that of a new connection takes longer."""
CROWDED_STEPS = MOST_STEPS // 2
"""Steps between two reports from which only every second one is reported."""
LAST_SECONDS = 2.0
"""Longest wait for the last report at the end of the process."""


class StepReporter:
    """Reporter of one rank. ``clock``: the rank's wall clock, by which its ops are timed."""

    def __init__(
        self, place: ObservedPlace, client: HttpClient, url: str, clock: Callable[[], float]
    ) -> None:
        self._place, self._client, self._url, self._clock = place, client, url, clock
        self._queue: deque[FinishedStep] = deque(maxlen=MOST_STEPS)
        self._session = secrets.token_hex(8)
        self._readings: deque[tuple[float, float]] = deque(maxlen=CLOCK_READINGS)
        """Round trips, and the clocks' offsets that were measured by them."""
        self._pause, self._failures, self._dropped, self._stride = 1.0, 0, 0, 1
        self._down_since: float | None = None
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pipemorph-observe", daemon=True)

    @staticmethod
    def from_env(
        place: ObservedPlace,
        clock: Callable[[], float],
        environ: Mapping[str, str] = os.environ,
    ) -> StepReporter | None:
        """Start the reporter of this rank; None if no variable names a host. The variables are
        those of ranks that PipeMorph runs."""
        url = environ.get("PIPEMORPH_INGEST_URL")
        if not url:
            return None
        token = environ.get("PIPEMORPH_TOKEN_FILE")
        try:
            base = validate_url(url, "PIPEMORPH_INGEST_URL")
            if not token:
                raise InputError(
                    "PIPEMORPH_TOKEN_FILE is not set; expected the --token-file of pipemorph serve"
                )
        except InputError as error:
            _log.warning("steps are not reported, training goes on: %s", error)
            return None
        authority = environ.get("PIPEMORPH_CA_FILE") or None
        # A resolver with threads of its own would hold up the end of the process.
        client = HttpClient(base, Path(token), authority, resolver=BlockingResolver)
        reporter = StepReporter(place, client, base, clock)
        reporter._thread.start()
        return reporter

    def add_step(self, step: FinishedStep) -> None:
        """Add a step. Never blocks."""
        if step.step % self._stride == 0:
            self._dropped += len(self._queue) == MOST_STEPS
            self._queue.append(step)

    def close(self) -> None:
        """Send the last report, for at most :data:`LAST_SECONDS`, unless requests fail."""
        self._ends.set()
        if not self._down_since:
            self._thread.join(LAST_SECONDS)

    # --- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            asyncio.run(self._report_until_end())
        except Exception as error:  # noqa: BLE001 - training goes on, whatever it is
            kind = type(error).__name__
            _log.warning("steps are no longer reported, training goes on: %s: %s", kind, error)

    async def _report_until_end(self) -> None:
        unsent: list[ObservedStep] = []
        while True:
            ends = self._ends.is_set()
            unsent = [*unsent, *self._take_steps()][-MOST_STEPS:]
            try:
                async with self._client:
                    while not ends:
                        await self._post(unsent)
                        unsent = []
                        await self._rest(0.0 if len(self._readings) < FIRST_READINGS else None)
                        ends = self._ends.is_set()
                        unsent = self._take_steps()
                    await self._post(unsent, finished=True)
                return
            except NoResponseError as error:
                self._log_failure(str(error))
                if ends:
                    return
                await self._rest(min(LONGEST_PAUSE, 0.25 * 2**self._failures))
            except _RefusedError as error:
                self._log_failure(str(error))
                if ends:
                    return
                await self._rest(REFUSED_PAUSE)

    async def _rest(self, seconds: float | None = None) -> None:
        """Wait until the next report is due, or the process ends."""
        until = monotonic() + (self._pause if seconds is None else seconds)
        while not self._ends.is_set() and monotonic() < until:
            await asyncio.sleep(min(0.1, max(0.0, until - monotonic())))

    def _take_steps(self) -> list[ObservedStep]:
        found = []
        with suppress(IndexError):
            while True:
                found.append(make_step(self._queue.popleft()))
        if len(found) > CROWDED_STEPS and not self._failures:
            # All ranks report the same steps, whichever of them are slower.
            self._stride *= 2
        return found

    async def _post(self, steps: list[ObservedStep], *, finished: bool = False) -> None:
        """Post a report. Raises :class:`NoResponseError` or :class:`_RefusedError`."""
        best = min(self._readings, default=None)
        while True:
            report = StepsReport(
                protocol=1,
                session=self._session,
                place=self._place,
                clock=None if best is None else best[1],
                round_trip=0.0 if best is None else best[0],
                steps=steps,
                dropped=self._dropped,
                finished=finished,
            )
            body = report.model_dump_json(exclude_defaults=True).encode()
            if len(body) <= MAX_STEPS_BYTES or not steps:
                break
            self._dropped += len(steps) - len(steps) // 2
            steps = steps[len(steps) - len(steps) // 2 :]
        began = self._clock()
        answer = await self._client.request("/v1/observations", body=body, seconds=REQUEST_SECONDS)
        ended = self._clock()
        if answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise answer.to_error("pipemorph serve")
        if answer.status != HTTPStatus.OK:
            raise _RefusedError(_describe_refusal(answer.status, answer.reason))
        try:
            reply = StepsReply.model_validate_json(answer.body)
        except ValidationError:
            raise _RefusedError("its answer is of another release; use the same on both") from None
        self._readings.append((ended - began, reply.at - (began + ended) / 2))
        self._pause, self._failures = reply.pause, 0
        if self._down_since is not None:
            _log.warning("reports work again after %.0f s", monotonic() - self._down_since)
            self._down_since = None

    def _log_failure(self, why: str) -> None:
        self._failures = min(8, self._failures + 1)
        if self._down_since is None:
            self._down_since = monotonic()
            _log.warning(
                "steps are not reported to %s (%s); trying again, training goes on",
                one_line(self._url), one_line(why, 300),
            )  # fmt: skip


def make_step(recorded: FinishedStep) -> ObservedStep:
    """Make the message of a step."""
    began = recorded.began

    def shift(at: float) -> int:
        return round(1e6 * (at - began))

    rows = [
        (
            op.optype, op.global_chunk, op.microbatch, shift(op.start), round(1e6 * op.duration),
            None if op.posted is None else shift(op.posted),
            None if op.waited is None else shift(op.waited), op.bytes,
        )
        for op in recorded.ops[:MOST_ROWS]
    ]  # fmt: skip
    return ObservedStep(
        step=recorded.step, began_at=began, ended_at=recorded.ended, omitted=recorded.omitted,
        rows=rows,
        waits=[(shift(at), round(1e6 * seconds)) for at, seconds in recorded.waits[:MOST_ROWS]],
    )  # fmt: skip


class _RefusedError(Exception):
    """The host refused a report."""


def _describe_refusal(status: int, reason: str) -> str:
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        return f"{reason}; PIPEMORPH_TOKEN_FILE must be the --token-file of pipemorph serve"
    if status == HTTPStatus.NOT_FOUND:
        return "it observes no job; start pipemorph serve with --observe"
    return reason


def describe_place(place: ObservedRank) -> ObservedPlace:
    """Describe the place of a rank for the host. Ranks with messages over gloo compute on
    processors."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    computes = "nccl" not in place.backend and local.isdecimal()
    return ObservedPlace(
        rank=place.rank,
        stages=place.ranks * len(place.chunks),
        replicas=place.replicas,
        replica=place.dp_rank,
        chunks=tuple(sorted(place.chunks)),
        host=_read_host_name(),
        transport="nccl" if "nccl" in place.backend else "gloo",
        crowding=compute_crowding(int(local)) if computes else None,
        framework=place.schedule[:64],
    )


def _read_host_name() -> str:
    """Name of this host that no other one has: that of its boot, or else of the network."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:64]
    return socket.gethostname()[:64] or "unknown"
