"""Schedule of status writes: soon after a change of state, seldom for progress alone.

A write takes the API server some ten milliseconds, and every watcher reads the whole job. Metrics
show the progress between writes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from pipemorph.control import Health, JobView
from pipemorph.control.history.goodput import GoodputMeter
from pipemorph.control.job_generations import JobGenerations
from pipemorph.protocol import LinkHealthReport
from pipemorph.views.status.summary import StatusInput, judge_conditions

METRICS_SECONDS = 5.0
"""Interval of updates of a job's metrics, and of visits of a job that does not report: its links
become unknown with time."""
FLOOR_SECONDS = 5.0
"""Least time between two writes of a job, which combines changes within seconds: a slow link, its
plan, and the effect. Directives, generations and the final status are written at once."""
PROGRESS_SECONDS = 30.0
"""Time between two writes of a job if only its progress has changed."""
DECIDING_SECONDS = 5.0
"""Longest wait of a change for a decision in progress, whose directive is written anyway."""
VISIT_SECONDS = 1.0
VISITS_PER_SECOND = 400.0
"""Limit for all jobs together: leaves most of a CPU for reports."""


@dataclass
class ReportLog:
    """Records when a job's reports arrive."""

    clock: Callable[[], float]
    generations: JobGenerations
    useful: GoodputMeter
    reported_at: float | None = None
    pending: bool = True
    """True if status may have changed since the last visit."""
    has_changes: bool = True
    """True if more of it than the job's progress may have changed."""
    _last: tuple[str, int, int] | None = None

    def record_report(self, report: LinkHealthReport) -> None:
        self.reported_at = self.clock()
        self.pending = True
        now = report.state, report.observed_plan_version, report.applied_plan_version
        self.useful.add_iterations(report.iterations, self.generations.running_share)
        recovered = self.generations.process_rank_report(report, self.reported_at)
        self.has_changes |= now != self._last or not report.is_progress or recovered
        self._last = now

    def mark_current(self) -> None:
        """Record that the status in the API is up to date."""
        self.pending = self.has_changes = False

    def mark_outdated(self) -> None:
        """Record that the status in the API is unknown or outdated."""
        self.pending = self.has_changes = True


def build_key_state(source: StatusInput, view: JobView, now: float) -> Hashable:
    """Part of a status whose change is written without delay."""
    records = source.controller.records
    return (
        (view.state, source.controller.attempt),
        (view.wanted_plan_version, view.applied_plan_version),
        frozenset((link.link, link.replica) for link in view.links if link.health is Health.SLOW),
        tuple(
            (kind, status, reason)
            for kind, (status, reason, _) in judge_conditions(source, view, now).items()
        ),
        bool(records) and records[-1].iteration_seconds_after is not None,
    )


def compute_visit_interval(jobs: int) -> float:
    """Seconds between two visits of a job; a visit costs a fraction of a millisecond."""
    return max(VISIT_SECONDS, jobs / VISITS_PER_SECOND)


def is_write_due(changed: bool, since_write: float) -> bool:
    """True if a status should be written now. ``changed``: more than progress has changed."""
    return since_write >= (FLOOR_SECONDS if changed else PROGRESS_SECONDS)
