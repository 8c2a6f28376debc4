"""Requests that the ranks of a generation leave between two iterations: for replicas of which all
pods are there again, or for another layout. Pure.

Ranks that are asked may stay, and say why. Whoever asked them in vain asks them again later, if at
all.
"""

from __future__ import annotations

from math import inf

from pipemorph.api.layout import RankLayout
from pipemorph.control.pods.layouts import Layouts

LEAVE_SECONDS = 600.0
"""Of ranks that are to leave: how long to wait while nothing is heard of them."""
STAY_SECONDS = 60.0
"""Ranks that could not leave are asked again after so long."""


class Leaving:
    """The requests of one job. ``layouts``: has the layout that its ranks are to leave for. Times:
    wall clock, seconds."""

    def __init__(self, layouts: Layouts) -> None:
        self._layouts = layouts
        self.begin_generation()

    def begin_generation(self) -> None:
        self.asked = False
        """Whether the ranks are to leave."""
        self._heard_of = -inf
        """When anything was heard of ranks of this generation, or they were first to leave."""
        self._asked_at = inf
        """When they were asked to leave for another layout."""
        self._stays: tuple[str, float] | None = None
        """Why the ranks could not leave, and when they said so."""

    @property
    def stays(self) -> str:
        """Why the ranks have not left, as they were asked to last; empty if they could."""
        return self._stays[0] if self._stays is not None else ""

    @property
    def reason(self) -> str:
        """Why a generation of which no rank has failed is over."""
        if self._layouts.asked:
            return f"the ranks leave for {self._layouts.asked}"
        return "a replica can join" if self.asked else "it is over"

    @property
    def _for_layout(self) -> bool:
        return self.asked and bool(self._layouts.asked)

    def heard(self, now: float) -> None:
        """Take that something is heard of ranks of this generation."""
        self._heard_of = max(self._heard_of, now)

    def for_layout(
        self, layout: RankLayout, now: float, promised: float | None, *, undoes: bool
    ) -> None:
        """Ask them to leave for a layout. ``promised``: the part of an iteration that this is
        expected to save, if it is known; ``undoes``: as of :attr:`Layouts.undoes`."""
        self.asked, self._stays, self._asked_at = True, None, now
        self._layouts.ask(layout, promised, undoes=undoes)

    def for_replicas(self, now: float) -> None:
        """Ask them to leave for replicas of which all pods are there."""
        self.asked, self._heard_of = True, now

    def stay(self, why: str, now: float) -> None:
        """Take that they go on as they are."""
        self.asked, self._stays = False, (why, now)
        self._layouts.begin_generation()

    def left_by(self) -> float:
        """Until when they have to begin to leave for another layout."""
        return self._asked_at + LEAVE_SECONDS if self._for_layout else inf

    def silent_at(self) -> float:
        """When ranks that are to leave for replicas have been silent for too long. Nobody waits
        for ranks that leave for another layout."""
        return self._heard_of + LEAVE_SECONDS if self.asked and not self._for_layout else inf

    def again_at(self) -> float:
        """From when on ranks that stayed may be asked for replicas again."""
        return -inf if self._stays is None else self._stays[1] + STAY_SECONDS
