"""When a job's status is written: at once when something turned, else every few seconds.

A thousand jobs that each write every few seconds would be the API server's largest client, so
progress waits longer the more jobs there are; turns do not wait.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipemorph.status import Condition, TrainingStatus

PROGRESS_SECONDS = 5.0
WRITES_PER_SECOND = 40.0
"""Of progress, all jobs together."""


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
    def of(training: TrainingStatus, conditions: list[Condition]) -> Turn:
        newest = training.last_adaptation
        return Turn(
            state=training.state,
            attempt=training.attempt,
            epochs=(training.wanted_epoch, training.applied_epoch),
            slow=frozenset((link.link, link.replica) for link in training.slow_links),
            conditions=tuple((c.type, c.status, c.reason) for c in conditions),
            measured=newest is not None and newest.iteration_seconds_after is not None,
        )


def progress_interval(jobs: int) -> float:
    """Seconds between two writes of mere progress of one job, with so many jobs."""
    return max(PROGRESS_SECONDS, jobs / WRITES_PER_SECOND)


def is_due(turned: bool, changed: bool, since_write: float, jobs: int) -> bool:
    """Whether to write now."""
    return turned or (changed and since_write >= progress_interval(jobs))
