"""How long a job may run, how long it stays once it has finished, and whose it is."""

from __future__ import annotations

from datetime import datetime, timedelta

from pipemorph_operator.names import CONTROLLER


def until_deadline(
    limit: int | None, ran: int, started: datetime | None, now: datetime
) -> float | None:
    """Seconds until ``spec.activeDeadlineSeconds`` is over, at most 0 if it is; None while no time
    passes: without a deadline, in suspension, in a queue. The deadline counts all attempts.
    ``ran``: seconds the job had run before it ``started``."""
    if limit is None or started is None:
        return None
    return (started + timedelta(seconds=limit - ran) - now).total_seconds()


def until_deletion(ttl: int | None, finished: datetime | None, now: datetime) -> float | None:
    """Seconds until ``spec.ttlSecondsAfterFinished`` deletes the job with all it owns, at most 0 if
    that is due; None if the job stays."""
    if ttl is None or finished is None:
        return None
    return (finished + timedelta(seconds=ttl) - now).total_seconds()


def is_ours(managed_by: str | None) -> bool:
    """Whether this operator reconciles a job with that ``spec.managedBy``."""
    return managed_by in (None, "", CONTROLLER)
