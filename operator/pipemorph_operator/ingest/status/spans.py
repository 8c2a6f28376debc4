"""Spans of a tracked job: its changes of plan, and recoveries of its ranks within their pods."""

from __future__ import annotations

from datetime import datetime

from pipemorph.api.status_recoveries import Recoveries, RecoveryRecord
from pipemorph.control import JobController
from pipemorph.spans import JobSpans

NEWEST_RECORDS = 8
"""Between two looks there are always fewer new ones."""
DETAILS = {"rank", "pod", "attempt", "generation", "iterations_done", "went_on_with", "repeated",
           "state"}  # fmt: skip
"""What of a recovery's record a span has, too."""


class TrackedSpans:
    """``seen``: recoveries in status at the start, of which another ingest has told if they were
    over."""

    def __init__(self, spans: JobSpans, seen: Recoveries | None) -> None:
        self._spans = spans
        self._told = max((_key(each) for each in _over(seen)), default=(-1, -1))

    def look(self, controller: JobController, recoveries: Recoveries, now: float) -> None:
        """Tell of what is new. ``now``: wall clock, seconds."""
        if not self._spans.enabled:
            return
        self._spans.plans(controller.records[-NEWEST_RECORDS:], now)
        for each in _over(recoveries):
            if _key(each) > self._told and each.seconds is not None:
                began = datetime.fromisoformat(each.lost_at).timestamp()
                details = each.model_dump(include=DETAILS)
                self._spans.recovery(each.cause, began=began, ended=began + each.seconds, **details)
                self._told = _key(each)

    def close(self, now: float) -> None:
        self._spans.close(now)


def _over(recoveries: Recoveries | None) -> list[RecoveryRecord]:
    last = recoveries.last if recoveries is not None else []
    return [each for each in last if each.seconds is not None]


def _key(record: RecoveryRecord) -> tuple[int, int]:
    return record.attempt, record.generation
