"""Child processes that answer requests, JSON lines in and JSON lines out."""

from __future__ import annotations

import json
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from pipemorph.errors import PipeMorphError, one_line

START_SECONDS = 60.0
ANSWER_SECONDS = 180.0
"""Longest wait for an answer: a device gives up a write after a few seconds."""
MAX_LINE = 1 << 20


class ProbeError(PipeMorphError):
    """A host could not carry out a request."""


class JsonProcess:
    """A running program that has written its first line. Raises :class:`ProbeError`."""

    def __init__(self, command: Sequence[str]) -> None:
        self._pending, self._last_error = b"", ""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        # A socket in place of pipes: reads have a timeout.
        self._socket, theirs = socket.socketpair()
        end = theirs.fileno()
        try:
            # A new session: Ctrl-C reaches only the command, which ends the process.
            self._process = subprocess.Popen(
                command, stdin=end, stdout=end, stderr=self._errors, start_new_session=True
            )
        except OSError as error:
            self._socket.close()
            self._errors.close()
            raise ProbeError(f"{command[0]} cannot be run: {error.strerror}") from None
        finally:
            theirs.close()
        try:
            self._receive_response(START_SECONDS)
        except ProbeError:
            self.close()
            raise

    def send_request(self, request: dict[str, Any]) -> dict[str, Any]:
        """The result of a request. Raises :class:`ProbeError`."""
        with suppress(OSError):  # The process has ended: the read reports it.
            self._socket.sendall(json.dumps(request).encode() + b"\n")
        return self._receive_response(ANSWER_SECONDS)

    def _receive_response(self, seconds: float) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while b"\n" not in self._pending and len(self._pending) <= MAX_LINE:
            try:
                self._socket.settimeout(max(0.001, deadline - time.monotonic()))
                data = self._socket.recv(1 << 16)
            except TimeoutError:
                self.close()
                raise ProbeError(f"no answer within {seconds:g} s") from None
            except OSError:  # It was closed here, or has ended with a line unread.
                data = b""
            if not data:
                raise ProbeError(self._describe_exit())
            self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise ProbeError(f"wrote {one_line(line[:200].decode(errors='replace'))!r}")
        if "error" in found:
            raise ProbeError(one_line(str(found["error"])))
        return found

    def _describe_exit(self) -> str:
        """The status of the ended process, with the last line of its errors."""
        self.close()
        return f"ended with status {self._process.returncode}{self._last_error}"

    def close(self) -> None:
        """End the program, and with it its queue pairs."""
        self._socket.close()
        # A process that closed its output is about to end with a status of its own.
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(0.5)
        self._process.kill()
        self._process.wait()
        if not self._errors.closed:
            self._errors.seek(0)
            lines = self._errors.read(MAX_LINE).decode(errors="replace").splitlines()
            self._last_error = f": {one_line(lines[-1])}" if lines else ""
            self._errors.close()
