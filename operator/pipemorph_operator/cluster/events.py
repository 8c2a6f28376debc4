"""Writes Kubernetes events, which ``kubectl describe`` shows."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from pipemorph_operator import names
from pipemorph_operator.cluster.client import ApiRefused, Cluster
from pipemorph_operator.cluster.facts import format_time

log = logging.getLogger("pipemorph.events")

Kind = Literal["Normal", "Warning"]
MAX_MESSAGE = 1024


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
    # kubectl sorts events of the same second by name, so the name contains the time.
    name = f"{about['name']}.{time.time_ns():x}"
    try:
        await cluster.create(
            {
                "apiVersion": "v1",
                "kind": "Event",
                "metadata": {"name": name, "namespace": about.get("namespace", "default")},
                "involvedObject": {
                    "apiVersion": api_version,
                    "kind": kind,
                    **{k: about[k] for k in ("name", "namespace", "uid") if k in about},
                },
                "type": event.kind,
                "reason": event.reason,
                "message": event.message[:MAX_MESSAGE],
                "source": {"component": component},
                "firstTimestamp": now,
                "lastTimestamp": now,
                "count": 1,
            },
            component,
        )
    except ApiRefused as refused:
        if not refused.namespace_ends:
            log.warning("event %s was rejected: %s", event.reason, refused)
