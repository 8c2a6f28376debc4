"""Events of links and plans: what of a job's conditions people are told when it turns.

Conditions say how things are; an event says that they changed, and when. Told is what calls for
attention, what was done about it, and that it is over. What is not known, and a plan on its way,
are in the conditions alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import aiohttp

from pipemorph.api.status import Condition
from pipemorph_operator import names
from pipemorph_operator.cluster.client import ApiRefused, Cluster
from pipemorph_operator.cluster.events import Event, tell

log = logging.getLogger("pipemorph.ingest")

MOST_UNDER_WAY = 64
"""Events on their way to an API server that may be slow, while many jobs have something to tell."""

Worth = Literal["trouble", "news", "relief"]
"""Relief is told where there was something else to tell before."""

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
}
_EACH_MESSAGE = frozenset({names.SCHEDULE_ADAPTED, names.LINKS_DELEGATED})
"""Another plan, or other links, under the same reason are news as well. Which links are slow and
by how much changes too often for that."""


class News:
    """What was told of one job. ``conditions`` are those in status: an ingest that starts over
    does not tell of them again."""

    def __init__(self, conditions: Iterable[Condition]) -> None:
        self._told: dict[str, tuple[str, str]] = {}
        self.of(conditions)

    def of(self, conditions: Iterable[Condition]) -> list[Event]:
        """What is to be told of these conditions now. Pure but for remembering it."""
        events = []
        for each in conditions:
            worth = WORTH.get((each.type, each.reason))
            if worth is None:
                continue
            word = (each.reason, each.message if each.type in _EACH_MESSAGE else "")
            last = self._told.get(each.type)
            self._told[each.type] = word
            if word == last or (worth == "relief" and last is None):
                continue
            kind: Literal["Normal", "Warning"] = "Warning" if worth == "trouble" else "Normal"
            events.append(Event(kind, each.reason, each.message))
        return events


class EventSender:
    """Sends events while others go on: directives do not wait for what people read."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._under_way: set[asyncio.Task[None]] = set()

    def send(self, job: Mapping[str, Any], events: Sequence[Event]) -> None:
        """``job``: name, namespace and uid. Too many at a time are only logged."""
        for event in events:
            where = f"{job['namespace']}/{job['name']}"
            log.info("%s: %s: %s", where, event.reason, event.message)
            if len(self._under_way) >= MOST_UNDER_WAY:
                log.warning("%s: too many events: %s is not one", where, event.reason)
                continue
            task = asyncio.create_task(self._tell(where, job, event))
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)

    async def _tell(self, where: str, job: Mapping[str, Any], event: Event) -> None:
        try:
            await tell(self._cluster, job, event, names.INGEST_OWNER)
        except (ApiRefused, aiohttp.ClientError, TimeoutError, OSError) as error:
            why = str(error) or type(error).__name__
            log.warning("%s: event %s was not written: %s", where, event.reason, why)
