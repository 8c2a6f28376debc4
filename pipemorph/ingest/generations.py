"""Answers the launchers of pods, which ask for the generation of ranks to run.

What follows a generation is persisted before any launcher is told of it, so that a restarted ingest
counts on. If that takes too long, launchers are told all the same: they know the number then. Not
so of one with another layout: its number does not say which, and ranks of another ingest's would
refuse to begin with these. That one waits until it is written.

Launchers keep a poll open to hear at once that a generation is over. Only so many may, of a job and
in all: the others are told to come back late. Their own ranks end when they lose their peers.
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

from pipemorph.api.layout import RankLayout
from pipemorph.control.generations import Generations
from pipemorph.control.observed.reports import ReportMismatch, WrongAttempt
from pipemorph.errors import one_line
from pipemorph.ingest.handler import Reply
from pipemorph.wire import MAX_WAIT_SECONDS, GenerationState, PodReport

log = logging.getLogger("pipemorph.ingest")

MARGIN = 0.001
"""Seconds after the time for which a decision is due: a clock may be read a little early."""
PERSIST_SECONDS = 2.0
"""How long launchers wait for the status to be written, if the layout stays."""
AGAIN_SECONDS = 1.0
"""Between two tries to write which layout a generation has."""

_Layouts = tuple[RankLayout, RankLayout | None]
"""``layout`` and ``layout_before`` of :class:`Generations`."""


class GenerationStore(Protocol):
    """Has the generations of a host's jobs, and persists them."""

    def generations(self, namespace: str, job: str) -> Generations | None:
        """Those of a job; None if the host has no such job."""

    async def persist_generations(self, namespace: str, job: str) -> None:
        """Make ``saved`` of the job's generations durable. May raise anything."""


@dataclass(frozen=True)
class PollLimits:
    """How many launchers may wait for an answer, and what others are told."""

    of_job: int = 32
    in_all: int = 1024
    """A quarter of the ingest's connections."""
    idle_of_job: int = 16
    """The same of pods without ranks in a generation that is not over, beside the others: of those
    with ranks one at least has to hear that they are to leave."""
    idle_in_all: int = 256
    later_seconds: float = 300.0
    """When a launcher that may not wait asks again whether a generation is over."""
    soon_seconds: float = 1.0
    """The same, whether the next one begins. Longer with many pods: 100 ask in a second."""
    idle_seconds: float = 5.0
    """The same, of pods without ranks in one that is not over."""
    reports_per_pod: float = 8.0
    """Burst of a job's reports: two of each launcher in a generation, and retries."""
    refill_per_pod: float = 0.5
    """Reports that it gains in a second; a pod without ranks uses 0.2 of them."""


@dataclass
class _Session:
    """State per job. ``served``: what launchers are told, once it is persisted; ``layouts``: those
    that are."""

    served: GenerationState
    layouts: _Layouts
    tokens: float
    refilled: float = field(default_factory=time.monotonic)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    waiters: set[asyncio.Future[None]] = field(default_factory=set)
    idle: set[asyncio.Future[None]] = field(default_factory=set)
    """Those of pods without ranks in a generation that is not over."""
    gone: bool = False
    """Whether the host has dropped the job."""

    def release(self) -> None:
        for waiter in (*self.waiters, *self.idle):
            if not waiter.done():
                waiter.set_result(None)


class GenerationDesk:
    """For use in one event loop. ``on_change``: called with a job after each of its changes."""

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
        self._sessions: WeakKeyDictionary[Generations, _Session] = WeakKeyDictionary()
        self._writes: set[asyncio.Task[None]] = set()
        self._waiting, self._idle = 0, 0
        self._closing = False

    async def tell(
        self, namespace: str, name: str, body: bytes, wait: str, *, uid: str = ""
    ) -> Reply:
        """Answer ``POST …/generation``. ``uid``: of the launcher's pod, empty if not known."""
        found = self._store.generations(namespace, name)
        if found is None:
            return Reply.error(404, f"there is no job {namespace}/{name} here")
        session = self._session(found)
        if not self._take_token(session, found.pods):
            return Reply.error(429, "more reports of generations than the job's pods can have")
        seconds = _seconds(wait)
        if seconds is None:
            return _bad_wait(wait)
        try:
            report = PodReport.model_validate_json(body)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            status = 400 if first["type"] == "json_invalid" else 422
            where = ".".join(str(part) for part in first["loc"])
            return Reply.error(status, f"{where or 'report'}: {first['msg']}", field=where)
        async with session.lock:
            if session.gone:
                return Reply.error(404, "the job has ended here")
            try:
                await self._change(
                    namespace, name, found, lambda: found.take(report, time.time(), uid)
                )
            except WrongAttempt as error:
                return Reply.error(403, str(error), field="attempt")
            except ReportMismatch as error:
                return Reply.error(422, str(error), field=error.field)
        self._on_change(namespace, name)
        over = GenerationState(attempt=report.attempt, generation=report.generation, over=True)
        return await self._when_past((namespace, name), found, over, seconds)

    async def _change(
        self, namespace: str, name: str, found: Generations, change: Callable[[], None]
    ) -> None:
        """Make a change of what launchers are told, and tell them once it is persisted. Under the
        session's lock."""
        session = self._session(found)
        before, saved = found.state, found.saved
        change()
        if found.state != before:
            _log(namespace, name, found)
        if found.saved != saved:
            await self._persist((namespace, name), found, session)
        self._serve(found, session)

    @staticmethod
    def _serve(found: Generations, session: _Session) -> None:
        """Tell launchers what there is, if they may know it."""
        served, state = session.served, found.state
        begins = state.attempt == served.attempt and state.generation > served.generation
        if begins and session.layouts != _layouts(found):
            return  # They are told when that is written.
        if session.gone or state == served:
            return  # Another host has written of the job meanwhile, and knows nothing of this.
        session.served = state
        session.release()

    async def poll(
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
        """Answer ``GET …/generation``. ``leaving``: the launcher knows that its ranks are to;
        ``pod``: its number, empty if it does not say; ``uid``: as of :meth:`tell`."""
        found = self._store.generations(namespace, name)
        if found is None:
            return Reply.error(404, f"there is no job {namespace}/{name} here")
        numbers = {}
        asked = {"attempt": attempt, "generation": generation} | ({"pod": pod} if pod else {})
        for key, text in asked.items():
            if not (text.isascii() and text.isdigit() and len(text) <= 9):
                return Reply.error(
                    400, f"{key} is {text[:40]!r}; expected an integer of 0 or more", field=key
                )
            numbers[key] = int(text)
        if numbers["attempt"] != found.attempt:
            return Reply.error(
                403,
                f"attempt {numbers['attempt']} is not the attempt in progress, {found.attempt}",
                field="attempt",
            )
        seconds = _seconds(wait)
        if seconds is None:
            return _bad_wait(wait)
        if pod:
            found.heard(numbers["pod"], uid, time.time())
        if found.begun(numbers["generation"]):
            session = self._session(found)
            session.served = found.state
            session.release()
        known = GenerationState(
            attempt=numbers["attempt"], generation=numbers["generation"], leave=leaving
        )
        return await self._when_past((namespace, name), found, known, seconds)

    async def ask(
        self,
        namespace: str,
        name: str,
        layout: RankLayout,
        *,
        of: tuple[int, int],
        promised: float | None = None,
        undoes: bool = False,
    ) -> bool:
        """Have the ranks of a job leave for another layout, see :meth:`Generations.ask`, and tell
        their launchers. ``of``: the attempt and the generation of these ranks. Returns False if
        that is not possible now, others run meanwhile, or the job is not there."""
        found = self._store.generations(namespace, name)
        if found is None:
            return False
        session, taken = self._session(found), False

        def change() -> None:
            nonlocal taken
            if (found.attempt, found.saved.generation) == of:
                taken = found.ask(layout, time.time(), promised=promised, undoes=undoes)

        async with session.lock:
            if not session.gone:
                await self._change(namespace, name, found, change)
        return taken

    def hurry(self, found: Generations) -> None:
        """Say that the host has told ``found`` of a loss: what is due may be so earlier."""
        session = self._sessions.get(found)
        if session is not None:
            session.release()

    def dropped(self, found: Generations) -> None:
        """Answer the polls of a job that the host has dropped, as when it is another host's now."""
        session = self._sessions.get(found)
        if session is not None:
            session.gone = True
            session.release()

    def close(self) -> None:
        """Answer waiting and later polls at once."""
        self._closing = True
        for session in self._sessions.values():
            session.release()

    async def _when_past(
        self, job: tuple[str, str], found: Generations, known: GenerationState, wait: float
    ) -> Reply:
        """What there is to tell to a launcher that knows ``known``, as soon as it differs."""
        session, limits = self._session(found), self._limits
        end = time.monotonic() + wait
        again = 0.0
        while not _past(session.served, known) and not self._closing:
            left = end - time.monotonic()
            if left <= 0:
                break
            idle = known.over and not session.served.over
            of_job, in_all = len(session.waiters), self._waiting
            most, most_in_all = limits.of_job, limits.in_all
            if idle:
                of_job, in_all = len(session.idle), self._idle
                most, most_in_all = limits.idle_of_job, limits.idle_in_all
            if of_job >= most or in_all >= most_in_all:
                again = limits.later_seconds
                if known.over:
                    least = limits.idle_seconds if idle else limits.soon_seconds
                    again = max(least, found.pods / 100)
                break
            due = found.due(now := time.time())
            await self._wait(
                session, left if due is None else min(left, max(0.0, due - now) + MARGIN), idle
            )
            if due is not None and time.time() >= due:
                await self._look(job, found, session)
            if session.gone:
                break
        if session.gone:
            return Reply.error(404, "the job has ended here, or is another host's: tell it again")
        state = session.served.model_copy(update={"again": again})
        return Reply(200, state.model_dump_json().encode())

    async def _look(self, job: tuple[str, str], found: Generations, session: _Session) -> None:
        """Let time decide; of those that wait for it, the first one does so."""
        async with session.lock:
            if session.gone:
                return
            before = found.state
            await self._change(*job, found, lambda: found.look(time.time()))
        if found.state != before:
            self._on_change(*job)

    async def _wait(self, session: _Session, seconds: float, idle: bool) -> None:
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

    async def _persist(self, job: tuple[str, str], found: Generations, session: _Session) -> None:
        task = asyncio.create_task(self._write(job, found, session))
        self._writes.add(task)
        task.add_done_callback(self._writes.discard)
        # It goes on after the time limit.
        done, _ = await asyncio.wait((task,), timeout=PERSIST_SECONDS)
        if not done:
            why = f"not written within {PERSIST_SECONDS:g} s"
            log.error("%s/%s: a generation was begun and not persisted: %s", *job, why)

    async def _write(self, job: tuple[str, str], found: Generations, session: _Session) -> None:
        """Persist what there is; if layouts are others than those that are, until that is done."""
        attempt = found.attempt
        while not (session.gone or self._closing) and found.attempt == attempt:
            layouts = _layouts(found)
            try:
                await self._store.persist_generations(*job)
            except Exception as error:  # noqa: BLE001 - whatever the host's storage raises
                why = one_line(str(error))
                log.error("%s/%s: a generation was begun and not persisted: %s", *job, why)
                if layouts == session.layouts:
                    return
                await asyncio.sleep(AGAIN_SECONDS)
            else:
                session.layouts = layouts
                self._serve(found, session)
                return

    def _session(self, found: Generations) -> _Session:
        session = self._sessions.get(found)
        if session is None:
            burst = self._limits.reports_per_pod * found.pods + 1
            session = self._sessions[found] = _Session(found.state, _layouts(found), burst)
        elif session.served.attempt != found.attempt:
            session.served, session.layouts = found.state, _layouts(found)
            session.release()
        return session

    def _take_token(self, session: _Session, pods: int) -> bool:
        now, limits = time.monotonic(), self._limits
        gained = (now - session.refilled) * (limits.refill_per_pod * pods + 1)
        session.tokens = min(limits.reports_per_pod * pods + 1, session.tokens + gained)
        session.refilled = now
        if session.tokens < 1:
            return False
        session.tokens -= 1
        return True


def _layouts(found: Generations) -> _Layouts:
    return found.layout, found.layout_before


def _past(state: GenerationState, known: GenerationState) -> bool:
    """Whether ``state`` is news for who knows ``known``."""
    newer = state.generation > known.generation
    # A launcher whose ranks run knows best when they have finished.
    ends = bool(state.verdict) and (state.verdict != "completed" or known.over)
    over = state.over and not known.over
    leaves = state.leave != known.leave and not known.over
    return newer or ends or state.attempt != known.attempt or over or leaves


def _log(namespace: str, name: str, found: Generations) -> None:
    state = found.state
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
        what += " is to leave: a replica that is missing may run again"
    elif found.stays:
        what += f" does not leave, as it was to: {found.stays}"
    else:
        what += " begins"
    if not state.over and (state.layout or state.layout_before is not None):
        what += f", with {state.layout}"
        what += " on trial" if state.layout_before is not None else ""
    if state.left_out:
        what += f", without replicas {', '.join(map(str, state.left_out))}"
    log.info("%s/%s: %s", namespace, name, one_line(what))


def _seconds(text: str) -> float | None:
    """A time to wait; None if it is none."""
    try:
        seconds = float(text) if len(text) <= 40 else -1.0
    except ValueError:
        return None
    return seconds if 0 <= seconds <= MAX_WAIT_SECONDS else None


def _bad_wait(text: str) -> Reply:
    return Reply.error(
        400,
        f"wait is {text[:40]!r}; expected 0 to {MAX_WAIT_SECONDS:g} seconds",
        field="wait",
    )
