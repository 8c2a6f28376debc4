"""Who may be connected to the ingest, and for how long without having said what for.

A connection costs some 50 KiB with TLS before its client has proved anything. So their number is
bounded: in all, per source address, and most tightly for *silent* ones, which have not sent a
whole request head yet. Where a bound is reached, the oldest silent connection of the source that
has most of them makes room. So a crowd of silent connections displaces itself, and a client that
comes, speaks and is served at once keeps its place.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from aiohttp import web

log = logging.getLogger("pipemorph.ingest")

BACKLOG = 1024
"""Connections that wait in the kernel to be accepted, as when all agents come back at once."""
TELL_SECONDS = 10.0
"""Between two lines in the log about connections that were not served."""
EXHAUSTED_SECONDS = 1.0
"""Pause where the process has no file descriptors left."""
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

Unserved = Literal["silent", "crowded", "handshake"]
"""Why a connection was not served: no whole request head in time, no room, or no TLS."""
OnUnserved = Callable[[Unserved], None]
_WORDS: dict[Unserved, str] = {
    "silent": "sent no whole request in time",
    "crowded": "found no room, or made room for others",
    "handshake": "did not agree on TLS",
}


@dataclass(frozen=True)
class ConnectionLimits:
    """Most connections at a time. Raises ValueError for one below 1.

    An agent holds two. ``per_source`` is generous, since all agents may share one address,
    behind a NAT or a proxy. ``silent`` bounds those without a whole request head.
    """

    in_all: int = 4096
    per_source: int = 2048
    silent: int = 256

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{name} is {value}; expected at least 1 connection")


class Connection(asyncio.Protocol):
    """One client's connection: passes everything on to ``inner``, which serves it."""

    def __init__(self, doors: Doors, sock: socket.socket, source: str) -> None:
        self.source = source
        self.timer: asyncio.TimerHandle | None = None
        self._doors = doors
        self._sock = sock
        self._transport: asyncio.Transport | None = None
        self._inner: asyncio.Protocol = asyncio.Protocol()

    def spoke(self) -> None:
        """A whole request head has come: the connection may stay."""
        self._doors.spoke(self)

    def abort(self) -> None:
        """End it now, in whatever state it is."""
        if self._transport is not None:
            self._transport.abort()
            return
        try:
            # In the middle of a TLS handshake there is nothing else to hold on to: the handshake
            # fails, and closes the socket.
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            if error.errno not in (errno.ENOTCONN, errno.EBADF):
                raise  # Those two: it has ended by itself.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._inner = self._doors.serve()
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._doors.gone(self)
        self._inner.connection_lost(exc)


def heard(request: web.Request) -> None:
    """A whole request head has come over a connection, which may stay. For the middleware of an
    application; behind another server than :class:`Doors` this does nothing."""
    connection = request.transport.get_protocol() if request.transport is not None else None
    if isinstance(connection, Connection):
        connection.spoke()


class Doors:
    """Accepts connections at listening sockets, within ``limits``.

    ``serve`` makes the protocol that serves a connection once it is established. From being
    accepted to the end of its first request head a connection has ``head_seconds``.
    """

    def __init__(
        self,
        serve: Callable[[], asyncio.Protocol],
        *,
        limits: ConnectionLimits,
        head_seconds: float,
        tls: ssl.SSLContext | None = None,
        on_unserved: OnUnserved | None = None,
    ) -> None:
        self.serve = serve
        self._limits = limits
        self._head_seconds = head_seconds
        self._tls = tls
        self._on_unserved = on_unserved
        self._open: set[Connection] = set()
        self._per_source: Counter[str] = Counter()
        self._silent: dict[str, dict[Connection, None]] = {}
        """By source, the oldest first."""
        self._listeners: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._unserved: Counter[Unserved] = Counter()
        self._told_at = float("-inf")

    @property
    def sockets(self) -> list[socket.socket]:
        """Where connections are accepted."""
        return self._listeners

    async def open(self, host: str | None, port: int) -> None:
        """Listen. Raises OSError if the address is taken."""
        loop = asyncio.get_running_loop()
        # asyncio knows which addresses a host has; it does not know of limits.
        bound = await loop.create_server(asyncio.Protocol, host, port, start_serving=False)
        self._listeners = [each.dup() for each in bound.sockets]
        bound.close()
        try:
            for listener in self._listeners:
                listener.setblocking(False)
                listener.listen(BACKLOG)
                self._keep(loop.create_task(self._accept(listener)))
        except OSError:
            await self.close()
            raise

    async def close(self) -> None:
        """Accept no more, and end what has not been served."""
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for listener in self._listeners:
            listener.close()
        self._listeners = []
        for silent in [*self._silent.values()]:
            for connection in [*silent]:
                self.gone(connection)
                connection.abort()

    # --- one connection's way ---------------------------------------------------------------

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, address = await loop.sock_accept(listener)
            except OSError as error:
                exhausted = error.errno in _EXHAUSTED  # Else it is a client that has gone already.
                if exhausted:
                    log.error("no connection can be accepted: %s", error)
                await asyncio.sleep(EXHAUSTED_SECONDS if exhausted else 0.0)
                continue
            self._admit(sock, address[0])
            # Accepting does not wait while there is somebody to accept; others have turns too.
            await asyncio.sleep(0)

    def _admit(self, sock: socket.socket, source: str) -> None:
        while not self._has_room(source):
            oldest = self._oldest_silent(source)
            if oldest is None:
                sock.close()
                self._count("crowded", source)
                return
            self._end(oldest, "crowded")
        connection = Connection(self, sock, source)
        self._open.add(connection)
        self._per_source[source] += 1
        self._silent.setdefault(source, {})[connection] = None
        loop = asyncio.get_running_loop()
        connection.timer = loop.call_later(self._head_seconds, self._end, connection, "silent")
        self._keep(loop.create_task(self._establish(connection, sock)))

    def _has_room(self, source: str) -> bool:
        return (
            sum(map(len, self._silent.values())) < self._limits.silent
            and len(self._open) < self._limits.in_all
            and self._per_source[source] < self._limits.per_source
        )

    def _oldest_silent(self, source: str) -> Connection | None:
        """Whose place a new connection of ``source`` may take."""
        if self._per_source[source] >= self._limits.per_source:
            crowd = self._silent.get(source, {})
        else:
            crowd = max(self._silent.values(), key=len, default={})
        return next(iter(crowd), None)

    async def _establish(self, connection: Connection, sock: socket.socket) -> None:
        timeout = self._head_seconds if self._tls is not None else None
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection, sock, ssl=self._tls, ssl_handshake_timeout=timeout
            )
        except OSError as error:  # TLS errors and its timeout are such, too.
            # The frames would keep 50 KiB, in a circle, until the garbage collector comes by.
            error.__traceback__ = None
            if connection in self._open:
                log.debug("no TLS with %s: %s", connection.source, error)
                self.gone(connection)
                self._count("handshake", connection.source)

    def _end(self, connection: Connection, why: Unserved) -> None:
        self.gone(connection)
        connection.abort()
        self._count(why, connection.source)

    def spoke(self, connection: Connection) -> None:
        """It is not silent any more."""
        if connection.timer is not None:
            connection.timer.cancel()
        silent = self._silent.get(connection.source, {})
        silent.pop(connection, None)
        if not silent:
            self._silent.pop(connection.source, None)

    def gone(self, connection: Connection) -> None:
        """It has ended, or is about to."""
        if connection not in self._open:
            return
        self.spoke(connection)
        self._open.discard(connection)
        self._per_source[connection.source] -= 1
        if not self._per_source[connection.source]:
            del self._per_source[connection.source]

    # --- what is told -------------------------------------------------------------------------

    def _count(self, why: Unserved, source: str) -> None:
        if self._on_unserved is not None:
            self._on_unserved(why)
        self._unserved[why] += 1
        now = time.monotonic()
        if now - self._told_at < TELL_SECONDS:
            return
        self._told_at = now
        told = ", ".join(f"{count} {_WORDS[why]}" for why, count in self._unserved.items())
        log.warning("connections that were not served: %s; the last one from %s", told, source)
        self._unserved.clear()

    def _keep(self, task: asyncio.Task[None]) -> None:
        """The event loop itself does not hold on to tasks."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
