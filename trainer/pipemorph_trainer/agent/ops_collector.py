"""Collection of the op traces of iterations, about one a second.

All ranks get the request for an iteration that none of them has begun, so the request arrives in
time and all report the same iteration. In a large job this is done less often; while the live page
has a viewer, those of the viewed column get requests meanwhile. The module is pure: callers pass
the time.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import NamedTuple

from pipemorph.protocol import Count, OpsTrace, ProtocolModel
from pipemorph.protocol.page_messages import OpsWanted
from pipemorph.spec.mesh import MeshShape

REQUEST_INTERVAL_SECONDS = 1.0
"""Least time between two requests."""
RANKS_PER_SECOND = 32
"""Ranks of the whole job that send their ops in a second, on average."""
ITERATIONS_AHEAD, SECONDS_AHEAD = 2, 0.3
"""Least distance from the newest iteration to the requested one: iterations, and seconds."""
PATIENCE_SECONDS = 5.0
"""Seconds to wait for the answers of all ranks, in addition to the time until the iteration ends.
Then the request is dropped, and another iteration is requested."""

NO_ITERATION = -1


class OpsRequest(ProtocolModel):
    """Request to a rank: report the ops of this iteration when it is finished."""

    ops_of: Count

    @staticmethod
    def is_ops_request(payload: bytes) -> bool:
        """True if the frame ``payload`` is such a request, and not a plan."""
        return payload.startswith(b'{"ops_of":')


class _PendingRequest(NamedTuple):
    columns: range
    iteration: int
    missing: set[tuple[int, int]]
    """Columns and stages whose ops have not arrived."""
    deadline: float


class OpsCollector:
    """Collector of the ops of a job's ranks. ``ask`` sends a request to ranks. ``on_column`` gets
    the ops of all stages of the viewed column in an iteration, ``on_job`` those of all columns.
    Times are monotonic seconds."""

    def __init__(
        self,
        mesh: MeshShape,
        ask: Callable[[set[int], int], None],
        on_column: Callable[[list[OpsTrace]], None],
        on_job: Callable[[list[OpsTrace]], None],
    ) -> None:
        self._mesh, self._request_ops = mesh, ask
        self._on_column, self._on_job = on_column, on_job
        self._column, self._viewed_until = 0, float("-inf")
        self._interval = max(REQUEST_INTERVAL_SECONDS, mesh.world_size / RANKS_PER_SECOND)
        """Least time between two requests to all ranks."""
        self._job_requested_at = float("-inf")
        self._iteration, self._seconds = NO_ITERATION, 1.0
        self._requested_at = float("-inf")
        self._pending: _PendingRequest | None = None
        self._collected: list[OpsTrace] = []

    def extend_watch(self, wanted: OpsWanted, now: float) -> None:
        """Extend the time in which the page has a viewer."""
        if wanted.column >= self._mesh.columns:
            return
        self._column, self._viewed_until = wanted.column, now + wanted.seconds

    def record_progress(self, iteration: int, seconds: float | None, now: float) -> None:
        """Record the iteration of rank 0. ``seconds``: duration of the previous one, if known."""
        self._iteration = max(self._iteration, iteration)
        if iteration < self._iteration - ITERATIONS_AHEAD:
            self._iteration = iteration  # The ranks have restarted.
        self._seconds = seconds or self._seconds
        self._request_if_due(now)

    def _request_if_due(self, now: float) -> None:
        if self._pending is not None and now < self._pending.deadline:
            return
        if now - self._requested_at < REQUEST_INTERVAL_SECONDS:
            return
        columns = range(self._column, self._column + 1)
        if now - self._job_requested_at >= self._interval:
            columns, self._job_requested_at = range(self._mesh.columns), now
        elif now >= self._viewed_until:
            return
        ahead = max(ITERATIONS_AHEAD, 1 + ceil(SECONDS_AHEAD / max(1e-3, self._seconds)))
        iteration = self._iteration + ahead
        missing = {(column, stage) for column in columns for stage in range(self._mesh.stages)}
        until = now + PATIENCE_SECONDS + 2 * (ahead + 1) * self._seconds
        self._pending, self._collected = _PendingRequest(columns, iteration, missing, until), []
        self._requested_at = now
        self._request_ops(
            {self._mesh.find_rank(stage, column) for column, stage in missing}, iteration
        )

    def record_ops(self, ops: OpsTrace, now: float) -> None:
        """Record the ops of a stage. Ops without a request are dropped."""
        question, place = self._pending, (ops.column, ops.stage)
        if question is None or ops.iteration != question.iteration or place not in question.missing:
            return
        question.missing.discard(place)
        self._collected.append(ops)
        if not question.missing:
            whole, self._pending, self._collected = self._collected, None, []
            whole.sort(key=lambda each: (each.column, each.stage))
            if now < self._viewed_until:
                self._on_column([each for each in whole if each.column == self._column])
            if len(question.columns) == self._mesh.columns:
                self._on_job(whole)
