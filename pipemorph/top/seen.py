"""What top has seen by itself since it started: status tells only of now."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from pipemorph.api.status import TrainingStatus
from pipemorph.explain.cluster_job import ClusterJob

MOST_TIMES = 40
"""Newest iteration times that are kept of a job."""
MOST_DELAYS = 12
"""Newest delays that are kept of a link."""

Link = tuple[int, int]
"""Number of a link, and the pipeline column in which it is slowest."""


@dataclass
class Seen:
    """Of one job. ``times``: of an iteration, in seconds, whenever status told of another one;
    ``which``: which ones that are, in words. ``delays``: in milliseconds, of links that were slow
    whenever they were told anew; 0 where they were not."""

    times: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_TIMES))
    which: str = "as seen since top started"
    delays: dict[Link, deque[float]] = field(default_factory=dict)
    _iteration: int | None = None
    _told: tuple[int, str | None] | None = None

    def look(self, job: ClusterJob) -> None:
        training = job.status.training if job.status is not None else None
        if training is None:
            return
        if training.iteration_seconds and training.iteration != self._iteration:
            self._iteration = training.iteration
            self.times.append(training.iteration_seconds)
        self.look_at_links(training)

    def look_at_links(self, training: TrainingStatus) -> None:
        """Of a job whose times are known otherwise."""
        told = training.iteration, training.last_report_time
        if told == self._told:
            return
        self._told = told
        now = {(link.link, link.replica): link.delay_ms for link in training.slow_links}
        for link in [*self.delays, *(link for link in now if link not in self.delays)]:
            known = self.delays.setdefault(link, deque(maxlen=MOST_DELAYS))
            known.append(now.get(link, 0.0))
            if not any(known):
                del self.delays[link]
