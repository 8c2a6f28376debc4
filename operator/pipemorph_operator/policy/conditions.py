"""Updates metav1.Conditions, keyed by type. A new status sets a new transition time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from pipemorph.spec.job_status import Condition, ConditionStatus, JobState
from pipemorph.views.status.conditions import update_condition
from pipemorph_operator import names

STALL_REASONS = frozenset(
    {
        names.R_INVALID_SPEC,
        names.R_NO_IMAGE,
        names.R_REFUSED,
        names.R_PODS_REFUSED,
        names.R_INTERNAL,
    }
)
"""Reasons for which an unfinished job does not run, most likely until a user changes something. The
operator still retries."""

READY_WITHOUT_REPORTS: Mapping[str, ConditionStatus] = {
    names.R_NO_REPORTS: "False",
    names.R_STALE: "Unknown",
}
"""``Ready`` of a job whose pods run while its ranks do not report."""


def add_kstatus_conditions(
    conditions: Sequence[Condition], *, passing: bool, generation: int | None, now: datetime
) -> list[Condition]:
    """Copy of ``conditions`` with those of :data:`names.KSTATUS_CONDITIONS` derived from the
    others. ``passing``: the problem is expected to pass by itself, whatever its reason.

    A suspended job has none of them, since it matches its spec: kstatus reports it as current, and
    ``kubectl wait --for=condition=Ready`` continues to wait.
    """
    state = derive_job_state(conditions)
    kind = state if state in (names.SUSPENDED, names.COMPLETE, names.FAILED) else names.RUNNING
    source = next((c for c in conditions if c.type == kind), None)
    reason = source.reason if source is not None else names.R_WAITING_FOR_PODS
    message = source.message if source is not None else "the ranks have not started"
    verdicts: dict[str, ConditionStatus]
    match state:
        case "Suspended":
            verdicts = {}
        case "Running" if reason in READY_WITHOUT_REPORTS:
            verdicts = {names.READY: READY_WITHOUT_REPORTS[reason], names.RECONCILING: "True"}
        case "Running" if reason in (names.R_INVALID_SPEC, names.R_OTHER_AUTHORITY):
            verdicts = {names.READY: "False", names.STALLED: "True"}
        case "Running" | "Complete":
            verdicts = {names.READY: "True"}
        case "Failed":
            verdicts = {names.READY: "False", names.STALLED: "True"}
        case _:
            stalled = reason in STALL_REASONS and not passing
            held = names.STALLED if stalled else names.RECONCILING
            verdicts = {names.READY: "False", held: "True"}
    found = [c for c in conditions if c.type not in names.KSTATUS_CONDITIONS or c.type in verdicts]
    for kind, status in verdicts.items():
        found = update_condition(
            found, kind, status, reason, message, generation=generation, now=now
        )
    return found


def is_condition_true(conditions: Sequence[Condition], kind: str) -> bool:
    """True if the condition of that type exists and is True."""
    return any(c.type == kind and c.status == "True" for c in conditions)


def derive_job_state(conditions: Sequence[Condition]) -> JobState:
    """Value of ``status.state``: the conditions in one word. A terminal state takes precedence,
    then suspension by the user, then the state of the ranks."""
    if is_condition_true(conditions, names.COMPLETE):
        return "Complete"
    if is_condition_true(conditions, names.FAILED):
        return "Failed"
    if is_condition_true(conditions, names.SUSPENDED):
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
