"""Measurements for a decision, and their differences from those of the decision before.

All replicas run one plan, for the worst state of each link. An iteration takes as long as its
slowest replica, and plans of their own would help only if different links are slow in several
replicas.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Literal

from pipemorph.control.decide.replica_shares import Paces
from pipemorph.control.job_state.stages import StageRoom
from pipemorph.planning import Plan, Route, StageTimes
from pipemorph.protocol import Health, LinkState

SETTLED_ITERATIONS = 9
"""Iterations under a plan after which op times belong to it: as many as are in a median."""
MOSTLY_SETTLED_ITERATIONS = 5
"""Iterations under a plan after which the median belongs to it."""
CHECK_ITERATIONS = 3
"""Iterations between two updates from op times."""
LEAST_ROUTE_COST, MOST_ROUTE_COST = 0.01, 0.5
"""Bounds of the part of an op: less is within the error of op times; copies cannot take more."""
Cause = Literal[
    "slow",
    "worse",
    "eased",
    "varies",
    "recovered",
    "steady",
    "profile",
    "barrier",
    "memory",
    "restart",
    "undelivered",
    "pace",
    "weigh",
]
"""Cause of another decision. pace: replicas compute at other speeds; barrier: stages began or
ceased to wait for each other between iterations; undelivered: the last change missed its promise;
weigh: the plan stays, only its saving is predicted anew."""
OP_TIMES_SOURCE, BARRIER_SOURCE, PACE_SOURCE = -1, -2, -3
"""Sources of evidence besides the numbers of links: op times, the barrier, and the speeds of the
replicas."""
EvidenceSources = frozenset[int]
"""Evidence that a decision is based on: links, :data:`OP_TIMES_SOURCE`, :data:`BARRIER_SOURCE` or
:data:`PACE_SOURCE`."""

DELAY_MARGIN = 0.15
"""Fraction by which a delay may turn out to be longer than measured."""
MATERIAL_DELAY_CHANGE = 0.25
"""Relative change of a delay that requires another decision."""
MATERIAL_OP_CHANGE = 0.2
"""Relative change of an op time that requires another decision."""
FAR_WIRE_TIME = 0.5
"""Part of the longest op from which a wire time makes a link *far*."""


@dataclass(frozen=True)
class RouteCost:
    """Cost of delegated messages. ``op_fraction``: by which an op is longer for each of them.
    ``measured_routes``: routes on which the op times were measured; empty if they do not matter."""

    op_fraction: float = 0.0
    measured_routes: tuple[Route, ...] = ()

    def convert_op_times(
        self, stages: tuple[StageTimes, ...], routes: Sequence[Route]
    ) -> tuple[StageTimes, ...]:
        """Convert op times to other routes."""
        if (
            not self.op_fraction
            or not self.measured_routes
            or self.measured_routes == tuple(routes)
        ):
            return stages
        pairs = zip(
            stages,
            _count_delegated_ends(self.measured_routes),
            _count_delegated_ends(routes),
            strict=True,
        )
        return tuple(self._convert_stage(stage, was, now) for stage, was, now in pairs)

    def _convert_stage(self, stage: StageTimes, was: int, now: int) -> StageTimes:
        if was == now:
            return stage
        factor = (1 + self.op_fraction * now) / (1 + self.op_fraction * was)
        fused, extra = stage.fused_backward, (factor - 1) * stage.backward_input
        return stage.model_copy(
            update={
                "forward": factor * stage.forward,
                "backward_input": stage.backward_input + extra,
                "fused_backward": None if fused is None else fused + extra,
            }
        )


class RouteCostEstimator:
    """Estimates how much longer ops are at the ends of delegated links, from op times on both
    routes.

    The rank that computes copies a delegated message, or shares its processor with the copy. So an
    F or a B is longer for each message that it sends or receives on the delegated route. The same
    stages run with and without delegated ends, before and after a change of plan. Other changes
    meanwhile, such as the clock of all devices, show in the stages whose ends did not change.
    """

    def __init__(self) -> None:
        self._op_fraction = 0.0
        self._measured_on: tuple[Route, ...] = ()
        self._direct_op_times: tuple[StageTimes, ...] | None = None
        """Newest op times while no link was delegated."""
        self._direct_at = 0
        """Newest iteration at that time."""
        self._known_routes: tuple[Route, ...] = ()
        """Routes of the newest change, which is already in the estimate."""
        self._checked_at = -CHECK_ITERATIONS

    def is_update_due(self, last: int) -> bool:
        """True if op times should be observed now: not with each report, of which a host has many.
        ``last``: index of the newest iteration."""
        if last - self._checked_at < CHECK_ITERATIONS:
            return False
        self._checked_at = last
        return True

    @property
    def current_cost(self) -> RouteCost:
        return RouteCost(self._op_fraction, self._measured_on)

    def observe_op_times(
        self,
        stages: tuple[StageTimes, ...],
        plan: Plan,
        *,
        iterations: int,
        last: int,
        failed_over: bool = False,
    ) -> None:
        """Observe op times. ``iterations``: number that have run under this plan; ``last``: index
        of the newest. ``failed_over``: a direct route broke; then op times are ignored.

        Only op times from shortly before and shortly after a change are compared: a stage that
        becomes slow later has another reason."""
        if failed_over:
            self._measured_on = ()
            return
        if iterations < MOSTLY_SETTLED_ITERATIONS:
            return
        self._measured_on = plan.routes
        if iterations < SETTLED_ITERATIONS:
            return
        if not plan.delegated_links:
            self._direct_op_times, self._direct_at, self._known_routes = stages, last, ()
            return
        fresh, self._known_routes = self._known_routes != plan.routes, plan.routes
        began = last - iterations + 1
        if (
            fresh
            and self._direct_op_times is not None
            and began - self._direct_at <= SETTLED_ITERATIONS + CHECK_ITERATIONS
        ):
            self._estimate_cost(self._direct_op_times, stages, plan.routes)

    def _estimate_cost(
        self,
        direct: Sequence[StageTimes],
        stages: Sequence[StageTimes],
        routes: Sequence[Route],
    ) -> None:
        """Estimate the cost from op times on direct routes and on ``routes``."""
        found: dict[int, list[float]] = {}
        for before, stage, ends in zip(direct, stages, _count_delegated_ends(routes), strict=True):
            was = before.forward + before.backward_input
            if was > 0:
                ratio = (stage.forward + stage.backward_input) / was
                found.setdefault(ends, []).append(ratio)
        usual = median(found.pop(0, [0.0]))
        if not (usual and found):
            return  # Another change may have changed all stages.
        # Use the least: an end may be slow for another reason.
        part = min((ratio / usual - 1) / k for k, each in found.items() for ratio in each)
        self._op_fraction = min(part, MOST_ROUTE_COST) if part >= LEAST_ROUTE_COST else 0.0


def _count_delegated_ends(routes: Sequence[Route]) -> list[int]:
    """Count delegated links at each stage."""
    away = [route is Route.DELEGATED for route in routes]
    return [above + below for above, below in zip([False, *away], [*away, False], strict=True)]


@dataclass(frozen=True)
class Situation:
    """Measurements for a decision. Seconds; one entry per stage or link.

    ``wire_times``: current one-way times of a message; ``slow``: True where they are longer than
    normal; ``delays``: by this much; ``transfers``: part of the wire time for which a message
    occupies the link alone. ``rooms``: memory limits of the stages, from which the limits in
    ``stages`` follow; empty if nothing is limited. ``barrier``: True if stages wait for each other
    between iterations: the makespan counts, not the period. Each link is in the worst state of all
    replicas.
    """

    stages: tuple[StageTimes, ...]
    wire_times: tuple[float, ...]
    delays: tuple[float, ...]
    slow: tuple[bool, ...]
    unknown: tuple[bool, ...]
    rooms: tuple[StageRoom, ...] = ()
    transfers: tuple[float, ...] = ()
    """Empty if no link is narrow."""
    barrier: bool = True
    recent: tuple[tuple[float, ...], ...] = ()
    """Newest delays of windows by link, oldest first, if they vary so much that their mean says
    little, else empty; empty as a whole if no link varies."""
    route_cost: RouteCost = field(default_factory=RouteCost)
    """Cost of delegated messages in the op times in ``stages``."""
    failed_over: tuple[bool, ...] = ()
    """True for links whose direct route broke: they are delegated whatever the plan says. Empty if
    there are none."""
    op_times_assumed: bool = False
    """True if only the ratios of op times have a meaning: they were assumed, not measured."""
    paces: Paces = ()
    """Speeds of the replicas, if plans may give them unequal numbers of microbatches and one is
    slow; else empty."""

    def get_transfer_time(self, link: int) -> float:
        return self.transfers[link] if self.transfers else 0.0

    def resolve_routes(self, routes: Sequence[Route]) -> tuple[Route, ...]:
        """Routes that are in force under a plan with ``routes``."""
        if not self.failed_over:
            return tuple(routes)
        pairs = zip(routes, self.failed_over, strict=True)
        return tuple(Route.DELEGATED if failed else route for route, failed in pairs)

    @property
    def far(self) -> tuple[bool, ...]:
        """True for healthy links whose messages take a large part of an op."""
        least = FAR_WIRE_TIME * max(op for stage in self.stages for op in _get_op_times(stage))
        return tuple(w > least and not s for s, w in zip(self.slow, self.wire_times, strict=True))

    def far_links_moved(self, before: Situation) -> bool:
        """True if links became far or near, or the wire time of a far link changed much."""
        least = MATERIAL_OP_CHANGE * max(op for stage in self.stages for op in _get_op_times(stage))
        rows = zip(self.far, before.far, self.wire_times, before.wire_times, strict=True)
        return any(far != was or (far and abs(w - b) > least) for far, was, w, b in rows)

    def delay_varies(self, link: int) -> bool:
        """True if the delay of a link varies."""
        return bool(self.recent and self.recent[link])

    def without_delays(self, still: frozenset[int] = frozenset()) -> Situation:
        """Situation once all slow links but ``still`` have recovered."""
        links = range(len(self.slow))
        ended = [slow and i not in still for i, slow in enumerate(self.slow)]
        return replace(
            self,
            wire_times=tuple(
                max(0.0, self.wire_times[i] - self.delays[i] * ended[i]) for i in links
            ),
            delays=tuple(0.0 if ended[i] else self.delays[i] for i in links),
            slow=tuple(slow and i in still for i, slow in enumerate(self.slow)),
            transfers=tuple(0.0 if ended[i] else self.get_transfer_time(i) for i in links),
            recent=(),
        )

    def with_margin(self) -> Situation:
        """Situation with all delays longer by :data:`DELAY_MARGIN`."""
        strained = (w + DELAY_MARGIN * d for w, d in zip(self.wire_times, self.delays, strict=True))
        return replace(self, wire_times=tuple(strained))

    def with_longer_delays(self, by: Iterable[float]) -> Situation:
        """Situation with delays longer by these seconds by link."""
        wires = [wire + each for wire, each in zip(self.wire_times, by, strict=True)]
        return replace(self, wire_times=tuple(wires))


# --- differences ------------------------------------------------------------------------------


def update_link_states(before: Situation, links: Sequence[LinkState]) -> Situation:
    """Update ``before`` with the present state of its links, except unknown or doubtful ones."""
    known = [
        link.health is not Health.UNKNOWN and not (link.in_doubt and before.slow[i])
        for i, link in enumerate(links)
    ]
    recent = tuple(
        link.recent if known[i] or before.delay_varies(i) else () for i, link in enumerate(links)
    )
    failed_over = tuple(
        link.failed_over if known[i] else bool(before.failed_over and before.failed_over[i])
        for i, link in enumerate(links)
    )
    return replace(
        before,
        wire_times=tuple(
            link.wire_time if known[i] else before.wire_times[i] for i, link in enumerate(links)
        ),
        delays=tuple(link.delay if known[i] else before.delays[i] for i, link in enumerate(links)),
        slow=tuple(
            link.health is Health.SLOW if known[i] else before.slow[i]
            for i, link in enumerate(links)
        ),
        unknown=tuple(link.health is Health.UNKNOWN for link in links),
        transfers=tuple(
            link.transfer if known[i] else before.get_transfer_time(i)
            for i, link in enumerate(links)
        ),
        recent=recent if any(recent) else (),
        failed_over=failed_over if any(failed_over) else (),
    )


def find_link_change(
    now: Situation, before: Situation, least: float, part: float = MATERIAL_DELAY_CHANGE
) -> Cause | None:
    """Find how links have changed; None if not enough to matter. A change of a delay must exceed
    ``least`` seconds and the fraction ``part`` of the delay."""
    links = range(len(now.slow))
    if any(now.slow[i] and not before.slow[i] for i in links):
        return "slow"
    if any(before.slow[i] and not now.slow[i] for i in links):
        return "recovered"
    change = [now.delays[i] - before.delays[i] for i in links]
    material = [max(least, part * before.delays[i]) for i in links]
    narrowed = [now.get_transfer_time(i) - before.get_transfer_time(i) for i in links]
    if any(now.slow[i] and max(change[i], narrowed[i]) > material[i] for i in links):
        return "worse"
    if any(now.slow[i] and -min(change[i], narrowed[i]) > material[i] for i in links):
        return "eased"
    if any(now.delay_varies(i) and not before.delay_varies(i) for i in links):
        return "varies"
    return None


def find_evidence_sources(
    cause: Cause, now: Situation, before: Situation, least: float
) -> EvidenceSources:
    """Evidence sources of a decision for this cause. ``least``: as in :func:`find_link_change`."""
    if cause == "profile":
        return frozenset({OP_TIMES_SOURCE})
    if cause == "barrier":
        return frozenset({BARRIER_SOURCE})
    if cause == "pace":
        return frozenset({PACE_SOURCE})
    changed = {
        i
        for i, is_slow in enumerate(now.slow)
        if is_slow
        and (
            not before.slow[i]
            or max(
                abs(now.delays[i] - before.delays[i]),
                abs(now.get_transfer_time(i) - before.get_transfer_time(i)),
            )
            > max(least, MATERIAL_DELAY_CHANGE * before.delays[i])
        )
    }
    return frozenset(changed or (i for i, is_slow in enumerate(now.slow) if is_slow))


def find_turning_iterations(
    now: Situation, before: Situation, links: Sequence[LinkState]
) -> list[int]:
    """Iterations of the first windows of links that became slow or healthy, as far as known."""
    return [
        link.since_iteration
        for link, was, is_slow in zip(links, before.slow, now.slow, strict=True)
        if was != is_slow and link.since_iteration is not None
    ]


def op_times_differ(now: Situation, before: Situation) -> bool:
    """True if op times, reductions or normal wire times differ from the planned ones now."""
    ops = any(abs(change) > least for change, least in _list_op_changes(now.stages, before.stages))
    scale = max(op for stage in now.stages for op in _get_op_times(stage))
    wires = any(
        abs(new - old) > MATERIAL_OP_CHANGE * scale
        for new, old in zip(now.wire_times, before.wire_times, strict=True)
    )
    # A fused backward was unknown, and is now known to be shorter.
    fused = any(
        old.fused_backward is None and new.fusing_pays
        for new, old in zip(now.stages, before.stages, strict=True)
    )
    return ops or wires or fused


def _list_op_changes(
    now: Sequence[StageTimes], before: Sequence[StageTimes]
) -> Iterator[tuple[float, float]]:
    """Yield the change of each op and reduction, and the change that requires a decision."""
    scale = max(op for stage in now for op in _get_op_times(stage))
    for new_stage, old_stage in zip(now, before, strict=True):
        reductions = new_stage.reduction or 0.0, old_stage.reduction or 0.0
        for new, old in (
            *zip(_get_op_times(new_stage), _get_op_times(old_stage), strict=True),
            reductions,
        ):
            yield new - old, MATERIAL_OP_CHANGE * max(old, scale / 2)


def op_times_are_shorter(now: Sequence[StageTimes], before: Sequence[StageTimes]) -> bool:
    """True if op times or reductions are shorter than the planned ones, enough for another
    decision. No passing disturbance makes them shorter: load on a processor makes them longer."""
    return any(change < -least for change, least in _list_op_changes(now, before))


def without_longer_stages(now: Situation, before: Situation) -> Situation:
    """Reset stages of ``now`` that take longer than before to their times before."""
    pairs = zip(now.stages, before.stages, strict=True)
    stages = tuple(
        new if sum(_get_op_times(new)) <= sum(_get_op_times(old)) else _with_op_times(new, old)
        for new, old in pairs
    )
    return replace(now, stages=stages)


def limits_differ(now: Situation, before: Situation) -> bool:
    """True if memory limits have changed."""
    return any(
        (new.in_flight_limit, new.device_limit, new.recompute_limit)
        != (old.in_flight_limit, old.device_limit, old.recompute_limit)
        for new, old in zip(now.stages, before.stages, strict=True)
    )


def without_sources(situation: Situation, sources: Iterable[int], before: Situation) -> Situation:
    """Reset the evidence in ``sources`` to its state in ``before``."""
    sources = tuple(sources)
    wires, delays = list(situation.wire_times), list(situation.delays)
    slow = list(situation.slow)
    transfers = [situation.get_transfer_time(i) for i in range(len(slow))]
    stages, barrier, paces = situation.stages, situation.barrier, situation.paces
    recent = list(situation.recent)
    for source in sources:
        if source == BARRIER_SOURCE:
            barrier = before.barrier
            continue
        if source == PACE_SOURCE:
            paces = before.paces
            continue
        if source == OP_TIMES_SOURCE:
            # Assumed times have no unit: scale them to the sum of the measured ones.
            unit = (
                _sum_op_times(stages) / _sum_op_times(before.stages)
                if before.op_times_assumed
                else 1.0
            )
            pairs = zip(stages, before.stages, strict=True)
            stages = tuple(_with_op_times(new, old, unit) for new, old in pairs)
            continue
        wires[source] = max(0.0, wires[source] - delays[source] + before.delays[source])
        delays[source], slow[source] = before.delays[source], before.slow[source]
        transfers[source] = before.get_transfer_time(source)
        if recent:
            recent[source] = before.recent[source] if before.recent else ()
    return replace(
        situation,
        stages=stages,
        wire_times=tuple(wires),
        delays=tuple(delays),
        slow=tuple(slow),
        transfers=tuple(transfers),
        barrier=barrier,
        recent=tuple(recent),
        paces=paces,
    )


def _with_op_times(stage: StageTimes, other: StageTimes, unit: float = 1.0) -> StageTimes:
    """Copy ``stage`` with the op times of ``other``, multiplied by ``unit``."""
    fused = other.fused_backward
    return stage.model_copy(
        update={
            "forward": unit * other.forward,
            "backward_input": unit * other.backward_input,
            "backward_weight": unit * other.backward_weight,
            "fused_backward": None if fused is None else unit * fused,
        }
    )


def _sum_op_times(stages: Iterable[StageTimes]) -> float:
    return sum(s.forward + s.backward_input + s.backward_weight for s in stages)


def _get_op_times(stage: StageTimes) -> tuple[float, float, float]:
    return stage.forward, stage.backward_input, stage.backward_weight
