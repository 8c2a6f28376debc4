"""A line between two neighbouring ranks for what is not payload.

A plain socket beside the data paths. It carries the note of every direct message, the step
token that starts an iteration, shapes when they change, how far direct messages were taken, and
a goodbye; its end without a goodbye tells at once that the neighbour died. Tensors never travel
here.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import select
import socket
import struct
import time
from collections import deque
from typing import NamedTuple

from pipemorph_trainer.addresses import in_url
from pipemorph_trainer.errors import PipelineError
from pipemorph_trainer.paths.message import Direction, Note, Position, TensorMeta

log = logging.getLogger("pipemorph.trainer")

_HEADER = struct.Struct("<BBH")
_TOKEN = struct.Struct("<IIII")
_POSITION = struct.Struct("<qI")
_HELLO = struct.Struct("<II32s")
_NONCE_BYTES = 16
_STEP, _NOTE, _SHAPES, _GOODBYE, _TAKEN, _MISSING = 1, 2, 3, 4, 5, 6
_READ = 1 << 16


class StepToken(NamedTuple):
    """Starts an iteration: passed from stage to stage. The first three must agree everywhere;
    a new ``generation`` announces shapes. ``refused``: the batch of a stage above does not fit,
    so nothing follows."""

    iteration: int
    version: int
    generation: int
    refused: bool = False


class Line:
    """One connected, authenticated socket to a neighbour. Reads never block."""

    def __init__(self, sock: socket.socket, peer_rank: int) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
        self._sock = sock
        self._buffer = bytearray()
        self.peer_rank = peer_rank
        self.notes: dict[tuple[int, int, int], Note] = {}
        self.tokens: deque[StepToken] = deque()
        self.shapes: deque[tuple[TensorMeta, ...] | None] = deque()
        """None: there are none, because the step was refused."""
        self.taken: dict[int, Position] = {}
        """Per direction, the first direct message that the neighbour has not taken yet."""
        self.missing_from: Position | None = None
        """The first message that the neighbour misses of a direct path it has given up."""
        self.goodbye = False
        self.lost: str | None = None
        """Why nothing more can come, None while the line is up."""

    def fileno(self) -> int:
        return self._sock.fileno()

    def send_note(self, direction: Direction, note: Note) -> None:
        self._send(_NOTE, direction, note.pack())

    def send_token(self, token: StepToken) -> None:
        self._send(_STEP, 0, _TOKEN.pack(*token))

    def send_shapes(self, metas: tuple[TensorMeta, ...] | None) -> None:
        encoded = None if metas is None else [meta.encode() for meta in metas]
        self._send(_SHAPES, 0, json.dumps(encoded).encode())

    def send_taken(self, direction: Direction, after: Position) -> None:
        """All messages of ``direction`` before ``after`` are in use, and need not be kept."""
        self._send(_TAKEN, direction, _POSITION.pack(*after))

    def send_position(self, missing_from: Position) -> None:
        """The direct path is given up here; what came over it ends before this message."""
        self._send(_MISSING, 0, _POSITION.pack(*missing_from))

    def _send(self, kind: int, direction: int, body: bytes) -> None:
        data = memoryview(_HEADER.pack(kind, direction, len(body)) + body)
        deadline = 0.0
        while data:
            try:
                data = data[self._sock.send(data) :]
            except BlockingIOError:
                # Thousands of notes fit the socket's buffer: the peer has stopped reading.
                deadline = deadline or time.monotonic() + 60
                if time.monotonic() > deadline:
                    raise PipelineError(
                        f"rank {self.peer_rank} has not read its line for 60 s"
                    ) from None
                time.sleep(0.001)
            except OSError as error:
                # Reading tells the same with better words; what was promised is lost anyway.
                self.lost = self.lost or f"its connection broke ({error.strerror})"
                return

    def pump(self) -> None:
        """Read what has come. Sets :attr:`lost` at the end of the stream."""
        if self.lost:
            return
        while True:
            try:
                data = self._sock.recv(_READ)
            except BlockingIOError:
                break
            except OSError as error:
                self.lost = f"its connection broke ({error.strerror})"
                break
            if not data:
                self.lost = "it left" if self.goodbye else "its connection closed"
                break
            self._buffer += data
            if len(data) < _READ:
                break
        if self._buffer:
            self._parse()

    def ends_within(self, seconds: float) -> bool:
        """Whether nothing more can come, waiting at most so long for the end."""
        deadline = time.monotonic() + seconds
        news = select.poll()
        news.register(self._sock, select.POLLIN)
        self.pump()
        while self.lost is None and (left := deadline - time.monotonic()) > 0:
            news.poll(1e3 * left)
            self.pump()
        return self.lost is not None

    def _parse(self) -> None:
        buffer, at = self._buffer, 0
        while len(buffer) - at >= _HEADER.size:
            kind, direction, size = _HEADER.unpack_from(buffer, at)
            if len(buffer) - at < _HEADER.size + size:
                break
            body = bytes(buffer[at + _HEADER.size : at + _HEADER.size + size])
            at += _HEADER.size + size
            if kind == _NOTE:
                note = Note.unpack(body)
                self.notes[direction, note.iteration, note.microbatch] = note
            elif kind == _STEP:
                iteration, version, generation, refused = _TOKEN.unpack(body)
                self.tokens.append(StepToken(iteration, version, generation, bool(refused)))
            elif kind == _SHAPES:
                shapes = json.loads(body)
                self.shapes.append(
                    None if shapes is None else tuple(TensorMeta.decode(m) for m in shapes)
                )
            elif kind == _TAKEN:
                self.taken[direction] = Position(*_POSITION.unpack(body))
            elif kind == _MISSING:
                self.missing_from = Position(*_POSITION.unpack(body))
            else:
                self.goodbye = True
        del buffer[:at]

    def close(self, *, goodbye: bool) -> None:
        """Close; ``goodbye`` tells the peer that all is well."""
        if goodbye and not self.lost:
            self._send(_GOODBYE, 0, b"")
        self._sock.close()


def listen(host: str) -> socket.socket:
    """A socket neighbours can dial at ``host``, an address of this machine, or at all of them."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=8)


def _proof(secret: bytes, nonce: bytes, dialer: int, listener: int) -> bytes:
    message = b"pipemorph line" + nonce + struct.pack("<II", dialer, listener)
    return hmac.new(secret, message, hashlib.sha256).digest()


def _read_exactly(sock: socket.socket, size: int, who: str) -> bytes:
    data = b""
    while len(data) < size:
        got = sock.recv(size - len(data))
        if not got:
            raise PipelineError(f"{who} closed the line before it was set up")
        data += got
    return data


def dial(host: str, port: int, *, rank: int, peer_rank: int, secret: bytes, timeout: float) -> Line:
    """Dial the next stage's rank. Raises :class:`PipelineError` naming it if it cannot be
    reached or refuses."""
    try:
        sock = socket.create_connection((host, port), timeout=timeout)
        nonce = _read_exactly(sock, _NONCE_BYTES, f"rank {peer_rank} at {in_url(host)}:{port}")
        sock.sendall(_HELLO.pack(rank, peer_rank, _proof(secret, nonce, rank, peer_rank)))
    except OSError as error:
        raise PipelineError(
            f"rank {rank} cannot reach rank {peer_rank} at {in_url(host)}:{port}: {error}"
        ) from error
    return Line(sock, peer_rank)


def accept(
    listener: socket.socket, *, rank: int, peer_rank: int, secret: bytes, timeout: float
) -> Line:
    """Wait for the previous stage's rank to dial; anybody else is turned away, which is logged.

    Raises :class:`PipelineError` naming the rank that did not come within ``timeout``, and who was
    turned away meanwhile.
    """
    deadline = time.monotonic() + timeout
    refused, last = 0, ""
    while True:
        listener.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            sock, (host, port, *_) = listener.accept()
        except TimeoutError:
            many = "connection" if refused == 1 else "connections"
            told = f"; refused {refused} {many}, the last one {last}" if refused else ""
            raise PipelineError(
                f"rank {rank} waited {timeout:.0f} s for rank {peer_rank} to dial its line{told}"
            ) from None
        except ConnectionAbortedError:
            continue  # It broke before it was taken: the listener is as good as before.
        except OSError as error:
            raise PipelineError(
                f"rank {rank} cannot take the connection of rank {peer_rank}: {error}"
            ) from error
        sock.settimeout(max(0.001, min(10.0, deadline - time.monotonic())))
        why = _stranger(sock, rank, peer_rank, secret)
        if why is None:
            return Line(sock, peer_rank)
        sock.close()
        refused, last = refused + 1, f"from {in_url(host)}:{port}: {why}"
        log.warning("rank %d refused a connection to its line %s", rank, last)


def _stranger(sock: socket.socket, rank: int, peer_rank: int, secret: bytes) -> str | None:
    """Why what dialled is not rank ``peer_rank`` of this job; None if it is."""
    nonce = os.urandom(_NONCE_BYTES)
    try:
        sock.sendall(nonce)
        hello = _read_exactly(sock, _HELLO.size, "it")
    except TimeoutError:
        return "it did not say who it is"
    except OSError as error:
        return f"its connection broke ({error.strerror})"
    except PipelineError as error:
        return str(error)
    dialer, listener, proof = _HELLO.unpack(hello)
    if not hmac.compare_digest(proof, _proof(secret, nonce, dialer, listener)):
        return (
            f"wrong secret: it says it is rank {dialer}, but is of another job or attempt, or has "
            "another PIPEMORPH_SECRET_FILE"
        )
    if (dialer, listener) != (peer_rank, rank):
        return f"it is rank {dialer}, dialling rank {listener}"
    return None
