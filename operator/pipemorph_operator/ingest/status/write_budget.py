"""Says when a job's status is written: at once when its state changes, ever more rarely if not.

A write takes the API server some ten milliseconds, and every watcher reads the whole job. So
progress is no series of writes: each waits as long as the state has lasted, and the metrics have it
meanwhile. What changes within seconds, as a link, the plan for it and what that brought, is one
write.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipemorph.api.status import Condition, TrainingStatus
from pipemorph.control import Health, JobView
from pipemorph.control.generations import Generations
from pipemorph.control.record.goodput import Useful
from pipemorph.wire import LinkHealthReport
from pipemorph_operator.ingest.status.summary import Source, verdicts

FIGURES_SECONDS = 5.0
"""Between two updates of a job's metrics, and two visits of one that does not report, whose links
become unknown with time."""
FIGURES_PER_SECOND = 20.0
"""Limit of updates of metrics, all jobs together."""
PROGRESS_SECONDS = 5.0
"""From a change of state to the first write of progress, with few jobs."""
LONGEST_SECONDS = 60.0
"""The most from one write to the next, with few jobs."""
PROGRESS_PER_SECOND = 2.0
"""Limit of progress writes, all jobs together."""
SPACING_SECONDS = 5.0
"""Least time between two writes of a job, directives aside: what changes meanwhile is one write."""
DECIDING_SECONDS = 5.0
"""How long a change waits for a decision under way, whose directive is written anyway."""
WRITES_PER_SECOND = 40.0
"""Limit of progress and state changes, all jobs together: the API server takes some milliseconds
for each, and must not make directives, which are not limited, wait behind them."""
BURST = 80.0
"""State changes that may be written at once, as when many links become slow in one second."""
RUSH_JOBS, RUSH_SECONDS, HELD_SECONDS = 20, 4.0, 20.0
"""So many jobs that begin to report within so many seconds are a rush; how long it may hold a first
write."""
BEGINS_PER_SECOND = 10.0
"""Limit of the first writes of jobs that begin to report: a thousand that come back together would
take the API server for half a minute. Who needs a plan meanwhile has it written at once."""
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


@dataclass(frozen=True)
class KeyState:
    """The part of a status whose change is written without delay."""

    state: str
    attempt: int
    versions: tuple[int, int]
    slow: frozenset[tuple[int, int]]
    conditions: tuple[tuple[str, str, str], ...]
    measured: bool

    @staticmethod
    def of(source: Source, view: JobView, now: float) -> KeyState:
        records = source.controller.records
        return KeyState(
            state=view.state,
            attempt=source.controller.attempt,
            versions=(view.wanted_plan_version, view.applied_plan_version),
            slow=frozenset(
                (link.link, link.replica) for link in view.links if link.health is Health.SLOW
            ),
            conditions=tuple(
                (kind, status, reason)
                for kind, (status, reason, _) in verdicts(source, view, now).items()
            ),
            measured=bool(records) and records[-1].iteration_seconds_after is not None,
        )

    def is_told_by(self, training: TrainingStatus, conditions: Sequence[Condition]) -> bool:
        """Whether a status tells of this state: what another process has written of the job."""
        said = {(each.type, each.status, each.reason) for each in conditions}
        return (
            said >= set(self.conditions)
            and (training.attempt, training.state) == (self.attempt, self.state)
            and training.applied_plan_version == self.versions[1]
            and self.slow >= {(each.link, each.replica) for each in training.slow_links}
            and len(self.slow) == training.slow_link_count
        )


def look_interval(jobs: int) -> float:
    """Seconds between two visits of a job; a visit costs a fraction of a millisecond."""
    return max(LOOK_SECONDS, jobs / LOOKS_PER_SECOND)


def figures_interval(jobs: int) -> float:
    """Seconds between two updates of one job's metrics, with so many jobs."""
    return max(FIGURES_SECONDS, jobs / FIGURES_PER_SECOND)


def progress_interval(jobs: int, lasted: float) -> float:
    """Seconds from a write of one job, of so many, to the next one if its state does not change.
    ``lasted``: from its last change of state to that write, seconds."""
    alone = min(LONGEST_SECONDS, max(PROGRESS_SECONDS, lasted))
    return max(alone, jobs / PROGRESS_PER_SECOND)


class Rush:
    """Holds the first writes of jobs while many others begin to report, as after a restart: what
    the API server does then is to check their tokens. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._newest: deque[float] = deque(maxlen=RUSH_JOBS)
        self._next = float("-inf")

    def begins(self, now: float) -> None:
        """A job has begun to report."""
        self._newest.append(now)

    def holds(self, began_at: float, now: float) -> bool:
        """Whether the first write of a job that began then has to wait."""
        rush = len(self._newest) == RUSH_JOBS and now - self._newest[0] < RUSH_SECONDS
        return rush and now - began_at < HELD_SECONDS

    def lets(self, now: float) -> bool:
        """Whether another job's first write may begin."""
        return now >= self._next

    def began(self, now: float, replicas: int = 1) -> None:
        """A first write begins. ``replicas`` share the rate."""
        self._next = max(self._next + replicas / BEGINS_PER_SECOND, now)


class Budget:
    """Token bucket for the writes of all jobs. Directives are always allowed, and charged; progress
    leaves half of the bucket to state changes. ``now``: monotonic seconds."""

    def __init__(self, now: float) -> None:
        self._left, self._at = BURST, now

    def allows(self, now: float, *, state_changed: bool, replicas: int = 1) -> bool:
        """Whether a status may be written now; if so, charges it. ``replicas`` share the rate."""
        self._refill(now, replicas)
        if self._left < (1.0 if state_changed else BURST / 2):
            return False
        self._left -= 1.0
        return True

    def charge(self, now: float, *, replicas: int = 1) -> None:
        """Charge a directive, which is written regardless of the budget."""
        self._refill(now, replicas)
        self._left = max(-BURST, self._left - 1.0)

    def _refill(self, now: float, replicas: int) -> None:
        rate = WRITES_PER_SECOND / replicas
        self._left = min(BURST, self._left + max(0.0, now - self._at) * rate)
        self._at = now


def is_due(changed: bool, since_write: float, jobs: int, lasted: float) -> bool:
    """Whether a status should be written now. ``changed``: more of it than progress; ``lasted``:
    see :func:`progress_interval`."""
    interval = SPACING_SECONDS if changed else progress_interval(jobs, lasted)
    return since_write >= interval
