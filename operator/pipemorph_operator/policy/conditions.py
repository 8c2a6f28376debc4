"""Updates metav1.Conditions, keyed by type. A new status sets a new transition time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from pipemorph.api.status import Condition, ConditionStatus, JobState
from pipemorph.status.conditions import updated
from pipemorph_operator import names

STALLS = frozenset(
    {
        names.R_INVALID_SPEC,
        names.R_NO_IMAGE,
        names.R_REFUSED,
        names.R_PODS_REFUSED,
        names.R_INTERNAL,
    }
)
"""Reasons for which an unfinished job does not run, most likely until somebody changes something.
The operator tries again all the same."""

UNHEARD: Mapping[str, ConditionStatus] = {
    names.R_NO_REPORTS: "False",
    names.R_STALE: "Unknown",
}
"""``Ready`` of a job whose pods run while its ranks do not report."""


def for_kstatus(
    conditions: Sequence[Condition], *, passing: bool, generation: int | None, now: datetime
) -> list[Condition]:
    """A copy of ``conditions`` with those in :data:`names.KSTATUS_CONDITIONS` made of the others.
    ``passing``: what keeps the job from running is expected to pass, whatever its reason.

    A suspended job has none of them: it is as its spec asks, so kstatus takes it as current, and
    ``kubectl wait --for=condition=Ready`` goes on waiting.
    """
    state = job_state(conditions)
    kind = state if state in (names.SUSPENDED, names.COMPLETE, names.FAILED) else names.RUNNING
    source = next((c for c in conditions if c.type == kind), None)
    reason = source.reason if source is not None else names.R_WAITING_FOR_PODS
    message = source.message if source is not None else "the ranks have not started"
    verdicts: dict[str, ConditionStatus]
    match state:
        case "Suspended":
            verdicts = {}
        case "Running" if reason in UNHEARD:
            verdicts = {names.READY: UNHEARD[reason], names.RECONCILING: "True"}
        case "Running" if reason in (names.R_INVALID_SPEC, names.R_OTHER_AUTHORITY):
            verdicts = {names.READY: "False", names.STALLED: "True"}
        case "Running" | "Complete":
            verdicts = {names.READY: "True"}
        case "Failed":
            verdicts = {names.READY: "False", names.STALLED: "True"}
        case _:
            stalled = reason in STALLS and not passing
            held = names.STALLED if stalled else names.RECONCILING
            verdicts = {names.READY: "False", held: "True"}
    found = [c for c in conditions if c.type not in names.KSTATUS_CONDITIONS or c.type in verdicts]
    for kind, status in verdicts.items():
        found = updated(found, kind, status, reason, message, generation=generation, now=now)
    return found


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
