"""Measurements for a decision, and how they differ from those of the one before.

All replicas run one plan, for the worst of each link: an iteration takes as long as its slowest
replica, which a plan of its own would not make shorter unless different links are slow in several.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Literal

from pipemorph.control.observed.stages import Room
from pipemorph.planning import Plan, Route, StageTimes
from pipemorph.wire import Health, LinkState

SETTLED = 9
"""Iterations under a plan after which op times are those under it: as many as are in a median."""
MOSTLY = 5
"""Iterations after which their median is."""
LOOK_EVERY = 3
"""Iterations between two looks at op times."""
LEAST, MOST = 0.01, 0.5
"""Of an op: less is within the error of op times, and more is not the copies."""
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
    "weigh",
]
"""Why another decision is needed. barrier: stages wait for each other between iterations, or do so
no longer; undelivered: the last change did not bring what it promised; weigh: the plan stays, only
what it saves is to be predicted anew."""
OPS, BARRIER = -1, -2
"""The evidence "op times", and whether stages wait for each other between iterations; links have
their numbers."""
Sources = frozenset[int]
"""Evidence that a decision is based on: links, :data:`OPS` or :data:`BARRIER`."""

STRAIN = 0.15
"""By how much more a delay may turn out to be than it was measured to be, as a fraction."""
MATERIAL = 0.25
"""Relative change of a delay that requires another decision."""
MATERIAL_OP = 0.2
"""Relative change of an op time that requires another decision."""
FAR = 0.5
"""Part of the longest op from which a wire time makes a link one that is far away."""


@dataclass(frozen=True)
class RouteCost:
    """``part``: of an op, by which it is longer for each delegated message. ``measured_on``: the
    routes on which the op times at hand were measured; empty if that does not matter."""

    part: float = 0.0
    measured_on: tuple[Route, ...] = ()

    def on(self, stages: tuple[StageTimes, ...], routes: Sequence[Route]) -> tuple[StageTimes, ...]:
        """The op times as they would be on other routes."""
        if not self.part or not self.measured_on or self.measured_on == tuple(routes):
            return stages
        pairs = zip(stages, _ends(self.measured_on), _ends(routes), strict=True)
        return tuple(self._moved(stage, was, now) for stage, was, now in pairs)

    def _moved(self, stage: StageTimes, was: int, now: int) -> StageTimes:
        if was == now:
            return stage
        factor = (1 + self.part * now) / (1 + self.part * was)
        fused, extra = stage.fused_backward, (factor - 1) * stage.backward_input
        return stage.model_copy(
            update={
                "forward": factor * stage.forward,
                "backward_input": stage.backward_input + extra,
                "fused_backward": None if fused is None else fused + extra,
            }
        )


class RouteCosts:
    """Learns what delegating takes of the ops at the ends of a link, from op times on both routes.

    A delegated message is copied by the rank that computes, or beside it. So an F or a B is longer
    for each message that it sends or receives on the delegated route. How much is measured: the
    same stages run with and without delegated ends, before and after a change of plan. What else
    changed meanwhile, as the clock of all devices, shows in the stages whose ends did not.
    """

    def __init__(self) -> None:
        self._part = 0.0
        self._measured_on: tuple[Route, ...] = ()
        self._direct: tuple[StageTimes, ...] | None = None
        """The newest op times while no link was delegated."""
        self._direct_at = 0
        """The newest iteration then."""
        self._known: tuple[Route, ...] = ()
        """Routes of the newest change, which has been looked at."""
        self._seen_at = -LOOK_EVERY

    def due(self, last: int) -> bool:
        """Whether to look at op times again: not with each report, of which a host has many.
        ``last``: the index of the newest iteration."""
        if last - self._seen_at < LOOK_EVERY:
            return False
        self._seen_at = last
        return True

    @property
    def now(self) -> RouteCost:
        return RouteCost(self._part, self._measured_on)

    def observe(
        self,
        stages: tuple[StageTimes, ...],
        plan: Plan,
        *,
        iterations: int,
        last: int,
        failed_over: bool = False,
    ) -> None:
        """Note op times. ``iterations``: how many have run under this plan; ``last``: the index of
        the newest. Routes that are others than the plan's, since a direct one broke
        (``failed_over``), teach nothing.

        Only op times from shortly before a change and from shortly after it are compared: what
        makes a stage slow later is not what delegating takes."""
        if failed_over:
            self._measured_on = ()
            return
        if iterations < MOSTLY:
            return
        self._measured_on = plan.routes
        if iterations < SETTLED:
            return
        if not plan.delegated:
            self._direct, self._direct_at, self._known = stages, last, ()
            return
        fresh, self._known = self._known != plan.routes, plan.routes
        began = last - iterations + 1
        if fresh and self._direct is not None and began - self._direct_at <= SETTLED + LOOK_EVERY:
            self._learn(self._direct, stages, plan.routes)

    def _learn(
        self,
        direct: Sequence[StageTimes],
        stages: Sequence[StageTimes],
        routes: Sequence[Route],
    ) -> None:
        found: dict[int, list[float]] = {}
        for before, stage, ends in zip(direct, stages, _ends(routes), strict=True):
            was = before.forward + before.backward_input
            if was > 0:
                ratio = (stage.forward + stage.backward_input) / was
                found.setdefault(ends, []).append(ratio)
        usual = median(found.pop(0, [0.0]))
        if not (usual and found):
            return  # Whatever changed may have changed all stages.
        # The least: an end that is slow for another reason is not alone.
        part = min((ratio / usual - 1) / k for k, each in found.items() for ratio in each)
        self._part = min(part, MOST) if part >= LEAST else 0.0


def _ends(routes: Sequence[Route]) -> list[int]:
    """Number of delegated links at each stage."""
    away = [route is Route.DELEGATED for route in routes]
    return [above + below for above, below in zip([False, *away], [*away, False], strict=True)]


@dataclass(frozen=True)
class Situation:
    """Measurements for a decision. Seconds; one entry per stage or link.

    ``wire_times``: current one-way times of a message; ``slow``: which of them are longer than
    normal; ``delays``: by how much; ``transfers``: which part of them a message occupies the link,
    alone. ``rooms``: memory limits of the stages, from which the limits
    in ``stages`` follow; empty if nothing is limited. ``barrier``: whether stages wait for each
    other between iterations, so that the makespan counts, and not the period. Links are the worst
    of all replicas.
    """

    stages: tuple[StageTimes, ...]
    wire_times: tuple[float, ...]
    delays: tuple[float, ...]
    slow: tuple[bool, ...]
    unknown: tuple[bool, ...]
    rooms: tuple[Room, ...] = ()
    transfers: tuple[float, ...] = ()
    """Empty if no link is narrow."""
    barrier: bool = True
    recent: tuple[tuple[float, ...], ...] = ()
    """Per link, the newest delays, of windows, oldest first, if they vary so much that their mean
    says little; else empty, as the whole is if none does."""
    route_cost: RouteCost = field(default_factory=RouteCost)
    """What delegating takes of the op times in ``stages``."""
    failed_over: tuple[bool, ...] = ()
    """Which links are delegated whatever the plan says, since their direct route broke; empty if
    none is."""
    assumed: bool = False
    """Whether only the ratios of the op times mean anything, since nothing was known of them."""

    def transfer(self, link: int) -> float:
        return self.transfers[link] if self.transfers else 0.0

    def carried(self, routes: Sequence[Route]) -> tuple[Route, ...]:
        """The routes that are in force under a plan with ``routes``."""
        if not self.failed_over:
            return tuple(routes)
        pairs = zip(routes, self.failed_over, strict=True)
        return tuple(Route.DELEGATED if failed else route for route, failed in pairs)

    @property
    def far(self) -> tuple[bool, ...]:
        """Links that are well, and on which messages take as long as much of an op."""
        least = FAR * max(op for stage in self.stages for op in _ops(stage))
        return tuple(w > least and not s for s, w in zip(self.slow, self.wire_times, strict=True))

    def moved(self, before: Situation) -> bool:
        """Whether links are far that were not, or far from where they were."""
        least = MATERIAL_OP * max(op for stage in self.stages for op in _ops(stage))
        rows = zip(self.far, before.far, self.wire_times, before.wire_times, strict=True)
        return any(far != was or (far and abs(w - b) > least) for far, was, w, b in rows)

    def varies(self, link: int) -> bool:
        return bool(self.recent and self.recent[link])

    def well(self, still: frozenset[int] = frozenset()) -> Situation:
        """The situation once all slow links but ``still`` have recovered."""
        links = range(len(self.slow))
        ended = [slow and i not in still for i, slow in enumerate(self.slow)]
        return replace(
            self,
            wire_times=tuple(
                max(0.0, self.wire_times[i] - self.delays[i] * ended[i]) for i in links
            ),
            delays=tuple(0.0 if ended[i] else self.delays[i] for i in links),
            slow=tuple(slow and i in still for i, slow in enumerate(self.slow)),
            transfers=tuple(0.0 if ended[i] else self.transfer(i) for i in links),
            recent=(),
        )

    def strained(self) -> Situation:
        """The situation with all delays longer by :data:`STRAIN`."""
        strained = (w + STRAIN * d for w, d in zip(self.wire_times, self.delays, strict=True))
        return replace(self, wire_times=tuple(strained))

    def longer(self, by: Iterable[float]) -> Situation:
        """The situation with longer delays."""
        wires = [wire + each for wire, each in zip(self.wire_times, by, strict=True)]
        return replace(self, wire_times=tuple(wires))


# --- differences ------------------------------------------------------------------------------


def seen(before: Situation, links: Sequence[LinkState]) -> Situation:
    """``before`` with the present state of its links. What is unknown or in doubt stays."""
    known = [
        link.health is not Health.UNKNOWN and not (link.in_doubt and before.slow[i])
        for i, link in enumerate(links)
    ]
    recent = tuple(
        link.recent if known[i] or before.varies(i) else () for i, link in enumerate(links)
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
            link.transfer if known[i] else before.transfer(i) for i, link in enumerate(links)
        ),
        recent=recent if any(recent) else (),
        failed_over=failed_over if any(failed_over) else (),
    )


def change_of_links(
    now: Situation, before: Situation, least: float, part: float = MATERIAL
) -> Cause | None:
    """How links have changed; None if not enough to matter. ``least``: seconds of delay that never
    do; ``part``: fraction of it from which a change does."""
    links = range(len(now.slow))
    if any(now.slow[i] and not before.slow[i] for i in links):
        return "slow"
    if any(before.slow[i] and not now.slow[i] for i in links):
        return "recovered"
    change = [now.delays[i] - before.delays[i] for i in links]
    material = [max(least, part * before.delays[i]) for i in links]
    narrowed = [now.transfer(i) - before.transfer(i) for i in links]
    if any(now.slow[i] and max(change[i], narrowed[i]) > material[i] for i in links):
        return "worse"
    if any(now.slow[i] and -min(change[i], narrowed[i]) > material[i] for i in links):
        return "eased"
    if any(now.varies(i) and not before.varies(i) for i in links):
        return "varies"
    return None


def sources_of(cause: Cause, now: Situation, before: Situation, least: float) -> Sources:
    """What a decision for this cause would be based on. ``least``: as above."""
    if cause == "profile":
        return frozenset({OPS})
    if cause == "barrier":
        return frozenset({BARRIER})
    changed = {
        i
        for i, is_slow in enumerate(now.slow)
        if is_slow
        and (
            not before.slow[i]
            or max(abs(now.delays[i] - before.delays[i]), abs(now.transfer(i) - before.transfer(i)))
            > max(least, MATERIAL * before.delays[i])
        )
    }
    return frozenset(changed or (i for i, is_slow in enumerate(now.slow) if is_slow))


def turned_at(now: Situation, before: Situation, links: Sequence[LinkState]) -> list[int]:
    """Iterations of the first windows that showed which links are slow now and were not, or the
    other way round, as far as known."""
    return [
        link.since_iteration
        for link, was, is_slow in zip(links, before.slow, now.slow, strict=True)
        if was != is_slow and link.since_iteration is not None
    ]


def times_differ(now: Situation, before: Situation) -> bool:
    """Whether op times, reductions or normal wire times differ from the planned ones now."""
    ops = any(abs(change) > least for change, least in _changes(now.stages, before.stages))
    scale = max(op for stage in now.stages for op in _ops(stage))
    wires = any(
        abs(new - old) > MATERIAL_OP * scale
        for new, old in zip(now.wire_times, before.wire_times, strict=True)
    )
    # A fused backward that was unknown, and is shorter.
    fused = any(
        old.fused_backward is None and new.fusing_pays
        for new, old in zip(now.stages, before.stages, strict=True)
    )
    return ops or wires or fused


def _changes(
    now: Sequence[StageTimes], before: Sequence[StageTimes]
) -> Iterator[tuple[float, float]]:
    """By how much each op and reduction has become longer, and what requires another decision."""
    scale = max(op for stage in now for op in _ops(stage))
    for new_stage, old_stage in zip(now, before, strict=True):
        reductions = new_stage.reduction or 0.0, old_stage.reduction or 0.0
        for new, old in (*zip(_ops(new_stage), _ops(old_stage), strict=True), reductions):
            yield new - old, MATERIAL_OP * max(old, scale / 2)


def shorter(now: Sequence[StageTimes], before: Sequence[StageTimes]) -> bool:
    """Whether op times or reductions are shorter than the planned ones, enough for another
    decision. Nothing that passes makes them so: what uses a stage's processor makes them longer."""
    return any(change < -least for change, least in _changes(now, before))


def without_longer(now: Situation, before: Situation) -> Situation:
    """``now``, with the stages that take longer than before as they were."""
    pairs = zip(now.stages, before.stages, strict=True)
    stages = tuple(
        new if sum(_ops(new)) <= sum(_ops(old)) else _with_ops(new, old) for new, old in pairs
    )
    return replace(now, stages=stages)


def limits_differ(now: Situation, before: Situation) -> bool:
    """Whether limits have changed."""
    return any(
        (new.in_flight_limit, new.device_limit, new.recompute_limit)
        != (old.in_flight_limit, old.device_limit, old.recompute_limit)
        for new, old in zip(now.stages, before.stages, strict=True)
    )


def without(situation: Situation, sources: Iterable[int], before: Situation) -> Situation:
    """``situation``, but with what is in ``sources`` as it was ``before``."""
    sources = tuple(sources)
    wires, delays = list(situation.wire_times), list(situation.delays)
    slow = list(situation.slow)
    transfers = [situation.transfer(i) for i in range(len(slow))]
    stages, barrier = situation.stages, situation.barrier
    recent = list(situation.recent)
    for source in sources:
        if source == BARRIER:
            barrier = before.barrier
            continue
        if source == OPS:
            # Assumed times have no unit: they are as long together as the measured ones.
            unit = _total(stages) / _total(before.stages) if before.assumed else 1.0
            pairs = zip(stages, before.stages, strict=True)
            stages = tuple(_with_ops(new, old, unit) for new, old in pairs)
            continue
        wires[source] = max(0.0, wires[source] - delays[source] + before.delays[source])
        delays[source], slow[source] = before.delays[source], before.slow[source]
        transfers[source] = before.transfer(source)
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
    )


def _with_ops(stage: StageTimes, other: StageTimes, unit: float = 1.0) -> StageTimes:
    """``stage`` with the op times of another one, in so many of its units."""
    fused = other.fused_backward
    return stage.model_copy(
        update={
            "forward": unit * other.forward,
            "backward_input": unit * other.backward_input,
            "backward_weight": unit * other.backward_weight,
            "fused_backward": None if fused is None else unit * fused,
        }
    )


def _total(stages: Iterable[StageTimes]) -> float:
    return sum(s.forward + s.backward_input + s.backward_weight for s in stages)


def _ops(stage: StageTimes) -> tuple[float, float, float]:
    return stage.forward, stage.backward_input, stage.backward_weight
