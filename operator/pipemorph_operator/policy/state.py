"""``status.state``: the conditions in one word, for a column."""

from __future__ import annotations

from collections.abc import Sequence

from pipemorph.api.status import Condition, JobState
from pipemorph_operator import names
from pipemorph_operator.policy.conditions import is_true


def scalar(conditions: Sequence[Condition]) -> JobState:
    """A terminal state wins, then what the user asked for, then what the ranks do."""
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
