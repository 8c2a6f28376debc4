"""Writes a command's output to a file or to stdout."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pipemorph.errors import InputError, one_line


def emit(data: bytes, out: str | None) -> None:
    """Write ``data`` to the file ``out``; None: to stdout.

    Raises :class:`InputError` if the write fails, BrokenPipeError if stdout's reader has closed it.
    """
    if out is None:
        try:
            sys.stdout.buffer.write(data)
            sys.stdout.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            silence_stdout()
            raise InputError(f"cannot write standard output: {error.strerror}") from None
        return
    if not out:
        raise InputError("--out is empty; name a file")
    try:
        Path(out).write_bytes(data)
    except OSError as error:
        raise InputError(f"cannot write {one_line(out)}: {error.strerror}") from None


def silence_stdout() -> None:
    """Redirect a closed stdout to /dev/null: else Python reports the error again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
