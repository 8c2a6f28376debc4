"""Events of rails, transports and stragglers as text, for the display and report.json. Bounded."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

KEPT_EVENTS = 256


@dataclass(frozen=True)
class Event:
    """One event. ``number`` only grows; ``at``: the controller's wall clock, seconds."""

    number: int
    at: float
    iteration: int
    text: str

    def record(self) -> dict[str, object]:
        """For report.json."""
        return {"at": self.at, "iteration": self.iteration, "text": self.text}


class Events:
    """The newest events, oldest first."""

    def __init__(self) -> None:
        self._kept: deque[Event] = deque(maxlen=KEPT_EVENTS)
        self._next = 0

    def add(self, at: float, iteration: int, text: str) -> None:
        self._kept.append(Event(self._next, at, iteration, text[:500]))
        self._next += 1

    @property
    def next(self) -> int:
        """Number of the next event."""
        return self._next

    @property
    def oldest(self) -> int:
        """Number of the oldest event that is kept."""
        return self._kept[0].number if self._kept else self._next

    def newest(self, count: int = KEPT_EVENTS) -> tuple[Event, ...]:
        return tuple(self._kept)[-count:]
