"""Updates metav1.Conditions, keyed by type. A new status sets a new transition time."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from pipemorph.spec.job_status import Condition, ConditionStatus

MESSAGE_LENGTH = 4096


def format_time(when: datetime) -> str:
    """Format as metav1.Time: RFC 3339, whole seconds, UTC."""
    return when.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def update_condition(
    conditions: Sequence[Condition],
    kind: str,
    status: ConditionStatus,
    reason: str,
    message: str,
    *,
    generation: int | None,
    now: datetime,
) -> list[Condition]:
    """Copy of ``conditions`` with the condition of type ``kind`` set, in unchanged order."""
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
