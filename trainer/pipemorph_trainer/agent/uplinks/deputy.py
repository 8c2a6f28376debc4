"""Decides in the stead of an ingest that does not answer: with its own code, within one process.

The reports go to an ingest's handler here, which has a controller of its own for the job, and
planner processes. So evidence, decisions and plans are those that the ingest would make of the same
reports. It is handed the plan in force like any host that does not know it.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from pipemorph.api.spec import JobSpec
from pipemorph.control import JobController
from pipemorph.ingest import IngestHandler, MemoryStore, Planner, PlannerPool, Reply
from pipemorph.wire import AdaptationRecord, DirectiveEnvelope, HandIn, LinkHealthReport

log = logging.getLogger("pipemorph.agent")


class _Reserved(MemoryStore):
    """A job whose plans have versions up to ``last``: no other may be served."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self._last = last

    def reserved(self, namespace: str, job: str) -> int:
        return self._last

    def for_agent(self, namespace: str, job: str) -> range:
        return range(0)

    async def persist(self, namespace: str, job: str, snapshot: Mapping[str, Any]) -> None:
        if snapshot["plan_version"] > self._last:
            raise ValueError(f"v{self._last} is the last version that the ingest left to the agent")


class Deputy:
    """Controls one attempt of a job until it is closed.

    ``versions``: the first and the last that its plans may have. ``planner``: by default processes
    of its own. Raises :class:`~pipemorph.errors.InputError` if the spec allows no plan.
    """

    def __init__(
        self,
        spec: JobSpec,
        versions: tuple[int, int],
        *,
        namespace: str,
        job: str,
        attempt: int,
        planner: Planner | None = None,
    ) -> None:
        first, last = versions
        self._key = namespace, job
        self._controller = JobController(spec, attempt=attempt)
        self._controller.skip_to(first - 1)
        store = _Reserved(last)
        store.add(namespace, job, self._controller)
        self._planners = PlannerPool(1)
        self._handler = IngestHandler(store, planner=planner or self._planners)
        self._ticked_at = time.monotonic()

    @property
    def plan_version(self) -> int:
        """The newest that may be in use."""
        return self._controller.plan_version

    @property
    def records(self) -> list[AdaptationRecord]:
        """Adaptations as far as it knows them, oldest first."""
        return self._controller.records

    async def report(self, report: LinkHealthReport) -> DirectiveEnvelope | None:
        """Answer a report as an ingest does; None if it is refused, which is logged."""
        if time.monotonic() - self._ticked_at >= 1:
            self._ticked_at = time.monotonic()
            await self._handler.tick(*self._key)
        # What a host has to leave out is what is given here.
        report = report.model_copy(update={"last_own_version": 0})
        reply = await self._handler.report(*self._key, report.body())
        if reply.status != HTTPStatus.OK:
            log.error("deciding without the ingest: a report was refused: %s", _error(reply))
            return None
        return DirectiveEnvelope.model_validate_json(reply.body)

    async def hand_in(self, message: HandIn) -> None:
        """Let it go on from the plan in force."""

        async def body() -> bytes:
            return message.body()

        reply = await self._handler.hand_in(*self._key, body)
        if reply.status != HTTPStatus.OK:
            log.warning("deciding without the ingest: %s", _error(reply))

    async def close(self) -> None:
        self._handler.close()
        await self._planners.close()


def _error(reply: Reply) -> str:
    return str(json.loads(reply.body)["error"])
