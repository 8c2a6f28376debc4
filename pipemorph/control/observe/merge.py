"""What agents of a job's parts have told: states that the job's agent merges with its own. Pure.

A part is a range of ranks. Its agent judges the directions of links that these ranks receive, and
what else they tell; see :mod:`~pipemorph.control.observe.observer`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from pipemorph.api.mesh import MeshShape
from pipemorph.control.observe.link_book import FORWARD
from pipemorph.control.observe.reductions import GroupKey
from pipemorph.control.observe.series import Key
from pipemorph.wire import (
    Health,
    LinkState,
    RailsView,
    ReductionHealth,
    StageState,
    TransportsView,
)
from pipemorph.wire.parts import PartReport, UsualReduction

State = Literal["starting", "training", "finished", "failed"]
STATES: tuple[State, ...] = ("starting", "training", "finished", "failed")


def merged_state(told: Iterable[State], *, missing: bool) -> State:
    """The state of several: failed if one failed, finished if all have finished, else the earliest.

    ``missing``: whether some have told nothing yet. They are starting, unless others are training:
    then they are training too, since no iteration is possible without them.
    """
    states = set(told)
    if "failed" in states:
        return "failed"
    if missing:
        states.add("training" if "training" in states else "starting")
    return min(states, key=STATES.index)


def ranks_of_part(mesh: MeshShape, number: int, ranks: int) -> range:
    """The ranks of a part, of a job whose parts have so many; the last one may have fewer."""
    return range(number * ranks, min((number + 1) * ranks, mesh.world_size))


@dataclass
class Part:
    """One part, from its reports."""

    state: State = "starting"
    heard_at: float | None = None
    """Wall clock, seconds; None: not heard of, or forgotten."""
    settings: str = ""
    """Revision of those that it was told."""
    life: int = 0
    """Grows when what it told may be lost, so that it tells everything again."""
    slow: dict[Key, LinkState] = field(default_factory=dict)
    """Directions that are not known to be healthy again."""
    rests: set[int] = field(default_factory=set)
    late: tuple[int, ...] = ()
    late_reductions: int = 0
    bases: dict[str, dict[int, int]] = field(default_factory=dict)
    restore: list[LinkState] = field(default_factory=list)
    reductions: list[UsualReduction] = field(default_factory=list)
    """What to tell it with the next answer."""
    usual: Mapping[str, float] | None = None
    """What it was last told to be usual."""


class Parts:
    """All parts of a job but the first, which the job's agent observes itself. ``ranks``: of each
    part; 0: the job has one part."""

    def __init__(self, mesh: MeshShape, ranks: int) -> None:
        self._mesh, self._ranks = mesh, ranks
        count = -(-mesh.world_size // ranks) if ranks else 1
        self.parts = {number: Part() for number in range(1, count)}
        self.rests: list[dict[int, LinkState]] = [{} for _ in range(mesh.stages - 1)]
        """By link and part; those that are known to be healthy."""
        self.stages: list[dict[int, StageState]] = [{} for _ in range(mesh.stages)]
        self.groups: dict[GroupKey, ReductionHealth] = {}
        self.rails: dict[int, RailsView] = {}
        self.transports: dict[int, TransportsView] = {}
        self.late: Counter[int] = Counter()
        """By link, the number of parts in which it is late; without zeros."""
        self.judged: set[int] = set()
        """Links with healthy directions."""
        self.bases: dict[str, Counter[int]] = {}
        """By route and bucket, the number of directions."""
        self.late_reductions = 0
        self._states: Counter[State] = Counter()
        """Of parts that are heard of; without zeros."""
        self._slow = 0

    def __len__(self) -> int:
        return len(self.parts)

    def state(self, own: State) -> State:
        """The job's state. ``own``: that of the first part."""
        missing = self._states.total() < len(self.parts)
        return merged_state([own, *self._states], missing=missing)

    @property
    def any_slow(self) -> bool:
        return self._slow > 0

    def part_of(self, stage: int, column: int) -> int:
        """The part with the rank of a stage in a column."""
        return self._mesh.rank(stage, column) // self._ranks if self._ranks else 0

    def receiver(self, key: Key) -> int:
        """The part that receives a direction of a link."""
        link, column, direction = key
        return self.part_of(link + 1 if direction == FORWARD else link, column)

    def meet(self, number: int) -> None:
        """Let the next answer to a part have all that it has to know."""
        part = self.parts[number]
        part.life += 1
        part.usual = None
        part.restore = [row.without_windows() for row in part.slow.values()]

    def misfit(self, report: PartReport) -> str | None:
        """What of a report is of no link, stage or column of its part; None if all fits."""
        mesh, part = self._mesh, report.part
        if part not in self.parts:
            return f"a report of part {part}; the job has parts 1 to {len(self.parts)}"
        links, stages = mesh.stages - 1, mesh.stages
        rows = [("link", row.link, links, row.replica) for row in report.directions]
        rows += [("link", rest.link, links, rest.replica) for rest in report.links]
        rows += [("link", link, links, 0) for link in report.late]
        rows += [("stage", state.stage, stages, 0) for state in report.stages]
        rows += [("stage", pace.stage, stages, pace.column) for pace in report.paces]
        rows += [("stage", group.stage, stages, group.replica) for group in report.reductions]
        if report.rails is not None:
            troubles = (*report.rails.sick, *report.rails.congested)
            rows += [("stage", each.stage, stages, each.replica) for each in troubles]
        if report.transports is not None:
            rows += [("link", end.link, links, end.replica) for end in report.transports.fallen]
            if len(report.transports.links) not in (0, links):
                return f"transports of {len(report.transports.links)} links; the job has {links}"
        for what, number, count, column in rows:
            if number >= count:
                return f"a report of {what} {number}; the job has {count}"
            if column >= mesh.columns:
                return f"a report of column {column}; the job has {mesh.columns}"
        owners = [self.receiver(row.key) for row in report.directions]
        owners += [self.part_of(pace.stage, pace.column) for pace in report.paces]
        owners += [self.part_of(group.stage, group.replica) for group in report.reductions]
        for owner in owners:
            if owner != part:
                return f"a report of part {part} on what part {owner} has"
        return None

    def take(self, report: PartReport, now: float) -> None:
        """Take in a report that fits."""
        number, part = report.part, self.parts[report.part]
        if part.heard_at is None or part.state != report.state:
            self._states.subtract([part.state] if part.heard_at is not None else [])
            self._states.update([report.state])
            self._states = +self._states
        part.heard_at, part.state = now, report.state
        for row in report.directions:
            key: Key = row.key
            self._slow -= key in part.slow
            if row.health is Health.HEALTHY:
                part.slow.pop(key, None)
            else:
                part.slow[key] = row
                self._slow += 1
        for rest in report.links:
            self._rest(number, part, rest)
        for state in report.stages:
            self.stages[state.stage][number] = state
        for group in report.reductions:
            self.groups[group.stage, group.replica] = group
        if report.rails is not None:
            self.rails[number] = report.rails
        if report.transports is not None:
            self.transports[number] = report.transports
        self._late(part, tuple(report.late), report.late_reductions)
        for bases in report.bases:
            self._bases(part, bases.route, bases.counts)

    def _rest(self, number: int, part: Part, rest: LinkState) -> None:
        known = self.rests[rest.link]
        if rest.health is Health.HEALTHY:
            known[number] = rest
            part.rests.add(rest.link)
            self.judged.add(rest.link)
            return
        known.pop(number, None)
        part.rests.discard(rest.link)
        if not known:
            self.judged.discard(rest.link)

    def _end_rests(self, number: int) -> list[LinkState]:
        part = self.parts[number]
        ended = [LinkState(link, Health.UNKNOWN) for link in sorted(part.rests)]
        for rest in ended:
            self._rest(number, part, rest)
        return ended

    def _late(self, part: Part, links: tuple[int, ...], reductions: int) -> None:
        self.late_reductions += reductions - part.late_reductions
        part.late_reductions = reductions
        if links != part.late:
            self.late.subtract(part.late)
            self.late.update(links)
            self.late = +self.late
            part.late = links

    def _bases(self, part: Part, route: str, counts: dict[int, int]) -> None:
        total = self.bases.setdefault(route, Counter())
        total.subtract(part.bases.get(route, {}))
        total.update(counts)
        self.bases[route] = +total
        part.bases[route] = counts

    def remember(self, row: LinkState) -> LinkState:
        """Note what the host remembers of a direction of one of the parts, whose agent is told of
        it: it knows better, or it has started anew, too."""
        state = replace(row, health=Health.UNKNOWN)
        key: Key = row.key
        part = self.parts[self.receiver(key)]
        self._slow += key not in part.slow
        known = part.slow.setdefault(key, state)
        part.restore.append(row)
        return known

    def silent(self, now: float, most: float) -> Iterator[int]:
        """Parts that have told nothing for longer than ``most`` seconds, and have not ended."""
        for number, part in self.parts.items():
            ended = part.state in ("finished", "failed")
            if part.heard_at is not None and now - part.heard_at > most and not ended:
                yield number

    def forget(self, number: int) -> tuple[list[LinkState], list[LinkState]]:
        """Forget what a silent part has told of its links, but for those that were slow: they are
        unknown. Its agent has to tell everything again. Returns their states."""
        part = self.parts[number]
        self.meet(number)
        if part.heard_at is not None:
            self._states.subtract([part.state])
            self._states = +self._states
        part.heard_at = None
        self._late(part, (), 0)
        for route in list(part.bases):
            self._bases(part, route, {})
        for key, row in part.slow.items():
            part.slow[key] = replace(row, health=Health.UNKNOWN)
        return list(part.slow.values()), self._end_rests(number)
