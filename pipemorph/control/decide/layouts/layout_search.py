"""Finds a layout in which a slow wire costs less, if the change pays. Pure, but for the clock that
limits a search.

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

from pipemorph.control.decide.layouts.stage_overhead import StageOverhead
from pipemorph.detection.detector import MIN_DELAY_FRACTION
from pipemorph.errors import InputError
from pipemorph.planning import Route, StageTimes, build_problem, plan
from pipemorph.protocol import Health, LinkState, ReductionHealth
from pipemorph.spec.job_spec import JobSpec
from pipemorph.spec.layout import Layout, RankLayout, Wire
from pipemorph.spec.sections.schedule import Adaptation

MOST_SWAPS = 16
"""Most pairs of ranks that change places at once."""
MOST_MESH_ORDERS = 6
"""Most orders of the mesh that a search begins with."""
SEARCH_SECONDS = 2.0
"""Longest time of all searches of one decision, which the host of the ranks waits for."""
MOST_WAITED_ITERATIONS = 16
"""Most iterations to wait for the measured cost of a late edge to its group."""
EQUAL_WITHIN = 0.01
"""Predictions within this fraction count as equal, since the model is not more exact."""

LateWires = Mapping[Wire, float]
"""Seconds by which messages on a wire are later than usual; wires that are not late are missing."""


@dataclass(frozen=True)
class NetworkMeasurements:
    """Measurements of a job's controller for another layout. ``iterations_remaining``: None if
    the job has no end."""

    stages: tuple[StageTimes, ...]
    links: tuple[LinkState, ...]
    reductions: tuple[ReductionHealth, ...]
    barrier: bool
    iterations_remaining: int
    stage_overhead: StageOverhead = field(default_factory=StageOverhead)


@dataclass
class WireDelays:
    """Known delays of a job's wires, over all layouts. Unused wires stay as last measured.

    ``late``: seconds of delay. ``usual_seconds``: least seconds of a reduction's chunk over all
    generations: to the ring of a new one, a wire that was late from its start is normal.
    """

    adaptation: Adaptation
    late_seconds: dict[Wire, float] = field(default_factory=dict)
    usual_seconds: dict[Wire, float] = field(default_factory=dict)
    _remaining_at_first_late: dict[tuple[int, ...], int] = field(default_factory=dict)
    """Remaining iterations when a late edge was first seen that does not slow its ring, by ring."""

    def update_from(self, layout: Layout, network: NetworkMeasurements) -> None:
        """Update from measurements of the ranks in ``layout``."""
        found: dict[Wire, float] = {}
        used: set[Wire] = set()
        since: dict[tuple[int, ...], int] = {}
        for ring, group in _find_measured_groups(layout, network).items():
            assert group.slowest is not None
            edges = list(layout.find_ring_wires(ring))
            used |= set(edges)
            for wire in edges:
                self.usual_seconds[wire] = min(
                    self.usual_seconds.get(wire, math.inf), group.slowest.usual
                )
            wire = edges[group.slowest.at]
            late = group.slowest.seconds - self.usual_seconds[wire]
            if not self._is_late(late, self.usual_seconds[wire]):
                for each in edges:
                    self.late_seconds.pop(each, None)
                continue
            # The others are no later than this one.
            self.late_seconds |= {
                each: min(late, self.late_seconds[each])
                for each in edges
                if each in self.late_seconds
            }
            if group.slow:
                found[wire] = max(late, found.get(wire, 0.0))
            else:
                since[ring] = self._remaining_at_first_late.get(ring, network.iterations_remaining)
        self._remaining_at_first_late = since
        for link in network.links:
            wire = layout.find_link_wire(link.link, link.replica)
            if link.health is Health.SLOW and self._is_late(link.delay, 0.0):
                found[wire] = max(link.delay, found.get(wire, 0.0))
            elif link.health is Health.HEALTHY:
                for column in range(layout.mesh.columns):
                    wire = layout.find_link_wire(link.link, column)
                    if wire not in used:
                        self.late_seconds.pop(wire, None)
        self.late_seconds |= found

    def lacks_measurements(self, layout: Layout, network: NetworkMeasurements) -> bool:
        """True if too little is known for a decision: the edges of a ring have not been measured,
        or one is late and its cost to its group is unknown. That wait is limited: a message that is
        late by chance makes no group slow."""
        if len(_find_measured_groups(layout, network)) < len(layout.rings):
            return True
        return any(
            since - network.iterations_remaining < MOST_WAITED_ITERATIONS
            for since in self._remaining_at_first_late.values()
        )

    def _is_late(self, late: float, usual: float) -> bool:
        least = self.adaptation.min_delay_ms / 1e3
        return late >= max(least, MIN_DELAY_FRACTION * usual)


@dataclass(frozen=True)
class LayoutProposal:
    """Proposal of another layout. ``seconds_before``, ``seconds_after``: predicted seconds of an
    iteration in the present and the proposed layout. ``change_cost``: expected seconds of the
    change. ``pays_off``: within ``iterations_remaining``."""

    layout: Layout
    seconds_before: float
    seconds_after: float
    change_cost: float
    iterations_remaining: int
    least_gain: float

    @property
    def saved_seconds(self) -> float:
        """Seconds saved over the remaining iterations."""
        return (self.seconds_before - self.seconds_after) * self.iterations_remaining

    @property
    def promised_gain(self) -> float:
        """Fraction of an iteration that is saved."""
        return 1 - self.seconds_after / self.seconds_before

    @property
    def pays_off(self) -> bool:
        """True if the change saves enough of an iteration, and more in all than it costs."""
        enough = (
            self.seconds_before - self.seconds_after
            > max(self.least_gain, EQUAL_WITHIN) * self.seconds_before
        )
        return enough and self.saved_seconds > self.change_cost


def propose_places(
    spec: JobSpec,
    layout: Layout,
    network: NetworkMeasurements,
    late: LateWires,
    cost: float,
    *,
    without: Collection[RankLayout] = (),
    seconds: float = SEARCH_SECONDS,
) -> LayoutProposal | None:
    """Propose the best layout found within ``seconds``; None if none is better than the present
    one. ``cost``: seconds of a change; ``without``: layouts that failed before."""
    score, total = LayoutScorer(spec, network, late, layout), spec.parallelism.layers
    starts, end = _list_search_starts(layout), monotonic() + seconds
    found = layout
    for at, start in enumerate(starts):
        now = monotonic()
        until = now + (end - now) / (len(starts) - at)
        best = _swap_while_better(start, score, until)
        if best.to_explicit_layout(total) not in without:
            found = min(found, best, key=score.score_layout)
    if found == layout:
        return None
    before, after = score.score_layout(layout)[0], score.score_layout(found)[0]
    if not math.isfinite(before):
        return None
    return LayoutProposal(
        found, before, after, cost, network.iterations_remaining, spec.adaptation.min_gain
    )


def _list_search_starts(layout: Layout) -> list[Layout]:
    """List the starts of searches: the present layout, and layouts with the mesh's dimensions in
    another order, whose pods hold other ranks of the mesh."""
    mesh = layout.mesh
    several = [name for name in mesh.order if mesh.sizes[name] > 1]
    found = [layout]
    for order in islice(permutations(several), MOST_MESH_ORDERS):
        other = replace(mesh, order=order)
        numbers = {
            (other.find_coordinate(place).stage, other.find_coordinate(place).column): place
            for place in range(mesh.world_size)
        }
        at = [mesh.find_coordinate(rank) for rank in range(mesh.world_size)]
        places = tuple(numbers[each.stage, each.column] for each in at)
        found.append(replace(layout, places=places))
    return found


def _swap_while_better(layout: Layout, score: LayoutScorer, end: float) -> Layout:
    """Swap the places of two ranks, one of them at a late wire, as long as that helps. ``end``:
    monotonic time at which the search ends."""
    best = layout
    for _ in range(MOST_SWAPS):
        in_time = takewhile(
            lambda _: monotonic() < end, _list_swaps(best, score.find_ranks_at_late_wires(best))
        )
        found = min(in_time, key=score.score_layout, default=best)
        if score.score_layout(found) >= score.score_layout(best):
            break
        best = found
    return best


def _list_swaps(layout: Layout, ranks: Collection[int]) -> Iterator[Layout]:
    """Yield all layouts in which one of these ranks swaps places with a rank of another pod."""
    for rank in ranks:
        for other in range(layout.mesh.world_size):
            if layout.find_pod(rank) != layout.find_pod(other) and (
                other not in ranks or other > rank
            ):
                yield layout.swap_places(rank, other)


class LayoutScorer:
    """Predicts iterations from a network that was measured in ``layout``. ``stages_of``: returns op
    times for layers by stage."""

    def __init__(
        self,
        spec: JobSpec,
        network: NetworkMeasurements,
        late: LateWires,
        layout: Layout,
        stages_of: Callable[[tuple[int, ...]], tuple[StageTimes, ...]] | None = None,
    ) -> None:
        self._spec, self._network, self._late_wires, self._layout = spec, network, late, layout
        self._stages_of = stages_of or (lambda _: network.stages)
        self._groups = {_find_ring(layout, group): group for group in network.reductions}
        self._iteration_cache: dict[tuple[tuple[float, ...], ...], float] = {}
        self._scores: dict[Layout, tuple[float, float, int]] = {}

    def score_layout(self, layout: Layout) -> tuple[float, float, int]:
        """Score of a layout, lower is better: seconds of an iteration, seconds of delay in use, and
        number of ranks or layers that move."""
        if layout not in self._scores:
            self._scores[layout] = self._compute_score(layout)
        return self._scores[layout]

    def _compute_score(self, layout: Layout) -> tuple[float, float, int]:
        """Predict the slowest column's iteration, with the exposed part of all reductions."""
        mesh, slowest, used = layout.mesh, 0.0, 0.0
        exposed: dict[int, float] = {}
        for ring in layout.rings:
            late = max(map(self._get_wire_delay, layout.find_ring_wires(ring)), default=0.0)
            used += late
            if (found := self._predict_exposed_reduction(ring, late)) is not None:
                for rank in ring:
                    exposed[rank] = found
        for column in range(mesh.columns):
            delays = tuple(
                self._get_wire_delay(layout.find_link_wire(link, column))
                for link in range(mesh.stages - 1)
            )
            used += sum(delays)
            reductions = tuple(
                exposed.get(mesh.find_rank(stage, column), times.reduction or 0.0)
                for stage, times in enumerate(self._network.stages)
            )
            slowest = max(slowest, self._predict_iteration(delays, reductions, layout.layers))
        moved = len(self._layout.find_moved_ranks(layout))
        if total := self._spec.parallelism.layers:
            moved += self._layout.count_moved_layers(layout, total)
        # Predictions are no more exact than 10 us.
        return round(slowest, 5), used, moved

    def _get_wire_delay(self, wire: Wire) -> float:
        return self._late_wires.get(wire, 0.0)

    def find_ranks_at_late_wires(self, layout: Layout) -> list[int]:
        """Ranks that use a late wire."""
        mesh = layout.mesh
        pairs = [
            (mesh.find_rank(link, column), mesh.find_rank(link + 1, column))
            for column in range(mesh.columns)
            for link in range(mesh.stages - 1)
        ]
        for ring in layout.rings:
            pairs += zip(ring, (*ring[1:], ring[0]), strict=True)
        late = (pair for pair in pairs if self._get_wire_delay(layout.find_wire(*pair)))
        return sorted({rank for pair in late for rank in pair})

    @cached_property
    def _steps_per_byte(self) -> float | None:
        """Measured multiple of an edge's delay by which a reduction takes longer, per byte."""
        found = []
        for group in self._groups.values():
            edge, usual = group.slowest, group.normal
            if edge is not None and usual is not None and edge.seconds > edge.usual and group.slow:
                steps = (group.seconds - usual) / (edge.seconds - edge.usual)
                found.append(max(0.0, steps) / group.bytes)
        return median(found) if found else None

    def _predict_exposed_reduction(self, ring: Sequence[int], late: float) -> float | None:
        """Seconds of reduction after a stage's last op if an edge of its ring is ``late`` seconds
        late; None if nothing is known of the group."""
        group = self._groups.get(tuple(ring))
        if group is None:
            return None
        hidden = max(0.0, group.seconds - group.exposed)
        seconds = group.seconds if group.normal is None else group.normal
        each = self._steps_per_byte
        # Each element takes this many steps: no reduction takes fewer.
        steps = 2 * (len(ring) - 1) if each is None else each * group.bytes
        return max(0.0, seconds + steps * late - hidden)

    def _predict_iteration(
        self, delays: tuple[float, ...], reductions: tuple[float, ...], layers: tuple[int, ...]
    ) -> float:
        """Predicted seconds of an iteration with a plan for these delays and layers per stage;
        infinite if there is no plan."""
        key = (delays, reductions, layers)
        if key not in self._iteration_cache:
            stages = [
                times.model_copy(update={"reduction": reduction})
                for times, reduction in zip(self._stages_of(layers), reductions, strict=True)
            ]
            delegates = self._spec.transport.route != "direct"
            routes = [Route.DELEGATED if delay and delegates else Route.DIRECT for delay in delays]
            problem = build_problem(self._spec.schedule.microbatches, stages, delays, routes)
            if not self._network.barrier:
                problem = problem.model_copy(update={"objective": "period"})
            try:
                fits = all(stage.in_flight_limit != 0 for stage in stages)
                made = plan(problem, self._spec.schedule.policy_kind) if fits else None
                found = math.inf if made is None else made.objective
            except InputError:
                # For instance, a stage may hold fewer microbatches than the policy needs.
                found = math.inf
            self._iteration_cache[key] = found
        return self._iteration_cache[key]


def _find_measured_groups(
    layout: Layout, network: NetworkMeasurements
) -> dict[tuple[int, ...], ReductionHealth]:
    """Groups whose edges have been measured, by their ranks."""
    return {
        _find_ring(layout, group): group
        for group in network.reductions
        if group.slowest is not None
    }


def _find_ring(layout: Layout, group: ReductionHealth) -> tuple[int, ...]:
    """Ranks of a group, in the order of its ring."""
    rank = layout.mesh.find_rank(group.stage, group.replica)
    return next(ring for ring in layout.rings if rank in ring)


def format_wires(wires: Iterable[Wire]) -> str:
    """Text for wires: ``pods 1 and 2, pods 3 and 4``."""
    return ", ".join(f"pods {low} and {high}" for low, high in sorted(wires))
