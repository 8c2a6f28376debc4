"""Gateway of the live page: a loopback port of the pod, and the process behind it.

A viewer connects by ``kubectl port-forward`` with the token in the URL. A connection without the
token gets 401. The first viewer with the token starts the process of the page, which gets the
accepted connections and ends by itself when it has no viewers.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import os
import selectors
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from pipemorph.errors import one_line
from pipemorph_trainer.agent.page_feed import SOCKET_VARIABLE

PORT_VARIABLE, TOKEN_VARIABLE = "PIPEMORPH_PAGE_PORT", "PIPEMORPH_PAGE_TOKEN_FILE"
"""Variables that the operator sets: the port, and the file with the token."""
LEAST_TOKEN_BYTES = 16
MOST_WAITING, HEAD_SECONDS, MOST_HEAD_BYTES = 16, 5.0, 8192
"""Limits before the request line has arrived: connections, seconds for the line, and its bytes."""
EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
EXHAUSTED_SECONDS = 1.0
"""Pause of accepting when no file descriptor is free."""
START_PAUSE_SECONDS = 5.0
"""Least time between two starts of the process."""
END_SECONDS = 4.0
"""Time for the process to show viewers that the job is over."""
REFUSED = b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\n"
    b"Connection: close\r\n\r\n"
)
PROCESS = (sys.executable, "-m", "pipemorph_trainer.launcher.page")


class PageGateway:
    """Gateway of the page of a pod, from :meth:`start_listening` until :meth:`close`.

    ``environ``: variables for the ranks, which name the page's socket to the agent.
    """

    def __init__(self, port: int, token: str, folder: Path, note: Callable[[str], None]) -> None:
        self.port = port
        """Port of the listener; with 0, :meth:`start_listening` chooses a free one."""
        self._token, self._folder, self._note = token, folder, note
        self.environ = {SOCKET_VARIABLE: str(folder / "agent")}
        self._listener: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._started_at = float("-inf")
        self._wake, self._woken = socket.socketpair()
        self._ending = self._closing = False
        self._thread = threading.Thread(target=self._serve_connections, name="page", daemon=True)

    @staticmethod
    def from_env(environ: Mapping[str, str], note: Callable[[str], None]) -> PageGateway | None:
        """Make the gateway; None if the operator has not set the variables, or it cannot serve."""
        port, file = environ.get(PORT_VARIABLE, ""), environ.get(TOKEN_VARIABLE)
        if not port.isdecimal() or not file:
            return None
        try:
            token = Path(file).read_text().strip()
            folder = Path(tempfile.mkdtemp(prefix="page-"))
        except OSError as error:
            note(f"no live page: {one_line(str(error))}")
            return None
        if len(token) < LEAST_TOKEN_BYTES:
            note(f"no live page: the token in {file} is too short")
            return None
        return PageGateway(int(port), token, folder, note)

    def start_listening(self) -> None:
        """Start to listen. Idempotent."""
        if self._listener is not None:
            return
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", self.port))
            listener.listen()
        except OSError as error:
            listener.close()
            self._note(
                f"no live page: port {self.port} of 127.0.0.1 cannot be used ({error.strerror})"
            )
            return
        listener.setblocking(False)
        self.port = listener.getsockname()[1]
        self._listener = listener
        self._thread.start()

    def show_restart_cause(self, cause: str) -> None:
        """Show viewers the cause of the restart of the ranks."""
        if self._process is not None:
            self._send_message({"reason": cause})

    def close(self, state: str, reason: str) -> None:
        """Show viewers the end of the job, ``state`` as in the page's document, and stop."""
        self._ending = True
        if self._process is not None:
            self._send_message({"state": state, "reason": reason})
            try:
                self._process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._closing = True
        if self._listener is not None:
            self._wake.send(b"x")
            self._thread.join()
            self._listener.close()
        if self._control is not None:
            self._control.close()
        self._wake.close()
        self._woken.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    # --- connections ------------------------------------------------------------------------

    def _serve_connections(self) -> None:
        assert self._listener is not None
        waiting: dict[socket.socket, tuple[bytearray, float]] = {}
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)

            def stop_waiting_for(connection: socket.socket) -> None:
                selector.unregister(connection)
                del waiting[connection]

            accept_at = 0.0
            while not self._closing:
                if accept_at and time.monotonic() >= accept_at:
                    accept_at = 0.0
                    selector.register(self._listener, selectors.EVENT_READ)
                timeout = EXHAUSTED_SECONDS if accept_at else HEAD_SECONDS if waiting else None
                for key, _ in selector.select(timeout):
                    if key.fileobj is self._listener:
                        try:
                            connection, _ = self._listener.accept()
                        except OSError as error:
                            if error.errno in EXHAUSTED:
                                # The listener is readable: without a pause this thread would spin.
                                selector.unregister(self._listener)
                                accept_at = time.monotonic() + EXHAUSTED_SECONDS
                            continue  # Otherwise the client has disconnected.
                        connection.setblocking(False)
                        selector.register(connection, selectors.EVENT_READ)
                        waiting[connection] = bytearray(), time.monotonic() + HEAD_SECONDS
                    elif isinstance(key.fileobj, socket.socket) and key.fileobj in waiting:
                        done = self._read_request_line(key.fileobj, waiting[key.fileobj][0])
                        if done is not None:
                            stop_waiting_for(key.fileobj)
                            self._answer_connection(key.fileobj, done)
                now = time.monotonic()
                late = [each for each, (_, until) in waiting.items() if now > until]
                for connection in late or list(waiting)[: max(0, len(waiting) - MOST_WAITING)]:
                    stop_waiting_for(connection)
                    connection.close()
            for connection in list(waiting):
                stop_waiting_for(connection)
                connection.close()

    @staticmethod
    def _read_request_line(connection: socket.socket, head: bytearray) -> bytes | None:
        """Read more of a request. Returns it if its first line is whole or too long, else None."""
        try:
            read = connection.recv(MOST_HEAD_BYTES - len(head))
        except BlockingIOError:
            return None
        except OSError:
            return b""
        head += read
        whole = b"\r\n" in head or not read or len(head) >= MOST_HEAD_BYTES
        return bytes(head) if whole else None

    def _answer_connection(self, connection: socket.socket, head: bytes) -> None:
        with connection, contextlib.suppress(OSError):
            if not self._has_token(head):
                connection.send(REFUSED)
            elif not self._pass_to_process(connection, head):
                connection.send(BUSY)

    def _has_token(self, head: bytes) -> bool:
        parts = head.partition(b"\r\n")[0].split(b" ")
        path = parts[1].split(b"/") if len(parts) == 3 else []
        return len(path) == 3 and hmac.compare_digest(path[1], self._token.encode())

    # --- the process ------------------------------------------------------------------------

    def _pass_to_process(self, connection: socket.socket, head: bytes) -> bool:
        """Pass a connection to the process, and start the process if needed. Returns true if it was
        passed."""
        if self._process is None or self._process.poll() is not None:
            if self._ending or time.monotonic() - self._started_at < START_PAUSE_SECONDS:
                return False
            self._start_process()
        return self._send_message({"head": head.decode("latin-1")}, connection)

    def _start_process(self) -> None:
        self._started_at = time.monotonic()
        if self._control is not None:
            self._control.close()
        # SEQPACKET preserves message boundaries; a message has at most one connection.
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [*PROCESS, str(theirs.fileno())],
                stdin=subprocess.PIPE, pass_fds=[theirs.fileno()],
                env={**os.environ, **self.environ},
            )  # fmt: skip
        assert self._process.stdin is not None
        with contextlib.suppress(OSError), self._process.stdin as stdin:
            stdin.write(self._token.encode())

    def _send_message(
        self, message: dict[str, str], connection: socket.socket | None = None
    ) -> bool:
        assert self._control is not None
        fds = [] if connection is None else [connection.fileno()]
        try:
            socket.send_fds(self._control, [json.dumps(message).encode()], fds, socket.MSG_DONTWAIT)
        except OSError:
            return False  # The process has ended, or has not read earlier messages.
        return True
