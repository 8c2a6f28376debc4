"""Where the output of a rank goes: to a file of its own, or to the host's output line by line."""

from __future__ import annotations

import contextlib
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
SHOWN_BYTES = 4 << 10
"""Bytes of one line that the host reads of a file: the rest of a longer one is cut."""
MOST_BYTES = 32 << 20
"""Bytes of a file that the host looks through for :data:`KEPT_BYTES` of such lines."""
READ_BYTES = 64 << 10


class RankLog(Protocol):
    """The output of one rank in one attempt."""

    def open(self) -> int:
        """A file descriptor to write to, for the rank; the caller closes it after the start."""

    def lines(self) -> list[str]:
        """The last lines, at most :data:`KEPT_BYTES`, or why they cannot be read."""

    def finish(self) -> None:
        """Wait until the output of a rank that has ended is complete."""


class FileLog:
    """Appends to a file, which keeps everything. ``str()``: its path."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._start = path.stat().st_size if path.exists() else 0

    def open(self) -> int:
        # Somebody may have removed the folder of an earlier generation's logs.
        self._path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def lines(self) -> list[str]:
        try:
            with self._path.open("rb") as file:
                found = self._last(file)
        except OSError as error:
            return [f"{self} cannot be read: {error.strerror}"]
        lines, room = [], KEPT_BYTES
        for line in reversed(found.splitlines()):
            cut = line[:SHOWN_BYTES] + (b"..." if len(line) > SHOWN_BYTES else b"")
            room -= len(cut)
            if room < 0:
                break
            lines.append(cut.decode(errors="replace"))
        return lines[::-1]

    def _last(self, file: BinaryIO) -> bytes:
        """The end of the file, with at least :data:`KEPT_BYTES` of lines as they are cut."""
        end = file.seek(0, os.SEEK_END)
        start = self._start if end >= self._start else 0  # Shorter: it was truncated.
        size = KEPT_BYTES
        while True:
            file.seek(max(start, end - size))
            found = file.read(size)
            kept = sum(min(len(line), SHOWN_BYTES) for line in found.splitlines())
            if kept >= KEPT_BYTES or size >= min(end - start, MOST_BYTES):
                return found
            size *= 8

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
        self._continues = False
        """Whether it is the rest of a line of which the beginning was written."""
        self._reading = -1
        self._ended = False

    def open(self) -> int:
        self._reading, writing = os.pipe()
        threading.Thread(target=self._copy, name=f"log {self._prefix}", daemon=True).start()
        return writing

    def lines(self) -> list[str]:
        with self._lock:
            partial = [self._partial] if self._partial and not self._continues else []
            found = [*self._kept, *partial]
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
            # Of a line that is longer, the beginning is kept.
            kept = lines[self._continues :]
            self._continues &= not lines
            if self._partial and (self._ended or len(self._partial) > LONGEST_LINE):
                kept += [] if self._continues else [self._partial]
                lines.append(self._partial)
                self._partial, self._continues = b"", True
            self._keep(kept)
            # The rank goes on, and its last lines are kept, where this output cannot be written.
            with self._writing, contextlib.suppress(OSError):
                for line in lines:
                    self._output.write(self._prefix.encode() + line + b"\n")
                self._output.flush()

    def _keep(self, lines: list[bytes]) -> None:
        for line in lines:
            self._kept.append(line)
            self._kept_bytes += len(line)
            while self._kept_bytes > KEPT_BYTES:
                self._kept_bytes -= len(self._kept.popleft())

    def __str__(self) -> str:
        return f"lines that begin with {self._prefix.strip()}"
