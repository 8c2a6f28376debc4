"""Signals, exit codes and files by which hosts and ranks agree on the end of a rank."""

from __future__ import annotations

import os
import signal

ABORT_SIGNAL = signal.SIGUSR2
"""Signal that ends a rank at once: another one has failed. SIGTERM lets it save before it ends."""

EXIT_SAVED = os.EX_TEMPFAIL
"""Exit code of a rank that has saved at a request to end, with all others: nothing is lost and
nothing has failed; it can be started again."""

EXIT_NO_RESTART = os.EX_SOFTWARE
"""Exit code of a pod whose job must not restart: an exception was raised twice at one iteration."""

EXIT_SIGKILL, EXIT_SIGTERM = 128 + signal.SIGKILL, 128 + signal.SIGTERM
"""Exit codes of a pod: as of the kernel's out-of-memory killer, and as of a request to end."""
POD_LOST_EXITS = (EXIT_SAVED, EXIT_SIGKILL, EXIT_SIGTERM)
"""Exit codes of a pod with a launcher that mean that only this pod is lost: the host makes another
pod, which joins the others. Launchers never exit with one of them for a failure of their ranks."""

EXIT_DRAINED = 76
"""Exit code of ranks that have all stopped at one iteration, each with a copy of its state, to
continue with another layout: at other places, or with other layers."""

TRIAL_ITERATIONS = 2
"""Iterations that ranks have to finish with new layers before these count, and rank 0 reports it.
When the second is over, every rank has done the optimizer's step of the first. Until a rank begins
the third, all hold the previous layers as well."""

LAYERS_FIXED_PREFIX = "the parts of the model cannot change: "
"""Beginning of a :func:`drain_refusal_file_name` of ranks that can never change their layers."""


PROGRESS_BYTES = 16
"""Size of a progress file."""


def progress_file_name(rank: int) -> str:
    """Name of the file in a folder of the host to which a rank writes its finished iterations,
    see :func:`encode_progress`. A rank that has created it prints its stacks on SIGQUIT."""
    return f"progress.rank-{rank}"


def note_file_name(rank: int) -> str:
    """Name of the file in that folder to which a rank writes a line for its host to show."""
    return f"note.rank-{rank}"


def encode_progress(finished: int, first: int) -> bytes:
    """Content of a progress file: the iterations of the job that are ``finished`` for this rank,
    and the number of them with which it started, ``first``."""
    return finished.to_bytes(8, "little") + first.to_bytes(8, "little")


def decode_progress(written: bytes) -> tuple[int, int] | None:
    """``finished`` and ``first`` of a progress file; None if they are not written yet."""
    if len(written) < PROGRESS_BYTES:
        return None
    return int.from_bytes(written[:8], "little"), int.from_bytes(written[8:16], "little")


def drain_request_file_name(generation: int) -> str:
    """Name of the file, in the folder of the ranks' copies, by which a host requests that the ranks
    of a generation stop for another layout. Content: layers of each stage as JSON, or nothing."""
    return f"leave.generation-{generation}"


def drain_refusal_file_name(generation: int) -> str:
    """Name of the file with the ranks' reason not to stop, or with the reason why ranks with a new
    layout failed if other layers would fail, too."""
    return f"stay.generation-{generation}"
