"""Emits Kubernetes events for changes of a job's link and plan conditions.

A condition holds the current state; an event records when it changed. Events are emitted for
problems, adaptations and recoveries. Unknown states and pending plans appear in conditions only.
After the first :data:`BURST` events of a job in a row, one a minute is emitted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from pipemorph.spec.job_status import Condition
from pipemorph_operator import names
from pipemorph_operator.kube.client import REQUEST_ERRORS, KubeClient, describe_error
from pipemorph_operator.kube.events import KubeEvent, emit_event

log = logging.getLogger("pipemorph.ingest")

MAX_CONCURRENT_WRITES = 64
"""Limit of concurrent event writes, for many jobs with a slow API server."""

BURST, EVENT_SECONDS = 12.0, 60.0
"""Events of a job that may be emitted in a row, and seconds until one more is allowed."""

EventImportance = Literal["trouble", "news", "relief"]
"""``relief`` is emitted only after another event of the same condition."""

EVENT_IMPORTANCE: Mapping[tuple[str, str], EventImportance] = {
    (names.LINKS_HEALTHY, names.R_LINKS_SLOW): "trouble",
    (names.LINKS_HEALTHY, names.R_STALE): "trouble",
    (names.LINKS_HEALTHY, names.R_LINKS_OK): "relief",
    (names.SCHEDULE_ADAPTED, names.R_ADAPTED): "news",
    (names.SCHEDULE_ADAPTED, names.R_RETURNED): "news",
    (names.LINKS_DELEGATED, names.R_DELEGATED): "news",
    (names.LINKS_DELEGATED, names.R_DIRECT): "relief",
    (names.RAILS_HEALTHY, names.R_RAILS_SICK): "trouble",
    (names.RAILS_HEALTHY, names.R_RAILS_CONGESTED): "trouble",
    (names.RAILS_HEALTHY, names.R_FELL_BACK): "trouble",
    (names.RAILS_HEALTHY, names.R_RAILS_OK): "relief",
    (names.STAGES_EVEN, names.R_STAGES_SLOW): "trouble",
    (names.STAGES_EVEN, names.R_STAGES_EVEN): "relief",
    (names.STAGES_EVEN, names.R_STAGES_UNEQUAL): "relief",
    (names.REDUCTIONS_HEALTHY, names.R_REDUCTIONS_SLOW): "trouble",
    (names.REDUCTIONS_HEALTHY, names.R_REDUCTIONS_OK): "relief",
    (names.REPLICAS_COMPLETE, names.R_REPLICAS_FEWER): "trouble",
    (names.REPLICAS_COMPLETE, names.R_REPLICAS_ALL): "relief",
}
_EVENT_PER_MESSAGE = frozenset({names.SCHEDULE_ADAPTED, names.LINKS_DELEGATED})
"""Conditions with an event for every new message, not only every new reason: the message names the
plan or the links. Messages about slow links change too often for that."""


class ConditionEventFilter:
    """Selects the conditions of a job that deserve an event now. ``conditions``: those in status at
    start, so that a restarted ingest does not emit their events again."""

    def __init__(self, conditions: Iterable[Condition]) -> None:
        self._emitted: dict[str, tuple[str, str]] = {}
        self._room, self._at, self._left_out = BURST, 0.0, 0
        self.select_events(conditions, 0.0)
        self._room, self._left_out = BURST, 0

    def select_events(self, conditions: Iterable[Condition], now: float) -> list[KubeEvent]:
        """Events to emit for these conditions; counts them as emitted. ``now``: seconds."""
        self._room = min(BURST, self._room + max(0.0, now - self._at) / EVENT_SECONDS)
        self._at = now
        events = []
        for each in conditions:
            worth = EVENT_IMPORTANCE.get((each.type, each.reason))
            if worth is None:
                continue
            content = (each.reason, each.message if each.type in _EVENT_PER_MESSAGE else "")
            last = self._emitted.get(each.type)
            self._emitted[each.type] = content
            if content == last or (worth == "relief" and last is None):
                continue
            if self._room < 1:
                self._left_out += 1
                continue
            kind: Literal["Normal", "Warning"] = "Warning" if worth == "trouble" else "Normal"
            message = each.message
            if self._left_out:
                message = f"({self._left_out} earlier events were omitted) {message}"
            self._room, self._left_out = self._room - 1, 0
            events.append(KubeEvent(kind, each.reason, message))
        return events


class EventSender:
    """Writes events in background tasks, so that directives do not wait for them."""

    def __init__(self, cluster: KubeClient) -> None:
        self._cluster = cluster
        self._under_way: set[asyncio.Task[None]] = set()

    def send_events(self, job: Mapping[str, Any], events: Sequence[KubeEvent]) -> None:
        """Log and write events. ``job``: name, namespace and uid. Above the limit, only logs."""
        for event in events:
            where = f"{job['namespace']}/{job['name']}"
            log.info("%s: %s: %s", where, event.reason, event.message)
            if len(self._under_way) >= MAX_CONCURRENT_WRITES:
                log.warning("%s: too many events in progress: dropped %s", where, event.reason)
                continue
            task = asyncio.create_task(self._emit_event(where, job, event))
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)

    async def _emit_event(self, where: str, job: Mapping[str, Any], event: KubeEvent) -> None:
        try:
            await emit_event(self._cluster, job, event, names.INGEST_OWNER)
        except REQUEST_ERRORS as error:
            log.warning(
                "%s: event %s was not written: %s", where, event.reason, describe_error(error)
            )
