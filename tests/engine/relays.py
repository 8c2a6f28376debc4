"""Attacker on the way between two engines, without the job's secret."""

import contextlib
import itertools
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pairs

from pipemorph_trainer._engine import Engine, Link

OPENING = 40
MAC = 32
FRAME_HEADER = 24
SEAL = 16
TRAILER = 16
CHUNK_HEAD = 224 + SEAL
SLOT_BYTES = 200_000
CONTROL, DATA = 1, 2
"""Purpose of a connection, in its opening."""

Change = Callable[[int, bytes], list[bytes]]
"""Replacement of a frame with this number: nothing, itself, others."""


class Gone(Exception):
    """The connection has ended."""


class Cut(Gone):
    """A change that is the end of its connection."""


def read(source: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        try:
            part = source.recv(size - len(data))
        except OSError as e:
            raise Gone from e
        if not part:
            raise Gone
        data += part
    return data


class Relay:
    """Passes on the messages between two engines, changed or not.

    ``control(connection, to_acceptor)`` gives the change for the frames of one direction of one
    control connection (counted from 0), or none; ``data`` does so for the heads of chunks, and
    ``payload`` for what follows them: the payload, and what it is proved by.
    """

    def __init__(
        self,
        port: int,
        control: Callable[[int, bool], Change | None] = lambda connection, to_acceptor: None,
        data: Callable[[int, bool], Change | None] = lambda connection, to_acceptor: None,
        payload: Callable[[int, bool], Change | None] = lambda connection, to_acceptor: None,
    ) -> None:
        self._to = ("127.0.0.1", port)
        self._changes = {CONTROL: control, DATA: data}
        self._payload = payload
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.received: list[bytearray] = []
        """Bytes from each control connection's dialler, handshake and frames."""
        self.connections = 0
        """Control connections so far."""
        self._data = itertools.count()
        self._ends: list[socket.socket] = []
        self._lock = threading.Lock()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                dialler, _ = self._listener.accept()
                threading.Thread(target=self._pass_on, args=[dialler], daemon=True).start()

    def _pass_on(self, dialler: socket.socket) -> None:
        try:
            acceptor = socket.create_connection(self._to)
        except OSError:  # it has gone
            dialler.close()
            return
        with self._lock:
            self._ends += [dialler, acceptor]
        for end in (dialler, acceptor):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ends = (dialler, acceptor)
        try:
            kind, seen = self._shake_hands(dialler, acceptor)
        except (Gone, OSError):
            self._end(*ends)
            return
        with self._lock:
            if kind == CONTROL:
                number = self.connections
                self.connections += 1
                self.received.append(seen)
            else:
                number = next(self._data)
        for to_acceptor in (True, False):
            source, sink = ends if to_acceptor else ends[::-1]
            change = self._changes[kind](number, to_acceptor)
            payload = self._payload(number, to_acceptor) if kind == DATA else None
            # The threads of one connection end together: each ends both of its sockets.
            threading.Thread(
                target=self._frames,
                args=(kind, source, sink, (change, payload), seen if to_acceptor else bytearray()),
                daemon=True,
            ).start()

    def _shake_hands(
        self, dialler: socket.socket, acceptor: socket.socket
    ) -> tuple[int, bytearray]:
        opening = read(dialler, OPENING)
        acceptor.sendall(opening)
        dialler.sendall(read(acceptor, OPENING))
        size = read(dialler, 2)
        hello = size + read(dialler, int.from_bytes(size, "little") + MAC)
        acceptor.sendall(hello)
        verdict = read(acceptor, 3)
        dialler.sendall(verdict)
        if verdict[0] == 1:
            raise Gone
        dialler.sendall(read(acceptor, int.from_bytes(verdict[1:], "little") + MAC))
        if verdict[0] != 0:
            raise Gone
        return opening[6], bytearray(opening + hello)

    def _frames(
        self,
        kind: int,
        source: socket.socket,
        sink: socket.socket,
        changes: tuple[Change | None, Change | None],
        seen: bytearray,
    ) -> None:
        change, payload = changes
        for number in itertools.count():
            try:
                frame, rest = (control_frame if kind == CONTROL else chunk)(source)
                seen += frame
                for part in [frame] if change is None else change(number, frame):
                    sink.sendall(part)
                for part in [rest] if payload is None else payload(number, rest):
                    sink.sendall(part)
            except Cut:
                self._end(source, sink)
                return
            except (Gone, OSError):
                break
        # Data on its way in the other direction still arrives, such as the reason of an end.
        for end, how in ((source, socket.SHUT_RD), (sink, socket.SHUT_WR)):
            with contextlib.suppress(OSError):
                end.shutdown(how)

    def _end(self, *ends: socket.socket) -> None:
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._end(self._listener)
        self._listener.close()
        with self._lock:
            ends = list(self._ends)
        for end in ends:
            self._end(end)
            end.close()


def control_frame(source: socket.socket) -> tuple[bytes, bytes]:
    header = read(source, FRAME_HEADER)
    return header + read(source, int.from_bytes(header[:4], "little") + SEAL), b""


def chunk(source: socket.socket) -> tuple[bytes, bytes]:
    """Split a chunk: its head; its payload and what that is proved by."""
    head = read(source, CHUNK_HEAD)
    index, chunk_bytes = struct.unpack_from("<II", head, 28)
    message_bytes = struct.unpack_from("<Q", head, 48)[0]
    length = min(chunk_bytes, message_bytes - index * chunk_bytes)
    return head, read(source, length + TRAILER)


@contextlib.contextmanager
def relay(port: int, **changes: Callable[[int, bool], Change | None]) -> Iterator[Relay]:
    one = Relay(port, **changes)
    try:
        yield one
    finally:
        one.close()


@contextlib.contextmanager
def linked(
    relay_of: Callable[[int], contextlib.AbstractContextManager[Relay]], **settings: Any
) -> Iterator[tuple[Link, Link, Engine, Relay]]:
    """Rank 0's end, rank 1's end, rank 1's engine and the relay between them."""
    with contextlib.ExitStack() as stack:
        a, b = (
            stack.enter_context(contextlib.closing(pairs.engine(r, transport="tcp", **settings)))
            for r in (0, 1)
        )
        between = stack.enter_context(relay_of(b.port))
        low, high = pairs.join(a, b, port=between.port)
        low.reserve(1, 2, SLOT_BYTES)
        high.reserve(0, 2, SLOT_BYTES)
        yield low, high, b, between
        stack.close()
