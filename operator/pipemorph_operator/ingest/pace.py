"""When a job's status is written: at once when something turned, else every few seconds.

A thousand jobs that each write every few seconds would be the API server's largest client, so
progress waits longer the more jobs there are; turns do not wait.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipemorph.control import Health, JobView
from pipemorph_operator.ingest.summary import Source, verdicts

PROGRESS_SECONDS = 5.0
WRITES_PER_SECOND = 40.0
"""Of progress, all jobs together."""
LOOK_SECONDS = 1.0
LOOKS_PER_SECOND = 400.0
"""All jobs together: leaves most of a processor to reports."""


@dataclass(frozen=True)
class Turn:
    """What of a status is worth a write by itself."""

    state: str
    attempt: int
    epochs: tuple[int, int]
    slow: frozenset[tuple[int, int]]
    conditions: tuple[tuple[str, str, str], ...]
    measured: bool

    @staticmethod
    def of(source: Source, view: JobView, now: float) -> Turn:
        records = source.controller.records
        return Turn(
            state=view.state,
            attempt=source.controller.attempt,
            epochs=(view.wanted_epoch, view.applied_epoch),
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
    return max(PROGRESS_SECONDS, jobs / WRITES_PER_SECOND)


def is_due(turned: bool, since_write: float, jobs: int) -> bool:
    """Whether to write now, if anything is new."""
    return turned or since_write >= progress_interval(jobs)
