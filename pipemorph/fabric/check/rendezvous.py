"""Requests and answers between hosts that know one secret, over TCP.

After a mutual proof with fresh nonces, every line carries a code of its direction, number and text
under a key of this connection: none can be forged, replayed or moved to another connection. Nothing
is encrypted.

    listener  → connector  {"nonce": N}
    connector → listener   {"nonce": M, "proof": hmac("connector", N, M)}
    listener  → connector  {"proof": hmac("listener", N, M)}    or nothing: the proof is wrong
"""

from __future__ import annotations

import hashlib
import hmac
import json
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any

PORT = 29610
MOST_LINE = 1 << 20
HANDSHAKE_SECONDS = 10.0
IDLE_SECONDS = 300.0
"""A connector that says nothing for this long is given up."""
MOST_STRANGERS = 256
"""Connections without a proof at a time; the oldest makes room."""
BACKLOG = 1024
RETRY_SECONDS = 0.5
PROOF_SECONDS = 0.1
"""How soon a host that has proven itself is seen to."""
LISTENER, CONNECTOR = "listener", "connector"


class RendezvousError(Exception):
    """The other host was not reached, is not who it should be, or is gone."""


class Channel:
    """A proven connection, with the same interface at both ends."""

    def __init__(self, stream: socket.socket, key: bytes, own: str) -> None:
        self._stream, self._key = stream, key
        self._own, self._other = own, LISTENER if own == CONNECTOR else CONNECTOR
        self._sent = self._heard = 0
        self._lines = _Lines(stream)

    def say(self, message: dict[str, Any]) -> None:
        """Raises :class:`RendezvousError`."""
        text = json.dumps(message)
        code = _code(self._key, self._own, self._sent, text)
        self._sent += 1
        _send(self._stream, {"code": code, "text": text})

    def hear(self, seconds: float) -> dict[str, Any]:
        """Raises :class:`RendezvousError`."""
        found = self._lines.next(seconds)
        text = str(found.get("text"))
        code = _code(self._key, self._other, self._heard, text)
        self._heard += 1
        if not hmac.compare_digest(str(found.get("code")).encode(), code.encode()):
            raise RendezvousError("a line that the other end did not write")
        return _object(text)

    def ask(self, message: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Say something and hear the answer to it."""
        self.say(message)
        return self.hear(seconds)

    def close(self) -> None:
        _shut(self._stream)
        self._stream.close()


def connect(host: str, port: int, secret: str, seconds: float) -> Channel:
    """Connect to the host that listens there; tries again for ``seconds``.

    Raises :class:`RendezvousError`.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            stream = socket.create_connection((host, port), timeout=max(1.0, seconds))
            break
        except OSError as error:
            if time.monotonic() + RETRY_SECONDS > deadline:
                why = error.strerror or str(error)
                raise RendezvousError(f"no connection to port {port}: {why}") from None
            time.sleep(RETRY_SECONDS)
    try:
        lines = _Lines(stream)
        theirs = str(lines.next(HANDSHAKE_SECONDS).get("nonce"))
        own = secrets.token_hex(32)
        _send(stream, {"nonce": own, "proof": _proof(secret, CONNECTOR, theirs, own)})
        said = str(lines.next(HANDSHAKE_SECONDS).get("proof"))
        if not hmac.compare_digest(said.encode(), _proof(secret, LISTENER, theirs, own).encode()):
            raise RendezvousError("it does not know the secret")
    except RendezvousError as error:
        stream.close()
        raise RendezvousError(f"{error} (is the secret file the same on both hosts?)") from None
    return Channel(stream, _session(secret, theirs, own), CONNECTOR)


class Listener:
    """Accepts connections, and hands over those that know the secret, one at a time."""

    def __init__(self, address: str, port: int, secret: str) -> None:
        """``address``: empty for all. Raises OSError if it cannot be listened on."""
        both = not address and socket.has_dualstack_ipv6()
        self._socket = socket.create_server(
            (address, port),
            family=socket.AF_INET6 if both or ":" in address else socket.AF_INET,
            backlog=BACKLOG,
            dualstack_ipv6=both,
        )
        self._secret = secret
        self._strangers: list[socket.socket] = []
        self._proven: queue.Queue[Channel] = queue.Queue()

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    def __enter__(self) -> Listener:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._socket.close()

    def serve(self, use: Callable[[Channel], bool], seconds: float) -> bool:
        """Call ``use`` with each channel, until it returns True. False: nothing came to its end
        within ``seconds``, which do not count while a channel is in use."""
        deadline = time.monotonic() + seconds
        while (channel := self.accept(deadline)) is not None:
            began = time.monotonic()
            try:
                if use(channel):
                    return True
            finally:
                channel.close()
            deadline += time.monotonic() - began
        return False

    def accept(self, deadline: float) -> Channel | None:
        """The next host that knows the secret. None if none came until ``deadline``, of
        ``time.monotonic``."""
        while True:
            with suppress(queue.Empty):
                return self._proven.get_nowait()
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            self._socket.settimeout(min(left, PROOF_SECONDS))
            try:
                stream, _ = self._socket.accept()
            except OSError:  # nobody came, or is gone again
                continue
            self._strangers.append(stream)
            if len(self._strangers) > MOST_STRANGERS:
                _shut(self._strangers.pop(0))
            threading.Thread(
                target=self._prove, args=(stream,), daemon=True, name="stranger"
            ).start()

    def _prove(self, stream: socket.socket) -> None:
        try:
            own = secrets.token_hex(32)
            _send(stream, {"nonce": own})
            said = _Lines(stream).next(HANDSHAKE_SECONDS)
            theirs = str(said.get("nonce"))
            proof = _proof(self._secret, CONNECTOR, own, theirs)
            if not hmac.compare_digest(str(said.get("proof")).encode(), proof.encode()):
                raise RendezvousError("a wrong proof")
            _send(stream, {"proof": _proof(self._secret, LISTENER, own, theirs)})
        except RendezvousError:
            stream.close()
            return
        finally:
            with suppress(ValueError):  # It has made room for a newer one.
                self._strangers.remove(stream)
        self._proven.put(Channel(stream, _session(self._secret, own, theirs), LISTENER))


class _Lines:
    """Reads JSON objects, one a line, of at most :data:`MOST_LINE` bytes."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream, self._pending = stream, b""

    def next(self, seconds: float) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while b"\n" not in self._pending:
            if len(self._pending) > MOST_LINE:
                raise RendezvousError(f"a line of more than {MOST_LINE} bytes")
            self._stream.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                data = self._stream.recv(1 << 16)
            except TimeoutError:
                raise RendezvousError(f"no answer within {seconds:g} s") from None
            except OSError as error:
                raise RendezvousError(f"the connection broke: {error.strerror}") from None
            if not data:
                raise RendezvousError("the other end closed the connection")
            self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        return _object(line)


def _object(text: str | bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise RendezvousError("a line that is not of this protocol")
    return found


def _send(stream: socket.socket, message: dict[str, Any]) -> None:
    stream.settimeout(HANDSHAKE_SECONDS)
    try:
        stream.sendall(json.dumps(message).encode() + b"\n")
    except OSError as error:
        raise RendezvousError(f"the connection broke: {error.strerror or error}") from None


def _shut(stream: socket.socket) -> None:
    """Wake who waits for it, too."""
    with suppress(OSError):
        stream.shutdown(socket.SHUT_RDWR)


def _hmac(key: bytes, *parts: str) -> str:
    return hmac.new(key, json.dumps(parts).encode(), hashlib.sha256).hexdigest()


def _proof(secret: str, role: str, listener: str, connector: str) -> str:
    return _hmac(secret.encode(), "proof", role, listener, connector)


def _session(secret: str, listener: str, connector: str) -> bytes:
    return _hmac(secret.encode(), "session", listener, connector).encode()


def _code(key: bytes, role: str, number: int, text: str) -> str:
    return _hmac(key, role, str(number), text)
