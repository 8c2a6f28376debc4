"""What each link was like, iteration by iteration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from pipemorph.explain.cluster_job import SlowTime
from pipemorph.planning.ir import Route
from pipemorph.watch.document import Lane, LaneKind, Span
from pipemorph.wire import Health, LinkState

MOST_SPANS = 200
"""Newest states of one link that are kept."""
SAME = 0.1
"""Relative difference of two delays that are one state."""


@dataclass(frozen=True)
class Moment:
    """A state of one link. ``begin``: the iteration in which it began to show; ``fallen``: the
    transport that it fell back to, empty if it did not."""

    begin: int
    link: LinkState
    route: Route
    fallen: str = ""

    @property
    def kind(self) -> LaneKind:
        if self.fallen:
            return "fallen"
        if self.link.health is Health.UNKNOWN:
            return "unknown"
        if self.route is Route.DELEGATED:
            return "delegated"
        if self.link.health is Health.SLOW:
            return "narrow" if self.link.transfer > 0 else "slow"
        return "healthy"

    @property
    def text(self) -> str:
        """``+60 ms, delegated``"""
        parts = []
        if self.fallen:
            parts.append(f"fell back to {self.fallen}")
        if self.link.health is Health.SLOW:
            narrow = ", narrow" if self.link.transfer > 0 else ""
            parts.append(f"+{1e3 * self.link.delay:.3g} ms{narrow}")
        elif not parts:
            parts.append(self.link.health.value)
        if self.link.failed_over:
            parts.append("fell back to the engine")
        elif self.route is Route.DELEGATED:
            parts.append("delegated")
        return ", ".join(parts)

    def same(self, other: Moment) -> bool:
        """Whether both are one state to who looks at them."""
        mine, theirs = (
            (each.kind, each.link.health, each.route, each.fallen, each.link.failed_over)
            for each in (self, other)
        )
        alike = mine == theirs
        here, there = self.link.delay, other.link.delay
        return alike and abs(here - there) <= SAME * max(here, there)


@dataclass
class LaneLog:
    """The states of all links so far, oldest first; bounded."""

    _lanes: list[list[Moment]] = field(default_factory=list)

    def take(
        self,
        iteration: int,
        links: Sequence[LinkState],
        routes: Sequence[Route],
        fallen: Mapping[int, str],
    ) -> None:
        """Take the states of all links. ``iteration``: the one in progress."""
        if len(self._lanes) != len(links):
            self._lanes = [[] for _ in links]
        for number, (lane, link) in enumerate(zip(self._lanes, links, strict=True)):
            route = routes[number] if number < len(routes) else Route.DIRECT
            if link.failed_over:
                route = Route.DELEGATED  # Whatever the plan says.
            # Ranks that start again may repeat iterations, in which links may be otherwise.
            while lane and lane[-1].begin > iteration:
                lane.pop()
            moment = Moment(iteration, link, route, fallen.get(number, ""))
            if lane and lane[-1].same(moment):
                continue
            before, shown = lane[-1].link.health if lane else None, link.since_iteration
            if shown is not None and before is not link.health:
                # A state is found some iterations after it began to show, in which the one before
                # may have changed.
                earliest = 0
                for each in reversed(lane):
                    if each.link.health is not before:
                        break
                    earliest = each.begin
                began = max(earliest, min(shown, iteration))
                moment = Moment(began, link, route, moment.fallen)
            while lane and lane[-1].begin >= moment.begin:
                lane.pop()
            if not lane or not lane[-1].same(moment):
                lane.append(moment)
                del lane[:-MOST_SPANS]

    def copy(self) -> LaneLog:
        return LaneLog([list(lane) for lane in self._lanes])

    def at(self, iteration: int) -> list[LinkState]:
        """The links as they were in an iteration: the state that began last until then."""
        return [
            max((m for m in lane if m.begin <= iteration), key=lambda m: m.begin, default=lane[0])
            .link
            for lane in self._lanes
            if lane
        ]  # fmt: skip

    def slow_times(self) -> list[SlowTime]:
        """When each link was slow, by link, oldest first."""
        found = []
        for number, lane in enumerate(self._lanes):
            ends = [*(moment.begin for moment in lane[1:]), None]
            for slow, moments in groupby(
                zip(lane, ends, strict=True), key=lambda each: each[0].link.is_late
            ):
                if slow:
                    late = list(moments)
                    most = max((each.link for each, _ in late), key=lambda link: link.delay)
                    begin, end = late[0][0].begin, late[-1][1]
                    first = late[0][0].link.since_iteration
                    if late[0][0] is lane[0] and first is not None:
                        begin = min(begin, first)  # Its beginning may be dropped.
                    found.append(
                        SlowTime(
                            link=number,
                            begin=begin,
                            end=end,
                            delay=most.delay,
                            column=most.replica,
                        )
                    )
        return found

    def lanes(self, names: Iterable[str]) -> list[Lane]:
        """For the page. ``names``: of the links."""
        made = []
        for name, moments in zip(names, self._lanes or [], strict=False):
            ends = [*(moment.begin for moment in moments[1:]), None]
            spans = [
                Span(begin=moment.begin, end=end, kind=moment.kind, text=moment.text)
                for moment, end in zip(moments, ends, strict=True)
            ]
            made.append(Lane(name=name, spans=spans))
        return made
