"""Deadline of a job, its deletion after it finished, and its assignment to this operator."""

from __future__ import annotations

from datetime import datetime, timedelta

from pipemorph_operator.names import CONTROLLER


def seconds_until_deadline(
    limit: int | None, ran: int, started: datetime | None, now: datetime
) -> float | None:
    """Seconds until ``spec.activeDeadlineSeconds`` expires, at most 0 if it has; None without a
    deadline and while its clock is stopped (suspended or queued). Covers all attempts together.
    ``ran``: seconds the job had run before it ``started``."""
    if limit is None or started is None:
        return None
    return (started + timedelta(seconds=limit - ran) - now).total_seconds()


def seconds_until_deletion(
    ttl: int | None, finished: datetime | None, now: datetime
) -> float | None:
    """Seconds until ``spec.ttlSecondsAfterFinished`` expires and the job is deleted, at most 0 if
    it has; None if the job is not deleted."""
    if ttl is None or finished is None:
        return None
    return (finished + timedelta(seconds=ttl) - now).total_seconds()


def is_managed_here(managed_by: str | None) -> bool:
    """True if ``spec.managedBy`` assigns the job to this operator."""
    return managed_by in (None, "", CONTROLLER)
