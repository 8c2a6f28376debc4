"""Destinations of a rank's output: its own file, or the host's output line by line."""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections import deque
from pathlib import Path
from typing import BinaryIO, Protocol

TAIL_BYTES = 64 << 10
"""Most bytes of a rank's last lines that the host holds."""
LONGEST_LINE = 16 << 10
"""Length of a line, in bytes, from which the host does not wait for its end."""
SHOWN_BYTES = 4 << 10
"""Most bytes that the host reads of a line in a file: longer lines are cut."""
MOST_BYTES = 32 << 20
"""Most bytes of a file in which the host searches for :data:`TAIL_BYTES` of such lines."""
READ_BYTES = 64 << 10


class RankLog(Protocol):
    """Output of a rank in one attempt."""

    def open_output(self) -> int:
        """Open a file descriptor for the rank to write to; the caller closes it after the start."""

    def read_last_lines(self) -> list[str]:
        """The last lines, at most :data:`TAIL_BYTES`, or the error in reading them."""

    def wait_complete(self) -> None:
        """Wait until the output of a rank that has ended is complete."""


class RankFileLog:
    """Appends to a file, which holds everything. ``str()``: its path."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._start = path.stat().st_size if path.exists() else 0

    def open_output(self) -> int:
        # The folder of an earlier generation's logs may have been removed.
        self._path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def read_last_lines(self) -> list[str]:
        try:
            with self._path.open("rb") as file:
                found = self._read_tail(file)
        except OSError as error:
            return [f"{self} cannot be read: {error.strerror}"]
        lines, room = [], TAIL_BYTES
        for line in reversed(found.splitlines()):
            cut = line[:SHOWN_BYTES] + (b"..." if len(line) > SHOWN_BYTES else b"")
            room -= len(cut)
            if room < 0:
                break
            lines.append(cut.decode(errors="replace"))
        return lines[::-1]

    def _read_tail(self, file: BinaryIO) -> bytes:
        """The end of the file, with at least :data:`TAIL_BYTES` of lines as they are cut."""
        end = file.seek(0, os.SEEK_END)
        start = self._start if end >= self._start else 0  # Shorter: it was truncated.
        size = TAIL_BYTES
        while True:
            file.seek(max(start, end - size))
            found = file.read(size)
            shown = sum(min(len(line), SHOWN_BYTES) for line in found.splitlines())
            if shown >= TAIL_BYTES or size >= min(end - start, MOST_BYTES):
                return found
            size *= 8

    def wait_complete(self) -> None:
        """Do nothing: the rank writes to the file itself."""

    def __str__(self) -> str:
        return str(self._path)


class PrefixedRankLog:
    """Copies each line to ``output`` with a prefix, and holds the last ones.

    For hosts whose own output is stored, as in a pod: ranks that share it would mix their lines.
    ``str()``: how to find the rank's lines.
    """

    _writing = threading.Lock()
    """Lock of all logs, since they share an output."""

    def __init__(self, prefix: str, output: BinaryIO) -> None:
        self._prefix, self._output = prefix, output
        self._tail: deque[bytes] = deque()
        self._tail_bytes = 0
        self._lock = threading.Lock()
        self._partial = b""
        """Beginning of a line whose end has not arrived yet."""
        self._continues = False
        """True if :attr:`_partial` continues a line whose beginning was written."""
        self._reading = -1
        self._ended = False

    def open_output(self) -> int:
        self._reading, writing = os.pipe()
        threading.Thread(target=self._copy_output, name=f"log {self._prefix}", daemon=True).start()
        return writing

    def read_last_lines(self) -> list[str]:
        with self._lock:
            partial = [self._partial] if self._partial and not self._continues else []
            found = [*self._tail, *partial]
        return [line.decode(errors="replace").rstrip("\r") for line in found]

    def wait_complete(self) -> None:
        # Not until the end of the pipe: child processes of the rank may still hold it.
        with self._lock:
            self._drain_pipe()

    def _copy_output(self) -> None:
        while not self._ended:
            select.select([self._reading], [], [])
            with self._lock:
                self._drain_pipe()
        os.close(self._reading)

    def _drain_pipe(self) -> None:
        """Read all data that is in the pipe now. Both threads call it, with the lock."""
        while not self._ended and select.select([self._reading], [], [], 0)[0]:
            chunk = os.read(self._reading, READ_BYTES)
            self._ended = not chunk
            *lines, self._partial = (self._partial + chunk).split(b"\n")
            # Hold only the beginning of a longer line.
            held = lines[self._continues :]
            self._continues &= not lines
            if self._partial and (self._ended or len(self._partial) > LONGEST_LINE):
                held += [] if self._continues else [self._partial]
                lines.append(self._partial)
                self._partial, self._continues = b"", True
            self._retain_lines(held)
            # If the output cannot be written, the rank goes on, and its last lines are held.
            with self._writing, contextlib.suppress(OSError):
                for line in lines:
                    self._output.write(self._prefix.encode() + line + b"\n")
                self._output.flush()

    def _retain_lines(self, lines: list[bytes]) -> None:
        for line in lines:
            self._tail.append(line)
            self._tail_bytes += len(line)
            while self._tail_bytes > TAIL_BYTES:
                self._tail_bytes -= len(self._tail.popleft())

    def __str__(self) -> str:
        prefix = self._prefix.strip()
        return f"lines that begin with {prefix}" if prefix else "the log of this pod"
