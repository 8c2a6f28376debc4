"""Rate limits of status writes: at once for state changes, every few seconds for progress.

A thousand jobs that write every few seconds would be the API server's largest client, so with more
jobs progress is written less often. State changes do not wait.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipemorph.control import Health, JobView
from pipemorph_operator.ingest.summary import Source, verdicts

PROGRESS_SECONDS = 5.0
PROGRESS_PER_SECOND = 20.0
"""Limit of progress writes, all jobs together."""
WRITES_PER_SECOND = 40.0
"""Limit of progress and state changes, all jobs together: the API server takes some milliseconds
for each, and must not make directives, which are not limited, wait behind them."""
BURST = 80.0
"""State changes that may be written at once, as when many links become slow in one second."""
LOOK_SECONDS = 1.0
LOOKS_PER_SECOND = 400.0
"""Limit for all jobs together: leaves most of a CPU for reports."""


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


def look_interval(jobs: int) -> float:
    """Seconds between two visits of a job; a visit costs a fraction of a millisecond."""
    return max(LOOK_SECONDS, jobs / LOOKS_PER_SECOND)


def progress_interval(jobs: int) -> float:
    """Seconds between two progress writes of one job, with so many jobs."""
    return max(PROGRESS_SECONDS, jobs / PROGRESS_PER_SECOND)


class Budget:
    """Token bucket for the writes of all jobs. Directives are always allowed, and charged; progress
    leaves half of the bucket to state changes. ``now``: monotonic seconds."""

    def __init__(self, now: float) -> None:
        self._left, self._at = BURST, now

    def allows(self, now: float, *, state_changed: bool) -> bool:
        """Whether a status may be written now; if so, charges it."""
        self._refill(now)
        if self._left < (1.0 if state_changed else BURST / 2):
            return False
        self._left -= 1.0
        return True

    def charge(self, now: float) -> None:
        """Charge a directive, which is written regardless of the budget."""
        self._refill(now)
        self._left = max(-BURST, self._left - 1.0)

    def _refill(self, now: float) -> None:
        self._left = min(BURST, self._left + max(0.0, now - self._at) * WRITES_PER_SECOND)
        self._at = now


def is_due(state_changed: bool, since_write: float, jobs: int) -> bool:
    """Whether changed figures should be written now."""
    return state_changed or since_write >= progress_interval(jobs)
