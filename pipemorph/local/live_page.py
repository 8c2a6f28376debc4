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
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from aiohttp import web

from pipemorph.errors import InputError, one_line
from pipemorph.ingest.connections import Acceptor, ConnectionLimits, find_connection
from pipemorph.views.live_page.document_cache import (
    VIEWER_TIMEOUT,
    DocumentCache,
    DocumentFactory,
    parse_number,
)

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

END_NOTICE_SECONDS = 2.0
"""Most seconds that a run waits at its end for viewers to receive the last document."""


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
