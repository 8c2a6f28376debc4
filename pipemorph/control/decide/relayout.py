"""Finds a layout in which a slow wire hurts less, and whether the way there pays. Pure.

A gradient reduction goes round a ring, chunk by chunk, and each step takes as long as its slowest
edge: a late wire costs it many times its delay. Between two stages a plan absorbs that delay, and a
wire that no neighbours use costs nothing. So ranks change places, two at a time, as long as the
predicted iteration becomes shorter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice, permutations
from statistics import median

from pipemorph.api.layout import Layout, Wire
from pipemorph.api.spec import Adaptation, JobSpec
from pipemorph.control.observed.links import Health, LinkHealth
from pipemorph.planning import Route, StageTimes, plan, problem_for
from pipemorph.wire import ReductionHealth

MOST_SWAPS = 16
"""Most pairs of ranks that change places at once."""
MOST_ORDERS = 6
"""Most orders of the mesh that a search begins with."""
MOST_TRIED = 20_000
"""Most layouts that one search looks at."""
SAME = 0.01
"""Predictions within this fraction count as equal, since the model is not more exact."""

Late = Mapping[Wire, float]
"""Seconds by which messages on a wire are later than usual; wires that are not late are missing."""


@dataclass(frozen=True)
class Network:
    """What a job's controller knows. ``left``: iterations that are still to be run."""

    stages: tuple[StageTimes, ...]
    links: tuple[LinkHealth, ...]
    reductions: tuple[ReductionHealth, ...]
    barrier: bool
    left: int


@dataclass
class Wires:
    """What is known of the wires of a job, whoever uses them. What nobody uses stays as it was."""

    adaptation: Adaptation
    late: dict[Wire, float] = field(default_factory=dict)

    def see(self, layout: Layout, network: Network) -> None:
        """Take what the ranks of ``layout`` have measured."""
        used: set[Wire] = set()
        for group in network.reductions:
            if group.slowest is None:
                continue
            edges = list(layout.edges(_ring(layout, group)))
            used |= set(edges)
            for wire in edges:
                self.late.pop(wire, None)
        for group in network.reductions:
            if group.slowest is not None:
                wire = list(layout.edges(_ring(layout, group)))[group.slowest.at]
                self._note(wire, group.slowest.seconds - group.slowest.usual, group.slowest.usual)
        for link in network.links:
            if link.health is Health.SLOW:
                self._note(layout.link(link.link, link.replica), link.delay, 0.0)
            elif link.health is Health.HEALTHY:
                for column in range(layout.mesh.columns):
                    wire = layout.link(link.link, column)
                    if wire not in used:
                        self.late.pop(wire, None)

    def waits(self, network: Network) -> bool:
        """Whether a group has a late edge, and it is not known yet what that costs it."""
        return any(
            self._is_late(edge.seconds - edge.usual, edge.usual) and not group.slow
            for group in network.reductions
            if (edge := group.slowest) is not None
        )

    def _is_late(self, late: float, usual: float) -> bool:
        least = self.adaptation.min_delay_ms / 1e3
        return late >= max(least, self.adaptation.min_delay_fraction * usual)

    def _note(self, wire: Wire, late: float, usual: float) -> None:
        if self._is_late(late, usual):
            self.late[wire] = max(late, self.late.get(wire, 0.0))


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
    def pays(self) -> bool:
        enough = self.before - self.after > max(self.least_gain, SAME) * self.before
        return enough and self.saved > self.cost


def propose(
    spec: JobSpec, layout: Layout, network: Network, late: Late, cost: float
) -> Proposal | None:
    """The best layout that was found; None if none is better than the present one. ``cost``:
    seconds of a change."""
    score = _Score(spec, network, late, layout)
    found = min((_search(each, score) for each in _starts(layout)), key=score.of)
    if found == layout:
        return None
    before, after = score.of(layout)[0], score.of(found)[0]
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


def _search(layout: Layout, score: _Score) -> Layout:
    """Exchange the places of two ranks, of which one is at a late wire, as long as that helps."""
    best, tried = layout, 0
    for _ in range(MOST_SWAPS):
        at_late = score.at_late(best)
        pairs = [
            best.swapped(rank, other)
            for rank in at_late
            for other in range(layout.mesh.world_size)
            if best.pod(rank) != best.pod(other) and (other not in at_late or other > rank)
        ][: MOST_TRIED - tried]
        tried += len(pairs)
        found = min(pairs, key=score.of, default=best)
        if score.of(found) >= score.of(best):
            break
        best = found
    return best


class _Score:
    """Predicts iterations, from a network that was measured in ``layout``."""

    def __init__(self, spec: JobSpec, network: Network, late: Late, layout: Layout) -> None:
        self._spec, self._network, self._late, self._layout = spec, network, late, layout
        self._groups = {_ring(layout, group): group for group in network.reductions}
        self._known: dict[tuple[tuple[float, ...], tuple[float, ...]], float] = {}
        self._scores: dict[tuple[int, ...], tuple[float, float, int]] = {}

    def of(self, layout: Layout) -> tuple[float, float, int]:
        """Seconds of an iteration; of delay that is in use; and ranks that move. The less, the
        better."""
        if layout.places not in self._scores:
            self._scores[layout.places] = self._score(layout)
        return self._scores[layout.places]

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
            slowest = max(slowest, self._iteration(delays, reductions))
        # No prediction is more exact.
        return round(slowest, 5), used, len(self._layout.moved(layout))

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

    def _iteration(self, delays: tuple[float, ...], reductions: tuple[float, ...]) -> float:
        """Seconds of an iteration with a plan for these delays."""
        key = (delays, reductions)
        if key not in self._known:
            stages = [
                times.model_copy(update={"reduction": reduction})
                for times, reduction in zip(self._network.stages, reductions, strict=True)
            ]
            delegates = self._spec.adaptation.allow_delegation
            routes = [Route.DELEGATED if delay and delegates else Route.DIRECT for delay in delays]
            problem = problem_for(
                self._spec.schedule.microbatches, stages, delays, routes,
                queues=self._spec.transport.queues,
                half_duplex=self._spec.transport.direct_duplex == "half",
            )  # fmt: skip
            if not self._network.barrier:
                problem = problem.model_copy(update={"objective": "period"})
            self._known[key] = plan(problem, self._spec.schedule.policy_kind).objective
        return self._known[key]


def _ring(layout: Layout, group: ReductionHealth) -> tuple[int, ...]:
    """The ranks of a group, in the order of its ring."""
    rank = layout.mesh.rank(group.stage, group.replica)
    return next(ring for ring in layout.rings if rank in ring)


def named(wires: Iterable[Wire]) -> str:
    """``pods 1 and 2, pods 3 and 4``"""
    return ", ".join(f"pods {low} and {high}" for low, high in sorted(wires))
