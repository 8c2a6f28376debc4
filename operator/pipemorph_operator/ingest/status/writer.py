"""Writes the ingest's part of jobs' status: what they train, and their conditions.

The ingest owns the fields :data:`~pipemorph_operator.names.INGEST_FIELDS` and its conditions (field
owner ``pipemorph-ingest``), so its writes and the operator's never overwrite each other. Every
write contains all owned fields.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial

from pipemorph.api.status import Condition, ControlState, JobStatus, TrainingStatus, UsefulTime
from pipemorph.control import JobView
from pipemorph.status import words
from pipemorph.status.summary import judge, summarize
from pipemorph_operator.cluster.client import REQUEST_ERRORS, ApiRefused, Cluster, reason_of
from pipemorph_operator.ingest import figures
from pipemorph_operator.ingest.status import write_schedule
from pipemorph_operator.ingest.status.condition_events import EventSender
from pipemorph_operator.ingest.status.fence import Overtaken
from pipemorph_operator.ingest.status.tracked import TrackedJob
from pipemorph_operator.metrics import DIRECTIVES, PERSIST_SECONDS, STATUS_WRITES

log = logging.getLogger("pipemorph.ingest")

MOST_WRITES = 16
"""Limit of concurrent status writes. More would only wait in the API server while their time limits
run. Changes and progress use at most half, so that directives need not wait for them."""

FINAL_WRITE_PAUSES = (1.0, 5.0, 20.0, 60.0, 0.0)
"""Seconds to wait after each failed write of a job's final status."""
GONE = frozenset({404, 409})
"""HTTP status if the job no longer exists, or was replaced by one of the same name."""


class StatusWriter:
    """Writes status when it is due. ``is_tracked``: whether
    a job may still be written; ``overtaken`` is told of one of which another ingest has written a
    plan."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        is_tracked: Callable[[TrackedJob], bool],
        overtaken: Callable[[TrackedJob, Overtaken], None],
    ) -> None:
        self._cluster = cluster
        self._clock = clock
        self._monotonic = monotonic
        self._is_tracked = is_tracked
        self._overtaken = overtaken
        self._writes = asyncio.Semaphore(MOST_WRITES)
        self._writing = 0
        self._sender = EventSender(cluster)

    async def persist(self, tracked: TrackedJob) -> None:
        """Write the plan version and the summary. Raises if the write failed."""
        started = self._monotonic()
        async with tracked.writing:
            await self._write(tracked)
        DIRECTIVES.inc()
        PERSIST_SECONDS.observe(self._monotonic() - started)

    async def persist_generations(self, tracked: TrackedJob) -> None:
        """Write all, and with it the generation. Raises if the write failed."""
        tracked.reports.again()  # Whatever becomes of this write.
        async with tracked.writing:
            await self._write(tracked)

    async def look(self, tracked: TrackedJob) -> None:
        """Write the job's status if it is due. Failures are logged and retried."""
        key, now = tracked.key, self._monotonic()
        if tracked.writing.locked() or tracked.awaits_directive(now):
            return
        due = partial(write_schedule.is_due, since_write=now - tracked.written_at)
        pending = tracked.reports.pending and due(tracked.has_news)
        if not pending and now - tracked.looked_at < write_schedule.FIGURES_SECONDS:
            return
        tracked.looked_at, tracked.looked_version = now, tracked.controller.plan_version
        wall = self._clock()
        view = tracked.controller.view(wall)
        key_state = write_schedule.key_state(tracked.source, view, wall)
        recovers = tracked.recovers
        state_changed = key_state != tracked.key_state or recovers
        tracked.reports.news = state_changed
        training, conditions = self._summary(tracked, view, wall)
        heard_at = tracked.reports.reported_at or tracked.taken_over_at
        figures.show(
            key, training, conditions, heard_at,
            recoveries=tracked.generations.saved.count or 0, goodput=tracked.goodput(wall),
            links=view.links,
        )  # fmt: skip
        known = training == tracked.written and conditions == tracked.conditions
        if known and not recovers:
            tracked.reports.looked()
            return
        if not due(state_changed) or self._writing >= MOST_WRITES // 2:
            return  # Retried in the next round.
        tracked.reports.looked()
        async with tracked.writing:
            try:
                await self._write(tracked)
            except (*REQUEST_ERRORS, Overtaken, LookupError) as error:
                tracked.reports.again()
                tracked.written_at = self._monotonic()
                log.warning("%s/%s: writing status failed: %s", *key, error)

    @staticmethod
    def _summary(
        tracked: TrackedJob, view: JobView, now: float
    ) -> tuple[TrainingStatus, list[Condition]]:
        source = tracked.source
        training = summarize(source, now, view, tracked.written)
        return training, judge(source, tracked.conditions, now, view)

    async def _write(self, tracked: TrackedJob) -> None:
        """Write the ingest's part of a job's status, as of when the write starts."""
        self._writing += 1
        try:
            async with self._writes:
                await self._apply(tracked)
        finally:
            self._writing -= 1

    async def _apply(self, tracked: TrackedJob) -> None:
        if not tracked.ended and not self._is_tracked(tracked):
            raise LookupError("the job is no longer tracked here")
        wall = self._clock()
        view = tracked.controller.view(wall)
        key_state = write_schedule.key_state(tracked.source, view, wall)
        training, conditions = self._summary(tracked, view, wall)
        newest = tracked.controller.plan_version
        goodput = tracked.goodput(wall)
        status = JobStatus(
            conditions=conditions,
            training=training,
            control=ControlState(plan_version=newest) if newest else None,
            recoveries=tracked.generations.told,
            goodput=goodput,
            goodput_percent=words.goodput(goodput),
            useful_time=_useful_time(tracked),
        )
        try:
            await tracked.fence.apply(self._cluster, tracked.about, status)
        except BaseException as error:
            STATUS_WRITES.labels(result="error").inc()
            if isinstance(error, Overtaken) and self._is_tracked(tracked):
                log.error("%s/%s: %s; continuing from it", *tracked.key, error)
                self._overtaken(tracked, error)
            raise
        STATUS_WRITES.labels(result="ok").inc()
        tracked.written, tracked.conditions = training, conditions
        tracked.recoveries = status.recoveries
        events = tracked.recovery_events.changed(status.recoveries)
        self._sender.send(tracked.about, [*tracked.events.changed(conditions, wall), *events])
        tracked.written_at = self._monotonic()
        tracked.key_state = key_state

    async def finish(self, tracked: TrackedJob) -> None:
        """Write the final status of a finished job: its last figures, and links not slow."""
        for pause in FINAL_WRITE_PAUSES:
            try:
                async with tracked.writing:
                    await self._write(tracked)
                return
            except Overtaken:
                return  # Another ingest writes the final status.
            except REQUEST_ERRORS as error:
                why = reason_of(error)
                log.warning("%s/%s: writing the final status failed: %s", *tracked.key, why)
                if isinstance(error, ApiRefused) and error.status in GONE:
                    return
            # Retry here: finished jobs are no longer visited.
            await asyncio.sleep(pause)


def _useful_time(tracked: TrackedJob) -> UsefulTime | None:
    useful = tracked.reports.useful
    if not useful.iterations:
        return None
    return UsefulTime(seconds=round(useful.seconds, 3), iterations=useful.iterations)
