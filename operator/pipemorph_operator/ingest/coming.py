"""Jobs that are tracked soon: once their first plan is computed, and their saved one is read."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from pipemorph.api.spec import JobSpec
from pipemorph.api.status import ControlState
from pipemorph.control.first_plan import (
    FirstSchedule,
    initial_problem,
    is_quick,
    is_shared,
    share,
)
from pipemorph.errors import InputError
from pipemorph.ingest import PlannerLost
from pipemorph_operator import names
from pipemorph_operator.cluster.client import REQUEST_ERRORS, Cluster, path, reason_of
from pipemorph_operator.ingest.plans import plan_object
from pipemorph_operator.ingest.plans.restore import is_ahead
from pipemorph_operator.ingest.status.tracked import Key

log = logging.getLogger("pipemorph.ingest")

PLAN_AGAIN_SECONDS = 5.0
"""Delay before a retry after the planner process of first plans died."""
MOST_READS = 16
"""Limit of concurrent reads of saved plans."""
READ_AGAIN_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 8.0
"""Delay before a saved plan is read again after that failed; it doubles each time, up to this."""
ARRIVAL_SECONDS = 4.0
"""How long a request waits for its job to be known: an agent waits for five seconds."""

FirstPlanner = Callable[[JobSpec], Awaitable[FirstSchedule | None]]
"""The interface of :class:`pipemorph.ingest.FirstPlanner`."""


class Take(Protocol):
    """Told of a job that can be tracked now, as last read."""

    def __call__(
        self, key: Key, body: Mapping[str, Any], found: plan_object.Found, *, overtaken: bool
    ) -> None: ...


@dataclass
class _Coming:
    body: Mapping[str, Any]
    """As last read."""
    task: asyncio.Task[None]
    overtaken: bool
    """Whether another ingest has written a plan meanwhile."""


class ComingJobs:
    """``first_plan`` computes the first plans of large jobs; None: all are computed in-process."""

    def __init__(self, cluster: Cluster, first_plan: FirstPlanner | None, take: Take) -> None:
        self._cluster = cluster
        self._first_plan = first_plan
        self._take = take
        self._jobs: dict[Key, _Coming] = {}
        self._reads = asyncio.Semaphore(MOST_READS)
        self._awaited: dict[Key, list[asyncio.Future[None]]] = {}
        """Requests for jobs that may be tracked soon."""
        self._listed = False

    def __contains__(self, key: Key) -> bool:
        return key in self._jobs

    # --- who waits for them ---------------------------------------------------------------

    def listed(self) -> None:
        """All jobs that there are, are known."""
        self._listed = True
        for key in self._awaited.keys() - self._jobs.keys():
            self.arrived(key)

    def may_come(self, key: Key) -> bool:
        """Whether a job that is not tracked may still be: jobs are being read, or its plan is."""
        return not self._listed or key in self._jobs

    async def arrival(self, key: Key) -> None:
        """Wait until the job is tracked, or it is known that it is not, or a little: after a
        restart all agents come at once, before jobs and plans have been read, and large jobs
        planned."""
        if not self.may_come(key):
            return
        waiting = asyncio.get_running_loop().create_future()
        self._awaited.setdefault(key, []).append(waiting)
        try:
            await asyncio.wait((waiting,), timeout=ARRIVAL_SECONDS)
        finally:
            if not waiting.done():
                self._awaited[key].remove(waiting)

    def arrived(self, key: Key) -> None:
        """The job is tracked, or it is known that it is not."""
        for waiting in self._awaited.pop(key, ()):
            waiting.cancel()

    # --- what they wait for ---------------------------------------------------------------

    def needs_first_plan(self, spec: JobSpec) -> bool:
        """Whether the first plan has to be computed in another process."""
        return self._first_plan is not None and not (is_quick(spec) or is_shared(spec))

    def expect(self, key: Key, body: Mapping[str, Any], spec: JobSpec, *, overtaken: bool) -> None:
        """Start what has to be there before the job is tracked; then have it taken, with the latest
        ``body``."""
        coming = self._jobs.get(key)
        if coming is not None:
            coming.body = body
            return
        task = asyncio.create_task(self._prepare(key, spec))
        task.add_done_callback(partial(self._ended, key))
        self._jobs[key] = _Coming(body, task, overtaken)

    def drop(self, key: Key) -> None:
        """The job is gone, or there already."""
        coming = self._jobs.pop(key, None)
        if coming is not None:
            coming.task.cancel()

    def _ended(self, key: Key, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._jobs.pop(key, None)
            log.error("%s/%s cannot accept reports", *key, exc_info=error)

    async def _prepare(self, key: Key, spec: JobSpec) -> None:
        kept = None
        if self.needs_first_plan(spec):
            schedule = await self._first_schedule(key, spec)
            if schedule is None:
                del self._jobs[key]
                self.arrived(key)
                return
            # The cache of shared plans is weak: keep the plan alive until the controller has it.
            kept = share(initial_problem(spec), schedule)
        found = await self._saved_plan(key)
        coming = self._jobs.pop(key)
        self._take(key, coming.body, found, overtaken=coming.overtaken)
        del kept

    async def _first_schedule(self, key: Key, spec: JobSpec) -> FirstSchedule | None:
        """The job's first plan; None if there is none."""
        assert self._first_plan is not None
        while True:
            try:
                return await self._first_plan(spec)
            except InputError as error:
                log.error("%s/%s cannot accept reports: %s", *key, error)
                return None
            except (PlannerLost, OSError) as error:
                log.error("%s/%s: computing the first plan failed; retrying: %s", *key, error)
                await asyncio.sleep(PLAN_AGAIN_SECONDS)

    async def _saved_plan(self, key: Key) -> plan_object.Found:
        """What is saved of the job. If the plan was written after the job was read, the job is read
        again."""
        pause = READ_AGAIN_SECONDS
        while True:
            coming = self._jobs[key]
            uid = coming.body["metadata"]["uid"]
            if _control(coming.body) is None:
                return plan_object.Found()
            try:
                async with self._reads:
                    found = await plan_object.read(self._cluster, *key, uid)
                    control = _control(coming.body)
                    if control is not None and found.plan and is_ahead(found.plan, control):
                        body = await self._cluster.get(path(names.KIND, *key))
                        if body is not None and body["metadata"]["uid"] == uid:
                            coming.body = body
                return found
            except REQUEST_ERRORS as error:
                log.warning("%s/%s: its plan could not be read: %s", *key, reason_of(error))
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


def _control(body: Mapping[str, Any]) -> ControlState | None:
    found = (body.get("status") or {}).get("control")
    return None if found is None else ControlState.model_validate(found)
