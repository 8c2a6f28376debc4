"""Emits Kubernetes events for changes of a job's link and plan conditions.

A condition holds the current state; an event records when it changed. Events are emitted for
problems, adaptations and recoveries. Unknown states and pending plans appear in conditions only.
Of a job whose link comes and goes, one a minute is emitted after the first :data:`BURST`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from pipemorph.api.status import Condition
from pipemorph_operator import names
from pipemorph_operator.cluster.client import REQUEST_ERRORS, Cluster, reason_of
from pipemorph_operator.cluster.events import Event, emit

log = logging.getLogger("pipemorph.ingest")

MOST_UNDER_WAY = 64
"""Limit of concurrent event writes, for when many jobs emit events to a slow API server."""

BURST, EVENT_SECONDS = 12.0, 60.0
"""Events of one job that may be emitted in a row, and seconds until there is room for one more."""

Worth = Literal["trouble", "news", "relief"]
"""``relief`` is emitted only after another event of the same condition."""

WORTH: Mapping[tuple[str, str], Worth] = {
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
    (names.REDUCTIONS_HEALTHY, names.R_REDUCTIONS_SLOW): "trouble",
    (names.REDUCTIONS_HEALTHY, names.R_REDUCTIONS_OK): "relief",
    (names.REPLICAS_COMPLETE, names.R_REPLICAS_FEWER): "trouble",
    (names.REPLICAS_COMPLETE, names.R_REPLICAS_ALL): "relief",
}
_EACH_MESSAGE = frozenset({names.SCHEDULE_ADAPTED, names.LINKS_DELEGATED})
"""Conditions with an event for every new message, not only every new reason: the message names the
plan or the links. Messages about slow links change too often for that."""


class ConditionEvents:
    """Remembers for which conditions of a job events were emitted. ``conditions``: those in status
    at start, so that a restarted ingest does not emit their events again."""

    def __init__(self, conditions: Iterable[Condition]) -> None:
        self._emitted: dict[str, tuple[str, str]] = {}
        self._room, self._at, self._left_out = BURST, 0.0, 0
        self.changed(conditions, 0.0)
        self._room, self._left_out = BURST, 0

    def changed(self, conditions: Iterable[Condition], now: float) -> list[Event]:
        """Events to emit for these conditions; remembers them as emitted. ``now``: seconds."""
        self._room = min(BURST, self._room + max(0.0, now - self._at) / EVENT_SECONDS)
        self._at = now
        events = []
        for each in conditions:
            worth = WORTH.get((each.type, each.reason))
            if worth is None:
                continue
            word = (each.reason, each.message if each.type in _EACH_MESSAGE else "")
            last = self._emitted.get(each.type)
            self._emitted[each.type] = word
            if word == last or (worth == "relief" and last is None):
                continue
            if self._room < 1:
                self._left_out += 1
                continue
            kind: Literal["Normal", "Warning"] = "Warning" if worth == "trouble" else "Normal"
            message = each.message
            if self._left_out:
                message = f"({self._left_out} events before this one were left out) {message}"
            self._room, self._left_out = self._room - 1, 0
            events.append(Event(kind, each.reason, message))
        return events


class EventSender:
    """Writes events in background tasks, so that directives do not wait for them."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._under_way: set[asyncio.Task[None]] = set()

    def send(self, job: Mapping[str, Any], events: Sequence[Event]) -> None:
        """Log and write events. ``job``: name, namespace and uid. Above the limit only logs."""
        for event in events:
            where = f"{job['namespace']}/{job['name']}"
            log.info("%s: %s: %s", where, event.reason, event.message)
            if len(self._under_way) >= MOST_UNDER_WAY:
                log.warning("%s: too many events in progress: dropped %s", where, event.reason)
                continue
            task = asyncio.create_task(self._emit(where, job, event))
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)

    async def _emit(self, where: str, job: Mapping[str, Any], event: Event) -> None:
        try:
            await emit(self._cluster, job, event, names.INGEST_OWNER)
        except REQUEST_ERRORS as error:
            log.warning("%s: event %s was not written: %s", where, event.reason, reason_of(error))
