"""Whether the spec of a job allows a plan, found out without holding up other jobs.

Small plans are made at once. A large one takes seconds of a processor, so it is made in another
process, one at a time, while the job waits; and only for a job that is about to start.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from pipemorph.api.spec import JobSpec
from pipemorph.control.first_plan import initial_schedule, is_quick
from pipemorph.errors import InputError
from pipemorph.ingest import PlannerLost

log = logging.getLogger("pipemorph.operator")

Key = tuple[str, str]

MOST_KEPT = 10_000
ASK_AGAIN_SECONDS = 30.0
"""After the planner was lost."""
LIMIT_SECONDS = 600.0
"""The largest job takes some 10 s where the processor is free."""


@dataclass(frozen=True)
class Plannable:
    """What is known of a job's plan: nothing yet, why there can be none, or that there is one."""

    known: bool
    problem: str = ""


class FirstPlanner(Protocol):
    """As :meth:`pipemorph.ingest.ProcessPlanner.first_plan`."""

    def __call__(self, spec: JobSpec, *, wanted: bool) -> Awaitable[Any]: ...


def at_once(spec: JobSpec) -> Plannable | None:
    """What can be told in no time; None for a spec that takes longer."""
    if not is_quick(spec):
        return None
    try:
        initial_schedule(spec)
    except InputError as error:
        return Plannable(known=True, problem=f"spec.schedule: {error}")
    return Plannable(known=True)


class Plans:
    """Remembers by a job's UID: what a plan is made from cannot be edited. ``again`` is called
    with a job's key once there is something to tell."""

    def __init__(self, planner: FirstPlanner, again: Callable[[Key], None]) -> None:
        self._planner = planner
        self._again = again
        self._kept: OrderedDict[str, Plannable] = OrderedDict()
        self._asking: dict[Key, tuple[str, asyncio.Task[None]]] = {}

    def look(self, key: Key, uid: str, spec: JobSpec) -> Plannable:
        """What is known by now. Starts to find out, the first time."""
        kept = self._kept.get(uid)
        if kept is not None:
            return kept
        asked = self._asking.get(key)
        if asked is None or asked[0] != uid:
            self.forget(key)
            self._asking[key] = uid, asyncio.create_task(self._ask(key, uid, spec))
        return Plannable(known=False)

    def forget(self, key: Key) -> None:
        """The job is gone: nobody waits for its plan."""
        asked = self._asking.pop(key, None)
        if asked is not None:
            asked[1].cancel()

    async def close(self) -> None:
        """Find out no more."""
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
                log.error("%s/%s: not known whether there is a plan, asked again: %s", *key, error)
                await asyncio.sleep(ASK_AGAIN_SECONDS)
        del self._asking[key]
        self._kept[uid] = found
        while len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)
        self._again(key)
