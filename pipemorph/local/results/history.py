"""The history of a run: finished iterations, and the controller's state after each report.

Written by the ingest's thread, read by the thread that shows progress.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from pipemorph.control.controller import JobController, JobView
from pipemorph.control.observe.events import Event
from pipemorph.control.record.goodput import Useful
from pipemorph.control.record.history import Decision
from pipemorph.watch.lanes import LaneLog
from pipemorph.wire import (
    AdaptationRecord,
    IterationSample,
    LinkHealthReport,
)

MOST_ITERATIONS = 1_000_000
"""Most iterations to keep, the newest: about 300 MB."""
FIRST_ITERATIONS = 64
"""So many are looked through for the first one that new ranks have finished themselves."""
NEWEST_RECORDS = 8
"""Newest records passed to the display; between two updates there are always fewer new ones."""


@dataclass(frozen=True)
class View(JobView):
    """The current state of the run, for the display, and what was new in it."""

    adaptations: tuple[AdaptationRecord, ...] = ()
    decisions: tuple[Decision, ...] = ()
    events: tuple[Event, ...] = ()
    """Events of rails, transports, stragglers and reductions."""


@dataclass
class Journal:
    """Finished iterations by index. An iteration repeated by a later attempt replaces the first."""

    view: View = field(default_factory=View)
    useful: Useful = field(default_factory=Useful)
    _iterations: dict[int, IterationSample] = field(default_factory=dict)
    _done: int = 0
    _unseen: list[IterationSample] = field(default_factory=list)
    _arrived: list[tuple[int, float]] = field(default_factory=list)
    """The first iterations that were reported since the ranks started, and when."""
    _changes: dict[int, AdaptationRecord] = field(default_factory=dict)
    _lanes: LaneLog = field(default_factory=LaneLog)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, report: LinkHealthReport, controller: JobController, now: float) -> None:
        """Record one accepted report and the controller's state after it."""
        now_seen = vars(controller.view(now))
        view = View(
            **now_seen | {"message": report.message or self.view.message},
            adaptations=tuple(r.model_copy() for r in controller.records[-NEWEST_RECORDS:]),
            decisions=tuple(controller.decisions[-NEWEST_RECORDS:]),
            events=controller.events,
        )
        fallen = {each.link: each.transport for each in view.transports.fallen}
        with self._lock:
            # Ranks that start do not know yet with which iteration they go on.
            starting = report.state == "starting"
            iteration = max(report.iteration, self._done) if starting else report.iteration
            self._lanes.take(iteration, view.links, controller.running.routes, fallen)
            self._changes.update((each.plan_version, each) for each in view.adaptations)
            for number, sample in enumerate(report.iterations, start=1):
                if len(self._arrived) < FIRST_ITERATIONS:
                    # A report may bring several iterations, which followed each other.
                    later = sum(each.seconds for each in report.iterations[number:])
                    self._arrived.append((sample.index, now - later))
                if self._iterations.get(sample.index) != sample:
                    self._unseen.append(sample)
            self._add(report.iterations)
            self.useful.take(report.iterations)
            self.view = view

    def add_earlier(self, iterations: Sequence[IterationSample]) -> None:
        """Record iterations that were reported to somebody else."""
        with self._lock:
            self._add(iterations)

    def _add(self, iterations: Sequence[IterationSample]) -> None:
        for sample in iterations:
            self._iterations[sample.index] = sample
            self._done = max(self._done, sample.index + 1)
        while len(self._iterations) > MOST_ITERATIONS:
            del self._iterations[next(iter(self._iterations))]

    def forget_view(self) -> None:
        """Forget the current state: the ranks start again. What is over stays."""
        with self._lock:
            plan = self.view.applied_plan_version
            self.view = View(applied_plan_version=plan, worth=self.view.worth)
            self._arrived = []

    def first(self, least: int = 0) -> tuple[int, float] | None:
        """The first iteration from ``least`` on that was reported since the ranks started, and when
        it was over: wall clock, seconds, as far as it is known from the report. None before it.
        Earlier ones may be reported that other ranks had finished."""
        with self._lock:
            return next((each for each in self._arrived if each[0] >= least), None)

    def unseen(self) -> list[IterationSample]:
        """Iterations that finished since the last call."""
        with self._lock:
            unseen, self._unseen = self._unseen, []
            return unseen

    def done(self) -> int:
        """One more than the index of the newest iteration; 0 without one."""
        with self._lock:
            return self._done

    def iterations(self, newest: int | None = None) -> list[IterationSample]:
        """All iterations, or so many of the newest, by index."""
        with self._lock:
            indices = sorted(self._iterations)
            if newest is not None:
                indices = indices[-newest:]
            return [self._iterations[index] for index in indices]

    def changes(self) -> list[AdaptationRecord]:
        """All changes of plan, oldest first."""
        with self._lock:
            return [self._changes[version] for version in sorted(self._changes)]

    def lanes(self) -> LaneLog:
        """What each link was like so far."""
        with self._lock:
            return self._lanes.copy()
