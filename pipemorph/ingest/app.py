"""The ingest over HTTP: aiohttp around :class:`~pipemorph.ingest.handler.IngestHandler`.

One slow or hostile client costs a socket for a few seconds and nothing more: a connection
that has not sent a whole request head within ``head`` seconds is cut, TLS handshake included,
and so is a body that does not come within ``body`` seconds; a body over the limit is refused
without being read; and who may not speak for a job is not kept connected.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestPayloadError

from pipemorph.ingest.connections import ConnectionLimits, Doors, OnUnserved, heard
from pipemorph.ingest.handler import IngestHandler, Limits, Reply
from pipemorph.ingest.interfaces import Authenticator, JobStore, Refused
from pipemorph.ingest.planner_pool import Planner, plan_here
from pipemorph.wire import MAX_REPORT_BYTES

log = logging.getLogger("pipemorph.ingest")

OnAnswer = Callable[[str, int, float], None]
"""Hears of an answer: ``report`` or ``poll``, HTTP status, seconds it took."""


@dataclass(frozen=True)
class Timeouts:
    """Seconds a client has. Reports come from the same cluster or machine: a few suffice."""

    head: float = 5.0
    body: float = 5.0
    keep_alive: float = 60.0
    shutdown: float = 3.0


class _OneLine(logging.Filter):
    """A stranger's bad HTTP is one line in the log, not a traceback."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError | RequestPayloadError | ConnectionError):
            record.levelno, record.levelname = logging.WARNING, "WARNING"
            record.msg, record.args = "bad HTTP: %s", (_shown(str(error)),)
            record.exc_info = None
        return True


_http_log = logging.getLogger("pipemorph.ingest.http")
_http_log.addFilter(_OneLine())

_HANDLER = web.AppKey("handler", IngestHandler)


def make_app(
    handler: IngestHandler,
    authenticator: Authenticator,
    *,
    timeouts: Timeouts | None = None,
    on_answer: OnAnswer | None = None,
) -> web.Application:
    """The application, for a host that has an aiohttp server already.

    ``on_answer`` hears of every answer, for metrics.
    """
    limits = timeouts or Timeouts()

    async def authenticate(request: web.Request, namespace: str, name: str) -> Reply | None:
        """None if the caller may speak for the job, else the refusal."""
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        try:
            if scheme.lower() != "bearer" or not token.strip():
                raise Refused(401, "expected the header Authorization: Bearer TOKEN")
            await authenticator.authenticate(token.strip(), namespace, name, request.remote or "")
        except Refused as refusal:
            log.warning(
                "refused %s for job %s/%s from %s: %s",
                request.method, _shown(namespace), _shown(name), request.remote, refusal.reason,
            )  # fmt: skip
            # Who has no business here shall not keep a connection.
            return Reply.error(refusal.status, refusal.reason)._replace(hangs_up=True)
        return None

    async def reports(request: web.Request) -> Reply:
        namespace, name = request.match_info["namespace"], request.match_info["name"]
        refusal = await authenticate(request, namespace, name)
        if refusal is not None:
            return refusal
        too_long = Reply.error(413, f"the report is over {MAX_REPORT_BYTES} bytes")
        if (request.content_length or 0) > MAX_REPORT_BYTES:
            return too_long
        try:
            if request.content.is_eof():
                body = await request.read()  # It came with the head, as nearly always.
            else:
                body = await asyncio.wait_for(request.read(), limits.body)
        except web.HTTPRequestEntityTooLarge:
            return too_long
        except TimeoutError:
            return Reply.error(408, f"the report did not arrive within {limits.body:g} s")
        except (ConnectionError, RequestPayloadError, HttpProcessingError) as error:
            # Broken off, or framed or compressed in a way that cannot be read.
            return Reply.error(400, f"the report did not arrive whole: {error}")
        return await handler.report(namespace, name, body)

    async def directive(request: web.Request) -> Reply:
        namespace, name = request.match_info["namespace"], request.match_info["name"]
        refusal = await authenticate(request, namespace, name)
        if refusal is not None:
            return refusal
        query = request.query
        return await handler.poll(
            namespace,
            name,
            attempt=query.get("attempt", ""),
            after=query.get("after", "0"),
            wait=query.get("wait", "0"),
        )

    def answering(
        kind: str, decide: Callable[[web.Request], Awaitable[Reply]]
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def respond(request: web.Request) -> web.Response:
            began = time.monotonic()
            reply = await decide(request)
            if on_answer is not None:
                on_answer(kind, reply.status, time.monotonic() - began)
            return _response(reply)

        return respond

    @web.middleware
    async def one_line_errors(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        heard(request)
        try:
            return await handler(request)
        except web.HTTPException as error:
            return _response(Reply.error(error.status, error.reason))
        except Exception:  # A fault of ours: one line for the caller, the rest for our log.
            log.exception("%s %s failed", request.method, _shown(request.path))
            return _response(Reply.error(500, "the ingest failed; its log says why"))

    app = web.Application(middlewares=[one_line_errors], client_max_size=MAX_REPORT_BYTES)
    app[_HANDLER] = handler
    app.router.add_post("/v1/jobs/{namespace}/{name}/reports", answering("report", reports))
    app.router.add_get("/v1/jobs/{namespace}/{name}/directive", answering("poll", directive))
    app.on_shutdown.append(_release_polls)
    return app


async def _release_polls(app: web.Application) -> None:
    app[_HANDLER].close()


def _response(reply: Reply) -> web.Response:
    response = web.Response(status=reply.status, body=reply.body, content_type="application/json")
    response.headers.update(reply.headers)
    if reply.hangs_up or reply.status in (400, 404, 408, 413):
        response.force_close()  # The rest of a body is not read.
    return response


def _shown(text: str) -> str:
    """Text of a stranger, fit for one log line."""
    return ascii(text[:80])[1:-1]


class IngestServer:
    """The ingest on a socket of its own. ``async with`` it, or start and stop it.

    >>> server = IngestServer(store, BearerAuthenticator(token))   # doctest: +SKIP
    >>> await server.start()                                       # doctest: +SKIP
    >>> server.url                                                 # doctest: +SKIP
    'http://127.0.0.1:39211'
    """

    def __init__(
        self,
        store: JobStore,
        authenticator: Authenticator,
        *,
        host: str | None = "127.0.0.1",
        port: int = 0,
        tls: ssl.SSLContext | None = None,
        limits: Limits | None = None,
        timeouts: Timeouts | None = None,
        planner: Planner = plan_here,
        on_answer: OnAnswer | None = None,
        connections: ConnectionLimits | None = None,
        on_unserved: OnUnserved | None = None,
    ) -> None:
        self.handler = IngestHandler(store, limits=limits, planner=planner)
        self._authenticator = authenticator
        self._address = (host, port)
        self._tls = tls
        self._timeouts = timeouts or Timeouts()
        self._on_answer = on_answer
        self._connections = connections or ConnectionLimits()
        self._on_unserved = on_unserved
        self._runner: web.AppRunner | None = None
        self._doors: Doors | None = None

    @property
    def url(self) -> str:
        """Base URL, once started. Raises RuntimeError before."""
        if self._doors is None:
            raise RuntimeError("the ingest is not started")
        listener = self._doors.sockets[0]
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if listener.family == socket.AF_INET6 else host
        return f"{'https' if self._tls else 'http'}://{shown}:{port}"

    async def start(self) -> None:
        """Bind and serve. Raises OSError if the address is taken."""
        app = make_app(
            self.handler,
            self._authenticator,
            timeouts=self._timeouts,
            on_answer=self._on_answer,
        )
        runner = web.AppRunner(
            app,
            access_log=None,
            logger=_http_log,
            keepalive_timeout=self._timeouts.keep_alive,
            lingering_time=min(1.0, self._timeouts.body),
            shutdown_timeout=self._timeouts.shutdown,
        )
        await runner.setup()
        assert runner.server is not None
        doors = Doors(
            runner.server,
            limits=self._connections,
            head_seconds=self._timeouts.head,
            tls=self._tls,
            on_unserved=self._on_unserved,
        )
        try:
            await doors.open(*self._address)
        except OSError:
            await runner.cleanup()
            raise
        self._runner, self._doors = runner, doors

    async def stop(self) -> None:
        """Answer waiting polls, finish requests in progress (bounded), close."""
        if self._doors is not None:
            await self._doors.close()
            self._doors = None
        if self._runner is not None:
            self.handler.close()
            await self._runner.cleanup()
            self._runner = None

    async def __aenter__(self) -> IngestServer:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
