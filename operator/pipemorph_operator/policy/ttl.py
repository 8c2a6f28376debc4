"""``spec.ttlSecondsAfterFinished``: a finished job is deleted, with all it owns."""

from __future__ import annotations

from datetime import datetime, timedelta


def seconds_left(ttl: int | None, finished: datetime | None, now: datetime) -> float | None:
    """Seconds until deletion, at most 0 if it is due; None if the job stays."""
    if ttl is None or finished is None:
        return None
    return (finished + timedelta(seconds=ttl) - now).total_seconds()
