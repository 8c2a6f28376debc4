"""Writes the ingest's part of jobs' status: training, plans, recoveries, goodput and conditions.

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

from pipemorph.control import JobView
from pipemorph.spec.job_status import (
    Condition,
    ControlStatus,
    JobStatus,
    TrainingStatus,
    UsefulTime,
)
from pipemorph.views.status import job_metrics, status_text
from pipemorph.views.status.summary import summarize_training, update_conditions
from pipemorph_operator.ingest.status import write_schedule
from pipemorph_operator.ingest.status.condition_events import EventSender
from pipemorph_operator.ingest.status.status_fence import StatusOvertakenError
from pipemorph_operator.ingest.status.tracked_job import TrackedJob
from pipemorph_operator.kube.client import REQUEST_ERRORS, KubeApiError, KubeClient, describe_error
from pipemorph_operator.metrics import DIRECTIVES, PERSIST_SECONDS, STATUS_WRITES

log = logging.getLogger("pipemorph.ingest")

MAX_WRITES = 16
"""Limit of concurrent status writes. More would only wait in the API server until they time out.
Changes and progress use at most half, so that directives need not wait for them."""

FINAL_WRITE_PAUSES = (1.0, 5.0, 20.0, 60.0, 0.0)
"""Seconds to wait after each failed write of a job's final status."""
GONE = frozenset({404, 409})
"""HTTP status if the job no longer exists, or was replaced by one of the same name."""


class StatusWriter:
    """Writes status when it is due. ``is_tracked`` returns True if a job may still be written;
    ``overtaken`` is called if another ingest has written the job's status."""

    def __init__(
        self,
        cluster: KubeClient,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        is_tracked: Callable[[TrackedJob], bool],
        overtaken: Callable[[TrackedJob, StatusOvertakenError], None],
    ) -> None:
        self._cluster = cluster
        self._clock = clock
        self._monotonic = monotonic
        self._is_tracked = is_tracked
        self._overtaken = overtaken
        self._writes = asyncio.Semaphore(MAX_WRITES)
        self._writing = 0
        self._sender = EventSender(cluster)

    async def write_directive(self, tracked: TrackedJob) -> None:
        """Write the plan version and the summary. Raises if the write fails."""
        started = self._monotonic()
        async with tracked.write_lock:
            await self._write_status(tracked)
        DIRECTIVES.inc()
        PERSIST_SECONDS.observe(self._monotonic() - started)

    async def write_generation(self, tracked: TrackedJob) -> None:
        """Write the whole status, including the generation. Raises if the write fails."""
        tracked.reports.mark_outdated()  # The outcome of this write may stay unknown.
        async with tracked.write_lock:
            await self._write_status(tracked)

    async def write_if_due(self, tracked: TrackedJob) -> None:
        """Write the job's status if it is due. Logs failures; the next visit retries."""
        key, now = tracked.key, self._monotonic()
        if tracked.write_lock.locked() or tracked.awaits_directive(now):
            return
        due = partial(write_schedule.is_write_due, since_write=now - tracked.written_at)
        pending = tracked.reports.pending and due(tracked.has_changes)
        if not pending and now - tracked.visited_at < write_schedule.METRICS_SECONDS:
            return
        tracked.visited_at, tracked.visited_version = now, tracked.controller.plan_version
        wall = self._clock()
        view = tracked.controller.get_job_view(wall)
        key_state = write_schedule.build_key_state(tracked.summary_source, view, wall)
        recovers = tracked.has_unwritten_recoveries
        state_changed = key_state != tracked.key_state or recovers
        tracked.reports.has_changes = state_changed
        training, conditions = self._build_summary(tracked, view, wall)
        reported_at = tracked.reports.reported_at or tracked.taken_over_at
        job_metrics.update_job_metrics(
            key, training, conditions, reported_at,
            recoveries=tracked.generations.saved.count or 0, goodput=tracked.compute_goodput(wall),
            links=view.links, idle=view.idle_totals,
        )  # fmt: skip
        known = training == tracked.written_training and conditions == tracked.conditions
        if known and not recovers:
            tracked.reports.mark_current()
            return
        if not due(state_changed) or self._writing >= MAX_WRITES // 2:
            return  # Retried in the next round.
        tracked.reports.mark_current()
        async with tracked.write_lock:
            try:
                await self._write_status(tracked)
            except (*REQUEST_ERRORS, StatusOvertakenError, LookupError) as error:
                tracked.reports.mark_outdated()
                tracked.written_at = self._monotonic()
                log.warning("%s/%s: writing status failed: %s", *key, error)

    @staticmethod
    def _build_summary(
        tracked: TrackedJob, view: JobView, now: float
    ) -> tuple[TrainingStatus, list[Condition]]:
        source = tracked.summary_source
        training = summarize_training(source, now, view, tracked.written_training)
        return training, update_conditions(source, tracked.conditions, now, view)

    async def _write_status(self, tracked: TrackedJob) -> None:
        """Write the ingest's part of a job's status, as of the start of the write."""
        self._writing += 1
        try:
            async with self._writes:
                await self._apply_status(tracked)
        finally:
            self._writing -= 1

    async def _apply_status(self, tracked: TrackedJob) -> None:
        if not tracked.has_ended and not self._is_tracked(tracked):
            raise LookupError("the job is no longer tracked here")
        wall = self._clock()
        view = tracked.controller.get_job_view(wall)
        key_state = write_schedule.build_key_state(tracked.summary_source, view, wall)
        training, conditions = self._build_summary(tracked, view, wall)
        newest = tracked.controller.plan_version
        goodput = tracked.compute_goodput(wall)
        status = JobStatus(
            conditions=conditions,
            training=training,
            control=ControlStatus(plan_version=newest) if newest else None,
            recoveries=tracked.generations.status_recoveries,
            goodput=goodput,
            goodput_percent=status_text.format_goodput(goodput),
            useful_time=_read_useful_time(tracked),
        )
        try:
            await tracked.status_fence.apply_status(self._cluster, tracked.object_reference, status)
        except BaseException as error:
            STATUS_WRITES.labels(result="error").inc()
            if isinstance(error, StatusOvertakenError) and self._is_tracked(tracked):
                log.error("%s/%s: %s; continuing from that status", *tracked.key, error)
                self._overtaken(tracked, error)
            raise
        STATUS_WRITES.labels(result="ok").inc()
        tracked.written_training, tracked.conditions = training, conditions
        tracked.recoveries = status.recoveries
        events = tracked.recovery_events.select_events(status.recoveries)
        self._sender.send_events(
            tracked.object_reference,
            [*tracked.condition_events.select_events(conditions, wall), *events],
        )
        tracked.written_at = self._monotonic()
        tracked.key_state = key_state

    async def write_final_status(self, tracked: TrackedJob) -> None:
        """Write the final status of a finished job, with its last figures and no slow links."""
        for pause in FINAL_WRITE_PAUSES:
            try:
                async with tracked.write_lock:
                    await self._write_status(tracked)
                return
            except StatusOvertakenError:
                return  # Another ingest writes the final status.
            except REQUEST_ERRORS as error:
                why = describe_error(error)
                log.warning("%s/%s: writing the final status failed: %s", *tracked.key, why)
                if isinstance(error, KubeApiError) and error.status in GONE:
                    return
            # Retry here: finished jobs are no longer visited.
            await asyncio.sleep(pause)


def _read_useful_time(tracked: TrackedJob) -> UsefulTime | None:
    useful = tracked.reports.useful
    if not useful.iterations:
        return None
    return UsefulTime(seconds=round(useful.seconds, 3), iterations=useful.iterations)
