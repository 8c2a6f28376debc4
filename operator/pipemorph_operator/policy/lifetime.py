"""A job's deadline, its deletion after it finished, and whether this operator manages it."""

from __future__ import annotations

from datetime import datetime, timedelta

from pipemorph_operator.names import CONTROLLER


def until_deadline(
    limit: int | None, ran: int, started: datetime | None, now: datetime
) -> float | None:
    """Seconds until ``spec.activeDeadlineSeconds`` expires, at most 0 if it has; None without a
    deadline and while its clock is stopped (suspended or queued). Covers all attempts together.
    ``ran``: seconds the job had run before it ``started``."""
    if limit is None or started is None:
        return None
    return (started + timedelta(seconds=limit - ran) - now).total_seconds()


def until_deletion(ttl: int | None, finished: datetime | None, now: datetime) -> float | None:
    """Seconds until ``spec.ttlSecondsAfterFinished`` expires and the job is deleted, at most 0 if
    it has; None if the job is kept."""
    if ttl is None or finished is None:
        return None
    return (finished + timedelta(seconds=ttl) - now).total_seconds()


def is_ours(managed_by: str | None) -> bool:
    """Whether ``spec.managedBy`` assigns the job to this operator."""
    return managed_by in (None, "", CONTROLLER)
