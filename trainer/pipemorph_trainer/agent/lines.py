"""Frames and handshake (:mod:`.frames`) over the connections of asyncio."""

from __future__ import annotations

import asyncio
import socket

from pipemorph_trainer.agent import frames

IDLE_SECONDS, PROBE_SECONDS, PROBES = 10, 5, 3
"""A peer that has vanished is known after so long without a sign of it."""


async def read(reader: asyncio.StreamReader, limit: int = frames.MAX_FRAME_BYTES) -> bytes:
    """The next frame. Raises :class:`frames.FrameError` if it exceeds the limit."""
    length = int.from_bytes(await reader.readexactly(frames.HEADER_BYTES), "big")
    if length > limit:
        raise frames.FrameError(f"frame of {length} bytes; at most {limit}")
    return await reader.readexactly(length)


async def introduce(
    reader: asyncio.StreamReader,
    line: asyncio.StreamWriter,
    secret: bytes,
    side: frames.Side,
    number: int,
) -> None:
    """Do a client's part of the handshake. Raises :class:`frames.FrameError` if either end does not
    let the other in."""
    challenge = frames.decode(frames.Challenge, await read(reader, frames.MAX_HELLO_BYTES)).nonce
    nonce = frames.new_nonce()
    mine = frames.proof(secret, side, challenge, nonce, number)
    line.write(frames.encode(frames.Hello(rank=number, side=side, nonce=nonce, proof=mine)))
    welcome = frames.decode(frames.Welcome, await read(reader, frames.MAX_HELLO_BYTES))
    if welcome.proof is None:
        raise frames.FrameError(f"the job's agent refused this one: {welcome.refused}")
    expected = frames.proof(secret, "agent", challenge, nonce, number)
    if not frames.proves(welcome.proof, expected):
        raise frames.FrameError("the peer does not know this attempt's secret")


def keep_alive(line: asyncio.StreamWriter) -> None:
    """Let the kernel find out that the other end has vanished."""
    sock: socket.socket = line.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_NODELAY", 1),
        ("TCP_KEEPIDLE", IDLE_SECONDS),
        ("TCP_KEEPINTVL", PROBE_SECONDS),
        ("TCP_KEEPCNT", PROBES),
        ("TCP_USER_TIMEOUT", 1000 * (IDLE_SECONDS + PROBES * PROBE_SECONDS)),
    ):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
