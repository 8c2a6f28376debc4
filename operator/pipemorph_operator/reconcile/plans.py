"""Checks whether a job's spec allows a plan, without blocking other jobs.

Small plans are computed at once. A large one takes seconds of CPU time: it is computed in another
process, one at a time, while the job waits, and only for a job that is about to start.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from pipemorph.api.spec import JobSpec
from pipemorph.control.first_plan import initial_schedule, is_quick
from pipemorph.errors import InputError
from pipemorph.ingest import FirstPlanner, PlannerLost

log = logging.getLogger("pipemorph.operator")

Key = tuple[str, str]

MOST_KEPT = 10_000
ASK_AGAIN_SECONDS = 30.0
"""Delay before a retry after the planner process died."""
LIMIT_SECONDS = 600.0
"""Time limit of one plan. The largest takes about 10 s on an idle CPU."""


@dataclass(frozen=True)
class Plannable:
    """Whether a job can be planned: not ``known`` yet, no (``problem`` says why), or yes."""

    known: bool
    problem: str = ""


def at_once(spec: JobSpec) -> Plannable | None:
    """The answer for a small spec; None for a spec that takes longer to plan."""
    if not is_quick(spec):
        return None
    try:
        initial_schedule(spec)
    except InputError as error:
        return Plannable(known=True, problem=f"spec.schedule: {error}")
    return Plannable(known=True)


class Plans:
    """Caches answers by the job's UID, since the inputs of a plan are immutable. Calls ``again``
    with the job's key once its answer is known."""

    def __init__(self, planner: FirstPlanner, again: Callable[[Key], None]) -> None:
        self._planner = planner
        self._again = again
        self._kept: OrderedDict[str, Plannable] = OrderedDict()
        self._asking: dict[Key, tuple[str, asyncio.Task[None]]] = {}

    def look(self, key: Key, uid: str, spec: JobSpec) -> Plannable:
        """The answer, as far as known. The first call starts the computation."""
        kept = self._kept.get(uid)
        if kept is not None:
            return kept
        asked = self._asking.get(key)
        if asked is None or asked[0] != uid:
            self.forget(key)
            self._asking[key] = uid, asyncio.create_task(self._ask(key, uid, spec))
        return Plannable(known=False)

    def forget(self, key: Key) -> None:
        """Cancel the computation for a deleted job."""
        asked = self._asking.pop(key, None)
        if asked is not None:
            asked[1].cancel()

    async def close(self) -> None:
        """Cancel all computations."""
        tasks = [task for _, task in self._asking.values()]
        for key in [*self._asking]:
            self.forget(key)
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, key: Key, uid: str, spec: JobSpec) -> None:
        found = None
        while found is None:
            try:
                await self._planner(spec, wanted=False)
                found = Plannable(known=True)
            except InputError as error:
                found = Plannable(known=True, problem=f"spec.schedule: {error}")
            except (PlannerLost, OSError) as error:
                log.error("%s/%s: the plan could not be computed; retrying: %s", *key, error)
                await asyncio.sleep(ASK_AGAIN_SECONDS)
        del self._asking[key]
        self._kept[uid] = found
        while len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)
        self._again(key)
