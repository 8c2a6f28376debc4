"""A program on a real terminal, and what is on its screen."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence

import pyte


class Screen(pyte.HistoryScreen):  # type: ignore[misc]  # pyte has no types.
    """``str()`` of it is what it shows."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__(columns, rows, history=10_000)
        self._stream = pyte.ByteStream(self)

    def __str__(self) -> str:
        return "\n".join(line.rstrip() for line in self.display).rstrip()

    @property
    def whole(self) -> list[str]:
        """Lines of the terminal, also those above the screen."""
        above = ("".join(line[i].data for i in range(self.columns)) for line in self.history.top)
        return [*(line.rstrip() for line in above), *str(self).split("\n")]

    def feed(self, sent: bytes) -> None:
        self._stream.feed(sent)


class Terminal:
    """A program on a real terminal, whose :attr:`screen` a test can see. A context manager."""

    def __init__(
        self, command: Sequence[str], rows: int, columns: int, environment: Mapping[str, str]
    ) -> None:
        self.screen = Screen(rows, columns)
        self._master, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        inherited = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
        self.program = subprocess.Popen(
            command, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True,
            env={**inherited, "TERM": "xterm-256color", "PYTHONUTF8": "1", **environment},
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
        """Text of the screen as soon as ``shown`` is true of it."""
        deadline = time.monotonic() + seconds
        while not shown(str(self.screen)):
            assert self._read(deadline), f"it has ended, and shows\n{self.screen}"
        return str(self.screen)

    def ended(self, seconds: float) -> int:
        """Exit status, after all output."""
        deadline = time.monotonic() + seconds
        while self._read(deadline):
            pass
        return self.program.wait(seconds)

    def _read(self, deadline: float) -> bool:
        """Read more output. Returns false at the end. Fails at the deadline."""
        remaining = deadline - time.monotonic()
        ready = remaining > 0 and select.select([self._master], [], [], remaining)[0]
        assert ready, f"not in time; it shows\n{self.screen}"
        try:
            sent = os.read(self._master, 1 << 16)
        except OSError:  # EIO: the other end is closed.
            return False
        self.screen.feed(sent)
        return bool(sent)
