"""Jobs that are tracked soon: once their first plan is computed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from pipemorph.api.spec import JobSpec
from pipemorph.control.first_plan import (
    initial_problem,
    is_quick,
    is_shared,
    share,
)
from pipemorph.errors import InputError
from pipemorph.ingest import PlannerLost
from pipemorph.planning import Schedule
from pipemorph_operator.ingest.status.tracked import Key

log = logging.getLogger("pipemorph.ingest")

PLAN_AGAIN_SECONDS = 5.0
"""Delay before a retry after the planner process of first plans died."""
ARRIVAL_SECONDS = 4.0
"""How long a request waits for its job to be known: an agent waits for five seconds."""

FirstPlanner = Callable[[JobSpec], Awaitable[Schedule | None]]
"""The interface of :class:`pipemorph.ingest.FirstPlanner`."""


Take = Callable[[Key, Mapping[str, Any]], None]
"""Callback: the job can be tracked now; its manifest as last read."""


@dataclass
class _Coming:
    body: Mapping[str, Any]
    """As last read."""
    task: asyncio.Task[None]


class ComingJobs:
    """``first_plan`` computes the first plans of large jobs; None: all are computed in-process."""

    def __init__(self, first_plan: FirstPlanner | None, take: Take) -> None:
        self._first_plan = first_plan
        self._take = take
        self._jobs: dict[Key, _Coming] = {}
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
        """Whether a job that is not tracked may still be: jobs are being read, or its first plan
        is computed."""
        return not self._listed or key in self._jobs

    async def arrival(self, key: Key) -> None:
        """Wait until the job is tracked, or it is known that it is not, or a little: after a
        restart all agents come at once, before jobs have been read, and large jobs planned."""
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

    def expect(self, key: Key, body: Mapping[str, Any], spec: JobSpec) -> None:
        """Start what has to be there before the job is tracked; then have it taken, with the latest
        ``body``."""
        coming = self._jobs.get(key)
        if coming is not None:
            coming.body = body
            return
        task = asyncio.create_task(self._prepare(key, spec))
        task.add_done_callback(partial(self._ended, key))
        self._jobs[key] = _Coming(body, task)

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
        schedule = await self._first_schedule(key, spec)
        if schedule is None:
            del self._jobs[key]
            self.arrived(key)
            return
        # The cache of shared plans is weak: hold the plan until the controller has it.
        held = share(initial_problem(spec), schedule)
        self._take(key, self._jobs.pop(key).body)
        del held

    async def _first_schedule(self, key: Key, spec: JobSpec) -> Schedule | None:
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
