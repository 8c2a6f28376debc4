"""Requests to the ranks of one host to leave between two iterations, and the ranks' answers.

Requests and answers are files in the folder in which the ranks save their state in memory. A host
of ranks (``pipemorph run``, or the launcher in a pod) exchanges them while the ranks train.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pipemorph.local.processes.memory_folder import MemoryCheckpointFolder
from pipemorph.protocol import ResumedFrom
from pipemorph.spec.layout import RankLayout


class DrainReporter(Protocol):
    """Receives the ranks' answers: a client of the ingest in a pod, or the host of a run."""

    def report_drain_refusal(self, generation: int, why: str) -> None:
        """Report that the ranks do not leave."""

    def report_resumed(self, generation: int, state: ResumedFrom) -> None:
        """Report that the ranks have started with this state; a new layout is in effect."""


class DrainRequests:
    """Drain requests of one host. ``folder``: None if its ranks save no state and cannot leave.
    ``note``: prints a line for the user."""

    def __init__(
        self,
        folder: MemoryCheckpointFolder | None,
        answers: DrainReporter,
        note: Callable[[str], None],
    ) -> None:
        self._folder, self._answers, self._note = folder, answers, note
        self._requested = False
        self._awaits_report = False

    def start_generation(self, *, awaits_report: bool) -> None:
        """Begin a generation. ``awaits_report``: rank 0 is on this host and reports its state."""
        self._requested, self._awaits_report = False, awaits_report

    def exchange_messages(self, generation: int, layout: RankLayout | None) -> None:
        """Report the ranks' answers, and write the request to leave for ``layout``. None: there is
        no request, and an earlier one is withdrawn."""
        folder = self._folder
        if folder is None:
            return
        if self._awaits_report and (state := _read_resumed(folder, generation)) is not None:
            self._awaits_report = False
            self._answers.report_resumed(generation, state)
        # Rank 0 gives the reason not to leave, whichever host sent the request.
        if why := folder.read_drain_refusal(generation):
            folder.clear_drain_refusal(generation)
            self._report_refusal(generation, why)
        if layout is not None and not self._requested:
            try:
                folder.request_drain(generation, layout.layers)
            except OSError as error:
                self._report_refusal(generation, f"cannot write to {folder.root}: {error.strerror}")
                return
        elif layout is None and self._requested:
            folder.withdraw_drain(generation)
        self._requested = layout is not None

    def _report_refusal(self, generation: int, why: str) -> None:
        self._note(f"the ranks do not leave as requested: {why}")
        self._answers.report_drain_refusal(generation, why)


def _read_resumed(folder: MemoryCheckpointFolder, generation: int) -> ResumedFrom | None:
    """State that the ranks reported; None, too, while the report cannot be read, as when this host
    has no free file descriptor."""
    try:
        return folder.read_resumed(generation)
    except OSError:
        return None
