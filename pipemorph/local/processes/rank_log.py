"""Where the output of a rank goes: to a file of its own, or to the host's output line by line."""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from pathlib import Path
from typing import BinaryIO, Protocol

KEPT_BYTES = 64 << 10
"""Most bytes of a rank's last lines that the host reads."""
LONGEST_LINE = 16 << 10
"""Bytes of one line after which the host does not wait for its end."""
READ_BYTES = 64 << 10


class RankLog(Protocol):
    """The output of one rank in one attempt."""

    def open(self) -> int:
        """A file descriptor to write to, for the rank; the caller closes it after the start."""

    def lines(self) -> list[str]:
        """The last lines, at most :data:`KEPT_BYTES`."""

    def finish(self) -> None:
        """Wait until the output of a rank that has ended is complete."""


class FileLog:
    """Appends to a file, which keeps everything. ``str()``: its path."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._start = path.stat().st_size if path.exists() else 0

    def open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def lines(self) -> list[str]:
        with self._path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(self._start, end - KEPT_BYTES))
            return file.read().decode(errors="replace").splitlines()

    def finish(self) -> None:
        """Nothing to do: the rank writes to the file itself."""

    def __str__(self) -> str:
        return str(self._path)


class PrefixedLog:
    """Copies each line to ``output`` with a prefix, and keeps the last ones.

    For hosts whose own output is what is kept, as in a pod: ranks that share it would mix their
    lines. ``str()``: how to find the rank's lines.
    """

    _writing = threading.Lock()
    """Of all logs, since they share an output."""

    def __init__(self, prefix: str, output: BinaryIO) -> None:
        self._prefix, self._output = prefix, output
        self._kept: deque[bytes] = deque()
        self._kept_bytes = 0
        self._lock = threading.Lock()
        self._partial = b""
        """The beginning of a line whose end has not come yet."""
        self._reading = -1
        self._ended = False

    def open(self) -> int:
        self._reading, writing = os.pipe()
        threading.Thread(target=self._copy, name=f"log {self._prefix}", daemon=True).start()
        return writing

    def lines(self) -> list[str]:
        with self._lock:
            found = [*self._kept, self._partial] if self._partial else [*self._kept]
        return [line.decode(errors="replace").rstrip("\r") for line in found]

    def finish(self) -> None:
        # Not until the end of the pipe: child processes of the rank may still hold it.
        with self._lock:
            self._take()

    def _copy(self) -> None:
        while not self._ended:
            select.select([self._reading], [], [])
            with self._lock:
                self._take()
        os.close(self._reading)

    def _take(self) -> None:
        """Take what is in the pipe now. Both threads call it, with the lock."""
        while not self._ended and select.select([self._reading], [], [], 0)[0]:
            chunk = os.read(self._reading, READ_BYTES)
            self._ended = not chunk
            *lines, self._partial = (self._partial + chunk).split(b"\n")
            if self._partial and (self._ended or len(self._partial) > LONGEST_LINE):
                lines.append(self._partial)
                self._partial = b""
            self._write(lines)

    def _write(self, lines: list[bytes]) -> None:
        for line in lines:
            self._kept.append(line)
            self._kept_bytes += len(line)
            while self._kept_bytes > KEPT_BYTES:
                self._kept_bytes -= len(self._kept.popleft())
        with self._writing:
            for line in lines:
                self._output.write(self._prefix.encode() + line + b"\n")
            self._output.flush()

    def __str__(self) -> str:
        return f"lines that begin with {self._prefix.strip()}"
