"""What the host of an observer has not been told yet, and the reports made of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from pipemorph.control.observe.events import Events
from pipemorph.control.observe.report.news import (
    Budget,
    News,
    link_differs,
    reduction_differs,
    stage_differs,
    stragglers_differ,
    unlike,
)
from pipemorph.control.observe.series import Key
from pipemorph.wire import (
    MAX_REPORT_BYTES,
    MOST_SLOW,
    EventReport,
    Health,
    IterationSample,
    LinkHealthReport,
    LinkState,
    RailsView,
    ReductionHealth,
    StageState,
    StragglersView,
    TransportsView,
    WireModel,
)
from pipemorph.wire.messages import MOST_EVENTS, MOST_ITERATIONS, MOST_STAGES

NEWEST_ITERATIONS, ITERATIONS_KEPT = 16, 4096
HEADROOM_BYTES = 512
"""Room for the names and brackets of lists."""


class Unreported:
    """Values of all kinds that the host does not have, iterations, events and the last message.

    ``events``: of the observer. ``min_delay``: what it ignores at the moment, seconds.
    """

    def __init__(self, events: Events, min_delay: Callable[[], float]) -> None:
        self._events, self._events_told = events, 0
        self.directions: News[Key, LinkState] = News(
            LinkState,
            lambda row: row.key,
            lambda told, new: link_differs(told, new, min_delay()),
            ends=lambda row: row.health is Health.HEALTHY,
        )
        self.links: News[int, LinkState] = News(
            LinkState,
            lambda row: row.link,
            lambda told, new: link_differs(told, new, min_delay()),
            ends=lambda row: row.health is Health.UNKNOWN,
        )
        self.stages: News[int, StageState] = News(StageState, lambda row: row.stage, stage_differs)
        self.reductions: News[tuple[int, int], ReductionHealth] = News(
            ReductionHealth, lambda row: (row.stage, row.replica), reduction_differs
        )
        self.rails: News[None, RailsView] = News(RailsView, lambda _: None, unlike)
        self.transports: News[None, TransportsView] = News(TransportsView, lambda _: None, unlike)
        self.stragglers: News[None, StragglersView] = News(
            StragglersView, lambda _: None, stragglers_differ
        )
        self._kinds: tuple[News[Any, Any], ...] = (
            self.directions, self.links, self.stages, self.reductions, self.rails,
            self.transports, self.stragglers,
        )  # fmt: skip
        self._iterations: deque[IterationSample] = deque(maxlen=ITERATIONS_KEPT)
        self._told_iterations: deque[IterationSample] = deque(maxlen=NEWEST_ITERATIONS)
        self.message: str | None = None

    def finished(self, iterations: Iterable[IterationSample]) -> None:
        """Note iterations, oldest first. Rank 0 sends some again after a lost connection."""
        self._iterations.extend(each for each in iterations if each not in self._iterations)

    @property
    def urgent(self) -> bool:
        """Whether the host has to know of a value at once."""
        return any(kind.urgent for kind in self._kinds)

    def __bool__(self) -> bool:
        waiting = bool(self._iterations) or self.message is not None
        return waiting or any(self._kinds) or self._events.next > self._events_told

    def fill(self, empty: LinkHealthReport) -> LinkHealthReport:
        """``empty`` with what is news, of at most ``MAX_REPORT_BYTES``. It stays news until it is
        :meth:`told`."""
        budget = Budget(MAX_REPORT_BYTES - len(empty.body()) - HEADROOM_BYTES)
        finished = list(reversed(self._iterations))
        iterations = _fit(budget, finished[:NEWEST_ITERATIONS])
        half = budget.part(budget.bytes_left / 2)
        directions = self.directions.take(half, MOST_SLOW)
        budget.back(half)
        all_slow = len(directions) == len(self.directions)
        stages = self.stages.take(budget, MOST_STAGES)
        links = self.links.take(budget, MOST_STAGES) if all_slow else []
        reductions = self.reductions.take(budget, MOST_STAGES)
        rails = self.rails.take(budget, 1)
        transports = self.transports.take(budget, 1)
        stragglers = self.stragglers.take(budget, 1)
        events = _fit(budget, self._unsaid_events())
        if len(iterations) == NEWEST_ITERATIONS:
            iterations += _fit(budget, finished[NEWEST_ITERATIONS:MOST_ITERATIONS])
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

    def _unsaid_events(self) -> list[EventReport]:
        unsaid = [e for e in self._events.newest() if e.number >= self._events_told]
        return [EventReport(iteration=e.iteration, text=e.text) for e in unsaid[:MOST_EVENTS]]

    def told(self, report: LinkHealthReport) -> None:
        """Note that the host has accepted a report."""
        sent = {id(sample) for sample in report.iterations}
        self._iterations = deque(
            (sample for sample in self._iterations if id(sample) not in sent), ITERATIONS_KEPT
        )
        self._events_told = max(self._events_told, self._events.oldest)
        self._events_told += len(report.events)
        if self.message == report.message:
            self.message = None
        self.directions.delivered(report.directions)
        self.links.delivered(report.links)
        self.stages.delivered(report.stages)
        self.reductions.delivered(report.reductions)
        if report.rails is not None:
            self.rails.delivered([report.rails])
        if report.transports is not None:
            self.transports.delivered([report.transports])
        if report.stragglers is not None:
            self.stragglers.delivered([report.stragglers])

    def keep(self, iterations: Sequence[IterationSample]) -> None:
        """Keep the newest that the host has, in case it forgets them."""
        self._told_iterations.extend(iterations)

    def repeat_states(self) -> None:
        """Every state is news."""
        for kind in self._kinds:
            kind.again()

    def again(self) -> None:
        """Everything is news: the host has lost what it was told."""
        self.repeat_states()
        self._iterations.extendleft(reversed(self._told_iterations))
        self._told_iterations.clear()


T = TypeVar("T", bound=WireModel)


def _fit(budget: Budget, items: Sequence[T]) -> list[T]:
    """The first ``items`` that fit."""
    taken: list[T] = []
    for item in items:
        if not budget.admit(len(item.body())):
            break
        taken.append(item)
    return taken
