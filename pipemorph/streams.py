"""Standard streams of a command that are closed, or cannot be written any more."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TextIO


def open_closed() -> None:
    """Open /dev/null as standard input or error where it is closed: else the next file that is
    opened would be it, in every process that is started, too."""
    for number in (0, 2):
        try:
            os.fstat(number)
        except OSError:
            _become_null(number)
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.dup(2), "w", errors="backslashreplace")


def silence(stream: TextIO) -> None:
    """Redirect a stream that cannot be written to /dev/null: else Python reports it at exit."""
    with contextlib.suppress(OSError):  # Of a stream that is no file.
        _become_null(stream.fileno())


def _become_null(number: int) -> None:
    opened = os.open(os.devnull, os.O_RDWR)
    os.dup2(opened, number)
    os.set_inheritable(number, True)
    if opened != number:
        os.close(opened)
