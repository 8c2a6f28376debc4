"""State of each link, iteration by iteration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from pipemorph.planning.ir import Route
from pipemorph.protocol import Health, LinkState
from pipemorph.views.explanation.explained_job import SlowPeriod
from pipemorph.views.live_page.page_document import LinkSpan, LinkSpanKind, LinkTimeline

MOST_SPANS = 200
"""Most states stored per link, the newest."""
SAME_DELAY_TOLERANCE = 0.1
"""Relative difference up to which two delays are one state."""


@dataclass(frozen=True)
class LinkPhase:
    """State of a link from an iteration on. ``begin``: the iteration in which it began to show;
    ``fallen``: the transport that the link fell back to, empty if it did not."""

    begin: int
    link: LinkState
    route: Route
    fallen: str = ""

    @property
    def kind(self) -> LinkSpanKind:
        """Kind of the state, by which the page colours it."""
        if self.fallen:
            return "fallen"
        if self.link.health is Health.UNKNOWN:
            return "unknown"
        if self.link.health is Health.SLOW:
            return "narrow" if self.link.transfer > 0 else "slow"
        return "healthy"

    @property
    def text(self) -> str:
        """Short text, such as ``+60 ms, delegated``."""
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

    def is_same_state(self, other: LinkPhase) -> bool:
        """True if a viewer sees both as one state."""
        mine, theirs = (
            (each.kind, each.link.health, each.route, each.fallen, each.link.failed_over)
            for each in (self, other)
        )
        alike = mine == theirs
        here, there = self.link.delay, other.link.delay
        return alike and abs(here - there) <= SAME_DELAY_TOLERANCE * max(here, there)


@dataclass
class LinkHistory:
    """States of all links so far, oldest first; bounded."""

    _lanes: list[list[LinkPhase]] = field(default_factory=list)

    def record_states(
        self,
        iteration: int,
        links: Sequence[LinkState],
        routes: Sequence[Route],
        fallen: Mapping[int, str],
    ) -> None:
        """Record the states of all links. ``iteration``: the one in progress."""
        if len(self._lanes) != len(links):
            self._lanes = [[] for _ in links]
        for number, (lane, link) in enumerate(zip(self._lanes, links, strict=True)):
            route = routes[number] if number < len(routes) else Route.DIRECT
            if link.failed_over:
                route = Route.DELEGATED  # Under every plan.
            # Restarted ranks may repeat iterations, with links in other states.
            while lane and lane[-1].begin > iteration:
                lane.pop()
            moment = LinkPhase(iteration, link, route, fallen.get(number, ""))
            if lane and lane[-1].is_same_state(moment):
                continue
            before, shown = lane[-1].link.health if lane else None, link.since_iteration
            if shown is not None and before is not link.health:
                # A state is detected some iterations after it began to show. The state before may
                # have changed in between.
                earliest = 0
                for each in reversed(lane):
                    if each.link.health is not before:
                        break
                    earliest = each.begin
                began = max(earliest, min(shown, iteration))
                moment = LinkPhase(began, link, route, moment.fallen)
            while lane and lane[-1].begin >= moment.begin:
                lane.pop()
            if not lane or not lane[-1].is_same_state(moment):
                lane.append(moment)
                del lane[:-MOST_SPANS]

    def copy(self) -> LinkHistory:
        return LinkHistory([list(lane) for lane in self._lanes])

    def get_states_at(self, iteration: int) -> list[LinkState]:
        """State of each link in an iteration: the last that began until then."""
        return [
            max((m for m in lane if m.begin <= iteration), key=lambda m: m.begin, default=lane[0])
            .link
            for lane in self._lanes
            if lane
        ]  # fmt: skip

    def list_slow_periods(self) -> list[SlowPeriod]:
        """Periods in which each link was slow, by link, oldest first."""
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
                        begin = min(begin, first)  # An earlier entry may be dropped.
                    found.append(
                        SlowPeriod(
                            link=number,
                            begin=begin,
                            end=end,
                            delay=most.delay,
                            column=most.replica,
                        )
                    )
        return found

    def build_timelines(self, names: Iterable[str]) -> list[LinkTimeline]:
        """Lanes for the page. ``names``: of the links."""
        made = []
        for name, moments in zip(names, self._lanes or [], strict=False):
            ends = [*(moment.begin for moment in moments[1:]), None]
            spans = [
                LinkSpan(
                    begin=moment.begin,
                    end=end,
                    kind=moment.kind,
                    delegated=moment.route is Route.DELEGATED,
                    text=moment.text,
                )
                for moment, end in zip(moments, ends, strict=True)
            ]
            made.append(LinkTimeline(name=name, spans=spans))
        return made
