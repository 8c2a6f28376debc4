"""Nodes that several jobs accuse, by their slow links.

A slow link has a node at each end, and one job cannot say which of the two is the cause. A node at
which links of two jobs are slow within a day gets an event, which names the jobs and what they
measured, and a metric. Both are for people: jobs are placed by their own slow links only.

The accusations are in the memory of the operator that leads. The next leader begins without them;
jobs whose links are still slow accuse their nodes again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial

from pipemorph_operator import names
from pipemorph_operator.cluster.events import Event
from pipemorph_operator.metrics import NODE_ACCUSING_JOBS

WINDOW_SECONDS = 24 * 3600.0
ENOUGH_JOBS = 2
MAX_NODES = 2_000
MAX_JOBS = 16
"""Most jobs of one node, those with the newest accusations."""


class NodeAccusations:
    """The accusations of the last day, by node and job, oldest first. Bounded: beyond
    :data:`MAX_NODES` the nodes that have not been accused for longest are dropped."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._by_node: dict[str, dict[str, tuple[float, str]]] = {}
        """When, seconds since the Unix epoch, and what was measured."""

    def add(self, job: str, measured: Mapping[str, str]) -> dict[str, Event]:
        """Add what ``job`` (``NAMESPACE/NAME``) measured at nodes. Returns, by node, the events of
        those that enough jobs accuse now and did not before."""
        self._drop_old()
        events: dict[str, Event] = {}
        for node, text in measured.items():
            jobs = self._by_node.pop(node, {})
            before = len(jobs)
            jobs.pop(job, None)
            jobs[job] = self._clock(), text
            if len(jobs) > MAX_JOBS:
                del jobs[next(iter(jobs))]
            self._by_node[node] = jobs
            if before < ENOUGH_JOBS <= len(jobs):
                NODE_ACCUSING_JOBS.labels(node=node).set_function(partial(self.count, node))
                events[node] = _event(jobs)
        while len(self._by_node) > MAX_NODES:
            self._drop(next(iter(self._by_node)))
        return events

    def count(self, node: str) -> int:
        """Number of jobs that accused the node within a day."""
        since = self._clock() - WINDOW_SECONDS
        return sum(at >= since for at, _ in self._by_node.get(node, {}).values())

    def clear(self) -> None:
        """Drop all accusations and the metric."""
        for node in list(self._by_node):
            self._drop(node)

    def _drop_old(self) -> None:
        since = self._clock() - WINDOW_SECONDS
        for node, jobs in list(self._by_node.items()):
            before = len(jobs)
            for job in [job for job, (at, _) in jobs.items() if at < since]:
                del jobs[job]
            if before >= ENOUGH_JOBS > len(jobs):
                NODE_ACCUSING_JOBS.remove(node)
            if not jobs:
                del self._by_node[node]

    def _drop(self, node: str) -> None:
        if len(self._by_node.pop(node)) >= ENOUGH_JOBS:
            NODE_ACCUSING_JOBS.remove(node)


def _event(jobs: Mapping[str, tuple[float, str]]) -> Event:
    measured = "; ".join(f"{job}: {text}" for job, (_, text) in jobs.items())
    return Event(
        "Warning",
        names.R_NODE_ACCUSED,
        f"links of {len(jobs)} jobs at this node were slow within a day: {measured}",
    )
