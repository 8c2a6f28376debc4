"""Asks ranks for the ops of one iteration, about once a second, while somebody watches the job.

The ranks of one column are asked at once, for an iteration that none of them has begun: so all of
them hear of it in time, and tell of the same one. While nobody watches, nothing is asked for. Pure,
without a clock of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import NamedTuple

from pipemorph.api.mesh import MeshShape
from pipemorph.wire import Count, OpsTrace, WireModel
from pipemorph.wire.page import OpsWanted

EVERY_SECONDS = 1.0
"""Least time between two questions."""
AHEAD, AHEAD_SECONDS = 2, 0.3
"""By how many iterations, and how much time, the one that is asked for is ahead of the newest."""
PATIENCE_SECONDS = 5.0
"""How long to wait for the answers of all ranks, beside the iterations until then. What is missing
then is not waited for: another iteration is asked for."""

NONE = -1


class OpsAsked(WireModel):
    """To a rank: tell the ops of this iteration, when it is finished."""

    ops_of: Count

    @staticmethod
    def is_one(payload: bytes) -> bool:
        """Whether a frame is one, and not a plan."""
        return payload.startswith(b'{"ops_of":')


class _Question(NamedTuple):
    column: int
    iteration: int
    missing: set[int]
    """Stages that have not told yet."""
    until: float


class OpsCollector:
    """The ops of a job's ranks. ``ask`` asks ranks for an iteration; ``on_whole`` gets the stages
    of one, when all have told. Times are monotonic seconds."""

    def __init__(
        self,
        mesh: MeshShape,
        ask: Callable[[set[int], int], None],
        on_whole: Callable[[list[OpsTrace]], None],
    ) -> None:
        self._mesh, self._ask, self._on_whole = mesh, ask, on_whole
        self._column, self._until = 0, float("-inf")
        self._iteration, self._seconds = NONE, 1.0
        self._asked_at = float("-inf")
        self._question: _Question | None = None
        self._told: list[OpsTrace] = []

    def wanted(self, wanted: OpsWanted, now: float) -> None:
        """Somebody watches."""
        if wanted.column >= self._mesh.columns:
            return
        self._column, self._until = wanted.column, now + wanted.seconds

    def progress(self, iteration: int, seconds: float | None, now: float) -> None:
        """Rank 0 is in this iteration; ``seconds``: that the one before took, if that is known."""
        self._iteration = max(self._iteration, iteration)
        if iteration < self._iteration - AHEAD:
            self._iteration = iteration  # The ranks have started again.
        self._seconds = seconds or self._seconds
        self._consider(now)

    def _consider(self, now: float) -> None:
        if now >= self._until:
            self._question, self._told = None, []
            return
        if self._question is not None and now < self._question.until:
            return
        if now - self._asked_at < EVERY_SECONDS:
            return
        ahead = max(AHEAD, 1 + ceil(AHEAD_SECONDS / max(1e-3, self._seconds)))
        iteration = self._iteration + ahead
        stages = set(range(self._mesh.stages))
        until = now + PATIENCE_SECONDS + 2 * (ahead + 1) * self._seconds
        self._question, self._told = _Question(self._column, iteration, stages, until), []
        self._asked_at = now
        self._ask({self._mesh.rank(stage, self._column) for stage in stages}, iteration)

    def take(self, ops: OpsTrace, now: float) -> None:
        """A stage's ops. Those that nobody has asked for are dropped."""
        question = self._question
        if question is None or (ops.column, ops.iteration) != (
            question.column, question.iteration,
        ) or ops.stage not in question.missing:  # fmt: skip
            return
        question.missing.discard(ops.stage)
        self._told.append(ops)
        if not question.missing:
            whole, self._question, self._told = self._told, None, []
            self._on_whole(sorted(whole, key=lambda each: each.stage))
