"""Writes a command's output to a file or to stdout."""

from __future__ import annotations

import sys
from pathlib import Path

from pipemorph.errors import InputError, one_line
from pipemorph.streams import silence


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
            silence(sys.stdout)
            raise InputError(f"cannot write standard output: {error.strerror}") from None
        return
    if not out:
        raise InputError("--out is empty; name a file")
    try:
        Path(out).write_bytes(data)
    except OSError as error:
        raise InputError(f"cannot write {one_line(out)}: {error.strerror}") from None
