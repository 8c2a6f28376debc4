"""Writes Kubernetes events, which ``kubectl describe`` shows.

Emitting the same event again increments its count, as for Kubernetes' own events.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal
from weakref import WeakKeyDictionary

from pipemorph.views.status.conditions import format_time
from pipemorph_operator import names
from pipemorph_operator.kube.client import KubeApiError, KubeClient, build_path

log = logging.getLogger("pipemorph.events")

EventType = Literal["Normal", "Warning"]
MAX_MESSAGE = 1024
MAX_SERIES = 4096
"""Limit of events whose count can be incremented: the newest of this process."""
NOT_FOUND = 404

_Series = OrderedDict[tuple[str, ...], tuple[str, int]]
_event_series: WeakKeyDictionary[KubeClient, _Series] = WeakKeyDictionary()
"""Name and count of each event, by its object, component, type, reason and message."""


@dataclass(frozen=True)
class KubeEvent:
    """Kubernetes event about an object."""

    kind: EventType
    reason: str
    message: str


async def emit_event(
    cluster: KubeClient,
    about: Mapping[str, Any],
    event: KubeEvent,
    component: str,
    *,
    kind: str = names.KIND,
    api_version: str = names.API_VERSION,
) -> None:
    """Write ``event``; ``about``: metadata of the object, by default a job. Events of objects
    without a namespace go to ``default``. A rejected event is only logged: status has the same
    information. Raises connection errors."""
    now = format_time(datetime.now(UTC))
    namespace, message = about.get("namespace", "default"), event.message[:MAX_MESSAGE]
    series = _event_series.setdefault(cluster, OrderedDict())
    same = (about["uid"], component, event.kind, event.reason, message)
    # kubectl sorts events of the same second by name, so the name contains the time.
    name, count = series.pop(same, (f"{about['name']}.{time.time_ns():x}", 0))
    try:
        if count:
            try:
                again = {"count": count + 1, "lastTimestamp": now}
                await cluster.patch(build_path("Event", namespace, name), again, component)
                series[same] = name, count + 1
                return
            except KubeApiError as refused:
                if refused.status != NOT_FOUND:
                    raise
                name = f"{about['name']}.{time.time_ns():x}"  # Kubernetes drops events after 1 h.
        await cluster.create(
            {
                "apiVersion": "v1",
                "kind": "Event",
                "metadata": {"name": name, "namespace": namespace},
                "involvedObject": {
                    "apiVersion": api_version,
                    "kind": kind,
                    **{k: about[k] for k in ("name", "namespace", "uid") if k in about},
                },
                "type": event.kind,
                "reason": event.reason,
                "message": message,
                "source": {"component": component},
                "firstTimestamp": now,
                "lastTimestamp": now,
                "count": 1,
            },
            component,
        )
        series[same] = name, 1
        if len(series) > MAX_SERIES:
            series.popitem(last=False)
    except KubeApiError as refused:
        if not refused.is_namespace_terminating:
            log.warning("event %s was rejected: %s", event.reason, refused)
