"""The HTTP side of a page on the user's own machine: on loopback, by a token in the URL, read only.

The token keeps other users and other pages of the browser out: who does not know the URL is told
nothing but 401.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable

from aiohttp import web

from pipemorph.errors import InputError
from pipemorph.ingest.connections import Acceptor, ConnectionLimits, connection_of

_unsaid = logging.getLogger("pipemorph.watch.requests")
"""Of requests that are no HTTP: who sends them is told, the user's terminal is not."""
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

Tell = Callable[[web.BaseRequest, bool], Awaitable[web.Response]]
"""Answers a request of who knows the token: for the page (True), or for a document."""


class Door:
    """Serves what ``tell`` tells to those with the ``token``, by default a new one. For one event
    loop. ``listener``: see :func:`listen`; without one, connections are handed to :meth:`take`."""

    def __init__(
        self, tell: Tell, listener: socket.socket | None = None, token: str | None = None
    ) -> None:
        self._listener, self._tell = listener, tell
        self._token = token or secrets.token_urlsafe(24)
        self._runner: web.ServerRunner | None = None
        self._acceptor: Acceptor | None = None

    @property
    def url(self) -> str:
        assert self._listener is not None
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}/{self._token}/"

    async def open(self) -> None:
        server = web.Server(self._answer, access_log=None, logger=_unsaid)
        self._runner = web.ServerRunner(server)
        await self._runner.setup()
        if self._listener is not None:
            assert self._runner.server is not None
            self._acceptor = Acceptor(self._runner.server, limits=LIMITS, head_seconds=HEAD_SECONDS)
            await self._acceptor.listen([self._listener])

    async def take(self, connection: socket.socket, head: bytes) -> None:
        """Serve a connection that somebody else has accepted. ``head``: what was read from it."""
        assert self._runner is not None and self._runner.server is not None
        protocol = self._runner.server()
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.connect_accepted_socket(lambda: protocol, connection)
        protocol.data_received(head)

    async def close(self) -> None:
        if self._acceptor is not None:
            await self._acceptor.close()
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
        if (connection := connection_of(request)) is not None:
            connection.authenticated()
        answer = await self._tell(request, page)
        if self._listener is None:
            answer.enable_compression()  # It goes through a network.
        return answer


def told(body: bytes, *, page: bool) -> web.Response:
    """An answer with the page, or with a document."""
    kind = "text/html" if page else "application/json"
    return web.Response(body=body, content_type=kind, charset="utf-8", headers=HEADERS)


def busy() -> web.Response:
    """An answer to who asks for more than there may be made now."""
    return web.Response(status=429, headers=HEADERS | {"Retry-After": "1"})


def failed() -> web.Response:
    """An answer while there is nothing to tell."""
    return web.Response(status=503, headers=HEADERS)


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
