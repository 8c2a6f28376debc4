"""Tells the host how many iterations this rank has finished, so that it finds ranks that hang, and
knows after a failure whether there was a further one."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
from pathlib import Path

from pipemorph.errors import InputError
from pipemorph.exits import note_file, progress_bytes, progress_file

_STDERR = 2


def leave_note(folder: Path | None, rank: int, text: str) -> None:
    """Leave a line for the output of this rank's host, also before an agent has begun. ``folder``:
    as of :class:`Progress`."""
    if folder is not None:
        unfinished = folder / f"unfinished.{note_file(rank)}"
        with contextlib.suppress(OSError):  # The log of the rank has it, too.
            unfinished.write_text(text)
            unfinished.rename(folder / note_file(rank))


class Progress:
    """A count in a file in ``folder``. From now on this process prints the
    stacks of its threads on SIGQUIT, unless the script handles that.

    Raises :class:`InputError` if the file cannot be made.
    """

    def __init__(self, folder: Path, rank: int, finished: int) -> None:
        self._first = finished
        path = folder / progress_file(rank)
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self.finished(finished)
        except OSError as error:
            raise InputError(
                f"PIPEMORPH_PROGRESS_DIR: {path} cannot be written: {error.strerror}; expected a"
                " folder of this rank's host"
            ) from None
        if signal.getsignal(signal.SIGQUIT) is signal.SIG_DFL:
            faulthandler.register(signal.SIGQUIT, file=_STDERR, all_threads=True)

    def finished(self, iterations: int) -> None:
        os.pwrite(self._file, progress_bytes(iterations, self._first), 0)

    def close(self) -> None:
        """The count stays as it is. Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
