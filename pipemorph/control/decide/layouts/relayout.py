"""Finds a layout in which a slow wire hurts less, and whether the way there pays. Pure, but
for the time that a search may take.

A gradient reduction goes round a ring, chunk by chunk, and each step takes as long as its slowest
edge: a late wire costs it many times its delay. Between two stages a plan absorbs that delay, and a
wire that no neighbours use costs nothing. So ranks change places, two at a time, as long as the
predicted iteration becomes shorter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice, permutations, takewhile
from statistics import median
from time import monotonic

from pipemorph.api.layout import Layout, RankLayout, Wire
from pipemorph.api.sections.schedule import Adaptation
from pipemorph.api.spec import JobSpec
from pipemorph.control.decide.layouts.beside import Beside
from pipemorph.control.observe.detector import MIN_DELAY_FRACTION
from pipemorph.errors import InputError
from pipemorph.planning import Route, StageTimes, plan, problem_for
from pipemorph.wire import Health, LinkState, ReductionHealth

MOST_SWAPS = 16
"""Most pairs of ranks that change places at once."""
MOST_ORDERS = 6
"""Most orders of the mesh that a search begins with."""
SEARCH_SECONDS = 2.0
"""Longest time of all searches of one decision, which the host of the ranks waits for."""
MOST_WAITED = 16
"""Most iterations in which it is waited for what a late edge costs its group."""
SAME = 0.01
"""Predictions within this fraction count as equal, since the model is not more exact."""

Late = Mapping[Wire, float]
"""Seconds by which messages on a wire are later than usual; wires that are not late are missing."""


@dataclass(frozen=True)
class Network:
    """What a job's controller knows. ``left``: iterations that are still to be run; ``beside``:
    what stages do beside their layers."""

    stages: tuple[StageTimes, ...]
    links: tuple[LinkState, ...]
    reductions: tuple[ReductionHealth, ...]
    barrier: bool
    left: int
    beside: Beside = field(default_factory=Beside)


@dataclass
class Wires:
    """What is known of the wires of a job, whoever uses them. What nobody uses stays as it was.

    ``late``: seconds. ``usual``: the least that messages of a reduction's chunk have taken, over
    all generations. In a new one, a wire that is late from its start is what the ring is used to.
    """

    adaptation: Adaptation
    late: dict[Wire, float] = field(default_factory=dict)
    usual: dict[Wire, float] = field(default_factory=dict)
    _since: dict[tuple[int, ...], int] = field(default_factory=dict)
    """By ring with a late edge that does not make it slow: the iterations that were left when that
    was first seen."""

    def see(self, layout: Layout, network: Network) -> None:
        """Take what the ranks of ``layout`` have measured."""
        found: dict[Wire, float] = {}
        used: set[Wire] = set()
        since: dict[tuple[int, ...], int] = {}
        for ring, group in _measured(layout, network).items():
            assert group.slowest is not None
            edges = list(layout.edges(ring))
            used |= set(edges)
            for wire in edges:
                self.usual[wire] = min(self.usual.get(wire, math.inf), group.slowest.usual)
            wire = edges[group.slowest.at]
            late = group.slowest.seconds - self.usual[wire]
            if not self._is_late(late, self.usual[wire]):
                for each in edges:
                    self.late.pop(each, None)
                continue
            # The others are no later than this one.
            self.late |= {each: min(late, self.late[each]) for each in edges if each in self.late}
            if group.slow:
                found[wire] = max(late, found.get(wire, 0.0))
            else:
                since[ring] = self._since.get(ring, network.left)
        self._since = since
        for link in network.links:
            wire = layout.link(link.link, link.replica)
            if link.health is Health.SLOW and self._is_late(link.delay, 0.0):
                found[wire] = max(link.delay, found.get(wire, 0.0))
            elif link.health is Health.HEALTHY:
                for column in range(layout.mesh.columns):
                    wire = layout.link(link.link, column)
                    if wire not in used:
                        self.late.pop(wire, None)
        self.late |= found

    def waits(self, layout: Layout, network: Network) -> bool:
        """Whether too little is known for a decision: the edges of a ring have not been measured,
        or one is late, and it is not known yet what that costs its group. That is waited for only
        so long: a message that was late by chance makes no group slow."""
        if len(_measured(layout, network)) < len(layout.rings):
            return True
        return any(since - network.left < MOST_WAITED for since in self._since.values())

    def _is_late(self, late: float, usual: float) -> bool:
        least = self.adaptation.min_delay_ms / 1e3
        return late >= max(least, MIN_DELAY_FRACTION * usual)


@dataclass(frozen=True)
class Proposal:
    """Another layout. ``before``, ``after``: predicted seconds of an iteration in the present one
    and there. ``cost``: seconds that the change is expected to take. ``pays``: within the
    iterations left."""

    layout: Layout
    before: float
    after: float
    cost: float
    left: int
    least_gain: float

    @property
    def saved(self) -> float:
        """Seconds, over the iterations left."""
        return (self.before - self.after) * self.left

    @property
    def promised(self) -> float:
        """The part of an iteration that is saved."""
        return 1 - self.after / self.before

    @property
    def pays(self) -> bool:
        enough = self.before - self.after > max(self.least_gain, SAME) * self.before
        return enough and self.saved > self.cost


def propose(
    spec: JobSpec,
    layout: Layout,
    network: Network,
    late: Late,
    cost: float,
    *,
    without: Collection[RankLayout] = (),
    seconds: float = SEARCH_SECONDS,
) -> Proposal | None:
    """The best layout that was found within ``seconds``; None if none is better than the present
    one. ``cost``: seconds of a change; ``without``: layouts that cannot be, with all their
    numbers."""
    score, total = Score(spec, network, late, layout), spec.parallelism.layers
    starts, end = _starts(layout), monotonic() + seconds
    found = layout
    for at, start in enumerate(starts):
        now = monotonic()
        until = now + (end - now) / (len(starts) - at)
        best = _search(start, score, until)
        if best.whole(total) not in without:
            found = min(found, best, key=score.of)
    if found == layout:
        return None
    before, after = score.of(layout)[0], score.of(found)[0]
    if not math.isfinite(before):
        return None
    return Proposal(found, before, after, cost, network.left, spec.adaptation.min_gain)


def _starts(layout: Layout) -> list[Layout]:
    """Where searches begin: at the present layout, and at those whose pods have other parts of the
    mesh, with its dimensions in another order."""
    mesh = layout.mesh
    several = [name for name in mesh.order if mesh.sizes[name] > 1]
    found = [layout]
    for order in islice(permutations(several), MOST_ORDERS):
        other = replace(mesh, order=order)
        numbers = {
            (other.coordinate(place).stage, other.coordinate(place).column): place
            for place in range(mesh.world_size)
        }
        at = [mesh.coordinate(rank) for rank in range(mesh.world_size)]
        places = tuple(numbers[each.stage, each.column] for each in at)
        found.append(replace(layout, places=places))
    return found


def _search(layout: Layout, score: Score, end: float) -> Layout:
    """Exchange the places of two ranks, of which one is at a late wire, as long as that helps.
    ``end``: of the search, monotonic."""
    best = layout
    for _ in range(MOST_SWAPS):
        in_time = takewhile(lambda _: monotonic() < end, _swapped(best, score.at_late(best)))
        found = min(in_time, key=score.of, default=best)
        if score.of(found) >= score.of(best):
            break
        best = found
    return best


def _swapped(layout: Layout, ranks: Collection[int]) -> Iterator[Layout]:
    """All layouts in which one of these ranks has changed places with a rank of another pod."""
    for rank in ranks:
        for other in range(layout.mesh.world_size):
            if layout.pod(rank) != layout.pod(other) and (other not in ranks or other > rank):
                yield layout.swapped(rank, other)


class Score:
    """Predicts iterations, from a network that was measured in ``layout``. ``stages_of``: the op
    times of stages that hold so many layers."""

    def __init__(
        self,
        spec: JobSpec,
        network: Network,
        late: Late,
        layout: Layout,
        stages_of: Callable[[tuple[int, ...]], tuple[StageTimes, ...]] | None = None,
    ) -> None:
        self._spec, self._network, self._late, self._layout = spec, network, late, layout
        self._stages_of = stages_of or (lambda _: network.stages)
        self._groups = {_ring(layout, group): group for group in network.reductions}
        self._known: dict[tuple[tuple[float, ...], ...], float] = {}
        self._scores: dict[Layout, tuple[float, float, int]] = {}

    def of(self, layout: Layout) -> tuple[float, float, int]:
        """Seconds of an iteration; of delay that is in use; and ranks that move, or layers. The
        less, the better."""
        if layout not in self._scores:
            self._scores[layout] = self._score(layout)
        return self._scores[layout]

    def _score(self, layout: Layout) -> tuple[float, float, int]:
        mesh, slowest, used = layout.mesh, 0.0, 0.0
        exposed: dict[int, float] = {}
        for ring in layout.rings:
            late = max(map(self._of_wire, layout.edges(ring)), default=0.0)
            used += late
            if (found := self._exposed(ring, late)) is not None:
                for rank in ring:
                    exposed[rank] = found
        for column in range(mesh.columns):
            delays = tuple(
                self._of_wire(layout.link(link, column)) for link in range(mesh.stages - 1)
            )
            used += sum(delays)
            reductions = tuple(
                exposed.get(mesh.rank(stage, column), times.reduction or 0.0)
                for stage, times in enumerate(self._network.stages)
            )
            slowest = max(slowest, self._iteration(delays, reductions, layout.layers))
        moved = len(self._layout.moved(layout))
        if total := self._spec.parallelism.layers:
            moved += self._layout.handed_over(layout, total)
        # No prediction is more exact.
        return round(slowest, 5), used, moved

    def _of_wire(self, wire: Wire) -> float:
        return self._late.get(wire, 0.0)

    def at_late(self, layout: Layout) -> list[int]:
        """The ranks that use a late wire."""
        mesh = layout.mesh
        pairs = [
            (mesh.rank(link, column), mesh.rank(link + 1, column))
            for column in range(mesh.columns)
            for link in range(mesh.stages - 1)
        ]
        for ring in layout.rings:
            pairs += zip(ring, (*ring[1:], ring[0]), strict=True)
        late = (pair for pair in pairs if self._of_wire(layout.wire(*pair)))
        return sorted({rank for pair in late for rank in pair})

    @cached_property
    def _steps_per_byte(self) -> float | None:
        """How many times the delay of an edge a reduction takes longer, per byte, as measured."""
        found = []
        for group in self._groups.values():
            edge, usual = group.slowest, group.normal
            if edge is not None and usual is not None and edge.seconds > edge.usual and group.slow:
                steps = (group.seconds - usual) / (edge.seconds - edge.usual)
                found.append(max(0.0, steps) / group.bytes)
        return median(found) if found else None

    def _exposed(self, ring: Sequence[int], late: float) -> float | None:
        """What follows a stage's last op if its ring has an edge that is so late; None if nothing
        is known of the group."""
        group = self._groups.get(tuple(ring))
        if group is None:
            return None
        hidden = max(0.0, group.seconds - group.exposed)
        seconds = group.seconds if group.normal is None else group.normal
        each = self._steps_per_byte
        # As many as an element takes: no reduction takes fewer.
        steps = 2 * (len(ring) - 1) if each is None else each * group.bytes
        return max(0.0, seconds + steps * late - hidden)

    def _iteration(
        self, delays: tuple[float, ...], reductions: tuple[float, ...], layers: tuple[int, ...]
    ) -> float:
        """Seconds of an iteration with a plan for these delays and layers per stage; infinite if
        there is none."""
        key = (delays, reductions, layers)
        if key not in self._known:
            stages = [
                times.model_copy(update={"reduction": reduction})
                for times, reduction in zip(self._stages_of(layers), reductions, strict=True)
            ]
            delegates = self._spec.transport.route != "direct"
            routes = [Route.DELEGATED if delay and delegates else Route.DIRECT for delay in delays]
            problem = problem_for(self._spec.schedule.microbatches, stages, delays, routes)
            if not self._network.barrier:
                problem = problem.model_copy(update={"objective": "period"})
            try:
                fits = all(stage.in_flight_limit != 0 for stage in stages)
                made = plan(problem, self._spec.schedule.policy_kind) if fits else None
                found = math.inf if made is None else made.objective
            except InputError:
                # As where a stage may not hold as many microbatches as the policy needs.
                found = math.inf
            self._known[key] = found
        return self._known[key]


def _measured(layout: Layout, network: Network) -> dict[tuple[int, ...], ReductionHealth]:
    """The groups whose edges have been measured, by their ranks."""
    return {
        _ring(layout, group): group for group in network.reductions if group.slowest is not None
    }


def _ring(layout: Layout, group: ReductionHealth) -> tuple[int, ...]:
    """The ranks of a group, in the order of its ring."""
    rank = layout.mesh.rank(group.stage, group.replica)
    return next(ring for ring in layout.rings if rank in ring)


def named(wires: Iterable[Wire]) -> str:
    """``pods 1 and 2, pods 3 and 4``"""
    return ", ".join(f"pods {low} and {high}" for low, high in sorted(wires))
