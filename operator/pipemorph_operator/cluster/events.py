"""Writes Kubernetes events, which ``kubectl describe`` shows.

An event that is emitted again is counted up, as Kubernetes' own are, instead of written again.
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

from pipemorph.status.conditions import format_time
from pipemorph_operator import names
from pipemorph_operator.cluster.client import ApiRefused, Cluster, path

log = logging.getLogger("pipemorph.events")

Kind = Literal["Normal", "Warning"]
MAX_MESSAGE = 1024
MAX_SERIES = 4096
"""Newest events that are counted up. A process that starts begins new ones."""
NOT_FOUND = 404

_Series = OrderedDict[tuple[str, ...], tuple[str, int]]
_series: WeakKeyDictionary[Cluster, _Series] = WeakKeyDictionary()
"""Name and count of each event, by what it says."""


@dataclass(frozen=True)
class Event:
    """One Kubernetes event about an object."""

    kind: Kind
    reason: str
    message: str


async def emit(
    cluster: Cluster,
    about: Mapping[str, Any],
    event: Event,
    component: str,
    *,
    kind: str = names.KIND,
    api_version: str = names.API_VERSION,
) -> None:
    """Write ``event``; ``about`` is the metadata of the object, by default a job. Events of objects
    without a namespace are in ``default``. A rejected event is only logged, since status has the
    same information. Raises connection errors."""
    now = format_time(datetime.now(UTC))
    namespace, message = about.get("namespace", "default"), event.message[:MAX_MESSAGE]
    series = _series.setdefault(cluster, OrderedDict())
    same = (about["uid"], component, event.kind, event.reason, message)
    # kubectl sorts events of the same second by name, so the name contains the time.
    name, count = series.pop(same, (f"{about['name']}.{time.time_ns():x}", 0))
    try:
        if count:
            try:
                again = {"count": count + 1, "lastTimestamp": now}
                await cluster.patch(path("Event", namespace, name), again, component)
                series[same] = name, count + 1
                return
            except ApiRefused as refused:
                if refused.status != NOT_FOUND:
                    raise
                name = f"{about['name']}.{time.time_ns():x}"  # Events are kept for an hour.
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
    except ApiRefused as refused:
        if not refused.namespace_ends:
            log.warning("event %s was rejected: %s", event.reason, refused)
