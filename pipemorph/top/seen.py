"""What top has seen by itself since it started: status tells only of now."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from pipemorph.api.status import condition
from pipemorph.explain.cluster_job import ClusterJob

MOST_TIMES = 40
"""Newest iteration times that are kept of a job."""


@dataclass
class Seen:
    """Of one job. ``times``: of an iteration, in seconds, whenever status told of another one."""

    times: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_TIMES))
    turned: dict[int, float] = field(default_factory=dict)
    """Slow links of which top saw that they were not slow before: when, wall clock."""
    _iteration: int | None = None
    _slow: set[int] | None = None
    """Links that were slow at the last look, if all of them were listed."""

    def look(self, job: ClusterJob, now: float) -> None:
        """``now``: wall clock, seconds."""
        training = job.status.training if job.status is not None else None
        if job.status is None or training is None:
            return
        if training.iteration_seconds and training.iteration != self._iteration:
            self._iteration = training.iteration
            self.times.append(training.iteration_seconds)
        slow = {each.link for each in training.slow_links}
        self.turned = {link: at for link, at in self.turned.items() if link in slow}
        found = condition(job.status, "LinksHealthy")
        known = found is not None and found.status != "Unknown"
        if known and self._slow is not None:
            # The first slow link turned slow when the condition did, which status tells.
            for link in (slow - self._slow) if self._slow else ():
                self.turned[link] = now
        complete = known and training.slow_link_count == len(slow)
        self._slow = slow if complete else None
