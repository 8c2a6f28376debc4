"""What is on the screen of a terminal that was sent so much: as much of one as the commands use."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence

PARTS = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|([\r\n])|([^\x1b\r\n]+)")


class Screen:
    """``lines``: what is on it, from the top; ``scrolled``: lines above it; ``wrapped``: lines that
    were longer than it is wide. Raises :class:`ValueError` for an unknown sequence."""

    def __init__(self, rows: int, columns: int) -> None:
        self.rows, self.columns = rows, columns
        self.lines = [""] * rows
        self.scrolled: list[str] = []
        self.wrapped: list[str] = []
        self._at = (0, 0)
        self._rest = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    def __str__(self) -> str:
        return "\n".join(line.rstrip() for line in self.lines).rstrip()

    @property
    def whole(self) -> list[str]:
        """All lines, also those above the screen."""
        return [*self.scrolled, *str(self).split("\n")]

    def feed(self, sent: bytes) -> None:
        text = self._rest + self._decoder.decode(sent)
        # A sequence that has not come whole yet.
        begun = re.search(r"\x1b(\[[0-9;?]*)?$", text)
        text, self._rest = (text[: begun.start()], begun[0]) if begun else (text, "")
        at = 0
        for found in PARTS.finditer(text):
            if found.start() != at:
                break
            at = found.end()
            given, command, control, words = found.groups()
            if command:
                self._obey(command, given)
            elif control == "\r":
                self._at = self._at[0], 0
            elif control == "\n":
                self._next_line()
            else:
                self._write(words)
        if at != len(text):
            raise ValueError(f"no such sequence: {text[at : at + 12]!r}")

    def _obey(self, command: str, given: str) -> None:
        match command, given:
            case "H", "":
                self._at = 0, 0
            case "J", "2":
                self.lines = [""] * self.rows
            case "K", "2":
                self.lines[self._at[0]] = ""
            case _:
                raise ValueError(f"no such sequence: ESC[{given}{command}")

    def _next_line(self) -> None:
        row, column = self._at
        if row + 1 < self.rows:
            self._at = row + 1, column
            return
        self.scrolled.append(self.lines.pop(0).rstrip())
        self.lines.append("")

    def _write(self, text: str) -> None:
        for character in text:
            row, column = self._at
            if column == self.columns:
                self.wrapped.append(self.lines[row])
                self._at = row, 0
                self._next_line()
                row, column = self._at
            line = self.lines[row].ljust(column)
            self.lines[row] = line[:column] + character + line[column + 1 :]
            self._at = row, column + 1


class Terminal:
    """A program on a real terminal, whose :attr:`screen` a test can see. A context manager."""

    def __init__(
        self, command: Sequence[str], rows: int, columns: int, environment: Mapping[str, str]
    ) -> None:
        self.screen = Screen(rows, columns)
        self._master, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        kept = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
        self.program = subprocess.Popen(
            command, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True,
            env={**kept, "TERM": "xterm-256color", "PYTHONUTF8": "1", **environment},
        )  # fmt: skip
        os.close(terminal)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.program.poll() is None:
            self.program.kill()
        self.program.wait()
        os.close(self._master)

    def until(self, shown: Callable[[str], object], seconds: float) -> str:
        """What is on the screen as soon as ``shown`` is true of it."""
        deadline = time.monotonic() + seconds
        while not shown(str(self.screen)):
            assert self._read(deadline), f"it has ended, and shows\n{self.screen}"
        return str(self.screen)

    def ended(self, seconds: float) -> int:
        """Its exit status, after all that it has written."""
        deadline = time.monotonic() + seconds
        while self._read(deadline):
            pass
        return self.program.wait(seconds)

    def _read(self, deadline: float) -> bool:
        """Whether it has written more. Fails if it does not within its time."""
        left = deadline - time.monotonic()
        ready = left > 0 and select.select([self._master], [], [], left)[0]
        assert ready, f"not in time; it shows\n{self.screen}"
        try:
            sent = os.read(self._master, 1 << 16)
        except OSError:  # EIO: nobody has the other end open any more.
            return False
        self.screen.feed(sent)
        return bool(sent)
