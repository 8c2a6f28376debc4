"""How far the ranks of a job have come, how long their starts take, and when they have recovered.
Pure.

What ranks report is behind: launchers say how many iterations theirs had finished when they are
gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from pipemorph.api.status_recoveries import Recoveries, RecoveryRecord
from pipemorph.wire import IterationSample, ResumedFrom

WORD_SECONDS = 15.0
"""After an iteration was reported, how long to wait for word of what the ranks have begun with."""
MOST_ARRIVED = 64
"""Iterations that are looked through for the first one that the new ranks have finished."""


class Recovering:
    """Follows the newest start of the ranks, if it is known, until they have recovered: with which
    iteration, and after how long."""

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


class Progress:
    """Of one job. ``saved``: what is in status; ``done``: iterations that are known to be finished,
    beside those of reports to come; ``heard``: as of this. Times: wall clock, seconds."""

    def __init__(self, saved: Recoveries, done: int, *, heard: bool) -> None:
        self.finished = max(done, saved.finished)
        """Iterations that a rank is known to have finished."""
        told = [each.iterations_done for each in saved.last[-1:]]
        self.done = max(done, saved.finished - 1, *told)
        """Those after which all ranks are known to have begun the next one: none of them is run
        again by ranks that have kept their state."""
        self.ran = done > 0
        """Whether an iteration of this attempt is known to be finished."""
        self.heard = heard
        """Whether what the ranks have finished is known: not where another ingest was told last."""
        self.longest_start: float | None = None
        """Seconds from a start of the ranks, once all pods were there, to the first iteration that
        they finished; None: none was seen here. Records of other hosts' say only when ranks were
        lost."""
        self._starts_at: float | None = None
        """When the last pod came for the first start, until an iteration is finished."""
        self._recovering = Recovering()
        self.begin_generation()

    def begin_attempt(self) -> None:
        self._starts_at, self.ran = None, False
        self._recovering.follow(None)

    def begin_generation(self) -> None:
        self._waited: float | None = None
        """Seconds from the loss of the ranks before to the start of these; None: it was not seen
        here."""
        self.finished_before = self.finished
        self._recovering.begin()

    def follow(self, record: RecoveryRecord) -> None:
        """Follow a start of the ranks that another ingest has seen."""
        self._recovering.follow(record)

    def begins(self, record: RecoveryRecord, lost_at: float, now: float) -> None:
        """The ranks start again. ``lost_at``: when those before were lost."""
        self._recovering.follow(record, lost_at)
        self._waited = now - lost_at

    def starts(self, now: float) -> None:
        """A pod has come for the first start."""
        self._starts_at = now

    def gone(self, finished: int) -> None:
        """Take how many iterations ranks had finished that are gone."""
        self.heard = self.ran = True
        self._finish(finished)

    def resumed(self, word: ResumedFrom | None) -> None:
        """Take what the ranks have begun with."""
        self._recovering.resumed(word)

    def reported(self, iterations: Sequence[IterationSample], now: float) -> None:
        """Take iterations that ranks report as finished."""
        if iterations:
            self.ran = True
            if self._starts_at is not None:
                self._took(now - self._starts_at)
                self._starts_at = None
        for sample in iterations:
            self.done = max(self.done, sample.index + 1)
            self._finish(sample.index + 1)
        self._recovering.reported(iterations, now)

    def recovered(self, now: float) -> RecoveryRecord | None:
        """The whole record of the newest start, once; None if the ranks have not recovered yet."""
        done = self._recovering.done(now)
        if done is not None and done.seconds is not None and self._waited is not None:
            self._took(max(0.0, done.seconds - self._waited))
        return done

    def _took(self, seconds: float) -> None:
        """Take how long a start of the ranks took."""
        self.longest_start = max(self.longest_start or 0.0, seconds)

    def _finish(self, iterations: int) -> None:
        """Take that a rank has finished so many."""
        self.finished = max(self.finished, iterations)
        # No rank can be more than an iteration ahead of another.
        self.done = max(self.done, self.finished - 1)
