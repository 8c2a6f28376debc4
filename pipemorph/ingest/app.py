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

from pipemorph.ingest.connections import Acceptor, ConnectionLimits, OnUnserved, find_connection
from pipemorph.ingest.handler import IngestHandler, RateLimits, Reply
from pipemorph.ingest.interfaces import AccessDeniedError, Authenticator, Identity, JobStore
from pipemorph.ingest.planner_pool import Planner, plan_in_process
from pipemorph.ingest.restart_handler import RestartHandler
from pipemorph.protocol import MAX_POD_REPORT_BYTES, MAX_REPORT_BYTES, MAX_SNAPSHOT_MESSAGE_BYTES
from pipemorph.protocol.observed_steps import MAX_STEPS_BYTES

log = logging.getLogger("pipemorph.ingest")

Join = Callable[[Mapping[str, str], str], Reply]
"""Answers ``GET /v1/job``, a rank's request for its job: from the query, and the rank's address."""
Observe = Callable[[bytes], Reply]
"""Answers ``POST /v1/observations``, the steps of a rank that PipeMorph does not run."""
OnAnswer = Callable[[str, int, float], None]
"""Callback for every response: ``report``, ``poll``, ``snapshot``, ``join``, ``observation`` or
``generation``, HTTP status, duration in seconds."""


@dataclass(frozen=True)
class ClientTimeouts:
    """Time limits of clients, seconds. Short, as they are in the same cluster or machine."""

    head: float = 5.0
    body: float = 5.0
    keep_alive: float = 60.0
    refusal: float = 1.0
    """Delay of a refusal, so that clients that retry without end cost few requests."""
    shutdown: float = 3.0


STANDBY = Reply.from_error(503, "this replica of the ingest stands by; connect again")._replace(
    closes_connection=True  # The next connection may lead to the leader.
)
_QUOTED = re.compile(r"""[\s:]*\n|[\s:]+b?['"]""")
"""Pattern of the place in an error of aiohttp where data of the client begins."""
DELAYED_STATUSES = frozenset({401, 403, 429})
"""HTTP statuses of delayed responses. No agent that has its job's token needs them soon."""


class _OneLineHttpFilter(logging.Filter):
    """Logs malformed HTTP of unauthenticated clients in one line, without a traceback and without
    the data that they sent, which may be a token."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError | RequestPayloadError | ConnectionError):
            record.levelno, record.levelname = logging.WARNING, "WARNING"
            why = str(error.message if isinstance(error, HttpProcessingError) else error)
            why = _QUOTED.split(why)[0] or type(error).__name__
            record.msg, record.args = "bad HTTP: %s", (_sanitize_text(why),)
            record.exc_info = None
        return True


_http_log = logging.getLogger("pipemorph.ingest.http")
_http_log.addFilter(_OneLineHttpFilter())

_HANDLER = web.AppKey("handler", IngestHandler)
_RESTART_HANDLER = web.AppKey("restart_handler", RestartHandler)


def make_app(
    handler: IngestHandler,
    authenticator: Authenticator,
    *,
    timeouts: ClientTimeouts | None = None,
    on_answer: OnAnswer | None = None,
    join: Join | None = None,
    observe: Observe | None = None,
    restart_handler: RestartHandler | None = None,
    leads: Callable[[], bool] = lambda: True,
) -> web.Application:
    """The aiohttp application, for a host with its own server.

    ``on_answer`` is called for every response, for metrics. ``join``: for a host with one job;
    without it, ranks cannot request their job. ``observe``: for a host of an observed job.
    ``restart_handler``: for a host of launchers.
    ``leads``: returns True if this process serves now; a standby answers every request with 503.
    """
    limits = timeouts or ClientTimeouts()

    async def authenticate_request(
        request: web.Request, namespace: str, name: str
    ) -> Identity | Reply:
        """Identity of the caller, if it is authorized for the job, else the response to send."""
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        try:
            if scheme.lower() != "bearer" or not token.strip():
                raise AccessDeniedError(401, "expected the header Authorization: Bearer TOKEN")
            identity = await authenticator.authenticate_caller(
                token.strip(), namespace, name, request.remote or ""
            )
            if (connection := find_connection(request)) is not None:
                connection.mark_authenticated()
            return identity
        except AccessDeniedError as refusal:
            wanted = (
                f"job {_sanitize_text(namespace)}/{_sanitize_text(name)}" if name else "the job"
            )
            # Unverified, but it helps to find the machine with the wrong token.
            rank = request.query.get("rank")
            claim = "" if rank is None else f" (claims to be rank {rank[:20]!a})"
            log.warning(
                "refused %s for %s from %s%s: %s",
                request.method, wanted, request.remote, claim, refusal.reason,
            )  # fmt: skip
            # Disconnect unauthorized callers.
            return Reply.from_error(refusal.status, refusal.reason)._replace(closes_connection=True)

    async def handle_report(request: web.Request, namespace: str, name: str, _: Identity) -> Reply:
        body = await read_body(request, "report", MAX_REPORT_BYTES)
        return (
            body if isinstance(body, Reply) else await handler.handle_report(namespace, name, body)
        )

    async def handle_snapshot(
        request: web.Request, namespace: str, name: str, _: Identity
    ) -> Reply:
        large = request.clone(client_max_size=MAX_SNAPSHOT_MESSAGE_BYTES)
        body = partial(read_body, large, "snapshot", MAX_SNAPSHOT_MESSAGE_BYTES)
        return await handler.handle_snapshot(namespace, name, body)

    async def read_body(request: web.BaseRequest, what: str, most: int) -> bytes | Reply:
        """The body, of at most ``most`` bytes, or the error to answer."""
        too_long = Reply.from_error(413, f"the {what} is larger than {most} bytes")
        if request.headers.get("Content-Encoding", "identity") != "identity":
            return Reply.from_error(415, f"the {what} is compressed; expected it uncompressed")
        if (request.content_length or 0) > most:
            return too_long
        try:
            if request.content.is_eof():
                return await request.read()  # It usually arrives with the head.
            return await asyncio.wait_for(request.read(), limits.body)
        except web.HTTPRequestEntityTooLarge:
            return too_long
        except TimeoutError:
            return Reply.from_error(408, f"the {what} did not arrive within {limits.body:g} s")
        except (ConnectionError, RequestPayloadError, HttpProcessingError) as error:
            # Connection lost, or invalid framing or compression.
            return Reply.from_error(400, f"the {what}'s body could not be read: {error}")

    async def poll_directive(request: web.Request, namespace: str, name: str, _: Identity) -> Reply:
        query = request.query
        return await handler.handle_directive_poll(
            namespace,
            name,
            attempt=query.get("attempt", ""),
            after=query.get("after", "0"),
            wait=query.get("wait", "0"),
        )

    async def handle_pod_report(
        request: web.Request, namespace: str, name: str, caller: Identity
    ) -> Reply:
        assert restart_handler is not None
        body = await read_body(request, "report", MAX_POD_REPORT_BYTES)
        if isinstance(body, Reply):
            return body
        return await restart_handler.handle_pod_report(
            namespace, name, body, request.query.get("wait", "0"), uid=caller.uid
        )

    async def poll_generation(
        request: web.Request, namespace: str, name: str, caller: Identity
    ) -> Reply:
        assert restart_handler is not None
        query = request.query
        return await restart_handler.handle_poll(
            namespace,
            name,
            attempt=query.get("attempt", ""),
            generation=query.get("generation", ""),
            pod=query.get("pod", ""),
            uid=caller.uid,
            wait=query.get("wait", "0"),
            leaving=query.get("leaving", "") == "1",
        )

    async def handle_join(request: web.Request, *_: object) -> Reply:
        assert join is not None
        return join(request.query, request.remote or "")

    async def handle_observation(request: web.Request, *_: object) -> Reply:
        assert observe is not None
        large = request.clone(client_max_size=MAX_STEPS_BYTES)
        body = await read_body(large, "report", MAX_STEPS_BYTES)
        return body if isinstance(body, Reply) else observe(body)

    def make_route_handler(
        kind: str, decide: Callable[[web.Request, str, str, Identity], Awaitable[Reply]]
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def respond_to_request(request: web.Request) -> web.Response:
            began = time.monotonic()
            reply = STANDBY
            if leads():
                namespace, name = (request.match_info.get(k, "") for k in ("namespace", "name"))
                caller = await authenticate_request(request, namespace, name)
                reply = (
                    caller if isinstance(caller, Reply)
                    else await decide(request, namespace, name, caller)
                )  # fmt: skip
            if on_answer is not None:
                on_answer(kind, reply.status, time.monotonic() - began)
            if reply.status in DELAYED_STATUSES:
                await asyncio.sleep(limits.refusal)
            return _to_web_response(reply)

        return respond_to_request

    @web.middleware
    async def send_one_line_errors(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if (connection := find_connection(request)) is not None:
            connection.stop_head_timer()
        try:
            return await handler(request)
        except web.HTTPException as error:
            reply = Reply.from_error(error.status, error.reason)
        except Exception:  # An internal error: one line for the caller, the traceback for the log.
            log.exception("%s %s failed", request.method, _sanitize_text(request.path))
            reply = Reply.from_error(500, "internal error of the ingest; see its log")
        # The client may not have authenticated: close its connection.
        return _to_web_response(reply._replace(closes_connection=True))

    app = web.Application(middlewares=[send_one_line_errors], client_max_size=MAX_REPORT_BYTES)
    app[_HANDLER] = handler
    app.router.add_post(
        "/v1/jobs/{namespace}/{name}/reports", make_route_handler("report", handle_report)
    )
    app.router.add_get(
        "/v1/jobs/{namespace}/{name}/directive", make_route_handler("poll", poll_directive)
    )
    app.router.add_post(
        "/v1/jobs/{namespace}/{name}/snapshot", make_route_handler("snapshot", handle_snapshot)
    )
    if join is not None:
        app.router.add_get("/v1/job", make_route_handler("join", handle_join))
    if observe is not None:
        handle = make_route_handler("observation", handle_observation)
        app.router.add_post("/v1/observations", handle)
    if restart_handler is not None:
        app[_RESTART_HANDLER] = restart_handler
        where = "/v1/jobs/{namespace}/{name}/generation"
        app.router.add_post(where, make_route_handler("generation", handle_pod_report))
        app.router.add_get(where, make_route_handler("generation", poll_generation))
    app.on_shutdown.append(_release_polls)
    return app


async def _release_polls(app: web.Application) -> None:
    app[_HANDLER].close()
    if _RESTART_HANDLER in app:
        app[_RESTART_HANDLER].close()


def _to_web_response(reply: Reply) -> web.Response:
    response = web.Response(status=reply.status, body=reply.body, content_type="application/json")
    response.headers.update(reply.headers)  # They may include the body's type.
    if reply.closes_connection or reply.status in (400, 404, 408, 413, 415):
        response.force_close()  # Do not read the rest of the body.
    return response


def _sanitize_text(text: str) -> str:
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
        limits: RateLimits | None = None,
        timeouts: ClientTimeouts | None = None,
        planner: Planner = plan_in_process,
        on_answer: OnAnswer | None = None,
        connections: ConnectionLimits | None = None,
        on_unserved: OnUnserved | None = None,
        join: Join | None = None,
        observe: Observe | None = None,
        restart_handler: RestartHandler | None = None,
        leads: Callable[[], bool] = lambda: True,
    ) -> None:
        self.handler = IngestHandler(store, limits=limits, planner=planner)
        self._address = (host, port)
        self._tls = tls
        self._timeouts = timeouts = timeouts or ClientTimeouts()
        self._make_app = partial(
            make_app, self.handler, authenticator,
            timeouts=timeouts, on_answer=on_answer, join=join, observe=observe,
            restart_handler=restart_handler, leads=leads,
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
            # Only the reader of a body can limit its uncompressed size.
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
            await acceptor.open_listeners(*self._address)
        except OSError:
            await runner.cleanup()
            raise
        self._runner, self._acceptor = runner, acceptor

    def drop_stale_decisions(self) -> None:
        """Drop the state of jobs that the host no longer has. The host calls this regularly."""
        self.handler.drop_stale_decisions()

    async def stop(self) -> None:
        """Answer waiting polls, finish requests in progress (with a time limit), close."""
        if self._acceptor is not None:
            await self._acceptor.close()
            self._acceptor = None
        if self._runner is not None:
            await self._runner.cleanup()
            await self.handler.wait_until_persisted(self._timeouts.shutdown)
            self._runner = None

    async def __aenter__(self) -> IngestServer:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
