"""How hosts and ranks agree on the end of a rank: signals, exit codes and files."""

from __future__ import annotations

import os
import signal

END_NOW = signal.SIGUSR2
"""Ends a rank at once: another one has failed. SIGTERM lets it save before it ends."""

EXIT_SAVED = os.EX_TEMPFAIL
"""A rank's exit code after it was asked to end and has saved, as all others have: nothing is lost,
and nothing has failed; to be tried again."""

EXIT_NO_MORE = os.EX_SOFTWARE
"""Exit code of a pod whose job must not be started again: the same exception came twice at one
iteration."""

EXIT_SIGKILL, EXIT_SIGTERM = 128 + signal.SIGKILL, 128 + signal.SIGTERM
"""Of a pod: as by the kernel's out-of-memory killer, and as it was asked to end."""
EXITS_LOST = (EXIT_SAVED, EXIT_SIGKILL, EXIT_SIGTERM)
"""Exit codes of a pod with a launcher that mean that this pod is lost, and no other one: the host
makes another pod, which joins the others. Launchers end with none of them for their ranks."""

EXIT_MOVES = 76
"""A rank's exit code after all have left at one iteration, each with a copy of its state, to go on
at other places or with other parts."""

TRIAL_ITERATIONS = 2
"""Iterations that ranks have to finish with new parts of the model before these count, and rank 0
says so. When the second is over, every rank has taken the optimizer's step after the first. Until
a rank begins the one after the next, all have the parts before as well."""

PARTS_STAY = "the parts of the model cannot change: "
"""What :func:`stay_file` begins with if ranks do not leave for other parts, and never would."""


PROGRESS_BYTES = 16


def progress_file(rank: int) -> str:
    """Name of the file, in a folder of the host's, in which a rank says how many iterations are
    finished: :func:`progress_bytes`. A rank that has made it prints its stacks on SIGQUIT."""
    return f"progress.rank-{rank}"


def note_file(rank: int) -> str:
    """Name of the file, in the same folder, in which a rank leaves a line for its host to show."""
    return f"note.rank-{rank}"


def progress_bytes(finished: int, first: int) -> bytes:
    """The content of that file: the iterations of the job that are finished for this rank, and
    ``first``, those of them that it began with."""
    return finished.to_bytes(8, "little") + first.to_bytes(8, "little")


def progress_of(written: bytes) -> tuple[int, int] | None:
    """``finished`` and ``first`` of a file's content; None if they are not there yet."""
    if len(written) < PROGRESS_BYTES:
        return None
    return int.from_bytes(written[:8], "little"), int.from_bytes(written[8:16], "little")


def leave_file(generation: int) -> str:
    """Name of the file, in the folder of the ranks' copies, by which a host asks the ranks of a
    generation to leave: for other places, or with how many layers each stage is to hold, as JSON,
    for other parts."""
    return f"leave.generation-{generation}"


def stay_file(generation: int) -> str:
    """Name of the file in which they say why they do not, or why ranks of a new layout failed if no
    other parts would do."""
    return f"stay.generation-{generation}"
