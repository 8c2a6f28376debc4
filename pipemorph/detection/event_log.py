"""Events of rails, transports, reductions and stragglers, as text for the display and report."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

MOST_EVENTS = 256


@dataclass(frozen=True)
class HealthEvent:
    """Event. ``number`` only grows; ``at``: the controller's wall clock, seconds."""

    number: int
    at: float
    iteration: int
    text: str

    def to_report(self) -> dict[str, object]:
        """Fields for report.json."""
        return {"at": self.at, "iteration": self.iteration, "text": self.text}


class EventLog:
    """Newest events, oldest first. Bounded."""

    def __init__(self) -> None:
        self._newest_events: deque[HealthEvent] = deque(maxlen=MOST_EVENTS)
        self._next_number = 0

    def add_event(self, at: float, iteration: int, text: str) -> None:
        self._newest_events.append(HealthEvent(self._next_number, at, iteration, text[:500]))
        self._next_number += 1

    @property
    def next_number(self) -> int:
        """Number of the next event."""
        return self._next_number

    @property
    def oldest_number(self) -> int:
        """Number of the oldest event that is stored."""
        return self._newest_events[0].number if self._newest_events else self._next_number

    def get_newest(self, count: int = MOST_EVENTS) -> tuple[HealthEvent, ...]:
        return tuple(self._newest_events)[-count:]
