"""The history of a run: finished iterations, and the controller's state after each report.

Written by the ingest's thread, read by the thread that shows progress.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from pipemorph.control.controller import JobController, JobView
from pipemorph.control.history.goodput import GoodputMeter
from pipemorph.control.history.job_history import DecisionRecord
from pipemorph.detection.event_log import HealthEvent
from pipemorph.protocol import AdaptationRecord, Health, IterationSample, LinkHealthReport
from pipemorph.views.live_page.link_history import LinkHistory

MOST_ITERATIONS = 1_000_000
"""Most iterations that are held, the newest: about 300 MB."""
FIRST_ITERATIONS = 64
"""Most reported iterations that are searched for the first one of new ranks."""
NEWEST_RECORDS = 8
"""Newest records passed to the display; between two updates there are always fewer new ones."""


@dataclass(frozen=True)
class RunView(JobView):
    """Current state of the run, for the display, with the newest decisions and events."""

    adaptations: tuple[AdaptationRecord, ...] = ()
    decisions: tuple[DecisionRecord, ...] = ()
    events: tuple[HealthEvent, ...] = ()
    """Events of rails, transports, stragglers and reductions."""
    keep_reason: str = ""
    """Reason why the newest decision while a link was slow changed nothing; empty if it did."""


@dataclass
class RunJournal:
    """Finished iterations by index. An iteration repeated by a later attempt replaces the first."""

    view: RunView = field(default_factory=RunView)
    goodput_meter: GoodputMeter = field(default_factory=GoodputMeter)
    _iterations: dict[int, IterationSample] = field(default_factory=dict)
    _done: int = 0
    _unseen: list[IterationSample] = field(default_factory=list)
    _arrived: list[tuple[int, float]] = field(default_factory=list)
    """First iterations that were reported since the ranks started, and when."""
    _changes: dict[int, AdaptationRecord] = field(default_factory=dict)
    _lanes: LinkHistory = field(default_factory=LinkHistory)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def record_report(
        self, report: LinkHealthReport, controller: JobController, now: float
    ) -> None:
        """Record one accepted report and the controller's state after it."""
        now_seen = vars(controller.get_job_view(now))
        decisions = tuple(controller.decisions[-NEWEST_RECORDS:])
        is_slow = any(link.health is Health.SLOW for link in now_seen["links"])
        view = RunView(
            **now_seen | {"message": report.message or self.view.message},
            adaptations=tuple(r.model_copy() for r in controller.records[-NEWEST_RECORDS:]),
            decisions=decisions,
            events=controller.events,
            keep_reason=find_keep_reason(decisions) if is_slow else self.view.keep_reason,
        )
        fallen = {each.link: each.transport for each in view.transports.fallen}
        with self._lock:
            # Ranks that start cannot report yet with which iteration they resume.
            starting = report.state == "starting"
            iteration = max(report.iteration, self._done) if starting else report.iteration
            self._lanes.record_states(iteration, view.links, controller.running_plan.routes, fallen)
            self._changes.update((each.plan_version, each) for each in view.adaptations)
            for number, sample in enumerate(report.iterations, start=1):
                if len(self._arrived) < FIRST_ITERATIONS:
                    # A report may have several consecutive iterations.
                    later = sum(each.seconds for each in report.iterations[number:])
                    self._arrived.append((sample.index, now - later))
                if self._iterations.get(sample.index) != sample:
                    self._unseen.append(sample)
            self._add_iterations(report.iterations)
            self.goodput_meter.add_iterations(report.iterations)
            self.view = view

    def add_earlier_iterations(self, iterations: Sequence[IterationSample]) -> None:
        """Record iterations that were reported to another host."""
        with self._lock:
            self._add_iterations(iterations)

    def _add_iterations(self, iterations: Sequence[IterationSample]) -> None:
        for sample in iterations:
            self._iterations[sample.index] = sample
            self._done = max(self._done, sample.index + 1)
        while len(self._iterations) > MOST_ITERATIONS:
            del self._iterations[next(iter(self._iterations))]

    def reset_view(self) -> None:
        """Drop the current state: the ranks start again. Finished iterations stay."""
        with self._lock:
            plan = self.view.applied_plan_version
            self.view = RunView(
                applied_plan_version=plan,
                saved_time=self.view.saved_time,
                keep_reason=self.view.keep_reason,
            )
            self._arrived = []

    def find_first_iteration(self, least: int = 0) -> tuple[int, float] | None:
        """The first iteration from ``least`` on that was reported since the ranks started, and when
        it ended: wall clock, seconds, estimated from the report. None before it. Reports may have
        earlier iterations, which previous ranks had finished."""
        with self._lock:
            return next((each for each in self._arrived if each[0] >= least), None)

    def take_unseen_iterations(self) -> list[IterationSample]:
        """Iterations that finished since the last call."""
        with self._lock:
            unseen, self._unseen = self._unseen, []
            return unseen

    def count_done(self) -> int:
        """Number of iterations up to the newest one; 0 without one."""
        with self._lock:
            return self._done

    def list_iterations(self, newest: int | None = None) -> list[IterationSample]:
        """Iterations by index, or only the ``newest`` ones."""
        with self._lock:
            indices = sorted(self._iterations)
            if newest is not None:
                indices = indices[-newest:]
            return [self._iterations[index] for index in indices]

    def list_changes(self) -> list[AdaptationRecord]:
        """Changes of plan, oldest first."""
        with self._lock:
            return [self._changes[version] for version in sorted(self._changes)]

    def copy_link_history(self) -> LinkHistory:
        """Copy of the states of each link so far."""
        with self._lock:
            return self._lanes.copy()


def find_keep_reason(decisions: Sequence[DecisionRecord]) -> str:
    """Reason why the newest decision changed nothing; empty if it did, or there is none. That a
    change kept its promise is no decision."""
    newest = next((each for each in reversed(decisions) if each.kind != "outcome"), None)
    return newest.reason if newest is not None and newest.kind == "keep" else ""
