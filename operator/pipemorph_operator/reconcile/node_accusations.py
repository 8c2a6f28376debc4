"""Nodes that several jobs accuse, because their links at the node are slow.

A slow link has a node at each end, and one job cannot decide which of the two is the cause. A node
at which links of two jobs are slow within a day gets an event, with the jobs and their
measurements, and a metric. Both are for people: jobs are placed by their own slow links only.

Accusations are in the memory of the leading operator. The next leader starts without them; jobs
whose links are still slow accuse their nodes again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial

from pipemorph_operator import names
from pipemorph_operator.kube.events import KubeEvent
from pipemorph_operator.metrics import NODE_ACCUSING_JOBS

WINDOW_SECONDS = 24 * 3600.0
ENOUGH_JOBS = 2
MAX_NODES = 2_000
MAX_JOBS = 16
"""Limit of jobs per node: those with the newest accusations."""


class NodeAccusations:
    """Accusations of the last day, by node and job, oldest first. Bounded: beyond
    :data:`MAX_NODES`, the nodes with the oldest accusations are dropped."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._by_node: dict[str, dict[str, tuple[float, str]]] = {}
        """Time in seconds since the Unix epoch, and the measured delay as text."""

    def add_accusations(self, job: str, measured: Mapping[str, str]) -> dict[str, KubeEvent]:
        """Add what ``job`` (``NAMESPACE/NAME``) measured at nodes. Returns events, by node, for
        nodes that enough jobs accuse only now."""
        self._drop_expired()
        events: dict[str, KubeEvent] = {}
        for node, text in measured.items():
            jobs = self._by_node.pop(node, {})
            before = len(jobs)
            jobs.pop(job, None)
            jobs[job] = self._clock(), text
            if len(jobs) > MAX_JOBS:
                del jobs[next(iter(jobs))]
            self._by_node[node] = jobs
            if before < ENOUGH_JOBS <= len(jobs):
                NODE_ACCUSING_JOBS.labels(node=node).set_function(partial(self.count_jobs, node))
                events[node] = _build_event(jobs)
        while len(self._by_node) > MAX_NODES:
            self._drop_node(next(iter(self._by_node)))
        return events

    def count_jobs(self, node: str) -> int:
        """Number of jobs that have accused the node within a day."""
        since = self._clock() - WINDOW_SECONDS
        return sum(at >= since for at, _ in self._by_node.get(node, {}).values())

    def clear(self) -> None:
        """Drop all accusations and the metric."""
        for node in list(self._by_node):
            self._drop_node(node)

    def _drop_expired(self) -> None:
        since = self._clock() - WINDOW_SECONDS
        for node, jobs in list(self._by_node.items()):
            before = len(jobs)
            for job in [job for job, (at, _) in jobs.items() if at < since]:
                del jobs[job]
            if before >= ENOUGH_JOBS > len(jobs):
                NODE_ACCUSING_JOBS.remove(node)
            if not jobs:
                del self._by_node[node]

    def _drop_node(self, node: str) -> None:
        if len(self._by_node.pop(node)) >= ENOUGH_JOBS:
            NODE_ACCUSING_JOBS.remove(node)


def _build_event(jobs: Mapping[str, tuple[float, str]]) -> KubeEvent:
    measured = "; ".join(f"{job}: {text}" for job, (_, text) in jobs.items())
    return KubeEvent(
        "Warning",
        names.R_NODE_ACCUSED,
        f"links of {len(jobs)} jobs at this node were slow within a day: {measured}",
    )
