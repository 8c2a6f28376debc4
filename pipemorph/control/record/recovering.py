"""When ranks that began again have recovered: with which iteration, and after how long. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from pipemorph.api.status_recoveries import RecoveryRecord
from pipemorph.wire import IterationSample, ResumedFrom

WORD_SECONDS = 15.0
"""After an iteration was reported, how long to wait for word of what the ranks have begun with."""
MOST_ARRIVED = 64
"""Iterations that are looked through for the first one that the new ranks have finished."""


class Recovering:
    """Follows the newest start of the ranks, if it is known, until they have recovered."""

    def __init__(self) -> None:
        self._record: RecoveryRecord | None = None
        self._lost_at = 0.0
        self.begin()

    def begin(self) -> None:
        """What is reported from now on is of new ranks."""
        self._resumed: ResumedFrom | None = None
        self._arrived: list[tuple[int, float]] = []
        self._heard_at = 0.0
        """When the first of them was reported."""

    def follow(self, record: RecoveryRecord | None, lost_at: float | None = None) -> None:
        """``lost_at``: when the ranks before were lost, wall clock; None: as the record says."""
        self._record = record
        if lost_at is None and record is not None:
            lost_at = datetime.fromisoformat(record.lost_at).timestamp()
        self._lost_at = lost_at or 0.0

    def resumed(self, word: ResumedFrom | None) -> None:
        """Take what the ranks have begun with."""
        self._resumed = word

    def reported(self, iterations: Sequence[IterationSample], now: float) -> None:
        """Take iterations that ranks have finished, as they are reported at once."""
        if self._record is None:
            return
        for number, sample in enumerate(iterations, start=1):
            if len(self._arrived) < MOST_ARRIVED:
                self._heard_at = self._heard_at or now
                # A report may bring several iterations, which followed each other.
                later = sum(each.seconds for each in iterations[number:])
                self._arrived.append((sample.index, now - later))

    def done(self, now: float) -> RecoveryRecord | None:
        """The whole record, once; None if the ranks have not recovered yet."""
        if self._record is None or not self._arrived:
            return None
        if self._resumed is None and now - self._heard_at < WORD_SECONDS:
            return None
        # Earlier iterations may be reported that the ranks before had finished.
        least = self._resumed.iteration if self._resumed is not None else 0
        first = next((each for each in self._arrived if each[0] >= least), None)
        if first is None:
            return None
        index, at = first
        record, self._record = self._record, None
        return record.model_copy(
            update={
                "went_on_with": index,
                "repeated": max(0, record.iterations_done - index),
                "seconds": round(max(0.0, at - self._lost_at), 3),
                "state": self._resumed.rung if self._resumed is not None else None,
            }
        )
