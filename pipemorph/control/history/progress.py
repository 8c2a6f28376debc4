"""Progress of a job's ranks, the duration of their starts, and their recoveries. Pure.

Reports of ranks lag behind: launchers report how many iterations theirs had finished when they are
gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from pipemorph.protocol import IterationSample, ResumedFrom
from pipemorph.spec.status_recoveries import Recoveries, RecoveryRecord

RESUMED_SECONDS = 15.0
"""Seconds to wait, after a reported iteration, for the report of the state ranks began with."""
MOST_CHECKED_ITERATIONS = 64
"""Most iterations to search for the first one that the new ranks have finished."""


class RecoveryTimer:
    """Times the newest start of the ranks, if it is known, until they have recovered, and finds the
    iteration with which they did."""

    def __init__(self) -> None:
        self._record: RecoveryRecord | None = None
        self._lost_at = 0.0
        self.reset_reports()

    def reset_reports(self) -> None:
        """Begin a generation: reports come from new ranks."""
        self._resumed: ResumedFrom | None = None
        self._reported_iterations: list[tuple[int, float]] = []
        self._first_reported_at = 0.0
        """Time at which the first of them was reported."""

    def follow_start(self, record: RecoveryRecord | None, lost_at: float | None = None) -> None:
        """Follow the start of ``record``. ``lost_at``: time of the loss, wall clock; None: as in
        the record."""
        self._record = record
        if lost_at is None and record is not None:
            lost_at = datetime.fromisoformat(record.lost_at).timestamp()
        self._lost_at = lost_at or 0.0

    def record_resumed(self, state: ResumedFrom | None) -> None:
        """Record the state that the ranks have begun with."""
        self._resumed = state

    def record_iterations(self, iterations: Sequence[IterationSample], now: float) -> None:
        """Record the iterations of one report of the ranks."""
        if self._record is None:
            return
        for number, sample in enumerate(iterations, start=1):
            if len(self._reported_iterations) < MOST_CHECKED_ITERATIONS:
                self._first_reported_at = self._first_reported_at or now
                # A report may bring several consecutive iterations.
                later = sum(each.seconds for each in iterations[number:])
                self._reported_iterations.append((sample.index, now - later))

    def take_record(self, now: float) -> RecoveryRecord | None:
        """Complete the record, once; None if the ranks have not recovered yet."""
        if self._record is None or not self._reported_iterations:
            return None
        if self._resumed is None and now - self._first_reported_at < RESUMED_SECONDS:
            return None
        # Reports may include iterations that the ranks before had finished.
        least = self._resumed.iteration if self._resumed is not None else 0
        first = next((each for each in self._reported_iterations if each[0] >= least), None)
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


class GenerationProgress:
    """Progress of one job. ``saved``: recoveries in status; ``done``: iterations that are known to
    be finished; ``known``: initial value of ``finished_known``. Times: wall clock, seconds."""

    def __init__(self, saved: Recoveries, done: int, *, known: bool) -> None:
        self.iterations_finished = max(done, saved.finished)
        """Iterations that a rank is known to have finished."""
        recorded = [each.iterations_done for each in saved.last[-1:]]
        self.iterations_done = max(done, saved.finished - 1, *recorded)
        """Iterations after which all ranks are known to have begun the next one: ranks with their
        state in memory repeat none of them."""
        self.has_run = done > 0
        """True if an iteration of this attempt is known to be finished."""
        self.finished_known = known
        """True if the iterations that ranks have finished are known: not if another ingest received
        the last report."""
        self.longest_start: float | None = None
        """Longest time from a start of the ranks, with all pods present, to their first finished
        iteration, seconds; None: none was seen here. Records of other hosts state only the time of
        the loss."""
        self._first_start_at: float | None = None
        """Time at which the last pod joined for the first start, until an iteration is finished."""
        self._recovery_timer = RecoveryTimer()
        self.begin_generation()

    def begin_attempt(self) -> None:
        self._first_start_at, self.has_run = None, False
        self._recovery_timer.follow_start(None)

    def begin_generation(self) -> None:
        """Reset the state of a start of the ranks."""
        self._waited_seconds: float | None = None
        """Seconds from the loss of the ranks before to the start of these; None: not seen here."""
        self.finished_before = self.iterations_finished
        self._recovery_timer.reset_reports()

    def follow_start(self, record: RecoveryRecord) -> None:
        """Follow a start of the ranks that another ingest has seen."""
        self._recovery_timer.follow_start(record)

    def record_restart(self, record: RecoveryRecord, lost_at: float, now: float) -> None:
        """Record a restart of the ranks. ``lost_at``: time at which those before were lost."""
        self._recovery_timer.follow_start(record, lost_at)
        self._waited_seconds = now - lost_at

    def record_first_start(self, now: float) -> None:
        """Record that a pod has joined for the first start."""
        self._first_start_at = now

    def record_departed_ranks(self, finished: int) -> None:
        """Record the number of iterations that ranks had finished that are gone."""
        self.finished_known = self.has_run = True
        self._record_finished(finished)

    def record_resumed(self, state: ResumedFrom | None) -> None:
        """Record the state that the ranks have begun with."""
        self._recovery_timer.record_resumed(state)

    def record_iterations(self, iterations: Sequence[IterationSample], now: float) -> None:
        """Record iterations that ranks report as finished."""
        if iterations:
            self.has_run = True
            if self._first_start_at is not None:
                self._record_start_time(now - self._first_start_at)
                self._first_start_at = None
        for sample in iterations:
            self.iterations_done = max(self.iterations_done, sample.index + 1)
            self._record_finished(sample.index + 1)
        self._recovery_timer.record_iterations(iterations, now)

    def take_recovery(self, now: float) -> RecoveryRecord | None:
        """Complete the newest start's record, once; None if the ranks have not recovered yet."""
        done = self._recovery_timer.take_record(now)
        if done is not None and done.seconds is not None and self._waited_seconds is not None:
            self._record_start_time(max(0.0, done.seconds - self._waited_seconds))
        return done

    def _record_start_time(self, seconds: float) -> None:
        """Record the duration of a start of the ranks."""
        self.longest_start = max(self.longest_start or 0.0, seconds)

    def _record_finished(self, iterations: int) -> None:
        """Record the number of iterations that a rank has finished."""
        self.iterations_finished = max(self.iterations_finished, iterations)
        # No rank can be more than an iteration ahead of another.
        self.iterations_done = max(self.iterations_done, self.iterations_finished - 1)
