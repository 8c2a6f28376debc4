"""Serves the live page of a job: on loopback, by a token in the URL, read only.

The token keeps other users and other pages of the browser out: who does not know the URL is told
nothing but 401. Nothing is done while nobody looks, see :mod:`pipemorph.watch.documents`.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from aiohttp import web

from pipemorph.api.spec import PipeMorphJob
from pipemorph.api.status import JobStatus
from pipemorph.control.decide.forecast import Outlook
from pipemorph.errors import InputError, one_line
from pipemorph.ingest.connections import Acceptor, ConnectionLimits, connection_of
from pipemorph.local.clock import now
from pipemorph.local.results.history import Journal
from pipemorph.local.results.traces import TraceIndex
from pipemorph.watch.build import MOST_STEPS, StageTrace, Watched, watch_view, worst_column
from pipemorph.watch.document import Recovered, WatchView
from pipemorph.watch.documents import LOOKING, Documents, MakeView, number

log = logging.getLogger("pipemorph.watch")
_unsaid = logging.getLogger("pipemorph.watch.requests")
"""Log of requests that are not HTTP. It is silent: their senders get an answer."""
_unsaid.setLevel(logging.CRITICAL + 1)

HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; connect-src 'self'; img-src data: blob:; base-uri 'none'; "
    "form-action 'none'",
}
LIMITS = ConnectionLimits(in_all=256, per_source=256, unauthenticated=64)
HEAD_SECONDS = 5.0
"""Time limit of the first request of a connection."""

TRACE_BYTES = 64 << 20
"""How much of the ranks' traces is looked through when somebody begins to watch."""
LAST_WORD = 2.0
"""How long a run waits at its end for who looks to have been told."""


class Told(NamedTuple):
    """How the ranks are. ``outlook``: see :meth:`JobController.outlook`."""

    status: JobStatus
    outlook: Outlook | None
    recoveries: Sequence[Recovered] = ()


class Traces(Protocol):
    """Ops of iterations."""

    def available(self, column: int) -> list[int]:
        """The iterations of a column whose ops are there, ascending."""
        ...

    def read(self, column: int, iteration: int) -> Sequence[StageTrace]:
        """The ops of an iteration, at least those of a column; empty if they are gone."""
        ...


class FolderTraces:
    """Ops from the files that the ranks of a run write."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._index = folder, TraceIndex(newest=TRACE_BYTES)

    def available(self, column: int) -> list[int]:
        self._index.update(self._folder)
        return self._index.iterations()

    def read(self, column: int, iteration: int) -> Sequence[StageTrace]:
        try:
            found = self._index.read([iteration])[iteration]
        except (OSError, ValueError, KeyError, TypeError):
            return []  # A rank has just shortened its file.
        return found if all(trace.iteration == iteration for trace in found) else []


@dataclass
class Observer:
    """What there is to see of a job. ``tell``: how the ranks are, it raises TimeoutError if the
    control loop does not answer; ``gpus``: of all ranks together, if the job's template does not
    say it; ``no_ops``: why there are no ops of any iteration, empty if that is not known;
    ``result``: where the job's result is to be found."""

    job: PipeMorphJob
    journal: Journal
    traces: Traces
    tell: Callable[[], Told]
    gpus: int = 0
    no_ops: str = ""
    result: str = "report.json of its folder"
    column: int | None = None
    """The column of the newest document."""

    def look(self) -> Watched:
        """What is known now, without the ops."""
        told = self.tell()
        decisions = (
            each for each in reversed(self.journal.view.decisions) if each.kind != "outcome"
        )
        newest = next(decisions, None)
        return Watched(
            job=self.job,
            now=now(),
            status=told.status,
            samples=self.journal.iterations(MOST_STEPS),
            changes=self.journal.changes(),
            lanes=self.journal.lanes(),
            recoveries=told.recoveries,
            kept=newest.reason if newest is not None and newest.kind == "keep" else "",
            outlook=told.outlook,
            gpus=self.gpus,
            no_ops=self.no_ops,
            result=self.result,
        )

    def document(
        self, column: int | None, iteration: int | None, number: int, live: bool
    ) -> WatchView:
        """The document of an iteration, by default the newest, in a column, by default that with
        the slowest link."""
        known = self.look()
        if column is None or not 0 <= column < self.job.spec.parallelism.mesh.columns:
            column = worst_column(known)
        self.column = column
        available = self.traces.available(column)
        if iteration not in available:
            iteration = available[-1] if available else None
        traces = [] if iteration is None else self.traces.read(column, iteration)
        return watch_view(
            replace(known, available=available), traces, column=column, number=number, live=live
        )


class WatchServer:
    """A context manager that serves the page from ``listener``, see :func:`listen`; without one,
    connections are handed to :meth:`take`. ``token``: by default a new one."""

    def __init__(
        self,
        document: MakeView,
        listener: socket.socket | None = None,
        token: str | None = None,
    ) -> None:
        self.documents = Documents(document)
        self._listener = listener
        self._token = token or secrets.token_urlsafe(24)
        self._runner: web.ServerRunner
        self._acceptor: Acceptor | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="watch", daemon=True)
        # One at a time: documents are made for all who look.
        self._maker = ThreadPoolExecutor(1, thread_name_prefix="watch-documents")
        self.asked_at = float("-inf")
        """When somebody has asked last, monotonic."""
        self._failed: set[type[Exception]] = set()
        """Errors that have been logged: once, as the page asks every second."""
        self._last_word = threading.Event()
        self._ended = asyncio.Event()
        self._waiting_for_end = 0
        """How many ask for nothing but the last word."""

    @property
    def url(self) -> str:
        assert self._listener is not None
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}/{self._token}/"

    def __enter__(self) -> WatchServer:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._open(), self._loop).result()
        return self

    def __exit__(self, *_: Any) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)  # Who waits is not waited for.
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._maker.shutdown()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def take(self, connection: socket.socket, head: bytes) -> None:
        """Serve a connection that somebody else has accepted. ``head``: what was read from it."""
        asyncio.run_coroutine_threadsafe(self._take(connection, head), self._loop)

    def finish(self) -> None:
        """The run is over: who looks, or waits for that, is told so, and that nothing follows."""
        looked = time.monotonic() - self.asked_at < LOOKING
        self.documents.finish()
        self._loop.call_soon_threadsafe(self._ended.set)
        if looked or self._waiting_for_end:
            self._last_word.wait(LAST_WORD)

    async def _open(self) -> None:
        self._runner = web.ServerRunner(web.Server(self._answer, access_log=None, logger=_unsaid))
        await self._runner.setup()
        if self._listener is not None:
            assert self._runner.server is not None
            self._acceptor = Acceptor(self._runner.server, limits=LIMITS, head_seconds=HEAD_SECONDS)
            await self._acceptor.listen([self._listener])

    async def _take(self, connection: socket.socket, head: bytes) -> None:
        assert self._runner.server is not None
        protocol = self._runner.server()
        connection.setblocking(False)
        await self._loop.connect_accepted_socket(lambda: protocol, connection)
        protocol.data_received(head)

    async def _close(self) -> None:
        if self._acceptor is not None:
            await self._acceptor.close()
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
        if (connection := connection_of(request)) is not None:
            connection.authenticated()
        answer = await self._tell(request.query, page)
        answer.headers.update(HEADERS)
        if self._listener is None:
            answer.enable_compression()  # It goes through a network.
        return answer

    async def _tell(self, query: Mapping[str, str], page: bool) -> web.Response:
        """The answer with the page, or with a document."""
        self.asked_at = time.monotonic()
        if query.get("until") == "end":
            self._waiting_for_end += 1
            try:
                await self._ended.wait()
            finally:
                self._waiting_for_end -= 1
        asked = number(query.get("column")), number(query.get("iteration"))
        try:
            made = await self._loop.run_in_executor(self._maker, self.documents.get, asked, page)
        except Exception as error:  # noqa: BLE001  # Whatever it is, the job goes on.
            if type(error) not in self._failed:
                self._failed.add(type(error))
                late = isinstance(error, TimeoutError)
                why = "the control loop does not answer" if late else f"{error!r}"
                log.warning("the page of the job cannot be made now: %s", one_line(why, 300))
            return web.Response(status=503)
        if made is None:  # It would cost too much now.
            return web.Response(status=429, headers={"Retry-After": "1"})
        if not made.live:
            self._loop.call_later(0.1, self._last_word.set)  # When this answer is on its way.
        return web.Response(
            body=made.body(page=page, after=number(query.get("after"))),
            content_type="text/html" if page else "application/json",
            charset="utf-8",
        )


def listen(port: int, option: str = "--watch") -> socket.socket:
    """A socket of 127.0.0.1 at a port, 0 for any. Raises :class:`InputError` if it is in use;
    ``option``: which one named it."""
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind(("127.0.0.1", port))
        found.listen()  # Before, with that option, another one could bind it, too.
    except OSError as error:
        found.close()
        raise InputError(
            f"{option} {port}: port {port} of 127.0.0.1 cannot be used ({error.strerror}); name"
            " another one, or none for any that is free"
        ) from None
    return found
