"""Requests to the ranks of one host to leave between two iterations, and their answers, by files in
the folder of their copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pipemorph.api.layout import RankLayout
from pipemorph.local.processes.kept import KeptFolder
from pipemorph.wire import ResumedFrom


class Answers(Protocol):
    """Receives what ranks answer: the ingest's, in a pod, or that of the run."""

    def stays(self, generation: int, why: str) -> None:
        """The ranks go on as they are."""

    def resumed(self, generation: int, word: ResumedFrom) -> None:
        """The ranks have begun with this state; a new layout counts."""


class LeaveRequests:
    """The requests of one host. ``kept``: None if its ranks keep nothing, and cannot leave."""

    def __init__(
        self, kept: KeptFolder | None, answers: Answers, note: Callable[[str], None]
    ) -> None:
        self._kept, self._answers, self._note = kept, answers, note
        self._asked = False
        self._awaits_word = False

    def begin(self, *, word: bool) -> None:
        """Ranks start. ``word``: rank 0 is one of them, and says what they began with."""
        self._asked, self._awaits_word = False, word

    def look(self, generation: int, leaves: RankLayout | None) -> None:
        """Pass on what the ranks have answered, and whether they are to leave, and for which
        layout; None: they are not."""
        kept = self._kept
        if kept is None:
            return
        if self._awaits_word and (word := _resumed(kept, generation)) is not None:
            self._awaits_word = False
            self._answers.resumed(generation, word)
        # Rank 0 says why they go on as they are, whichever host has asked them.
        if why := kept.stay(generation):
            kept.forget_stay(generation)
            self._stays(generation, why)
        if leaves is not None and not self._asked:
            try:
                kept.ask_to_leave(generation, leaves.layers)
            except OSError as error:
                self._stays(generation, f"they cannot be told: {kept.root}: {error.strerror}")
                return
        elif leaves is None and self._asked:
            kept.stop_asking(generation)
        self._asked = leaves is not None

    def _stays(self, generation: int, why: str) -> None:
        self._note(f"the ranks do not leave, as they were to: {why}")
        self._answers.stays(generation, why)


def _resumed(kept: KeptFolder, generation: int) -> ResumedFrom | None:
    """None, too, if it cannot be read now, as while this host may open no more files."""
    try:
        return kept.resumed(generation)
    except OSError:
        return None
