"""Control socket between two neighbouring ranks.

It is a TCP connection separate from the data. It carries the note of every direct message, the
times at which messages were complete on a device, the step token that starts an iteration, shapes
when they change, the position of consumed direct messages, the plans that the stages below hold,
and a goodbye. If it ends without a goodbye, the neighbour has died. It carries no tensors.
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
from pipemorph_trainer.topology.addresses import format_for_url
from pipemorph_trainer.topology.device_event_clock import DeviceMoment
from pipemorph_trainer.transport.message import (
    NOTE_BYTES,
    Direction,
    MessageContents,
    Note,
    Position,
    SendTimestamp,
    TensorMeta,
    new_tuple,
)

log = logging.getLogger("pipemorph.trainer")

_HEADER = struct.Struct("<BBH")
_TOKEN = struct.Struct("<IIIIIII")
_COST_BYTES, _PLACE_BYTES = 8, 4
_POSITION = struct.Struct("<qI")
_TIMESTAMP = struct.Struct("<IIdd")
_LEAST_BYTES = NOTE_BYTES + _POSITION.size
"""Least length of a frame behind its header, so that one call reads any frequent one."""
_NOTE_FRAME = struct.Struct("<BBHIIIIddddf?qI")
"""Frame of a note, with its header: the most frequent one, packed and unpacked by one call."""
_SHORTEST_FRAME = _HEADER.size + _LEAST_BYTES
_MOST_UNREPORTED = 4
"""Taken messages after which a frame reports them, if no note has."""
_HELLO = struct.Struct("<II16s32s")
_NONCE_BYTES = 16
_CLIENT_SECONDS = 10.0
_MOST_CLIENTS = 256
_MOST_LOGGED = 100
_STEP, _NOTE, _SHAPES, _GOODBYE, _CONSUMED, _MISSING, _HELD, _TIMESTAMPS = 1, 2, 3, 4, 5, 6, 7, 8
_MOST_BYTES = (1 << 16) - 1
_MOST_TIMESTAMPS = _MOST_BYTES // _TIMESTAMP.size
_SO_TIMESTAMPNS = 35
"""Linux's SO_TIMESTAMPNS, which Python does not define: the kernel adds the arrival time to
received data. On the few architectures with another number, notes have no arrival time."""
_SOL_SOCKET = int(socket.SOL_SOCKET)
_STAMP = struct.Struct("ll")
_STAMP_BYTES = _STAMP.size
_EXTRA = socket.CMSG_SPACE(_STAMP.size)

_open_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_in_child() -> None:
    # Open copies in a child would hide the end of this rank from its neighbours.
    for sock in list(_open_sockets):
        sock.close()


os.register_at_fork(after_in_child=_close_in_child)


def _ignore_held_versions() -> None:
    """Do nothing, since plans do not change."""


def _ignore_send_timestamps(direction: int, departures: Sequence[SendTimestamp]) -> None:
    """Do nothing, since this route receives no messages from a device."""


class StepToken(NamedTuple):
    """Token that starts an iteration, or the ``evaluation`` before it. Each stage passes it to the
    next one. ``version``: of the plan that all stages run; ``digest`` names its content.
    ``iteration`` and ``evaluation`` must be equal on all ranks; a new ``generation`` announces
    shapes. ``refused``: the batch of a stage above does not fit, so no messages follow. ``costs``:
    of the microbatches; empty if unknown. ``order``: the microbatch of each place; empty: in
    order."""

    iteration: int
    version: int
    generation: int
    refused: bool = False
    evaluation: bool = False
    digest: int = 0
    costs: tuple[float, ...] = ()
    order: tuple[int, ...] = ()

    def pack(self) -> bytes:
        """Return the token as bytes: the costs follow the other fields, and as many places if there
        is an order."""
        *fields, costs, order = self
        rows = struct.pack(f"<{len(costs)}d{len(order)}I", *costs, *order)
        return _TOKEN.pack(*fields, len(costs)) + rows

    @staticmethod
    def unpack(body: bytes) -> StepToken:
        iteration, version, generation, refused, evaluation, digest, count = _TOKEN.unpack_from(
            body
        )
        places = (len(body) - _TOKEN.size - count * _COST_BYTES) // _PLACE_BYTES
        rows = struct.unpack_from(f"<{count}d{places}I", body, _TOKEN.size)
        return StepToken(
            iteration, version, generation, bool(refused), bool(evaluation), digest,
            rows[:count], rows[count:],
        )  # fmt: skip


class ArrivedNote(NamedTuple):
    """Note with its arrival. ``arrived_at``: time at which the kernel received it, wall clock, or
    later; None if unknown."""

    note: Note
    arrived_at: float | None


class ControlSocket:
    """Connected, authenticated socket to a neighbour. Reads never block."""

    def __init__(self, sock: socket.socket, peer_rank: int) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
        with suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        _open_sockets.add(sock)
        self._sock = sock
        self._buffer = b""
        self._consumed_up_to: Position = -1, 0
        self._unreported = 0
        self.peer_rank = peer_rank
        self.notes: dict[tuple[int, int, int], ArrivedNote] = {}
        self.tokens: deque[StepToken] = deque()
        self.shapes: deque[MessageContents | None] = deque()
        """Shapes in order of arrival; None: no shapes, because the step was refused."""
        self.consumed: dict[int, Position] = {}
        """First direct message that the neighbour has not consumed, by direction."""
        self.missing_from: Position | None = None
        """First message that the neighbour misses, after it gave up the direct route."""
        self.held: frozenset[int] = frozenset()
        """Plan versions that the neighbour and all stages below it hold."""
        self.on_held: Callable[[], None] = _ignore_held_versions
        """Called after :attr:`held` has changed."""
        self.on_send_timestamps: Callable[[int, Sequence[SendTimestamp]], None] = (
            _ignore_send_timestamps
        )
        """Called with a direction, and departures of its messages by the neighbour's clock."""
        self.goodbye = False
        self.lost: str | None = None
        """Reason for the end of the connection; None while it is up."""

    def fileno(self) -> int:
        return self._sock.fileno()

    def send_note(
        self,
        direction: Direction,
        note: tuple[int, int, int, int, float, float, float, float, float, bool],
    ) -> None:
        """Send the note of a direct message, the fields of a :class:`Note`, with the position taken
        in the other direction."""
        self._unreported = 0
        self._write_bytes(
            _NOTE_FRAME.pack(_NOTE, direction, _LEAST_BYTES, *note, *self._consumed_up_to)
        )

    def send_token(self, token: StepToken) -> None:
        self._send_frame(_STEP, 0, token.pack())

    def send_shapes(self, contents: MessageContents | None) -> None:
        encoded = None
        if contents is not None:
            encoded = [[meta.encode() for meta in contents.metas], contents.structure]
        body = json.dumps(encoded).encode()
        if len(body) > _MOST_BYTES:
            raise ShapeError(
                f"the structure of the stage's output takes {len(body)} bytes to describe; "
                f"expected at most {_MOST_BYTES}"
            )
        self._send_frame(_SHAPES, 0, body)

    def send_consumed(self, direction: Direction, after: Position, *, last: bool) -> None:
        """Report that messages of ``direction`` before ``after`` were consumed, so that the
        neighbour can drop them: with the next note, or at once after some messages and for the
        ``last`` of an iteration."""
        self._consumed_up_to = after
        self._unreported += 1
        if last or self._unreported == _MOST_UNREPORTED:
            self._unreported = 0
            self._send_frame(_CONSUMED, direction, _POSITION.pack(*after))

    def send_missing_from(self, missing_from: Position) -> None:
        """Report that this rank gave up the direct route, and the first message that it misses."""
        self._send_frame(_MISSING, 0, _POSITION.pack(*missing_from))

    def send_held(self, versions: frozenset[int]) -> None:
        """Report the versions of the plans that this stage and all stages below hold."""
        self._send_frame(_HELD, 0, struct.pack(f"<{len(versions)}I", *sorted(versions)))

    def send_timestamps(self, direction: Direction, departures: Sequence[SendTimestamp]) -> None:
        """Report the times at which direct messages were complete on this rank's device."""
        for first in range(0, len(departures), _MOST_TIMESTAMPS):
            some = departures[first : first + _MOST_TIMESTAMPS]
            body = b"".join([_TIMESTAMP.pack(*position, *moment) for position, moment in some])
            self._send_frame(_TIMESTAMPS, direction, body)

    def _send_frame(self, kind: int, direction: int, body: bytes) -> None:
        self._write_bytes(
            _HEADER.pack(kind, direction, len(body)) + body.ljust(_LEAST_BYTES, b"\0")
        )

    def _write_bytes(self, data: bytes) -> None:
        deadline = 0.0
        while True:
            try:
                sent = self._sock.send(data)
                if sent == len(data):
                    return
                data = data[sent:]
            except BlockingIOError:
                # The buffer has room for thousands of notes, so the peer has stopped reading.
                deadline = deadline or time.monotonic() + 60
                if time.monotonic() > deadline:
                    raise PipelineError(
                        f"rank {self.peer_rank} has not read from its control socket for 60 s"
                    ) from None
                time.sleep(0.001)
            except OSError as error:
                # The next read also finds the end, with a clearer reason.
                self.lost = self.lost or f"its connection broke ({error.strerror})"
                return

    def read_arrived(self) -> None:
        """Read all arrived frames. Sets :attr:`lost` at the end of the stream."""
        while self._read_frame():
            pass

    def find_note(self, key: tuple[int, int, int]) -> ArrivedNote | None:
        """Find the note of a direct message by direction, iteration and microbatch; None if it has
        not arrived."""
        while (found := self.notes.get(key)) is None and self._read_frame():
            pass
        return found

    def _read_frame(self) -> bool:
        """Read at most one frame, since the kernel reports the time of the newest byte read.
        Returns true if more may have arrived."""
        if self.lost:
            return False
        # The length of a frame is known once its header has arrived.
        begun = self._buffer
        missing = _read_frame_length(begun) - len(begun) if begun else _SHORTEST_FRAME
        try:
            data, extra, _, _ = self._sock.recvmsg(missing, _EXTRA)
        except BlockingIOError:
            return False
        except OSError as error:
            self.lost = f"its connection broke ({error.strerror})"
            return False
        if not data:
            self.lost = "it closed its end" if self.goodbye else "its connection closed"
            return False
        frame = begun + data if begun else data
        if len(frame) == _SHORTEST_FRAME and frame[0] == _NOTE:
            self._buffer = b""
            fields = _NOTE_FRAME.unpack(frame)
            _, direction, _, _, iteration, microbatch = fields[:6]
            note = new_tuple(Note, fields[3:13])
            arrived = new_tuple(ArrivedNote, (note, _read_kernel_timestamp(extra)))
            self.notes[direction, iteration, microbatch] = arrived
            self.consumed[1 - direction] = fields[13:]
            return True
        if len(frame) < _SHORTEST_FRAME or len(frame) < _read_frame_length(frame):
            self._buffer = frame
            return True
        self._buffer = b""
        kind, direction, size = _HEADER.unpack_from(frame)
        self._handle_frame(kind, direction, frame[_HEADER.size : _HEADER.size + size])
        return True

    def wait_for_end(self, seconds: float) -> bool:
        """Wait at most ``seconds`` for the end of the connection; return true if it has ended."""
        deadline = time.monotonic() + seconds
        readable = select.poll()
        readable.register(self._sock, select.POLLIN)
        self.read_arrived()
        while self.lost is None and (rest := deadline - time.monotonic()) > 0:
            readable.poll(1e3 * rest)
            self.read_arrived()
        return self.lost is not None

    def _handle_frame(self, kind: int, direction: int, body: bytes) -> None:
        """Handle a frame other than a note."""
        if kind == _STEP:
            self.tokens.append(StepToken.unpack(body))
        elif kind == _SHAPES:
            shapes = json.loads(body)
            if shapes is not None:
                metas, structure = shapes
                shapes = MessageContents(tuple(TensorMeta.decode(m) for m in metas), structure)
            self.shapes.append(shapes)
        elif kind == _CONSUMED:
            self.consumed[direction] = _POSITION.unpack(body)
        elif kind == _MISSING:
            self.missing_from = _POSITION.unpack(body)
        elif kind == _HELD:
            self.held = frozenset(struct.unpack(f"<{len(body) // 4}I", body))
            self.on_held()
        elif kind == _TIMESTAMPS:
            found = [
                SendTimestamp((iteration, microbatch), DeviceMoment(at, within))
                for iteration, microbatch, at, within in _TIMESTAMP.iter_unpack(body)
            ]
            self.on_send_timestamps(direction, found)
        else:
            self.goodbye = True

    def close(self, *, goodbye: bool) -> None:
        """Close the connection. ``goodbye``: announce a normal end to the peer."""
        if goodbye and not self.lost:
            self._send_frame(_GOODBYE, 0, b"")
        self._sock.close()


def _read_frame_length(begun: bytes) -> int:
    """Length of a frame that starts with ``begun``."""
    size = _HEADER.unpack_from(begun)[2] if len(begun) >= _HEADER.size else 0
    return max(_HEADER.size + size, _SHORTEST_FRAME)


def _read_kernel_timestamp(extra: list[tuple[int, int, bytes]]) -> float | None:
    """Kernel's time of arrival, from the ancillary data of a receive."""
    for level, kind, data in extra:
        if kind == _SO_TIMESTAMPNS and level == _SOL_SOCKET and len(data) >= _STAMP_BYTES:
            seconds, nanoseconds = _STAMP.unpack_from(data)
            return float(seconds + nanoseconds / 1e9)
    return None


def open_listener(host: str) -> socket.socket:
    """Listen at ``host``: an address of this machine, or a wildcard address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family, backlog=128)
    _open_sockets.add(listener)
    return listener


def _compute_proof(secret: bytes, role: bytes, nonces: bytes, dialer: int, listener: int) -> bytes:
    """Proof that one side of a connection has ``secret``; valid for this side and connection."""
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


def connect_to_peer(
    host: str, port: int, *, rank: int, peer_rank: int, secret: bytes, timeout: float
) -> ControlSocket:
    """Connect to the next stage's rank. Raises :class:`PipelineError`, which names the rank, if it
    cannot be reached, refuses, or does not have ``secret``."""
    deadline = time.monotonic() + timeout
    try:
        sock = socket.create_connection((host, port), timeout=timeout)
        try:
            nonces = _read_exactly(sock, _NONCE_BYTES, deadline) + os.urandom(_NONCE_BYTES)
            proof = _compute_proof(secret, b"dialer", nonces, rank, peer_rank)
            sock.sendall(_HELLO.pack(rank, peer_rank, nonces[_NONCE_BYTES:], proof))
            answer = _read_exactly(sock, len(proof), deadline)
            if not hmac.compare_digest(
                answer, _compute_proof(secret, b"listener", nonces, rank, peer_rank)
            ):
                raise ConnectionError("the peer does not have this job's secret")
        except OSError:
            sock.close()
            raise
    except OSError as error:
        raise PipelineError(
            f"rank {rank} cannot reach rank {peer_rank} at {format_for_url(host)}:{port}: {error}"
        ) from error
    return ControlSocket(sock, peer_rank)


class _UnauthenticatedClient:
    """Connection that is not authenticated yet."""

    def __init__(self, sock: socket.socket, where: str) -> None:
        sock.setblocking(False)
        self.sock, self.where = sock, where
        self.until = time.monotonic() + _CLIENT_SECONDS
        self._nonce = os.urandom(_NONCE_BYTES)
        self._hello = b""
        self.refused: str | None = None
        """Reason for the refusal; None while the client may be the expected rank."""
        try:
            sock.send(self._nonce)
        except OSError as error:
            self.refused = f"its connection broke ({error.strerror})"

    def check_hello(self, rank: int, peer_rank: int, secret: bytes) -> bool:
        """Read the hello. True if it proves rank ``peer_rank`` of this job; then it is answered.
        Never blocks."""
        try:
            got = self.sock.recv(_HELLO.size - len(self._hello))
            self._hello += got
            if not got:
                self.refused = "it closed the connection before it was set up"
            if len(self._hello) < _HELLO.size:
                return False
            dialer, listener, nonce, proof = _HELLO.unpack(self._hello)
            nonces = self._nonce + nonce
            if not hmac.compare_digest(
                proof, _compute_proof(secret, b"dialer", nonces, dialer, listener)
            ):
                self.refused = (
                    f"wrong secret: it says it is rank {dialer}, but is of another job or attempt, "
                    "or has another PIPEMORPH_SECRET_FILE"
                )
            elif (dialer, listener) != (peer_rank, rank):
                self.refused = f"it is rank {dialer}, dialling rank {listener}"
            else:
                self.sock.send(_compute_proof(secret, b"listener", nonces, dialer, listener))
        except BlockingIOError:
            return False
        except OSError as error:
            self.refused = f"its connection broke ({error.strerror})"
        return self.refused is None


def accept_peer(
    listener: socket.socket, *, rank: int, peer_rank: int, secret: bytes, timeout: float
) -> ControlSocket:
    """Wait for the previous stage's rank to connect. Other clients are refused and logged.

    Raises :class:`PipelineError` after ``timeout`` seconds, which names the missing rank and the
    refused clients.
    """
    deadline = time.monotonic() + timeout
    clients: list[_UnauthenticatedClient] = []  # oldest first
    refused, last = 0, ""
    with ExitStack() as at_end, selectors.DefaultSelector() as selector:
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ)
        at_end.callback(_close_clients, clients)
        while True:
            now = time.monotonic()
            for client in list(clients):
                if client.refused is None and client.until <= now:
                    client.refused = "it did not authenticate in time"
                if client.refused is None:
                    continue
                clients.remove(client)
                selector.unregister(client.sock)
                client.sock.close()
                refused, last = refused + 1, f"{client.where}: {client.refused}"
                if refused <= _MOST_LOGGED:
                    log.warning("rank %d refused a connection %s", rank, last)
            if now >= deadline:
                many = "connection" if refused == 1 else "connections"
                others = f"; refused {refused} {many}, the last one {last}" if refused else ""
                raise PipelineError(
                    f"rank {rank} waited {timeout:.0f} s for rank {peer_rank} to connect{others}"
                )
            until = min([deadline, *(client.until for client in clients)])
            for key, _ in selector.select(max(0.0, until - now)):
                if key.fileobj is not listener:
                    if key.data.check_hello(rank, peer_rank, secret):
                        clients.remove(key.data)
                        return ControlSocket(key.data.sock, peer_rank)
                elif (newest := _accept_client(listener, rank, peer_rank)) is not None:
                    selector.register(newest.sock, selectors.EVENT_READ, newest)
                    clients.append(newest)
                    if len(clients) > _MOST_CLIENTS:
                        clients[0].refused = "closed to make room for newer ones"


def _close_clients(clients: list[_UnauthenticatedClient]) -> None:
    for client in clients:
        client.sock.close()


def _accept_client(
    listener: socket.socket, rank: int, peer_rank: int
) -> _UnauthenticatedClient | None:
    try:
        sock, (host, port, *_) = listener.accept()
    except (BlockingIOError, ConnectionAbortedError):
        return None  # The connection broke before it was accepted; the listener is unaffected.
    except OSError as error:
        raise PipelineError(
            f"rank {rank} cannot accept the connection of rank {peer_rank}: {error}"
        ) from error
    return _UnauthenticatedClient(sock, f"from {format_for_url(host)}:{port}")
