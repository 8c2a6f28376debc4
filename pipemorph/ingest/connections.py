"""Accepts connections within limits, and closes connections that do not authenticate in time.

A TLS connection costs about 50 KiB before its client has authenticated, and its handshake a
millisecond or two in which no other client is answered. So the number of connections is limited: in
total, per source address, and most tightly for *unauthenticated* ones, which have sent no request
with a valid token yet. At a limit, the oldest unauthenticated connection of the source with most of
them is closed. So a flood of such connections displaces only itself, whatever it sends, and
a client that authenticates keeps its connection. A connection that has sent nothing is a socket and
a timer: a TLS handshake begins once the client has begun it, at a limited rate, and sources take
turns. All limits together use a part of the file descriptors that the process may open.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
import ssl
import sys
import time
from asyncio import sslproto
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from aiohttp import web

from pipemorph.ingest.token_bucket import TokenBucket

log = logging.getLogger("pipemorph.ingest")

BACKLOG = 1024
"""Length of the kernel's accept queue, for when all agents reconnect at once."""
HANDSHAKES_PER_SECOND, HANDSHAKES_AT_ONCE = 400.0, 2
"""Limit of all TLS handshakes together; they then use half of the event loop."""
RECONNECTS_PER_SECOND = 50.0
"""Rate of a source's connections beyond its limit, as of a client that reconnects for ever."""
SOURCES = 4096
"""Number of sources with a bucket beyond which idle sources are dropped."""
TLS_READ_BYTES = 4 * 1024
"""Read buffer per TLS connection of this process: the size of a report of a few stages. asyncio's
default is 256 KiB, and every job has two connections."""
TLS_RECORD = b"\x16"
"""First byte of a TLS client's first message."""
LOG_SECONDS = 10.0
"""Minimum time between two log lines about connections that were not served."""
EXHAUSTED_SECONDS = 1.0
"""Pause after the process has run out of file descriptors."""
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

SHARE_OF_FILES = 3
"""Divisor of the process's limit of open files: one :class:`Acceptor` uses at most this share. A
host may have two of them, and its own files."""

Unserved = Literal["silent", "crowded", "handshake"]
"""Reason why a connection was not served: no request head in time, limit reached, or TLS failed."""
OnUnserved = Callable[[Unserved], None]
_UNSERVED_PHRASES: dict[Unserved, str] = {
    "silent": "sent no complete request in time",
    "crowded": "exceeded the connection limits",
    "handshake": "failed the TLS handshake",
}

Start = Callable[[], bool]
"""Begins the work of a turn; False if there is none, so that the next one has the turn."""


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of open connections. Raises ValueError for a limit below 1.

    An agent uses two. ``per_source`` is generous, since all agents may share one address behind a
    NAT or a proxy. ``unauthenticated`` limits connections without a valid token yet, of 60 KiB
    each: after a restart a thousand agents come back within some seconds, with two connections
    each. The rest of ``total`` is reserved for authenticated clients.
    """

    total: int = 4096
    per_source: int = 2048
    unauthenticated: int = 512

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{name} is {value}; expected at least 1 connection")

    def fit_to_files(self, files: int) -> ConnectionLimits:
        """Limits that fit into ``files`` file descriptors: a third of them at most, of which a
        quarter may be unauthenticated."""
        most = max(4, files // SHARE_OF_FILES)
        if self.total <= most:
            return self
        return ConnectionLimits(
            most, min(self.per_source, most), min(self.unauthenticated, most // 4)
        )


def raise_open_files_limit(wanted: int = 0) -> int:
    """Number of files that this process may open, raised to ``wanted`` as far as the hard limit
    allows. Child processes inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft != unlimited and soft < wanted:
        soft = wanted if hard == unlimited else min(hard, wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return sys.maxsize if soft == unlimited else soft


class HandshakeLimiter:
    """Limits costly work to ``rate`` a second, ``burst`` at once; sources take turns.

    A source that begins many waits behind its own: the next turn is another's. For use in one event
    loop.
    """

    def __init__(self, rate: float, burst: int) -> None:
        self._bucket = TokenBucket(rate, burst, asyncio.get_running_loop().time())
        self._waiting: dict[str, deque[Start]] = {}
        """Work by source; the source of the next turn comes first."""
        self._timer: asyncio.TimerHandle | None = None

    def enqueue_start(self, source: str, start: Start) -> None:
        """Call ``start`` in this source's next turn: now if none waits."""
        self._waiting.setdefault(source, deque()).append(start)
        if self._timer is None:
            self._start_waiting()

    def close(self) -> None:
        """Drop all waiting work."""
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _start_waiting(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = None
        while self._waiting:
            if wait := self._bucket.seconds_until_token(loop.time()):
                self._timer = loop.call_later(wait, self._start_waiting)
                return
            source = next(iter(self._waiting))
            own = self._waiting.pop(source)
            start = own.popleft()
            if own:
                self._waiting[source] = own  # Behind all others.
            if start():
                self._bucket.take_token(loop.time())


class ClientConnection(asyncio.Protocol):
    """A client's connection: forwards all events to ``inner``, the protocol that serves it."""

    def __init__(self, acceptor: Acceptor, sock: socket.socket, source: str) -> None:
        self.source = source
        self.timer: asyncio.TimerHandle | None = None
        self._acceptor = acceptor
        self._sock = sock
        self._transport: asyncio.Transport | None = None
        self._inner: asyncio.Protocol = asyncio.Protocol()
        self.begun = False
        """True once the event loop has taken over the socket."""

    def stop_head_timer(self) -> None:
        """Stop the clock of the first request head."""
        if self.timer is not None:
            self.timer.cancel()

    def mark_authenticated(self) -> None:
        """Reserve the connection for its client: no other connection displaces it."""
        self._acceptor.mark_authenticated(self)

    def abort(self) -> None:
        """Close the connection now, in any state."""
        if self._transport is not None:
            self._transport.abort()
            return
        if not self.begun:
            asyncio.get_running_loop().remove_reader(self._sock)
            self._sock.close()
            return
        try:
            # During a TLS handshake there is no transport yet: shutting down the socket makes the
            # handshake fail, which closes it.
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            if error.errno not in (errno.ENOTCONN, errno.EBADF):
                raise  # These two errors mean that the connection is already closed.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._inner = self._acceptor.serve()
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
        self._acceptor.remove_connection(self)
        self._inner.connection_lost(exc)


def find_connection(request: web.BaseRequest) -> ClientConnection | None:
    """Connection of a request; None behind a server other than :class:`Acceptor`, or if it has been
    closed."""
    connection = request.transport.get_protocol() if request.transport is not None else None
    return connection if isinstance(connection, ClientConnection) else None


class Acceptor:
    """Accepts connections on listening sockets, within ``limits``.

    ``serve`` creates the protocol of an established connection, whose requests find theirs by
    :func:`find_connection`. The first request head must be complete ``head_seconds`` after
    the connection is accepted. Limits that do not fit into the process's limit of open files are
    lowered, see :meth:`ConnectionLimits.fit_to_files`.
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
        self._limits = limits.fit_to_files(raise_open_files_limit())
        self._head_seconds = head_seconds
        self._tls = tls
        self._on_unserved = on_unserved
        self._open: set[ClientConnection] = set()
        self._per_source: Counter[str] = Counter()
        self._unauthenticated: dict[str, dict[ClientConnection, None]] = {}
        """Connections without a valid token yet, by source, oldest first."""
        self._coming: dict[str, TokenBucket] = {}
        """Buckets of connections that may still come now, by source."""
        self._handshakes: HandshakeLimiter | None = None
        self._listeners: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._unserved: Counter[Unserved] = Counter()
        self._logged_at = float("-inf")

    @property
    def sockets(self) -> list[socket.socket]:
        """The listening sockets."""
        return self._listeners

    async def open_listeners(self, host: str | None, port: int) -> None:
        """Listen. Raises OSError if the address is taken."""
        # asyncio resolves and binds the addresses; the sockets are then used with limits here.
        bound = await asyncio.get_running_loop().create_server(
            asyncio.Protocol, host, port, start_serving=False
        )
        listeners = [each.dup() for each in bound.sockets]
        bound.close()
        await self.accept_from(listeners)

    async def accept_from(self, listeners: Sequence[socket.socket]) -> None:
        """Accept from bound sockets, which :meth:`close` closes. Raises OSError for a taken
        address."""
        loop = asyncio.get_running_loop()
        if self._tls is not None:
            self._handshakes = HandshakeLimiter(HANDSHAKES_PER_SECOND, HANDSHAKES_AT_ONCE)
            sslproto.SSLProtocol.max_size = TLS_READ_BYTES
        self._listeners = [*listeners]
        try:
            for listener in self._listeners:
                listener.setblocking(False)
                listener.listen(BACKLOG)
                self._retain_task(loop.create_task(self._accept_clients(listener)))
        except OSError:
            await self.close()
            raise

    async def close(self) -> None:
        """Stop accepting, and close unauthenticated connections."""
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._handshakes is not None:
            self._handshakes.close()
        for listener in self._listeners:
            listener.close()
        self._listeners = []
        for connections in [*self._unauthenticated.values()]:
            for connection in [*connections]:
                self.remove_connection(connection)
                connection.abort()

    # --- lifecycle of a connection ----------------------------------------------------------

    async def _accept_clients(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, address = await loop.sock_accept(listener)
            except OSError as error:
                exhausted = error.errno in _EXHAUSTED  # Else the client disconnected already.
                if exhausted:
                    log.error("cannot accept connections: %s", error)
                await asyncio.sleep(EXHAUSTED_SECONDS if exhausted else 0.0)
                continue
            self._admit_client(sock, address[0])
            # sock_accept does not yield while clients are queued: let other tasks run.
            await asyncio.sleep(0)

    def _admit_client(self, sock: socket.socket, source: str) -> None:
        # Without handshakes a connection costs next to nothing, and the oldest makes room.
        if self._handshakes is not None and not self._take_source_token(source):
            sock.close()
            self._count_unserved("crowded", source)
            return
        while not self._is_below_limits(source):
            oldest = self._find_displaceable(source)
            if oldest is None:
                sock.close()
                self._count_unserved("crowded", source)
                return
            self._drop_connection(oldest, "crowded")
        connection = ClientConnection(self, sock, source)
        self._open.add(connection)
        self._per_source[source] += 1
        self._unauthenticated.setdefault(source, {})[connection] = None
        loop = asyncio.get_running_loop()
        connection.timer = loop.call_later(
            self._head_seconds, self._drop_connection, connection, "silent"
        )
        if self._handshakes is None:
            self._begin_serving(connection, sock)
            return
        sock.setblocking(False)
        loop.add_reader(sock, self._enqueue_handshake, connection, sock)

    def _take_source_token(self, source: str) -> bool:
        now = time.monotonic()
        if len(self._coming) >= SOURCES:
            self._coming = {
                key: each for key, each in self._coming.items() if not each.is_full(now)
            }
        bucket = self._coming.get(source)
        if bucket is None:
            burst = self._limits.per_source
            bucket = self._coming[source] = TokenBucket(RECONNECTS_PER_SECOND, burst, now)
        return bucket.take_token(now)

    def _enqueue_handshake(self, connection: ClientConnection, sock: socket.socket) -> None:
        """Queue a client that has begun a TLS handshake; disconnect others."""
        asyncio.get_running_loop().remove_reader(sock)
        try:
            first = sock.recv(1, socket.MSG_PEEK)
        except OSError:
            first = b""
        if first == TLS_RECORD:
            assert self._handshakes is not None
            self._handshakes.enqueue_start(
                connection.source, partial(self._begin_serving, connection, sock)
            )
        else:
            self._drop_connection(connection, "handshake")

    def _begin_serving(self, connection: ClientConnection, sock: socket.socket) -> bool:
        """Begin to serve a connection, unless it has been closed."""
        if connection not in self._open:
            return False
        loop = asyncio.get_running_loop()
        assert connection.timer is not None
        connection.timer.cancel()  # It may have waited for its turn.
        connection.timer = loop.call_later(
            self._head_seconds, self._drop_connection, connection, "silent"
        )
        connection.begun = True
        self._retain_task(loop.create_task(self._establish_transport(connection, sock)))
        return True

    def _is_below_limits(self, source: str) -> bool:
        return (
            sum(map(len, self._unauthenticated.values())) < self._limits.unauthenticated
            and len(self._open) < self._limits.total
            and self._per_source[source] < self._limits.per_source
        )

    def _find_displaceable(self, source: str) -> ClientConnection | None:
        """The connection to close in favour of a new one from ``source``, if any."""
        if self._per_source[source] >= self._limits.per_source:
            crowd = self._unauthenticated.get(source, {})
        else:
            crowd = max(self._unauthenticated.values(), key=len, default={})
        return next(iter(crowd), None)

    async def _establish_transport(self, connection: ClientConnection, sock: socket.socket) -> None:
        timeout = self._head_seconds if self._tls is not None else None
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection,
                sock,
                ssl=self._tls,
                ssl_handshake_timeout=timeout,
                ssl_shutdown_timeout=timeout,
            )
        except OSError as error:  # Includes TLS errors and the handshake's timeout.
            # The traceback's reference cycle would hold 50 KiB until the next garbage collection.
            error.__traceback__ = None
            if connection in self._open:
                log.debug("TLS handshake with %s failed: %s", connection.source, error)
                self.remove_connection(connection)
                self._count_unserved("handshake", connection.source)

    def _drop_connection(self, connection: ClientConnection, why: Unserved) -> None:
        self.remove_connection(connection)
        connection.abort()
        self._count_unserved(why, connection.source)

    def mark_authenticated(self, connection: ClientConnection) -> None:
        """Remove a connection from those that may be displaced."""
        connection.stop_head_timer()
        others = self._unauthenticated.get(connection.source, {})
        others.pop(connection, None)
        if not others:
            self._unauthenticated.pop(connection.source, None)

    def remove_connection(self, connection: ClientConnection) -> None:
        """Remove a connection that has closed or is being closed."""
        if connection not in self._open:
            return
        self.mark_authenticated(connection)
        self._open.discard(connection)
        self._per_source[connection.source] -= 1
        if not self._per_source[connection.source]:
            del self._per_source[connection.source]

    # --- log and metrics ----------------------------------------------------------------------

    def _count_unserved(self, why: Unserved, source: str) -> None:
        if self._on_unserved is not None:
            self._on_unserved(why)
        self._unserved[why] += 1
        now = time.monotonic()
        if now - self._logged_at < LOG_SECONDS:
            return
        self._logged_at = now
        counts = ", ".join(
            f"{count} {_UNSERVED_PHRASES[why]}" for why, count in self._unserved.items()
        )
        log.warning("connections not served: %s; the last one from %s", counts, source)
        self._unserved.clear()

    def _retain_task(self, task: asyncio.Task[None]) -> None:
        """Hold a reference to a task; the event loop holds only weak ones."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
