"""``spec.activeDeadlineSeconds``: over all attempts, not counting suspension."""

from __future__ import annotations

from datetime import datetime, timedelta


def seconds_left(
    limit: int | None, ran: int, started: datetime | None, now: datetime
) -> float | None:
    """Seconds until the job is out of time, at most 0 if it is; None while none passes: without a
    deadline, in suspension, in a queue. ``ran``: seconds it had run before it ``started``."""
    if limit is None or started is None:
        return None
    return (started + timedelta(seconds=limit - ran) - now).total_seconds()
