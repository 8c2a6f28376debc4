"""Serves :class:`~pipemorph.ingest.handler.IngestHandler` over HTTP with aiohttp.

A slow or hostile client costs one socket for a few seconds: a connection is closed that does not
complete the TLS handshake and a request head within ``head`` seconds, or a body within ``body``
seconds. A body over the limit is rejected unread; unauthenticated clients are disconnected.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestPayloadError

from pipemorph.ingest.connections import Acceptor, ConnectionLimits, OnUnserved, connection_of
from pipemorph.ingest.generations import GenerationDesk
from pipemorph.ingest.handler import IngestHandler, Limits, Reply
from pipemorph.ingest.interfaces import Authenticator, Identity, JobStore, Refused
from pipemorph.ingest.planner_pool import Planner, plan_here
from pipemorph.wire import (
    MAX_HAND_IN_BYTES,
    MAX_POD_REPORT_BYTES,
    MAX_REPORT_BYTES,
)

log = logging.getLogger("pipemorph.ingest")

Join = Callable[[Mapping[str, str], str], Reply]
"""Answers ``GET /v1/job``, by which a rank asks for the job of its token: the query, and the rank's
address."""
OnAnswer = Callable[[str, int, float], None]
"""Called for every response: ``report``, ``poll``, ``snapshot``, ``join`` or ``generation``, HTTP
status, duration in seconds."""


@dataclass(frozen=True)
class Timeouts:
    """Time limits of clients, seconds. Short, as they are in the same cluster or machine."""

    head: float = 5.0
    body: float = 5.0
    keep_alive: float = 60.0
    refusal: float = 1.0
    """Until a caller is told that it is refused, or asks too often: each connection of those who
    ask again and again costs one request in this time."""
    shutdown: float = 3.0


STANDBY = Reply.error(503, "this replica of the ingest stands by; connect again")._replace(
    hangs_up=True  # The next connection may lead to the leader.
)
_QUOTED = re.compile(r"""[\s:]*\n|[\s:]+b?['"]""")
"""Where what a client sent begins in an error of aiohttp."""
HELD = frozenset({401, 403, 429})
"""Answers that are held back for a moment. No agent that has its job's token needs them soon."""


class _OneLine(logging.Filter):
    """Logs malformed HTTP of unauthenticated clients in one line, without a traceback, and without
    what they sent, which may be a token."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError | RequestPayloadError | ConnectionError):
            record.levelno, record.levelname = logging.WARNING, "WARNING"
            why = str(error.message if isinstance(error, HttpProcessingError) else error)
            why = _QUOTED.split(why)[0] or type(error).__name__
            record.msg, record.args = "bad HTTP: %s", (_shown(why),)
            record.exc_info = None
        return True


_http_log = logging.getLogger("pipemorph.ingest.http")
_http_log.addFilter(_OneLine())

_HANDLER = web.AppKey("handler", IngestHandler)
_DESK = web.AppKey("desk", GenerationDesk)


def make_app(
    handler: IngestHandler,
    authenticator: Authenticator,
    *,
    timeouts: Timeouts | None = None,
    on_answer: OnAnswer | None = None,
    join: Join | None = None,
    desk: GenerationDesk | None = None,
    leads: Callable[[], bool] = lambda: True,
) -> web.Application:
    """The aiohttp application, for a host with its own server.

    ``on_answer`` is called for every response, for metrics. ``join``: for a host with one job;
    without it, ranks cannot ask for their job. ``desk``: for a host whose ranks have launchers.
    ``leads``: whether this process serves now; a standby answers every request with 503.
    """
    limits = timeouts or Timeouts()

    async def authenticate(request: web.Request, namespace: str, name: str) -> Identity | Reply:
        """Who the caller is, if it is authorized for the job, else the response to send."""
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        try:
            if scheme.lower() != "bearer" or not token.strip():
                raise Refused(401, "expected the header Authorization: Bearer TOKEN")
            identity = await authenticator.authenticate(
                token.strip(), namespace, name, request.remote or ""
            )
            if (connection := connection_of(request)) is not None:
                connection.authenticated()
            return identity
        except Refused as refusal:
            wanted = f"job {_shown(namespace)}/{_shown(name)}" if name else "the job"
            # Anybody may say it; it helps to find which machine has the wrong token.
            rank = request.query.get("rank")
            says = "" if rank is None else f" (says that it is rank {rank[:20]!a})"
            log.warning(
                "refused %s for %s from %s%s: %s",
                request.method, wanted, request.remote, says, refusal.reason,
            )  # fmt: skip
            # Disconnect unauthorized callers.
            return Reply.error(refusal.status, refusal.reason)._replace(hangs_up=True)

    async def reports(request: web.Request, namespace: str, name: str, _: Identity) -> Reply:
        body = await read(request, "report", MAX_REPORT_BYTES)
        return body if isinstance(body, Reply) else await handler.report(namespace, name, body)

    async def snapshot(request: web.Request, namespace: str, name: str, _: Identity) -> Reply:
        large = request.clone(client_max_size=MAX_HAND_IN_BYTES)
        body = partial(read, large, "snapshot", MAX_HAND_IN_BYTES)
        return await handler.hand_in(namespace, name, body)

    async def read(request: web.BaseRequest, what: str, most: int) -> bytes | Reply:
        """The body, of at most ``most`` bytes, or the error to answer."""
        too_long = Reply.error(413, f"the {what} is larger than {most} bytes")
        if request.headers.get("Content-Encoding", "identity") != "identity":
            return Reply.error(415, f"the {what} is compressed; expected one that is not")
        if (request.content_length or 0) > most:
            return too_long
        try:
            if request.content.is_eof():
                return await request.read()  # It arrived with the head, as it usually does.
            return await asyncio.wait_for(request.read(), limits.body)
        except web.HTTPRequestEntityTooLarge:
            return too_long
        except TimeoutError:
            return Reply.error(408, f"the {what} did not arrive within {limits.body:g} s")
        except (ConnectionError, RequestPayloadError, HttpProcessingError) as error:
            # Connection lost, or invalid framing or compression.
            return Reply.error(400, f"the {what}'s body could not be read: {error}")

    async def directive(request: web.Request, namespace: str, name: str, _: Identity) -> Reply:
        query = request.query
        return await handler.poll(
            namespace,
            name,
            attempt=query.get("attempt", ""),
            after=query.get("after", "0"),
            wait=query.get("wait", "0"),
        )

    async def tell_generation(
        request: web.Request, namespace: str, name: str, caller: Identity
    ) -> Reply:
        assert desk is not None
        body = await read(request, "report", MAX_POD_REPORT_BYTES)
        if isinstance(body, Reply):
            return body
        return await desk.tell(
            namespace, name, body, request.query.get("wait", "0"), uid=caller.uid
        )

    async def poll_generation(
        request: web.Request, namespace: str, name: str, caller: Identity
    ) -> Reply:
        assert desk is not None
        query = request.query
        return await desk.poll(
            namespace,
            name,
            attempt=query.get("attempt", ""),
            generation=query.get("generation", ""),
            pod=query.get("pod", ""),
            uid=caller.uid,
            wait=query.get("wait", "0"),
            leaving=query.get("leaving", "") == "1",
        )

    async def job(request: web.Request, *_: object) -> Reply:
        assert join is not None
        return join(request.query, request.remote or "")

    def answering(
        kind: str, decide: Callable[[web.Request, str, str, Identity], Awaitable[Reply]]
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def respond(request: web.Request) -> web.Response:
            began = time.monotonic()
            reply = STANDBY
            if leads():
                namespace, name = (request.match_info.get(k, "") for k in ("namespace", "name"))
                caller = await authenticate(request, namespace, name)
                reply = (
                    caller if isinstance(caller, Reply)
                    else await decide(request, namespace, name, caller)
                )  # fmt: skip
            if on_answer is not None:
                on_answer(kind, reply.status, time.monotonic() - began)
            if reply.status in HELD:
                await asyncio.sleep(limits.refusal)
            return _response(reply)

        return respond

    @web.middleware
    async def one_line_errors(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if (connection := connection_of(request)) is not None:
            connection.head_received()
        try:
            return await handler(request)
        except web.HTTPException as error:
            reply = Reply.error(error.status, error.reason)
        except Exception:  # An internal error: one line for the caller, the traceback for the log.
            log.exception("%s %s failed", request.method, _shown(request.path))
            reply = Reply.error(500, "internal error of the ingest; see its log")
        # The client may not have authenticated: no such answer keeps its connection open.
        return _response(reply._replace(hangs_up=True))

    app = web.Application(middlewares=[one_line_errors], client_max_size=MAX_REPORT_BYTES)
    app[_HANDLER] = handler
    app.router.add_post("/v1/jobs/{namespace}/{name}/reports", answering("report", reports))
    app.router.add_get("/v1/jobs/{namespace}/{name}/directive", answering("poll", directive))
    app.router.add_post("/v1/jobs/{namespace}/{name}/snapshot", answering("snapshot", snapshot))
    if join is not None:
        app.router.add_get("/v1/job", answering("join", job))
    if desk is not None:
        app[_DESK] = desk
        where = "/v1/jobs/{namespace}/{name}/generation"
        app.router.add_post(where, answering("generation", tell_generation))
        app.router.add_get(where, answering("generation", poll_generation))
    app.on_shutdown.append(_release_polls)
    return app


async def _release_polls(app: web.Application) -> None:
    app[_HANDLER].close()
    if _DESK in app:
        app[_DESK].close()


def _response(reply: Reply) -> web.Response:
    response = web.Response(status=reply.status, body=reply.body, content_type="application/json")
    response.headers.update(reply.headers)  # Of which one may be the type of the body.
    if reply.hangs_up or reply.status in (400, 404, 408, 413, 415):
        response.force_close()  # Do not read the rest of the body.
    return response


def _shown(text: str) -> str:
    """Untrusted text as one printable log line."""
    return ascii(text[:80])[1:-1]


class IngestServer:
    """An ingest server with its own socket. Use with ``async with``, or start and stop it.

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
        join: Join | None = None,
        desk: GenerationDesk | None = None,
        leads: Callable[[], bool] = lambda: True,
    ) -> None:
        self.handler = IngestHandler(store, limits=limits, planner=planner)
        self._address = (host, port)
        self._tls = tls
        self._timeouts = timeouts = timeouts or Timeouts()
        self._make_app = partial(
            make_app, self.handler, authenticator,
            timeouts=timeouts, on_answer=on_answer, join=join, desk=desk, leads=leads,
        )  # fmt: skip
        self._connections = connections or ConnectionLimits()
        self._on_unserved = on_unserved
        self._runner: web.AppRunner | None = None
        self._acceptor: Acceptor | None = None

    @property
    def url(self) -> str:
        """Base URL. Raises RuntimeError before the start."""
        if self._acceptor is None:
            raise RuntimeError("the ingest is not started")
        listener = self._acceptor.sockets[0]
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if listener.family == socket.AF_INET6 else host
        return f"{'https' if self._tls else 'http'}://{shown}:{port}"

    async def start(self) -> None:
        """Bind and serve. Raises OSError if the address is taken."""
        runner = web.AppRunner(
            self._make_app(),
            access_log=None,
            logger=_http_log,
            # How large a body may be uncompressed, only its reader knows.
            auto_decompress=False,
            keepalive_timeout=self._timeouts.keep_alive,
            lingering_time=min(1.0, self._timeouts.body),
            shutdown_timeout=self._timeouts.shutdown,
        )
        await runner.setup()
        assert runner.server is not None
        acceptor = Acceptor(
            runner.server,
            limits=self._connections,
            head_seconds=self._timeouts.head,
            tls=self._tls,
            on_unserved=self._on_unserved,
        )
        try:
            await acceptor.open(*self._address)
        except OSError:
            await runner.cleanup()
            raise
        self._runner, self._acceptor = runner, acceptor

    def sweep(self) -> None:
        """Drop what is kept for jobs that the host no longer has. The host calls this now and
        then."""
        self.handler.sweep()

    async def stop(self) -> None:
        """Answer waiting polls, finish requests in progress (with a time limit), close."""
        if self._acceptor is not None:
            await self._acceptor.close()
            self._acceptor = None
        if self._runner is not None:
            await self._runner.cleanup()
            await self.handler.persisted(self._timeouts.shutdown)
            self._runner = None

    async def __aenter__(self) -> IngestServer:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
