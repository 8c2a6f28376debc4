"""Emits Kubernetes events when a job's ranks start again within their pods, and have recovered."""

from __future__ import annotations

from pipemorph.api.status_recoveries import Recoveries, RecoveryRecord
from pipemorph.explain.story import plural
from pipemorph_operator import names
from pipemorph_operator.cluster.events import Event

MOST_NAMED = 8


class RecoveryEvents:
    """Remembers of which recoveries events were emitted. ``seen``: those in status at start, so
    that a restarted ingest does not emit their events again."""

    def __init__(self, seen: Recoveries | None) -> None:
        self._last = seen.last[-1] if seen and seen.last else None
        self._count = seen.count if seen else 0

    def changed(self, now: Recoveries | None) -> list[Event]:
        """Events to emit for these; remembers them as emitted. Several that are written at once are
        told of as one."""
        if now is None or not now.last:
            return []
        last, events = now.last[-1], []
        changes = bool(last.layers or last.places)
        if now.count > self._count:
            text = f"the ranks start again as generation {last.generation}: {last.cause}"
            if last.replaced:
                text += f" (another pod in the place of {', '.join(map(str, last.replaced))})"
            if now.left_out:
                without = ", ".join(map(str, now.left_out[:MOST_NAMED]))
                train = plural(last.replicas or 0, "replica trains", "replicas train")
                text += f"; {train} on, without {without}"
            if changes:
                text += "; they have the layout of before again"
            events.append(Event("Warning", names.R_RANKS_RESTARTED, text))
        elif changes and not (self._last is not None and _same(self._last, last)):
            text = f"generation {last.generation} begins with another layout: {last.cause}"
            events.append(Event("Normal", names.R_LAYOUT_CHANGED, text))
        known = self._last is not None and _same(self._last, last) and self._last.seconds
        if last.seconds is not None and not known:
            events.append(Event("Normal", names.R_RECOVERED, _words(last)))
        self._last, self._count = last, now.count
        return events


def _same(one: RecoveryRecord, other: RecoveryRecord) -> bool:
    return (one.attempt, one.generation) == (other.attempt, other.generation)


def _words(record: RecoveryRecord) -> str:
    """``generation 2 went on with iteration 17 after 2.3 s; 0 iterations were run again``"""
    again = plural(record.repeated or 0, "iteration was", "iterations were")
    return (
        f"generation {record.generation} went on with iteration {record.went_on_with} after"
        f" {record.seconds:.1f} s; {again} run again"
    )
