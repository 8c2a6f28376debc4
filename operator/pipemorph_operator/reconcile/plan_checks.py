"""Checks whether a job's spec allows a plan, without blocking other jobs.

Small plans are computed at once. A large plan takes seconds of CPU time: another process computes
it, one at a time, while the job waits, and only for a job that is about to start.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from pipemorph.control.first_plan import make_initial_schedule, plans_quickly
from pipemorph.errors import InputError
from pipemorph.ingest import FirstPlanner, PlannerLostError
from pipemorph.spec.job_spec import JobSpec

log = logging.getLogger("pipemorph.operator")

Key = tuple[str, str]

MAX_CACHED = 10_000
RETRY_SECONDS = 30.0
"""Delay before a retry after the planner process died."""
LIMIT_SECONDS = 600.0
"""Time limit of one plan. The largest takes about 10 s on an idle CPU."""


@dataclass(frozen=True)
class PlanCheck:
    """Answer whether a job can be planned, once ``is_known``: no, with a ``problem``; or yes."""

    is_known: bool
    problem: str = ""


def check_small_spec(spec: JobSpec) -> PlanCheck | None:
    """Answer for a small spec; None for a spec that takes longer to plan."""
    if not plans_quickly(spec):
        return None
    try:
        make_initial_schedule(spec)
    except InputError as error:
        return PlanCheck(is_known=True, problem=f"spec.schedule: {error}")
    return PlanCheck(is_known=True)


class PlanChecker:
    """Caches answers by the job's UID, because the inputs of a plan are immutable. Calls ``again``
    with the job's key once its answer is known."""

    def __init__(self, planner: FirstPlanner, again: Callable[[Key], None]) -> None:
        self._planner = planner
        self._again = again
        self._answers: OrderedDict[str, PlanCheck] = OrderedDict()
        self._computing: dict[Key, tuple[str, asyncio.Task[None]]] = {}

    def check_plan(self, key: Key, uid: str, spec: JobSpec) -> PlanCheck:
        """Answer, as far as known. The first call starts the computation."""
        answer = self._answers.get(uid)
        if answer is not None:
            return answer
        computing = self._computing.get(key)
        if computing is None or computing[0] != uid:
            self.cancel_check(key)
            self._computing[key] = uid, asyncio.create_task(self._compute_check(key, uid, spec))
        return PlanCheck(is_known=False)

    def cancel_check(self, key: Key) -> None:
        """Cancel the computation for a deleted job."""
        computing = self._computing.pop(key, None)
        if computing is not None:
            computing[1].cancel()

    async def close(self) -> None:
        """Cancel all computations."""
        tasks = [task for _, task in self._computing.values()]
        for key in [*self._computing]:
            self.cancel_check(key)
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _compute_check(self, key: Key, uid: str, spec: JobSpec) -> None:
        found = None
        while found is None:
            try:
                await self._planner(spec, wanted=False)
                found = PlanCheck(is_known=True)
            except InputError as error:
                found = PlanCheck(is_known=True, problem=f"spec.schedule: {error}")
            except (PlannerLostError, OSError) as error:
                log.error("%s/%s: the plan could not be computed; retrying: %s", *key, error)
                await asyncio.sleep(RETRY_SECONDS)
        del self._computing[key]
        self._answers[uid] = found
        while len(self._answers) > MAX_CACHED:
            self._answers.popitem(last=False)
        self._again(key)
