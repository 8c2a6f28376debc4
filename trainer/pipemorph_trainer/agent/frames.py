"""Framing and handshake of connections to an agent. No sockets here.

A frame is a 4-byte big-endian length and that many bytes of JSON. The handshake proves to each end
that the other end has the attempt's secret, without sending the secret::

    agent → rank   {"nonce": N}                                   32 random bytes, hex
    rank  → agent  {"rank": R, "nonce": M, "proof": hmac("rank", N, M, R)}
    agent → rank   {"proof": hmac("agent", N, M, R)}    or   {"refused": "why"}

Then reports go up, plans and answers come down. The handshake rejects clients without the secret,
such as those of other jobs, and ranks with another version of the messages. Frames are not
encrypted: telemetry is not secret. An attacker who rewrites packets is not considered.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

M = TypeVar("M", bound=BaseModel)

HEADER_BYTES = 4
MAX_FRAME_BYTES = 16 << 20
"""Longest frame: a plan of 512 stages and 1024 microbatches fits."""
MAX_HELLO_BYTES = 4096
"""Limit before the peer is authenticated."""


class FrameError(Exception):
    """Violation of the protocol by the peer; the connection is closed."""


class HandshakeMessage(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Challenge(HandshakeMessage):
    nonce: str


class Hello(HandshakeMessage):
    rank: int
    nonce: str
    proof: str
    protocol: int = 1
    """Version of the messages, see :data:`~pipemorph.protocol.rank_messages.RANK_PROTOCOL`."""


class Welcome(HandshakeMessage):
    proof: str | None = None
    refused: str | None = None


def new_nonce() -> str:
    return secrets.token_hex(32)


def compute_proof(secret: bytes, side: str, challenge: str, nonce: str, rank: int) -> str:
    """Proof by ``side`` ("rank" or "agent") that it has ``secret``: an HMAC-SHA256, hex."""
    text = "\n".join(("pipemorph-agent-1", side, challenge, nonce, str(rank)))
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()


def equal_proofs(claimed: str, expected: str) -> bool:
    """Compare two proofs in constant time."""
    return hmac.compare_digest(claimed.encode(), expected.encode())


def add_length_prefix(payload: bytes) -> bytes:
    """Prefix ``payload`` with its length. Raises :class:`FrameError` if it is too long."""
    if len(payload) > MAX_FRAME_BYTES:
        raise FrameError(f"frame of {len(payload)} bytes; at most {MAX_FRAME_BYTES}")
    return len(payload).to_bytes(HEADER_BYTES, "big") + payload


def encode_frame(message: BaseModel) -> bytes:
    return add_length_prefix(message.model_dump_json().encode())


def decode_message(kind: type[M], payload: bytes) -> M:
    """Parse ``payload`` as a ``kind``. Raises :class:`FrameError` if that fails."""
    try:
        return kind.model_validate_json(payload)
    except ValidationError as error:
        raise FrameError(f"not a {kind.__name__}: {error.error_count()} errors") from None


async def read_frame(reader: asyncio.StreamReader, limit: int = MAX_FRAME_BYTES) -> bytes:
    """Read the next frame. Raises :class:`FrameError` if it exceeds ``limit`` bytes."""
    length = int.from_bytes(await reader.readexactly(HEADER_BYTES), "big")
    if length > limit:
        raise FrameError(f"frame of {length} bytes; at most {limit}")
    return await reader.readexactly(length)


class FrameReader:
    """Splits a byte stream into frames."""

    def __init__(self, limit: int = MAX_FRAME_BYTES) -> None:
        self.limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next_frame(self) -> bytes | None:
        """Next complete frame, or None. Raises :class:`FrameError` if it exceeds the limit."""
        if len(self._buffer) < HEADER_BYTES:
            return None
        length = int.from_bytes(self._buffer[:HEADER_BYTES], "big")
        if length > self.limit:
            raise FrameError(f"frame of {length} bytes; at most {self.limit}")
        end = HEADER_BYTES + length
        if len(self._buffer) < end:
            return None
        payload = bytes(self._buffer[HEADER_BYTES:end])
        del self._buffer[:end]
        return payload
