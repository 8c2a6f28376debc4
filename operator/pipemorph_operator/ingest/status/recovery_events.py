"""Emits Kubernetes events when a job's ranks start again within their pods, and have recovered."""

from __future__ import annotations

from pipemorph.spec.status_recoveries import Recoveries, RecoveryRecord
from pipemorph.views.explanation.explanation_text import format_count
from pipemorph_operator import names
from pipemorph_operator.kube.events import KubeEvent

MAX_NAMED = 8


class RecoveryEventFilter:
    """Selects recoveries that deserve an event now. ``seen``: those in status at start, so that a
    restarted ingest does not emit their events again."""

    def __init__(self, seen: Recoveries | None) -> None:
        self._last = seen.last[-1] if seen and seen.last else None
        self._count = seen.count if seen else 0

    def select_events(self, now: Recoveries | None) -> list[KubeEvent]:
        """Events to emit for these recoveries; counts them as emitted. Recoveries that are written
        together get one event."""
        if now is None or not now.last:
            return []
        last, events = now.last[-1], []
        changes = bool(last.layers or last.places)
        if now.count > self._count:
            text = f"the ranks start again as generation {last.generation}: {last.cause}"
            if last.replaced:
                text += f" (replaced pods: {', '.join(map(str, last.replaced))})"
            if now.excluded_replicas:
                without = ", ".join(map(str, now.excluded_replicas[:MAX_NAMED]))
                train = format_count(last.replicas or 0, "replica trains", "replicas train")
                text += f"; {train} on, without {without}"
            if changes:
                text += "; the previous layout is restored"
            events.append(KubeEvent("Warning", names.R_RANKS_RESTARTED, text))
        elif changes and not (self._last is not None and _is_same_recovery(self._last, last)):
            text = f"generation {last.generation} begins with another layout: {last.cause}"
            events.append(KubeEvent("Normal", names.R_LAYOUT_CHANGED, text))
        known = (
            self._last is not None and _is_same_recovery(self._last, last) and self._last.seconds
        )
        if last.seconds is not None and not known:
            events.append(KubeEvent("Normal", names.R_RECOVERED, _describe_recovery(last)))
        self._last, self._count = last, now.count
        return events


def _is_same_recovery(one: RecoveryRecord, other: RecoveryRecord) -> bool:
    return (one.attempt, one.generation) == (other.attempt, other.generation)


def _describe_recovery(record: RecoveryRecord) -> str:
    """``generation 2 went on with iteration 17 after 2.3 s; 0 iterations were repeated``"""
    again = format_count(record.repeated or 0, "iteration was", "iterations were")
    return (
        f"generation {record.generation} went on with iteration {record.went_on_with} after"
        f" {record.seconds:.1f} s; {again} repeated"
    )
