"""Standard streams of a command that are closed, or no longer writable."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TextIO


def open_closed_streams() -> None:
    """Open /dev/null as standard input or error if it is closed. Otherwise the next opened file
    would take its place, also in child processes."""
    for number in (0, 2):
        try:
            os.fstat(number)
        except OSError:
            _redirect_to_null(number)
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.dup(2), "w", errors="backslashreplace")


def silence_stream(stream: TextIO) -> None:
    """Redirect an unwritable stream to /dev/null; otherwise Python reports it at exit."""
    with contextlib.suppress(OSError):  # The stream may be no file.
        _redirect_to_null(stream.fileno())


def _redirect_to_null(number: int) -> None:
    opened = os.open(os.devnull, os.O_RDWR)
    os.dup2(opened, number)
    os.set_inheritable(number, True)
    if opened != number:
        os.close(opened)
