"""When a job's status is written: at once when something turned, else every few seconds.

A thousand jobs that each write every few seconds would be the API server's largest client, so
progress waits longer the more jobs there are; turns do not wait.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipemorph.control import Health, JobView
from pipemorph_operator.ingest.summary import Source, verdicts

PROGRESS_SECONDS = 5.0
PROGRESS_PER_SECOND = 20.0
"""Writes of progress, all jobs together."""
WRITES_PER_SECOND = 40.0
"""Of progress and turns, all jobs together: an API server takes some milliseconds for each, and
directives, which do not wait, must not wait behind them there."""
BURST = 80.0
"""Turns that may be written at once, when many links go slow in one second."""
LOOK_SECONDS = 1.0
LOOKS_PER_SECOND = 400.0
"""All jobs together: leaves most of a processor to reports."""


@dataclass(frozen=True)
class Turn:
    """What of a status is worth a write by itself."""

    state: str
    attempt: int
    versions: tuple[int, int]
    slow: frozenset[tuple[int, int]]
    conditions: tuple[tuple[str, str, str], ...]
    measured: bool

    @staticmethod
    def of(source: Source, view: JobView, now: float) -> Turn:
        records = source.controller.records
        return Turn(
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
    """Seconds between two looks at one job: a look costs a fraction of a millisecond."""
    return max(LOOK_SECONDS, jobs / LOOKS_PER_SECOND)


def progress_interval(jobs: int) -> float:
    """Seconds between two writes of mere progress of one job, with so many jobs."""
    return max(PROGRESS_SECONDS, jobs / PROGRESS_PER_SECOND)


class Budget:
    """Writes of all jobs together. Directives always may, at the expense of the rest; progress
    leaves half of what there is to turns. ``now`` is monotonic, seconds."""

    def __init__(self, now: float) -> None:
        self._left, self._at = BURST, now

    def allows(self, now: float, *, turned: bool) -> bool:
        """Whether a status may be written now; if so, it is charged."""
        self._refill(now)
        if self._left < (1.0 if turned else BURST / 2):
            return False
        self._left -= 1.0
        return True

    def charge(self, now: float) -> None:
        """A directive is written, whatever is left."""
        self._refill(now)
        self._left = max(-BURST, self._left - 1.0)

    def _refill(self, now: float) -> None:
        self._left = min(BURST, self._left + max(0.0, now - self._at) * WRITES_PER_SECOND)
        self._at = now


def is_due(turned: bool, since_write: float, jobs: int) -> bool:
    """Whether to write now, if anything is new."""
    return turned or since_write >= progress_interval(jobs)
