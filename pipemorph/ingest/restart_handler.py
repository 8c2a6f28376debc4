"""Answers the launchers of pods, which request the generation of ranks to run.

The next generation is persisted before it is sent to any launcher, so that a restarted ingest
continues from its number. If persisting takes too long, it is sent before: launchers then know the
number. A generation with another layout is never sent before it is persisted: its number does not
name the layout, and ranks that start with different layouts refuse each other.

Launchers hold a long poll open to be notified at once of the end of a generation. Concurrent polls
are limited per job and in total; other launchers retry later, and their own ranks end when they
lose their peers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakKeyDictionary

from pydantic import ValidationError

from pipemorph.control.job_generations import JobGenerations
from pipemorph.control.job_state.reports import ReportMismatch, WrongAttempt
from pipemorph.errors import one_line
from pipemorph.ingest.handler import Reply
from pipemorph.protocol import MAX_WAIT_SECONDS, GenerationState, PodReport
from pipemorph.spec.layout import RankLayout

log = logging.getLogger("pipemorph.ingest")

DEADLINE_MARGIN_SECONDS = 0.001
"""Seconds after a deadline at which it is checked: a clock may be read a little early."""
PERSIST_SECONDS = 2.0
"""Longest wait of launchers for the status to be written, if the layout stays."""
RETRY_SECONDS = 1.0
"""Pause between two tries to persist the layout of a generation."""

_Layouts = tuple[RankLayout, RankLayout | None]
"""``layout`` and ``layout_before`` of :class:`JobGenerations`."""


class GenerationStore(Protocol):
    """Finds the generations of a host's jobs, and persists them."""

    def find_generations(self, namespace: str, job: str) -> JobGenerations | None:
        """Generations of a job; None if the host has no such job."""

    async def persist_generations(self, namespace: str, job: str) -> None:
        """Make ``saved`` of the job's generations durable. May raise any exception."""


@dataclass(frozen=True)
class PollLimits:
    """Limits of launchers that wait for an answer, and retry times of the others."""

    per_job: int = 32
    total: int = 1024
    """A quarter of the ingest's connections."""
    idle_per_job: int = 16
    """Limit for pods without ranks in a generation that is not over, in addition: at least one pod
    with ranks must receive a request to leave."""
    idle_total: int = 256
    crowded_retry_seconds: float = 300.0
    """Retry time of a launcher that cannot wait, for the end of a generation."""
    next_generation_retry_seconds: float = 1.0
    """Retry time for the next generation. Longer with many pods: 100 retry in a second."""
    idle_retry_seconds: float = 5.0
    """Retry time of pods without ranks in a generation that is not over."""
    reports_per_pod: float = 8.0
    """Burst of a job's reports: two of each launcher in a generation, and retries."""
    refill_per_pod: float = 0.5
    """Reports that a job gains per second and pod; a pod without ranks uses 0.2 of them."""


@dataclass
class _GenerationSession:
    """State per job. ``served``: sent to launchers; ``layouts``: persisted."""

    served: GenerationState
    layouts: _Layouts
    tokens: float
    refilled: float = field(default_factory=time.monotonic)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    waiters: set[asyncio.Future[None]] = field(default_factory=set)
    idle: set[asyncio.Future[None]] = field(default_factory=set)
    """Waiting polls of pods without ranks in a generation that is not over."""
    dropped: bool = False
    """True once the host has dropped the job."""

    def release_waiters(self) -> None:
        for waiter in (*self.waiters, *self.idle):
            if not waiter.done():
                waiter.set_result(None)


class RestartHandler:
    """Answers launchers' reports and polls. ``on_change``: called with a job after each of its
    changes. For use in one event loop."""

    def __init__(
        self,
        store: GenerationStore,
        *,
        limits: PollLimits | None = None,
        on_change: Callable[[str, str], None] = lambda *_: None,
    ) -> None:
        self._store = store
        self._limits = limits or PollLimits()
        self._on_change = on_change
        self._sessions: WeakKeyDictionary[JobGenerations, _GenerationSession] = WeakKeyDictionary()
        self._writes: set[asyncio.Task[None]] = set()
        self._waiting, self._idle = 0, 0
        self._closing = False

    async def handle_pod_report(
        self, namespace: str, name: str, body: bytes, wait: str, *, uid: str = ""
    ) -> Reply:
        """Answer ``POST …/generation``. ``uid``: of the launcher's pod, empty if unknown."""
        found = self._store.find_generations(namespace, name)
        if found is None:
            return Reply.from_error(404, f"there is no job {namespace}/{name} here")
        session = self._get_session(found)
        if not self._take_token(session, found.pod_count):
            return Reply.from_error(429, "more reports of generations than the job's pods need")
        seconds = _parse_wait(wait)
        if seconds is None:
            return _wait_error(wait)
        try:
            report = PodReport.model_validate_json(body)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            status = 400 if first["type"] == "json_invalid" else 422
            where = ".".join(str(part) for part in first["loc"])
            return Reply.from_error(status, f"{where or 'report'}: {first['msg']}", field=where)
        async with session.lock:
            if session.dropped:
                return Reply.from_error(404, "the job has ended here")
            try:
                await self._apply_change(
                    namespace,
                    name,
                    found,
                    lambda: found.process_pod_report(report, time.time(), uid),
                )
            except WrongAttempt as error:
                return Reply.from_error(403, str(error), field="attempt")
            except ReportMismatch as error:
                return Reply.from_error(422, str(error), field=error.field)
        self._on_change(namespace, name)
        over = GenerationState(attempt=report.attempt, generation=report.generation, over=True)
        return await self._wait_for_change((namespace, name), found, over, seconds)

    async def _apply_change(
        self, namespace: str, name: str, found: JobGenerations, change: Callable[[], None]
    ) -> None:
        """Change a job's generations; send the state once it is persisted. Needs the session's
        lock."""
        session = self._get_session(found)
        before, saved = found.generation_state, found.saved
        change()
        if found.generation_state != before:
            _log_state(namespace, name, found)
        if found.saved != saved:
            await self._persist_in_time((namespace, name), found, session)
        self._publish_state(found, session)

    @staticmethod
    def _publish_state(found: JobGenerations, session: _GenerationSession) -> None:
        """Send the newest state to launchers, if it may be sent."""
        served, state = session.served, found.generation_state
        begins = state.attempt == served.attempt and state.generation > served.generation
        if begins and session.layouts != _current_layouts(found):
            return  # Launchers get it once it is persisted.
        if session.dropped or state == served:
            return  # Another host owns the job now, and does not have this state.
        session.served = state
        session.release_waiters()

    async def handle_poll(
        self,
        namespace: str,
        name: str,
        *,
        attempt: str,
        generation: str,
        wait: str,
        leaving: bool = False,
        pod: str = "",
        uid: str = "",
    ) -> Reply:
        """Answer ``GET …/generation``. ``leaving``: the launcher has the request to leave already;
        ``pod``: its number, empty if not given; ``uid``: as of :meth:`handle_pod_report`."""
        found = self._store.find_generations(namespace, name)
        if found is None:
            return Reply.from_error(404, f"there is no job {namespace}/{name} here")
        numbers = {}
        texts = {"attempt": attempt, "generation": generation} | ({"pod": pod} if pod else {})
        for key, text in texts.items():
            if not (text.isascii() and text.isdigit() and len(text) <= 9):
                return Reply.from_error(
                    400, f"{key} is {text[:40]!r}; expected an integer of 0 or more", field=key
                )
            numbers[key] = int(text)
        if numbers["attempt"] != found.attempt:
            return Reply.from_error(
                403,
                f"attempt {numbers['attempt']} is not the attempt in progress, {found.attempt}",
                field="attempt",
            )
        seconds = _parse_wait(wait)
        if seconds is None:
            return _wait_error(wait)
        if pod:
            found.record_poll(numbers["pod"], uid, time.time())
        if found.record_begun_generation(numbers["generation"]):
            session = self._get_session(found)
            session.served = found.generation_state
            session.release_waiters()
        known = GenerationState(
            attempt=numbers["attempt"], generation=numbers["generation"], leave=leaving
        )
        return await self._wait_for_change((namespace, name), found, known, seconds)

    async def request_layout(
        self,
        namespace: str,
        name: str,
        layout: RankLayout,
        *,
        of: tuple[int, int],
        promised: float | None = None,
        undoes: bool = False,
    ) -> bool:
        """Request that the ranks of a job leave for another layout, see
        :meth:`JobGenerations.request_layout`, and notify their launchers. ``of``: the attempt and
        the generation of these ranks. Returns False if that is not possible now, if another
        generation runs, or if the job is unknown."""
        found = self._store.find_generations(namespace, name)
        if found is None:
            return False
        session, taken = self._get_session(found), False

        def request_drain() -> None:
            nonlocal taken
            if (found.attempt, found.saved.generation) == of:
                taken = found.request_layout(layout, time.time(), promised=promised, undoes=undoes)

        async with session.lock:
            if not session.dropped:
                await self._apply_change(namespace, name, found, request_drain)
        return taken

    def notify_loss(self, found: JobGenerations) -> None:
        """Notify polls that ``found`` has a new loss: deadlines may be earlier."""
        session = self._sessions.get(found)
        if session is not None:
            session.release_waiters()

    def drop_job(self, found: JobGenerations) -> None:
        """Answer the polls of a job that the host has dropped, as when another host owns it now."""
        session = self._sessions.get(found)
        if session is not None:
            session.dropped = True
            session.release_waiters()

    def close(self) -> None:
        """Answer waiting and later polls at once."""
        self._closing = True
        for session in self._sessions.values():
            session.release_waiters()

    async def _wait_for_change(
        self, job: tuple[str, str], found: JobGenerations, known: GenerationState, wait: float
    ) -> Reply:
        """Newest state for a launcher, as soon as it differs from ``known``, its own."""
        session, limits = self._get_session(found), self._limits
        end = time.monotonic() + wait
        again = 0.0
        while not _is_newer(session.served, known) and not self._closing:
            remaining = end - time.monotonic()
            if remaining <= 0:
                break
            idle = known.over and not session.served.over
            of_job, in_all = len(session.waiters), self._waiting
            most, most_in_all = limits.per_job, limits.total
            if idle:
                of_job, in_all = len(session.idle), self._idle
                most, most_in_all = limits.idle_per_job, limits.idle_total
            if of_job >= most or in_all >= most_in_all:
                again = limits.crowded_retry_seconds
                if known.over:
                    least = (
                        limits.idle_retry_seconds if idle else limits.next_generation_retry_seconds
                    )
                    again = max(least, found.pod_count / 100)
                break
            due = found.next_deadline(now := time.time())
            if due is not None:
                remaining = min(remaining, max(0.0, due - now) + DEADLINE_MARGIN_SECONDS)
            await self._wait_for_release(session, remaining, idle)
            if due is not None and time.time() >= due:
                await self._apply_deadlines(job, found, session)
            if session.dropped:
                break
        if session.dropped:
            return Reply.from_error(
                404, "the job has ended here, or is another host's: report again"
            )
        state = session.served.model_copy(update={"again": again})
        return Reply(200, state.model_dump_json().encode())

    async def _apply_deadlines(
        self, job: tuple[str, str], found: JobGenerations, session: _GenerationSession
    ) -> None:
        """Apply deadlines that have passed; only the first of the waiting polls does so."""
        async with session.lock:
            if session.dropped:
                return
            before = found.generation_state
            await self._apply_change(*job, found, lambda: found.check_deadlines(time.time()))
        if found.generation_state != before:
            self._on_change(*job)

    async def _wait_for_release(
        self, session: _GenerationSession, seconds: float, idle: bool
    ) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiters = session.idle if idle else session.waiters
        waiters.add(waiter)
        self._waiting += not idle
        self._idle += idle
        try:
            await asyncio.wait((waiter,), timeout=seconds)
        finally:
            waiters.discard(waiter)
            self._waiting -= not idle
            self._idle -= idle

    async def _persist_in_time(
        self, job: tuple[str, str], found: JobGenerations, session: _GenerationSession
    ) -> None:
        task = asyncio.create_task(self._write_generations(job, found, session))
        self._writes.add(task)
        task.add_done_callback(self._writes.discard)
        # The task continues after the time limit.
        done, _ = await asyncio.wait((task,), timeout=PERSIST_SECONDS)
        if not done:
            why = f"not written within {PERSIST_SECONDS:g} s"
            log.error("%s/%s: a generation was begun and not persisted: %s", *job, why)

    async def _write_generations(
        self, job: tuple[str, str], found: JobGenerations, session: _GenerationSession
    ) -> None:
        """Persist the generations; retry while layouts are not persisted."""
        attempt = found.attempt
        while not (session.dropped or self._closing) and found.attempt == attempt:
            layouts = _current_layouts(found)
            try:
                await self._store.persist_generations(*job)
            except Exception as error:  # noqa: BLE001 - whatever the host's storage raises
                why = one_line(str(error))
                log.error("%s/%s: a generation was begun and not persisted: %s", *job, why)
                if layouts == session.layouts:
                    return
                await asyncio.sleep(RETRY_SECONDS)
            else:
                session.layouts = layouts
                self._publish_state(found, session)
                return

    def _get_session(self, found: JobGenerations) -> _GenerationSession:
        session = self._sessions.get(found)
        if session is None:
            burst = self._limits.reports_per_pod * found.pod_count + 1
            session = self._sessions[found] = _GenerationSession(
                found.generation_state, _current_layouts(found), burst
            )
        elif session.served.attempt != found.attempt:
            session.served, session.layouts = found.generation_state, _current_layouts(found)
            session.release_waiters()
        return session

    def _take_token(self, session: _GenerationSession, pods: int) -> bool:
        now, limits = time.monotonic(), self._limits
        gained = (now - session.refilled) * (limits.refill_per_pod * pods + 1)
        session.tokens = min(limits.reports_per_pod * pods + 1, session.tokens + gained)
        session.refilled = now
        if session.tokens < 1:
            return False
        session.tokens -= 1
        return True


def _current_layouts(found: JobGenerations) -> _Layouts:
    return found.layout, found.layout_before


def _is_newer(state: GenerationState, known: GenerationState) -> bool:
    """True if ``state`` is new to a launcher that has ``known``."""
    newer = state.generation > known.generation
    # A launcher whose ranks run waits for their own end.
    ends = bool(state.verdict) and (state.verdict != "completed" or known.over)
    over = state.over and not known.over
    leaves = state.leave != known.leave and not known.over
    return newer or ends or state.attempt != known.attempt or over or leaves


def _log_state(namespace: str, name: str, found: JobGenerations) -> None:
    state = found.generation_state
    what = f"generation {state.generation}"
    if state.verdict == "completed":
        what += " has finished"
    elif state.verdict:
        what += f" is not followed by another one: {state.why or state.reason}"
    elif state.over:
        what += f" is over: {state.reason}"
    elif state.leave_for:
        what += f" is to leave for {state.leave_for}"
    elif state.leave:
        what += " is to leave: a missing replica may run again"
    elif found.stay_reason:
        what += f" does not leave as requested: {found.stay_reason}"
    else:
        what += " begins"
    if not state.over and (state.layout or state.layout_before is not None):
        what += f", with {state.layout}"
        what += " on trial" if state.layout_before is not None else ""
    if state.excluded_replicas:
        what += f", without replicas {', '.join(map(str, state.excluded_replicas))}"
    log.info("%s/%s: %s", namespace, name, one_line(what))


def _parse_wait(text: str) -> float | None:
    """Seconds to wait; None if the text is invalid."""
    try:
        seconds = float(text) if len(text) <= 40 else -1.0
    except ValueError:
        return None
    return seconds if 0 <= seconds <= MAX_WAIT_SECONDS else None


def _wait_error(text: str) -> Reply:
    return Reply.from_error(
        400,
        f"wait is {text[:40]!r}; expected 0 to {MAX_WAIT_SECONDS:g} seconds",
        field="wait",
    )
