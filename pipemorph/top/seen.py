"""What top has seen by itself since it started: status tells only of now."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from pipemorph.explain.cluster_job import ClusterJob

MOST_TIMES = 40
"""Newest iteration times that are kept of a job."""


@dataclass
class Seen:
    """Of one job. ``times``: of an iteration, in seconds, whenever status told of another one;
    ``which``: which ones that are, in words."""

    times: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_TIMES))
    which: str = "as seen since top started"
    _iteration: int | None = None

    def look(self, job: ClusterJob) -> None:
        training = job.status.training if job.status is not None else None
        if training is None:
            return
        if training.iteration_seconds and training.iteration != self._iteration:
            self._iteration = training.iteration
            self.times.append(training.iteration_seconds)
