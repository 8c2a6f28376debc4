"""Who asks the ranks of a generation to leave between two iterations, and for what: for replicas of
which all pods are there again, or for other layers. Pure.

Ranks that are asked may stay, and say why. Whoever asked them in vain asks them again later, if at
all.
"""

from __future__ import annotations

from math import inf

from pipemorph.control.pods.splits import Split, Splits, named

LEAVE_SECONDS = 600.0
"""Of ranks that are to leave: how long to wait while nothing is heard of them."""
STAY_SECONDS = 60.0
"""Ranks that could not leave are asked again after so long."""


class Leaving:
    """Of one job. ``splits``: has the layers that its ranks are to leave for. Times: wall clock,
    seconds."""

    def __init__(self, splits: Splits) -> None:
        self._splits = splits
        self.begin_generation()

    def begin_generation(self) -> None:
        self.asked = False
        """Whether the ranks are to leave."""
        self._heard_of = -inf
        """When anything was heard of ranks of this generation, or they were first to leave."""
        self._asked_at = inf
        """When they were asked to leave for other layers."""
        self._stays: tuple[str, float] | None = None
        """Why the ranks could not leave, and when they said so."""

    @property
    def stays(self) -> str:
        """Why the ranks have not left, as they were asked to last; empty if they could."""
        return self._stays[0] if self._stays is not None else ""

    @property
    def reason(self) -> str:
        """Why a generation of which no rank has failed is over."""
        if self._splits.asked:
            return f"the ranks leave for {named(self._splits.asked)}"
        return "a replica can join" if self.asked else "it is over"

    @property
    def _for_layers(self) -> bool:
        return self.asked and bool(self._splits.asked)

    def heard(self, now: float) -> None:
        """Take that something is heard of ranks of this generation."""
        self._heard_of = max(self._heard_of, now)

    def for_layers(self, layers: Split, now: float, promised: float | None) -> None:
        """Ask them to leave for these: numbers of layers of all stages. ``promised``: the part of
        an iteration that this is expected to save, if it is known."""
        self.asked, self._stays, self._splits.asked = True, None, layers
        self._splits.promised = promised
        self._asked_at = now

    def for_replicas(self, now: float) -> None:
        """Ask them to leave for replicas of which all pods are there."""
        self.asked, self._heard_of = True, now

    def stay(self, why: str, now: float) -> None:
        """Take that they go on as they are."""
        self.asked, self._stays, self._splits.asked = False, (why, now), ()
        self._splits.promised = None

    def left_by(self) -> float:
        """Until when they have to begin to leave for other layers."""
        return self._asked_at + LEAVE_SECONDS if self._for_layers else inf

    def silent_at(self) -> float:
        """When ranks that are to leave for replicas have been silent for too long. Nobody waits
        for ranks that leave for other layers."""
        return self._heard_of + LEAVE_SECONDS if self.asked and not self._for_layers else inf

    def again_at(self) -> float:
        """From when on ranks that stayed may be asked for replicas again."""
        return -inf if self._stays is None else self._stays[1] + STAY_SECONDS
