"""When a job's status is written: soon after its state has changed, seldom for progress alone.

A write takes the API server some ten milliseconds, and every watcher reads the whole job. The
metrics have the progress meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from pipemorph.control import Health, JobView
from pipemorph.control.generations import Generations
from pipemorph.control.record.goodput import Useful
from pipemorph.status.summary import Source, verdicts
from pipemorph.wire import LinkHealthReport

FIGURES_SECONDS = 5.0
"""Between two updates of a job's metrics, and two visits of one that does not report, whose links
become unknown with time."""
FLOOR_SECONDS = 5.0
"""Least time between two writes of a job. What changes within seconds, as a link, the plan for it
and what that brought, is one write. Directives, generations and the final status do not wait."""
PROGRESS_SECONDS = 30.0
"""From one write of a job to the next one if only its progress has changed."""
DECIDING_SECONDS = 5.0
"""How long a change waits for a decision under way, whose directive is written anyway."""
LOOK_SECONDS = 1.0
LOOKS_PER_SECOND = 400.0
"""Limit for all jobs together: leaves most of a CPU for reports."""


@dataclass
class ReportLog:
    """Records when a job's reports arrive."""

    clock: Callable[[], float]
    generations: Generations
    useful: Useful
    reported_at: float | None = None
    pending: bool = True
    """Whether status may have changed since the last look."""
    news: bool = True
    """Whether more of it than the job's progress may have."""
    _last: tuple[str, int, int] | None = None

    def record(self, report: LinkHealthReport) -> None:
        self.reported_at = self.clock()
        self.pending = True
        now = report.state, report.observed_plan_version, report.applied_plan_version
        self.useful.take(report.iterations, self.generations.share)
        recovered = self.generations.reported(report, self.reported_at)
        self.news |= now != self._last or not report.is_progress or recovered
        self._last = now

    def looked(self) -> None:
        """Status is as it should be."""
        self.pending = self.news = False

    def again(self) -> None:
        """Status may be anything."""
        self.pending = self.news = True


def key_state(source: Source, view: JobView, now: float) -> Hashable:
    """The part of a status whose change is written without delay."""
    records = source.controller.records
    return (
        (view.state, source.controller.attempt),
        (view.wanted_plan_version, view.applied_plan_version),
        frozenset((link.link, link.replica) for link in view.links if link.health is Health.SLOW),
        tuple(
            (kind, status, reason)
            for kind, (status, reason, _) in verdicts(source, view, now).items()
        ),
        bool(records) and records[-1].iteration_seconds_after is not None,
    )


def look_interval(jobs: int) -> float:
    """Seconds between two visits of a job; a visit costs a fraction of a millisecond."""
    return max(LOOK_SECONDS, jobs / LOOKS_PER_SECOND)


def is_due(changed: bool, since_write: float) -> bool:
    """Whether a status should be written now. ``changed``: more of it than progress."""
    return since_write >= (FLOOR_SECONDS if changed else PROGRESS_SECONDS)
