"""Serves the live page of a job on loopback, read only.

The token in its URL excludes other users and other pages of the browser: any other URL gets status
401. Nothing is computed without viewers, see :mod:`pipemorph.views.live_page.document_cache`.
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

from pipemorph.control.decide.forecast import Outlook
from pipemorph.diagnose.formats.rank_traces import TraceIndex
from pipemorph.errors import InputError, one_line
from pipemorph.ingest.connections import Acceptor, ConnectionLimits, find_connection
from pipemorph.local.clock import now
from pipemorph.local.results.journal import RunJournal
from pipemorph.spec.job_spec import PipeMorphJob
from pipemorph.spec.job_status import JobStatus
from pipemorph.views.live_page.document_cache import (
    VIEWER_TIMEOUT,
    DocumentCache,
    DocumentFactory,
    parse_number,
)
from pipemorph.views.live_page.page_builder import (
    MOST_STEPS,
    StageTrace,
    WatchedJob,
    build_page_document,
    find_slowest_column,
)
from pipemorph.views.live_page.page_document import PageDocument, RecoveryEntry

log = logging.getLogger("pipemorph.watch")
_silent_log = logging.getLogger("pipemorph.watch.requests")
"""Log of requests that are not HTTP. It is silent: their senders get an answer."""
_silent_log.setLevel(logging.CRITICAL + 1)

HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; connect-src 'self'; img-src data: blob:; base-uri 'none'; "
    "form-action 'none'",
}
LIMITS = ConnectionLimits(total=256, per_source=256, unauthenticated=64)
HEAD_SECONDS = 5.0
"""Time limit of the first request of a connection."""

TRACE_BYTES = 64 << 20
"""Bytes of the ranks' traces that are searched for the first viewer."""
END_NOTICE_SECONDS = 2.0
"""Most seconds that a run waits at its end for viewers to receive the last document."""


class RunState(NamedTuple):
    """State of the ranks. ``outlook``: see :meth:`JobController.get_outlook`."""

    status: JobStatus
    outlook: Outlook | None
    recoveries: Sequence[RecoveryEntry] = ()


class TraceSource(Protocol):
    """Ops of iterations."""

    def list_iterations(self, column: int) -> list[int]:
        """Iterations of a column with ops, ascending."""
        ...

    def read_iteration(self, column: int, iteration: int) -> Sequence[StageTrace]:
        """Ops of an iteration, at least those of a column; empty if they are gone."""
        ...


class FolderTraceSource:
    """Ops from files that the ranks of a run write, of none without a folder. ``newest``: see
    :class:`TraceIndex`."""

    def __init__(self, folder: Path | None, newest: int | None = TRACE_BYTES) -> None:
        self._folder, self._index = folder, TraceIndex(newest=newest)

    def list_iterations(self, column: int) -> list[int]:
        if self._folder is not None:
            self._index.index_new_lines(self._folder)
        return self._index.list_iterations()

    def read_iteration(self, column: int, iteration: int) -> Sequence[StageTrace]:
        try:
            found = self._index.read_iterations([iteration])[iteration]
        except (OSError, ValueError, KeyError, TypeError):
            return []  # A rank has just shortened its file.
        return found if all(trace.iteration == iteration for trace in found) else []


@dataclass
class LivePageSource:
    """Data of a job's live page. ``read_run_state``: returns the state of the ranks, or raises
    TimeoutError if the control loop does not answer; ``gpus``: of all ranks, if the job's template
    does not define it; ``no_ops``: reason for missing ops, empty if unknown; ``result``: place of
    the job's result."""

    job: PipeMorphJob
    journal: RunJournal
    traces: TraceSource
    read_run_state: Callable[[], RunState]
    gpus: int = 0
    no_ops: str = ""
    result: str = "report.json of its folder"
    column: int | None = None
    """Column of the newest document."""

    def collect_state(self) -> WatchedJob:
        """Current state, without the ops."""
        ranks = self.read_run_state()
        decisions = (
            each for each in reversed(self.journal.view.decisions) if each.kind != "outcome"
        )
        newest = next(decisions, None)
        return WatchedJob(
            job=self.job,
            now=now(),
            status=ranks.status,
            samples=self.journal.list_iterations(MOST_STEPS),
            changes=self.journal.list_changes(),
            link_history=self.journal.copy_link_history(),
            recoveries=ranks.recoveries,
            keep_reason=newest.reason if newest is not None and newest.kind == "keep" else "",
            outlook=ranks.outlook,
            gpus=self.gpus,
            missing_ops_reason=self.no_ops,
            result_location=self.result,
        )

    def make_document(
        self, column: int | None, iteration: int | None, number: int, live: bool
    ) -> PageDocument:
        """Document of an iteration, by default the newest, in a column, by default of the slowest
        link."""
        known = self.collect_state()
        if column is None or not 0 <= column < self.job.spec.parallelism.mesh.columns:
            column = find_slowest_column(known)
        self.column = column
        available = self.traces.list_iterations(column)
        if iteration not in available:
            iteration = available[-1] if available else None
        traces = [] if iteration is None else self.traces.read_iteration(column, iteration)
        return build_page_document(
            replace(known, available=available), traces, column=column, number=number, live=live
        )


class LivePageServer:
    """Context manager that serves the page from ``listener``, see :func:`open_page_listener`, or
    connections that are passed to :meth:`adopt_connection`. ``token``: by default a new one."""

    def __init__(
        self,
        document: DocumentFactory,
        listener: socket.socket | None = None,
        token: str | None = None,
    ) -> None:
        self.documents = DocumentCache(document)
        self._listener = listener
        self._token = token or secrets.token_urlsafe(24)
        self._runner: web.ServerRunner
        self._acceptor: Acceptor | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="watch", daemon=True)
        # A single thread: documents are made for all viewers.
        self._maker = ThreadPoolExecutor(1, thread_name_prefix="watch-documents")
        self.requested_at = float("-inf")
        """Time of the last request, monotonic seconds."""
        self._logged_errors: set[type[Exception]] = set()
        """Errors that have been logged, each once: the page sends a request every second."""
        self._end_delivered = threading.Event()
        self._ended = asyncio.Event()
        self._end_waiters = 0
        """Number of requests that wait for the end."""

    @property
    def url(self) -> str:
        assert self._listener is not None
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}/{self._token}/"

    def __enter__(self) -> LivePageServer:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._open_server(), self._loop).result()
        return self

    def __exit__(self, *_: Any) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)  # Release requests that wait.
        asyncio.run_coroutine_threadsafe(self._close_server(), self._loop).result()
        self._maker.shutdown()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def adopt_connection(self, connection: socket.socket, head: bytes) -> None:
        """Serve a connection of another server. ``head``: data that was read from it."""
        asyncio.run_coroutine_threadsafe(self._adopt_connection(connection, head), self._loop)

    def announce_end(self) -> None:
        """End the page: send the last document to viewers and to requests that wait for the end."""
        looked = time.monotonic() - self.requested_at < VIEWER_TIMEOUT
        self.documents.mark_finished()
        self._loop.call_soon_threadsafe(self._ended.set)
        if looked or self._end_waiters:
            self._end_delivered.wait(END_NOTICE_SECONDS)

    async def _open_server(self) -> None:
        self._runner = web.ServerRunner(
            web.Server(self._handle_request, access_log=None, logger=_silent_log)
        )
        await self._runner.setup()
        if self._listener is not None:
            assert self._runner.server is not None
            self._acceptor = Acceptor(self._runner.server, limits=LIMITS, head_seconds=HEAD_SECONDS)
            await self._acceptor.accept_from([self._listener])

    async def _adopt_connection(self, connection: socket.socket, head: bytes) -> None:
        assert self._runner.server is not None
        protocol = self._runner.server()
        connection.setblocking(False)
        await self._loop.connect_accepted_socket(lambda: protocol, connection)
        protocol.data_received(head)

    async def _close_server(self) -> None:
        if self._acceptor is not None:
            await self._acceptor.close()
        await self._runner.cleanup()

    async def _handle_request(self, request: web.BaseRequest) -> web.Response:
        path = request.path.encode(errors="surrogateescape")
        page, document = (
            hmac.compare_digest(path, f"/{self._token}/{what}".encode()) for what in ("", "view")
        )
        if request.method != "GET" or not (page or document):
            refused = web.Response(status=401)
            refused.force_close()
            return refused
        if (connection := find_connection(request)) is not None:
            connection.mark_authenticated()
        answer = await self._make_response(request.query, page)
        answer.headers.update(HEADERS)
        if self._listener is None:
            answer.enable_compression()  # It is sent over a network.
        return answer

    async def _make_response(self, query: Mapping[str, str], page: bool) -> web.Response:
        """Response with the page, or with a document."""
        self.requested_at = time.monotonic()
        if query.get("until") == "end":
            self._end_waiters += 1
            try:
                await self._ended.wait()
            finally:
                self._end_waiters -= 1
        wanted = parse_number(query.get("column")), parse_number(query.get("iteration"))
        try:
            made = await self._loop.run_in_executor(self._maker, self.documents.get, wanted, page)
        except Exception as error:  # noqa: BLE001  # The job goes on after any error.
            if type(error) not in self._logged_errors:
                self._logged_errors.add(type(error))
                late = isinstance(error, TimeoutError)
                why = "the control loop does not answer" if late else f"{error!r}"
                log.warning("the page of the job cannot be made now: %s", one_line(why, 300))
            return web.Response(status=503)
        if made is None:  # It would take too much processor time now.
            return web.Response(status=429, headers={"Retry-After": "1"})
        if not made.live:
            self._loop.call_later(0.1, self._end_delivered.set)  # Once this answer is sent.
        return web.Response(
            body=made.select_body(page=page, after=parse_number(query.get("after"))),
            content_type="text/html" if page else "application/json",
            charset="utf-8",
        )


def open_page_listener(port: int, option: str = "--watch") -> socket.socket:
    """Listening socket of 127.0.0.1 at a port, 0 for any. Raises :class:`InputError` if it is in
    use; ``option``: the option that named it."""
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind(("127.0.0.1", port))
        found.listen()  # With that option, another socket could bind it until then.
    except OSError as error:
        found.close()
        raise InputError(
            f"{option} {port}: port {port} of 127.0.0.1 cannot be used ({error.strerror}); name"
            " another port, or none for any free one"
        ) from None
    return found
