"""The control socket between two neighbouring ranks.

A plain TCP connection beside the data. It carries the note of every direct message, when messages
were complete on a device, the step token that starts an iteration, shapes when they change, which
direct messages were taken, which plans the stages below hold, and a goodbye.
If it ends without a goodbye, the neighbour has died. It carries no tensors.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import select
import selectors
import socket
import struct
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import NamedTuple

from pipemorph_trainer.errors import PipelineError, ShapeError
from pipemorph_trainer.links.message import (
    NOTE_BYTES,
    Contents,
    Departure,
    Direction,
    Note,
    Position,
    TensorMeta,
    new_tuple,
)
from pipemorph_trainer.topology.addresses import in_url
from pipemorph_trainer.topology.device_time import Moment

log = logging.getLogger("pipemorph.trainer")

_HEADER = struct.Struct("<BBH")
_TOKEN = struct.Struct("<IIIIII")
_POSITION = struct.Struct("<qI")
_DEPARTURE = struct.Struct("<IIdd")
_LEAST_BYTES = NOTE_BYTES + _POSITION.size
"""Frames are padded to this length behind their header, so that one call reads any frequent one."""
_NOTE_FRAME = struct.Struct("<BBHIIIIddddf?qI")
"""The frame of a note, with its header: the most frequent one, packed and unpacked by one call."""
_SHORTEST_FRAME = _HEADER.size + _LEAST_BYTES
_MOST_UNSAID = 4
"""Messages taken after which the neighbour is told, if no note to it has told it."""
_HELLO = struct.Struct("<II16s32s")
_NONCE_BYTES = 16
_CLIENT_SECONDS = 10.0
_MOST_CLIENTS = 256
_MOST_LOGGED = 100
_STEP, _NOTE, _SHAPES, _GOODBYE, _TAKEN, _MISSING, _HELD, _DEPARTED = 1, 2, 3, 4, 5, 6, 7, 8
_MOST_BYTES = (1 << 16) - 1
_MOST_DEPARTURES = _MOST_BYTES // _DEPARTURE.size
_SO_TIMESTAMPNS = 35
"""Linux's SO_TIMESTAMPNS, which Python does not name: with what is received, the kernel says when
it came. On the few architectures with other numbers it does not, and notes have no arrival time."""
_SOL_SOCKET = int(socket.SOL_SOCKET)
_STAMP = struct.Struct("ll")
_STAMP_BYTES = _STAMP.size
_EXTRA = socket.CMSG_SPACE(_STAMP.size)

_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _leave_to_parent() -> None:
    # If a child kept them open, neighbours would not see the end of this rank.
    for sock in list(_open):
        sock.close()


os.register_at_fork(after_in_child=_leave_to_parent)


def _nobody() -> None:
    """Does nothing: plans do not change."""


def _nobody_asked(direction: int, departures: Sequence[Departure]) -> None:
    """Does nothing: this route takes messages from no device."""


class StepToken(NamedTuple):
    """Starts an iteration, or the ``evaluation`` before it. Each stage passes it to the next one.
    ``version``: of the plan that all stages run; ``digest`` names its content. ``iteration`` and
    ``evaluation`` must be equal on all ranks; a new ``generation`` announces shapes. ``refused``:
    the batch of a stage above does not fit, so nothing follows."""

    iteration: int
    version: int
    generation: int
    refused: bool = False
    evaluation: bool = False
    digest: int = 0


class ArrivedNote(NamedTuple):
    """``at``: when the kernel received it, wall clock, or later; None if that is unknown."""

    note: Note
    at: float | None


class PeerSocket:
    """One connected, authenticated socket to a neighbour. Reads never block."""

    def __init__(self, sock: socket.socket, peer_rank: int) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
        with suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        _open.add(sock)
        self._sock = sock
        self._buffer = b""
        self._took: Position = -1, 0
        self._unsaid = 0
        self.peer_rank = peer_rank
        self.notes: dict[tuple[int, int, int], ArrivedNote] = {}
        self.tokens: deque[StepToken] = deque()
        self.shapes: deque[Contents | None] = deque()
        """None: no shapes, because the step was refused."""
        self.taken: dict[int, Position] = {}
        """Per direction, the first direct message that the neighbour has not taken yet."""
        self.missing_from: Position | None = None
        """The first message that the neighbour misses, after it gave up the direct route."""
        self.held: frozenset[int] = frozenset()
        """Plan versions that the neighbour and all stages below it hold."""
        self.on_held: Callable[[], None] = _nobody
        """Called after :attr:`held` has changed."""
        self.on_departed: Callable[[int, Sequence[Departure]], None] = _nobody_asked
        """Called with a direction, and departures of its messages by the neighbour's clock."""
        self.goodbye = False
        self.lost: str | None = None
        """Why the connection ended; None while it is up."""

    def fileno(self) -> int:
        return self._sock.fileno()

    def send_note(
        self,
        direction: Direction,
        note: tuple[int, int, int, int, float, float, float, float, float, bool],
    ) -> None:
        """Send the note of a direct message, the fields of a :class:`Note`, and with it what was
        taken in the other direction."""
        self._unsaid = 0
        self._write(_NOTE_FRAME.pack(_NOTE, direction, _LEAST_BYTES, *note, *self._took))

    def send_token(self, token: StepToken) -> None:
        self._send(_STEP, 0, _TOKEN.pack(*token))

    def send_shapes(self, contents: Contents | None) -> None:
        encoded = None
        if contents is not None:
            encoded = [[meta.encode() for meta in contents.metas], contents.structure]
        body = json.dumps(encoded).encode()
        if len(body) > _MOST_BYTES:
            raise ShapeError(
                f"the structure of the stage's output takes {len(body)} bytes to describe; "
                f"expected at most {_MOST_BYTES}"
            )
        self._send(_SHAPES, 0, body)

    def send_taken(self, direction: Direction, after: Position, *, last: bool) -> None:
        """Say that messages of ``direction`` before ``after`` were taken and need not be kept:
        with the next note, or at once if there are some, or if it is the ``last`` of its
        iteration."""
        self._took = after
        self._unsaid += 1
        if last or self._unsaid == _MOST_UNSAID:
            self._unsaid = 0
            self._send(_TAKEN, direction, _POSITION.pack(*after))

    def send_position(self, missing_from: Position) -> None:
        """Say that this rank gave up the direct route, and which message it misses first."""
        self._send(_MISSING, 0, _POSITION.pack(*missing_from))

    def send_held(self, versions: frozenset[int]) -> None:
        """Say which plans this stage and all stages below hold."""
        self._send(_HELD, 0, struct.pack(f"<{len(versions)}I", *sorted(versions)))

    def send_departed(self, direction: Direction, departures: Sequence[Departure]) -> None:
        """Say when messages of the direct route were complete on this rank's device."""
        for first in range(0, len(departures), _MOST_DEPARTURES):
            some = departures[first : first + _MOST_DEPARTURES]
            body = b"".join([_DEPARTURE.pack(*position, *moment) for position, moment in some])
            self._send(_DEPARTED, direction, body)

    def _send(self, kind: int, direction: int, body: bytes) -> None:
        self._write(_HEADER.pack(kind, direction, len(body)) + body.ljust(_LEAST_BYTES, b"\0"))

    def _write(self, data: bytes) -> None:
        deadline = 0.0
        while True:
            try:
                sent = self._sock.send(data)
                if sent == len(data):
                    return
                data = data[sent:]
            except BlockingIOError:
                # The buffer holds thousands of notes, so the peer has stopped reading.
                deadline = deadline or time.monotonic() + 60
                if time.monotonic() > deadline:
                    raise PipelineError(
                        f"rank {self.peer_rank} has not read from its control socket for 60 s"
                    ) from None
                time.sleep(0.001)
            except OSError as error:
                # The next read also finds the end, with a better text.
                self.lost = self.lost or f"its connection broke ({error.strerror})"
                return

    def pump(self) -> None:
        """Read what has arrived. Sets :attr:`lost` at the end of the stream."""
        while self._read():
            pass

    def note_of(self, key: tuple[int, int, int]) -> ArrivedNote | None:
        """The note of a direct message, by direction, iteration and microbatch; None if it has not
        arrived."""
        while (found := self.notes.get(key)) is None and self._read():
            pass
        return found

    def _read(self) -> bool:
        """Read at most one frame, since the kernel tells the time of the newest byte read. Returns
        whether more may have arrived."""
        if self.lost:
            return False
        # Its length is known once any part behind the header has come.
        begun = self._buffer
        missing = _frame_bytes(begun) - len(begun) if begun else _SHORTEST_FRAME
        try:
            data, extra, _, _ = self._sock.recvmsg(missing, _EXTRA)
        except BlockingIOError:
            return False
        except OSError as error:
            self.lost = f"its connection broke ({error.strerror})"
            return False
        if not data:
            self.lost = "it left" if self.goodbye else "its connection closed"
            return False
        frame = begun + data if begun else data
        if len(frame) == _SHORTEST_FRAME and frame[0] == _NOTE:
            self._buffer = b""
            fields = _NOTE_FRAME.unpack(frame)
            _, direction, _, _, iteration, microbatch = fields[:6]
            note = new_tuple(Note, fields[3:13])
            arrived = new_tuple(ArrivedNote, (note, _arrival(extra)))
            self.notes[direction, iteration, microbatch] = arrived
            self.taken[1 - direction] = fields[13:]
            return True
        if len(frame) < _SHORTEST_FRAME or len(frame) < _frame_bytes(frame):
            self._buffer = frame
            return True
        self._buffer = b""
        kind, direction, size = _HEADER.unpack_from(frame)
        self._handle(kind, direction, frame[_HEADER.size : _HEADER.size + size])
        return True

    def ends_within(self, seconds: float) -> bool:
        """Wait at most ``seconds`` for the end of the connection; return whether it has ended."""
        deadline = time.monotonic() + seconds
        news = select.poll()
        news.register(self._sock, select.POLLIN)
        self.pump()
        while self.lost is None and (left := deadline - time.monotonic()) > 0:
            news.poll(1e3 * left)
            self.pump()
        return self.lost is not None

    def _handle(self, kind: int, direction: int, body: bytes) -> None:
        """Handle a frame that is no note."""
        if kind == _STEP:
            iteration, version, generation, refused, evaluation, digest = _TOKEN.unpack(body)
            self.tokens.append(
                StepToken(iteration, version, generation, bool(refused), bool(evaluation), digest)
            )
        elif kind == _SHAPES:
            shapes = json.loads(body)
            if shapes is not None:
                metas, structure = shapes
                shapes = Contents(tuple(TensorMeta.decode(m) for m in metas), structure)
            self.shapes.append(shapes)
        elif kind == _TAKEN:
            self.taken[direction] = _POSITION.unpack(body)
        elif kind == _MISSING:
            self.missing_from = _POSITION.unpack(body)
        elif kind == _HELD:
            self.held = frozenset(struct.unpack(f"<{len(body) // 4}I", body))
            self.on_held()
        elif kind == _DEPARTED:
            found = [
                Departure((iteration, microbatch), Moment(at, within))
                for iteration, microbatch, at, within in _DEPARTURE.iter_unpack(body)
            ]
            self.on_departed(direction, found)
        else:
            self.goodbye = True

    def close(self, *, goodbye: bool) -> None:
        """Close. ``goodbye``: tell the peer that the end is normal."""
        if goodbye and not self.lost:
            self._send(_GOODBYE, 0, b"")
        self._sock.close()


def _frame_bytes(begun: bytes) -> int:
    """Length of a frame of which ``begun`` has come."""
    size = _HEADER.unpack_from(begun)[2] if len(begun) >= _HEADER.size else 0
    return max(_HEADER.size + size, _SHORTEST_FRAME)


def _arrival(extra: list[tuple[int, int, bytes]]) -> float | None:
    """The kernel's time of arrival in what was received beside the data."""
    for level, kind, data in extra:
        if kind == _SO_TIMESTAMPNS and level == _SOL_SOCKET and len(data) >= _STAMP_BYTES:
            seconds, nanoseconds = _STAMP.unpack_from(data)
            return float(seconds + nanoseconds / 1e9)
    return None


def listen(host: str) -> socket.socket:
    """A socket that listens at ``host``: an address of this machine, or a wildcard address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family, backlog=128)
    _open.add(listener)
    return listener


def _proof(secret: bytes, role: bytes, nonces: bytes, dialer: int, listener: int) -> bytes:
    """Proof that one side of a connection knows ``secret``; valid for this side and connection."""
    message = b"pipemorph line, " + role + nonces + struct.pack("<II", dialer, listener)
    return hmac.new(secret, message, hashlib.sha256).digest()


def _read_exactly(sock: socket.socket, size: int, deadline: float) -> bytes:
    data = b""
    while len(data) < size:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        got = sock.recv(size - len(data))
        if not got:
            raise ConnectionError(
                "it closed the connection; if it has refused it, its log says why"
            )
        data += got
    return data


def dial(
    host: str, port: int, *, rank: int, peer_rank: int, secret: bytes, timeout: float
) -> PeerSocket:
    """Connect to the next stage's rank. Raises :class:`PipelineError`, which names the rank, if it
    cannot be reached, refuses, or does not know ``secret``."""
    deadline = time.monotonic() + timeout
    try:
        sock = socket.create_connection((host, port), timeout=timeout)
        try:
            nonces = _read_exactly(sock, _NONCE_BYTES, deadline) + os.urandom(_NONCE_BYTES)
            proof = _proof(secret, b"dialer", nonces, rank, peer_rank)
            sock.sendall(_HELLO.pack(rank, peer_rank, nonces[_NONCE_BYTES:], proof))
            answer = _read_exactly(sock, len(proof), deadline)
            if not hmac.compare_digest(
                answer, _proof(secret, b"listener", nonces, rank, peer_rank)
            ):
                raise ConnectionError("the peer does not know this job's secret")
        except OSError:
            sock.close()
            raise
    except OSError as error:
        raise PipelineError(
            f"rank {rank} cannot reach rank {peer_rank} at {in_url(host)}:{port}: {error}"
        ) from error
    return PeerSocket(sock, peer_rank)


class _Client:
    """A connection that is not authenticated yet."""

    def __init__(self, sock: socket.socket, where: str) -> None:
        sock.setblocking(False)
        self.sock, self.where = sock, where
        self.until = time.monotonic() + _CLIENT_SECONDS
        self._nonce = os.urandom(_NONCE_BYTES)
        self._hello = b""
        self.refused: str | None = None
        """Why it is not the expected rank; None while it may be."""
        try:
            sock.send(self._nonce)
        except OSError as error:
            self.refused = f"its connection broke ({error.strerror})"

    def proves(self, rank: int, peer_rank: int, secret: bytes) -> bool:
        """Whether it has proved to be rank ``peer_rank`` of this job; then answers. Never
        blocks."""
        try:
            got = self.sock.recv(_HELLO.size - len(self._hello))
            self._hello += got
            if not got:
                self.refused = "it closed the connection before it was set up"
            if len(self._hello) < _HELLO.size:
                return False
            dialer, listener, nonce, proof = _HELLO.unpack(self._hello)
            nonces = self._nonce + nonce
            if not hmac.compare_digest(proof, _proof(secret, b"dialer", nonces, dialer, listener)):
                self.refused = (
                    f"wrong secret: it says it is rank {dialer}, but is of another job or attempt, "
                    "or has another PIPEMORPH_SECRET_FILE"
                )
            elif (dialer, listener) != (peer_rank, rank):
                self.refused = f"it is rank {dialer}, dialling rank {listener}"
            else:
                self.sock.send(_proof(secret, b"listener", nonces, dialer, listener))
        except BlockingIOError:
            return False
        except OSError as error:
            self.refused = f"its connection broke ({error.strerror})"
        return self.refused is None


def accept(
    listener: socket.socket, *, rank: int, peer_rank: int, secret: bytes, timeout: float
) -> PeerSocket:
    """Wait for the previous stage's rank to connect. Other clients are refused and logged.

    Raises :class:`PipelineError` after ``timeout``, which names the missing rank and the clients
    that were refused meanwhile.
    """
    deadline = time.monotonic() + timeout
    clients: list[_Client] = []  # oldest first
    refused, last = 0, ""
    with ExitStack() as at_end, selectors.DefaultSelector() as news:
        listener.setblocking(False)
        news.register(listener, selectors.EVENT_READ)
        at_end.callback(_close_all, clients)
        while True:
            now = time.monotonic()
            for client in list(clients):
                if client.refused is None and client.until <= now:
                    client.refused = "it did not authenticate in time"
                if client.refused is None:
                    continue
                clients.remove(client)
                news.unregister(client.sock)
                client.sock.close()
                refused, last = refused + 1, f"{client.where}: {client.refused}"
                if refused <= _MOST_LOGGED:
                    log.warning("rank %d refused a connection %s", rank, last)
            if now >= deadline:
                many = "connection" if refused == 1 else "connections"
                told = f"; refused {refused} {many}, the last one {last}" if refused else ""
                raise PipelineError(
                    f"rank {rank} waited {timeout:.0f} s for rank {peer_rank} to connect{told}"
                )
            until = min([deadline, *(client.until for client in clients)])
            for key, _ in news.select(max(0.0, until - now)):
                if key.fileobj is not listener:
                    if key.data.proves(rank, peer_rank, secret):
                        clients.remove(key.data)
                        return PeerSocket(key.data.sock, peer_rank)
                elif (newest := _next_client(listener, rank, peer_rank)) is not None:
                    news.register(newest.sock, selectors.EVENT_READ, newest)
                    clients.append(newest)
                    if len(clients) > _MOST_CLIENTS:
                        clients[0].refused = "closed to make room for newer ones"


def _close_all(clients: list[_Client]) -> None:
    for client in clients:
        client.sock.close()


def _next_client(listener: socket.socket, rank: int, peer_rank: int) -> _Client | None:
    try:
        sock, (host, port, *_) = listener.accept()
    except (BlockingIOError, ConnectionAbortedError):
        return None  # It broke before it was accepted; the listener is not affected.
    except OSError as error:
        raise PipelineError(
            f"rank {rank} cannot take the connection of rank {peer_rank}: {error}"
        ) from error
    return _Client(sock, f"from {in_url(host)}:{port}")
