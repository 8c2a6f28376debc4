"""Number of iterations that this rank has finished. The host uses it to detect ranks that hang, and
to count the finished iterations after a failure."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
from pathlib import Path

from pipemorph.errors import InputError
from pipemorph.exits import encode_progress, note_file_name, progress_file_name

_STDERR = 2


def write_note(folder: Path | None, rank: int, text: str) -> None:
    """Write a line for the output of this rank's host, which needs no agent. ``folder``: as in
    :class:`ProgressFile`."""
    if folder is not None:
        unfinished = folder / f"unfinished.{note_file_name(rank)}"
        with contextlib.suppress(OSError):  # The log of the rank has the line as well.
            unfinished.write_text(text)
            unfinished.rename(folder / note_file_name(rank))


class ProgressFile:
    """File in ``folder`` with the number of finished iterations. Also makes this process print the
    stacks of its threads on SIGQUIT, unless the script handles that signal.

    Raises :class:`InputError` if the file cannot be made.
    """

    def __init__(self, folder: Path, rank: int, finished: int) -> None:
        self._first = finished
        path = folder / progress_file_name(rank)
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self.record_finished(finished)
        except OSError as error:
            raise InputError(
                f"PIPEMORPH_PROGRESS_DIR: {path} cannot be written: {error.strerror}; expected a"
                " folder of this rank's host"
            ) from None
        if signal.getsignal(signal.SIGQUIT) is signal.SIG_DFL:
            faulthandler.register(signal.SIGQUIT, file=_STDERR, all_threads=True)

    def record_finished(self, iterations: int) -> None:
        os.pwrite(self._file, encode_progress(iterations, self._first), 0)

    def close(self) -> None:
        """Close the file; the count stays. Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
