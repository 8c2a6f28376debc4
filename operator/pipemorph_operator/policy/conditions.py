"""metav1.Condition, keyed by type: the transition time moves only when the status does."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from pipemorph.api.status import Condition, ConditionStatus
from pipemorph_operator.facts import format_time

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
    """``conditions`` with the one of type ``kind`` set, in the same order."""
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
    """Whether the condition of that type is there and True."""
    return any(c.type == kind and c.status == "True" for c in conditions)
