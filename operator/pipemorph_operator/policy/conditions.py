"""Updates metav1.Conditions, keyed by type. A new status sets a new transition time."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from pipemorph.api.status import Condition, ConditionStatus, JobState
from pipemorph_operator import names
from pipemorph_operator.cluster.facts import format_time

MESSAGE_LENGTH = 4096


def updated(
    conditions: Sequence[Condition],
    kind: str,
    status: ConditionStatus,
    reason: str,
    message: str,
    *,
    generation: int | None,
    now: datetime,
) -> list[Condition]:
    """A copy of ``conditions`` with the condition of type ``kind`` set, in the same order."""
    old = next((c for c in conditions if c.type == kind), None)
    same = old is not None and old.status == status
    new = Condition(
        type=kind,
        status=status,
        observed_generation=generation,
        last_transition_time=old.last_transition_time if old and same else format_time(now),
        reason=reason,
        message=message[:MESSAGE_LENGTH],
    )
    if old is None:
        return [*conditions, new]
    return [new if c.type == kind else c for c in conditions]


def is_true(conditions: Sequence[Condition], kind: str) -> bool:
    """Whether the condition of that type exists and is True."""
    return any(c.type == kind and c.status == "True" for c in conditions)


def job_state(conditions: Sequence[Condition]) -> JobState:
    """``status.state``: one word for the conditions. Precedence: a terminal state, then suspension
    by the user, then the state of the ranks."""
    if is_true(conditions, names.COMPLETE):
        return "Complete"
    if is_true(conditions, names.FAILED):
        return "Failed"
    if is_true(conditions, names.SUSPENDED):
        return "Suspended"
    running = next((c for c in conditions if c.type == names.RUNNING), None)
    if running is None:
        return "Pending"
    if running.status == "True":
        return "Running"
    match running.reason:
        case names.R_RESTARTING | names.R_DRAINING:
            return "Restarting"
        case names.R_QUEUED:
            return "Queued"
        case names.R_WAITING_FOR_PODS | names.R_PODS_REFUSED:
            return "Starting"
        case _:
            return "Pending"
