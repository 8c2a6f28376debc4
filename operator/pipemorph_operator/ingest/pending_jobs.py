"""Jobs that will be tracked once their first plan is computed, and requests that wait for them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from pipemorph.control.first_plan import (
    build_initial_problem,
    has_shared_schedule,
    plans_quickly,
    share_schedule,
)
from pipemorph.errors import InputError
from pipemorph.ingest import PlannerLostError
from pipemorph.planning import Schedule
from pipemorph.spec.job_spec import JobSpec
from pipemorph_operator.ingest.status.tracked_job import Key

log = logging.getLogger("pipemorph.ingest")

PLAN_AGAIN_SECONDS = 5.0
"""Delay before a retry after the planner process of first plans died."""
ARRIVAL_SECONDS = 4.0
"""Longest wait of a request for its job to be tracked; agents time out after five seconds."""

FirstPlanner = Callable[[JobSpec], Awaitable[Schedule | None]]
"""Interface of :class:`pipemorph.ingest.FirstPlanner`."""


TrackJob = Callable[[Key, Mapping[str, Any]], None]
"""Callback: the job can be tracked now; the second argument is its latest manifest."""


@dataclass
class _PendingJob:
    body: Mapping[str, Any]
    """Latest manifest."""
    task: asyncio.Task[None]


class PendingJobs:
    """Computes first plans in other processes, by ``first_plan``, and passes planned jobs to
    ``track_job``. If ``first_plan`` is None, no job is pending: the caller plans in-process."""

    def __init__(self, first_plan: FirstPlanner | None, track_job: TrackJob) -> None:
        self._first_plan = first_plan
        self._track_job = track_job
        self._jobs: dict[Key, _PendingJob] = {}
        self._awaited: dict[Key, list[asyncio.Future[None]]] = {}
        """Requests for jobs that may be tracked soon."""
        self._listed = False

    def __contains__(self, key: Key) -> bool:
        return key in self._jobs

    # --- waiting requests -----------------------------------------------------------------

    def mark_all_listed(self) -> None:
        """Record that all existing jobs are known."""
        self._listed = True
        for key in self._awaited.keys() - self._jobs.keys():
            self.release_waiters(key)

    def may_appear(self, key: Key) -> bool:
        """True if an untracked job may be tracked soon: jobs are being read, or it is planned."""
        return not self._listed or key in self._jobs

    async def wait_for_job(self, key: Key) -> None:
        """Wait until the job is tracked, or known not to be, at most :data:`ARRIVAL_SECONDS`. After
        a restart all agents connect at once, before jobs are read and large jobs are planned."""
        if not self.may_appear(key):
            return
        waiting = asyncio.get_running_loop().create_future()
        self._awaited.setdefault(key, []).append(waiting)
        try:
            await asyncio.wait((waiting,), timeout=ARRIVAL_SECONDS)
        finally:
            if not waiting.done():
                self._awaited[key].remove(waiting)

    def release_waiters(self, key: Key) -> None:
        """End the wait for a job that is tracked now, or known not to be."""
        for waiting in self._awaited.pop(key, ()):
            waiting.cancel()

    # --- first plans ----------------------------------------------------------------------

    def needs_first_plan(self, spec: JobSpec) -> bool:
        """True if the first plan must be computed in another process."""
        return self._first_plan is not None and not (
            plans_quickly(spec) or has_shared_schedule(spec)
        )

    def add_job(self, key: Key, body: Mapping[str, Any], spec: JobSpec) -> None:
        """Compute the job's first plan in a task, then have it tracked with its latest ``body``."""
        pending = self._jobs.get(key)
        if pending is not None:
            pending.body = body
            return
        task = asyncio.create_task(self._plan_and_track(key, spec))
        task.add_done_callback(partial(self._log_failure, key))
        self._jobs[key] = _PendingJob(body, task)

    def remove_job(self, key: Key) -> None:
        """Remove a job that was deleted or is tracked already, and cancel its first plan."""
        pending = self._jobs.pop(key, None)
        if pending is not None:
            pending.task.cancel()

    def _log_failure(self, key: Key, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._jobs.pop(key, None)
            log.error("%s/%s cannot accept reports", *key, exc_info=error)

    async def _plan_and_track(self, key: Key, spec: JobSpec) -> None:
        schedule = await self._compute_first_plan(key, spec)
        if schedule is None:
            del self._jobs[key]
            self.release_waiters(key)
            return
        # The cache of shared plans holds weak references: hold the plan until the controller does.
        held = share_schedule(build_initial_problem(spec), schedule)
        self._track_job(key, self._jobs.pop(key).body)
        del held

    async def _compute_first_plan(self, key: Key, spec: JobSpec) -> Schedule | None:
        """First plan of the job; None if its spec allows none."""
        assert self._first_plan is not None
        while True:
            try:
                return await self._first_plan(spec)
            except InputError as error:
                log.error("%s/%s cannot accept reports: %s", *key, error)
                return None
            except (PlannerLostError, OSError) as error:
                log.error("%s/%s: computing the first plan failed; retrying: %s", *key, error)
                await asyncio.sleep(PLAN_AGAIN_SECONDS)
