"""Serves the live page of ``pipemorph run --watch``: on loopback, by a token in the URL, read only.

Nothing is done for it while nobody looks. All who look get the same documents, and what those cost
is bounded: on average :data:`SHARE` of one core, to make them and to write them as JSON and HTML.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from aiohttp import web

from pipemorph.api.spec import PipeMorphJob
from pipemorph.errors import InputError, one_line
from pipemorph.local.results.history import Journal
from pipemorph.local.results.report import Recovery
from pipemorph.local.results.traces import StageTrace, TraceIndex
from pipemorph.local.service import ControlService
from pipemorph.watch.build import (
    MOST_AVAILABLE,
    MOST_STEPS,
    Watched,
    recovered,
    watch_view,
    worst_column,
)
from pipemorph.watch.document import WatchView
from pipemorph.watch.page import render_page

log = logging.getLogger("pipemorph.watch")
_unsaid = logging.getLogger("pipemorph.watch.requests")
"""Of requests that are no HTTP: who sends them is told, the run's terminal is not."""
_unsaid.setLevel(logging.CRITICAL + 1)

SHARE = 0.05
"""Part of a core that documents may take in the long run, for all viewers together."""
BURST = 3.0
"""Seconds of a core that they may take at once, as when somebody steps through iterations; and the
most that one document counts for, so that the next one comes in a minute."""
DOCUMENTS = 8
"""Newest documents that are kept."""
EVERY = 1.0
"""Least seconds between two documents of the newest iteration."""
TRACE_BYTES = 64 << 20
"""How much of the ranks' traces is looked through when somebody begins to watch."""
LOOKING, LAST_WORD = 4.0, 2.0
"""Who has asked within so many seconds still looks; how long a run waits at its end for who does to
have been told."""
HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; connect-src 'self'; img-src data: blob:; base-uri 'none'; "
    "form-action 'none'",
}


class Told(NamedTuple):
    """How the ranks are: ``state`` as of the document, ``reason`` of a failure."""

    state: str
    reason: str
    recoveries: Sequence[Recovery]


@dataclass
class Observer:
    """What there is to see of a run. ``tell``: how its ranks are."""

    job: PipeMorphJob
    journal: Journal
    service: ControlService
    folder: Path
    tell: Callable[[], Told]

    def __post_init__(self) -> None:
        self._index = TraceIndex(newest=TRACE_BYTES)

    def look(self) -> Watched:
        """What is known now, without the ops. Raises TimeoutError if the control loop does not
        answer."""
        told, view = self.tell(), self.journal.view
        decisions = (each for each in reversed(view.decisions) if each.kind != "outcome")
        newest = next(decisions, None)
        self._index.update(self.folder)
        return Watched(
            job=self.job,
            now=time.time(),
            state=told.state,
            reason=told.reason,
            samples=self.journal.iterations(MOST_STEPS),
            changes=self.journal.changes(),
            lanes=self.journal.lanes(),
            worth=view.worth,
            plan_version=view.plan_version,
            wanted_version=view.wanted_version,
            peak_memory=view.peak_memory,
            recoveries=[recovered(each.record()) for each in told.recoveries],
            available=self._index.iterations(),
            kept=newest.reason if newest is not None and newest.kind == "keep" else "",
            outlook=self.service.outlook(),
        )

    def traces(self, iteration: int) -> list[StageTrace]:
        """The ops of an iteration; none if a rank has just shortened its file."""
        try:
            found = self._index.read([iteration])[iteration]
        except (OSError, ValueError, KeyError, TypeError):
            return []
        return found if all(trace.iteration == iteration for trace in found) else []

    def document(
        self, column: int | None, iteration: int | None, *, number: int, live: bool
    ) -> WatchView:
        """The document of an iteration, by default the newest, in a column, by default that with
        the slowest link."""
        known = self.look()
        if column is None or not 0 <= column < self.job.spec.parallelism.mesh.columns:
            column = worst_column(known)
        if iteration not in known.available:
            iteration = known.available[-1] if known.available else None
        traces = [] if iteration is None else self.traces(iteration)
        return watch_view(known, traces, column=column, number=number, live=live)


Asked = tuple[int | None, int | None]
"""Column and iteration; None: the default."""
NEWEST: Asked = (None, None)


@dataclass
class Made:
    """A document, when it was made (monotonic), and how it is sent. ``page``: with the page around
    it, once somebody has asked for that."""

    view: WatchView
    at: float
    json: bytes
    page: bytes | None = None


class WatchServer:
    """A context manager that serves the page from ``listener``, see :func:`listen`."""

    def __init__(self, observer: Observer, listener: socket.socket) -> None:
        self._observer, self._listener = observer, listener
        self._token = secrets.token_urlsafe(24)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="watch", daemon=True)
        # One at a time: documents are made for all who look.
        self._maker = ThreadPoolExecutor(1, thread_name_prefix="watch-documents")
        self._made: dict[Asked, Made] = {}
        self._newest: Made | None = None
        """The newest document, of whatever iteration."""
        self._last: bool | None = None
        """Whether the newest document was asked for as that of the newest iteration."""
        self._waiting: dict[bool, float] = {}
        """When one of the newest iteration, and one of another, was last refused."""
        self._number = 0
        self._left, self._filled = BURST, time.monotonic()
        self._asked_at = float("-inf")
        self._failed: set[type[Exception]] = set()
        """Errors that have been logged: once, as the page asks every second."""
        self._over = False
        self._last_word = threading.Event()
        self._ended = asyncio.Event()
        self._waiting_for_end = 0
        """How many ask for nothing but the last word."""
        self._runner: web.ServerRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}/{self._token}/"

    def __enter__(self) -> WatchServer:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        return self

    def __exit__(self, *_: Any) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)  # Who waits is not waited for.
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self._maker.shutdown()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def finish(self) -> None:
        """The run is over: who looks, or waits for that, is told so, and that nothing follows."""
        looked = time.monotonic() - self._asked_at < LOOKING
        self._over = True
        self._loop.call_soon_threadsafe(self._ended.set)
        if looked or self._waiting_for_end:
            self._last_word.wait(LAST_WORD)

    async def _start(self) -> None:
        server = web.Server(self._answer, access_log=None, logger=_unsaid)
        self._runner = web.ServerRunner(server)
        await self._runner.setup()
        await web.SockSite(self._runner, self._listener).start()

    async def _stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        path = request.path.encode(errors="surrogateescape")
        page, document = (
            hmac.compare_digest(path, f"/{self._token}/{what}".encode()) for what in ("", "view")
        )
        if request.method != "GET" or not (page or document):
            refused = web.Response(status=401)
            refused.force_close()
            return refused
        self._asked_at = time.monotonic()
        try:
            return await self._tell(request, page)
        except Exception as error:  # noqa: BLE001  # Whatever it is, the run goes on.
            if type(error) not in self._failed:
                self._failed.add(type(error))
                late = isinstance(error, TimeoutError)
                why = "the control loop does not answer" if late else f"{error!r}"
                log.warning("the page of the run cannot be made now: %s", one_line(why, 300))
            return web.Response(status=503, headers=HEADERS)

    async def _tell(self, request: web.BaseRequest, page: bool) -> web.Response:
        query = request.query
        if query.get("until") == "end":
            self._waiting_for_end += 1
            try:
                await self._ended.wait()
            finally:
                self._waiting_for_end -= 1
        asked = _number(query.get("column")), _number(query.get("iteration"))
        made = await self._loop.run_in_executor(self._maker, self._document, asked, page)
        if made is None:
            return web.Response(status=429, headers=HEADERS | {"Retry-After": "1"})
        view = made.view
        if not view.live:
            self._loop.call_later(0.1, self._last_word.set)  # When this answer is on its way.
        if page:
            return _response(made.page or b"", "text/html")
        told = view.live and _number(query.get("after")) == view.number
        return _response(b"null" if told else made.json, "application/json")

    def _document(self, asked: Asked, page: bool = False) -> Made | None:
        """The document, for a ``page`` with its HTML. That of before while another would come too
        soon, or cost too much. If there is none of before: for a page another one, else None."""
        now = time.monotonic()
        self._left = min(BURST, self._left + SHARE * (now - self._filled))
        self._filled = now
        asked = self._existing(asked)
        made = self._made.get(asked)
        last_word = self._over and (made is None or made.view.live)
        if last_word or self._newest is None:
            made = self._make(asked, now)
        elif made is None or now - made.at >= EVERY:
            if not self._is_paced(asked, now):
                made = self._make(asked, now)
            elif made is None and page:
                made = self._made.get(NEWEST, self._newest)
        if made is None:
            return None
        if page and made.page is None:
            with self._counted():
                made.page = render_page(made.view).encode()
        return made

    def _is_paced(self, asked: Asked, now: float) -> bool:
        """Whether another document would cost too much now. Who steps through iterations and who
        looks at the newest one take turns, else the one who asks first would get all."""
        kind, other = asked[1] is None, asked[1] is not None
        their_turn = self._last is kind and now - self._waiting.get(other, -math.inf) < LOOKING
        paced = self._left <= 0 or their_turn
        if paced:
            self._waiting[kind] = now
        return paced

    def _make(self, asked: Asked, now: float) -> Made:
        self._last = asked[1] is None
        self._waiting.pop(self._last, None)
        self._number += 1
        with self._counted():
            view = self._observer.document(*asked, number=self._number, live=not self._over)
            made = Made(view, now, view.model_dump_json().encode())
        self._made.pop(asked, None)
        self._made[asked] = self._newest = made
        oldest = [each for each in self._made if each != NEWEST]
        for each in oldest[: max(0, len(self._made) - DOCUMENTS)]:
            del self._made[each]
        return made

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Take what this costs off what is left."""
        began = time.thread_time()
        try:
            yield
        finally:
            self._left = max(-BURST, self._left - (time.thread_time() - began))

    def _existing(self, asked: Asked) -> Asked:
        """What is asked for, with the default in place of what there is not, as far as the newest
        document tells: all who ask for such get one document."""
        if self._newest is None:
            return asked
        (column, iteration), newest = asked, self._newest.view
        if column is not None and column >= len(newest.columns):
            column = None
        kept = newest.available
        # The document names only the newest of many.
        gone = len(kept) < MOST_AVAILABLE and iteration not in kept
        if iteration is not None and (gone or iteration > kept[-1]):
            iteration = None
        return column, iteration


def _response(body: bytes, kind: str) -> web.Response:
    return web.Response(body=body, content_type=kind, charset="utf-8", headers=HEADERS)


def listen(port: int) -> socket.socket:
    """A socket of 127.0.0.1 at a port, 0 for any. Raises :class:`InputError` if it is in use."""
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind(("127.0.0.1", port))
        found.listen()  # Before, with that option, another one could bind it, too.
    except OSError as error:
        found.close()
        raise InputError(
            f"--watch {port}: port {port} of 127.0.0.1 cannot be used ({error.strerror}); name"
            " another one, or none for any that is free"
        ) from None
    return found


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isascii() and text.isdigit() and len(text) < 12 else None
