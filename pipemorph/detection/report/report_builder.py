"""Builds reports of an observer from the changes that its host does not have yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from pipemorph.detection.direction_series import DirectionKey
from pipemorph.detection.event_log import EventLog
from pipemorph.detection.report.delta_tracker import (
    ByteBudget,
    DeltaTracker,
    classify_any_change,
    classify_link_change,
    classify_reduction_change,
    classify_stage_change,
    classify_straggler_change,
)
from pipemorph.protocol import (
    MAX_REPORT_BYTES,
    MOST_SLOW,
    EventReport,
    Health,
    IterationSample,
    LinkHealthReport,
    LinkState,
    ProtocolModel,
    RailsView,
    ReductionHealth,
    StageState,
    StragglersView,
    TransportsView,
)
from pipemorph.protocol.agent_messages import MOST_EVENTS, MOST_ITERATIONS, MOST_STAGES

NEWEST_ITERATIONS, MOST_KEPT_ITERATIONS = 16, 4096
HEADROOM_BYTES = 512
"""Room for the names and brackets of lists."""


class ReportBuilder:
    """Changes of all kinds that the host does not have, iterations, events and the last message.

    ``events``: of the observer. ``min_delay``: returns its present threshold of delays, seconds.
    """

    def __init__(self, events: EventLog, min_delay: Callable[[], float]) -> None:
        self._events, self._next_event_number = events, 0
        self.directions: DeltaTracker[DirectionKey, LinkState] = DeltaTracker(
            LinkState,
            lambda row: row.key,
            lambda sent, new: classify_link_change(sent, new, min_delay()),
            ends=lambda row: row.health is Health.HEALTHY,
        )
        self.links: DeltaTracker[int, LinkState] = DeltaTracker(
            LinkState,
            lambda row: row.link,
            lambda sent, new: classify_link_change(sent, new, min_delay()),
            ends=lambda row: row.health is Health.UNKNOWN,
        )
        self.stages: DeltaTracker[int, StageState] = DeltaTracker(
            StageState, lambda row: row.stage, classify_stage_change
        )
        self.reductions: DeltaTracker[tuple[int, int], ReductionHealth] = DeltaTracker(
            ReductionHealth, lambda row: (row.stage, row.replica), classify_reduction_change
        )
        self.rails: DeltaTracker[None, RailsView] = DeltaTracker(
            RailsView, lambda _: None, classify_any_change
        )
        self.transports: DeltaTracker[None, TransportsView] = DeltaTracker(
            TransportsView, lambda _: None, classify_any_change
        )
        self.stragglers: DeltaTracker[None, StragglersView] = DeltaTracker(
            StragglersView, lambda _: None, classify_straggler_change
        )
        self._trackers: tuple[DeltaTracker[Any, Any], ...] = (
            self.directions, self.links, self.stages, self.reductions, self.rails,
            self.transports, self.stragglers,
        )  # fmt: skip
        self._iterations: deque[IterationSample] = deque(maxlen=MOST_KEPT_ITERATIONS)
        self._delivered_iterations: deque[IterationSample] = deque(maxlen=NEWEST_ITERATIONS)
        self.message: str | None = None

    def add_iterations(self, iterations: Iterable[IterationSample]) -> None:
        """Add iterations, oldest first. Rank 0 sends some again after a lost connection."""
        self._iterations.extend(each for each in iterations if each not in self._iterations)

    @property
    def has_urgent(self) -> bool:
        """True if a change must be reported at once."""
        return any(kind.has_urgent for kind in self._trackers)

    def __bool__(self) -> bool:
        waiting = bool(self._iterations) or self.message is not None
        return waiting or any(self._trackers) or self._events.next_number > self._next_event_number

    def fill_report(self, empty: LinkHealthReport) -> LinkHealthReport:
        """Fill ``empty`` with changes, up to ``MAX_REPORT_BYTES``; pending until delivered."""
        budget = ByteBudget(MAX_REPORT_BYTES - len(empty.to_json()) - HEADROOM_BYTES)
        finished = list(reversed(self._iterations))
        iterations = _take_fitting(budget, finished[:NEWEST_ITERATIONS])
        half = budget.split_off(budget.bytes_remaining / 2)
        directions = self.directions.take_changes(half, MOST_SLOW)
        budget.return_unused(half)
        all_slow = len(directions) == len(self.directions)
        stages = self.stages.take_changes(budget, MOST_STAGES)
        links = self.links.take_changes(budget, MOST_STAGES) if all_slow else []
        reductions = self.reductions.take_changes(budget, MOST_STAGES)
        rails = self.rails.take_changes(budget, 1)
        transports = self.transports.take_changes(budget, 1)
        stragglers = self.stragglers.take_changes(budget, 1)
        events = _take_fitting(budget, self._list_unreported_events())
        if len(iterations) == NEWEST_ITERATIONS:
            iterations += _take_fitting(budget, finished[NEWEST_ITERATIONS:MOST_ITERATIONS])
        iterations.sort(key=lambda sample: sample.index)
        found: dict[str, Any] = {
            "iterations": iterations,
            "directions": directions,
            "links": links,
            "stages": stages,
            "reductions": reductions,
            "rails": rails[0] if rails else None,
            "transports": transports[0] if transports else None,
            "stragglers": stragglers[0] if stragglers else None,
            "events": events,
        }
        return empty.model_copy(update=found)

    def _list_unreported_events(self) -> list[EventReport]:
        unsaid = [e for e in self._events.get_newest() if e.number >= self._next_event_number]
        return [EventReport(iteration=e.iteration, text=e.text) for e in unsaid[:MOST_EVENTS]]

    def record_delivered(self, report: LinkHealthReport) -> None:
        """Record that the host has accepted a report."""
        sent = {id(sample) for sample in report.iterations}
        self._iterations = deque(
            (sample for sample in self._iterations if id(sample) not in sent), MOST_KEPT_ITERATIONS
        )
        self._next_event_number = max(self._next_event_number, self._events.oldest_number)
        self._next_event_number += len(report.events)
        if self.message == report.message:
            self.message = None
        self.directions.record_delivered(report.directions)
        self.links.record_delivered(report.links)
        self.stages.record_delivered(report.stages)
        self.reductions.record_delivered(report.reductions)
        if report.rails is not None:
            self.rails.record_delivered([report.rails])
        if report.transports is not None:
            self.transports.record_delivered([report.transports])
        if report.stragglers is not None:
            self.stragglers.record_delivered([report.stragglers])

    def keep_delivered_iterations(self, iterations: Sequence[IterationSample]) -> None:
        """Store the newest iterations that the host has, in case it loses them."""
        self._delivered_iterations.extend(iterations)

    def mark_states_changed(self) -> None:
        """Mark every state as changed."""
        for kind in self._trackers:
            kind.mark_all_changed()

    def mark_all_changed(self) -> None:
        """Mark everything as changed: the host has lost the delivered values."""
        self.mark_states_changed()
        self._iterations.extendleft(reversed(self._delivered_iterations))
        self._delivered_iterations.clear()


T = TypeVar("T", bound=ProtocolModel)


def _take_fitting(budget: ByteBudget, items: Sequence[T]) -> list[T]:
    """Take the first ``items`` that fit."""
    taken: list[T] = []
    for item in items:
        if not budget.reserve_bytes(len(item.to_json())):
            break
        taken.append(item)
    return taken
