"""Measurements for a decision, and how they differ from those of the one before.

Links fail in one place, so most replicas of a large job have no slow link. An iteration takes as
long as its slowest replica, and a plan for the delays of all of them together is slower than one
for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
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

ALIKE = 0.25
"""Delays that differ by less, as a fraction, are planned as one."""
STRAIN = 0.15
"""By how much more a delay may turn out to be than it was measured to be, as a fraction."""
MATERIAL = 0.25
"""Relative change of a delay that requires another decision."""
MATERIAL_OP = 0.2
"""Relative change of an op time that requires another decision."""
FAR = 0.5
"""Part of the longest op from which a wire time makes a link one that is far away."""
_LINK_CAUSES: tuple[Cause, ...] = ("slow", "recovered", "worse", "eased", "varies")
"""Of several replicas, the first of these counts."""


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
        the newest. Replicas with plans of their own have other routes, and teach nothing; nor do
        routes that are others than the plan's, since a direct one broke (``failed_over``).

        Only op times from shortly before a change and from shortly after it are compared: what
        makes a stage slow later is not what delegating takes."""
        if plan.own or failed_over:
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
class ReplicaLinks:
    """The links of some ``replicas``, see :class:`Situation`. Seconds, one entry per link."""

    replicas: tuple[int, ...]
    wire_times: tuple[float, ...]
    delays: tuple[float, ...]
    slow: tuple[bool, ...]
    unknown: tuple[bool, ...]
    transfers: tuple[float, ...]
    recent: tuple[tuple[float, ...], ...] = ()
    failed_over: tuple[bool, ...] = ()

    @property
    def late(self) -> float:
        """All delays together."""
        return sum(self.delays)

    def alike(self, other: ReplicaLinks, least: float) -> bool:
        """Whether one plan suits both as it suits each. ``least``: seconds that do not matter."""
        return self.slow == other.slow and all(
            abs(a - b) <= max(least, ALIKE * delay)
            for mine, theirs in (
                (self.wire_times, other.wire_times),
                (self.transfers, other.transfers),
            )
            for a, b, delay in zip(mine, theirs, self.delays, strict=True)
        )

    def joined(self, other: ReplicaLinks) -> ReplicaLinks:
        """The replicas of both, with the worst of each link."""
        return ReplicaLinks(
            replicas=tuple(sorted(self.replicas + other.replicas)),
            wire_times=tuple(map(max, self.wire_times, other.wire_times)),
            delays=tuple(map(max, self.delays, other.delays)),
            slow=tuple(a or b for a, b in zip(self.slow, other.slow, strict=True)),
            unknown=tuple(a and b for a, b in zip(self.unknown, other.unknown, strict=True)),
            transfers=tuple(map(max, self.transfers, other.transfers)),
            recent=self._recent_of_worst(other),
            failed_over=either(self.failed_over, other.failed_over),
        )

    def _recent_of_worst(self, other: ReplicaLinks) -> tuple[tuple[float, ...], ...]:
        if not self.recent and not other.recent:
            return ()
        steady = ((),) * len(self.delays)
        pairs = zip(self.recent or steady, other.recent or steady, strict=True)
        return tuple(
            mine if self.delays[i] >= other.delays[i] else theirs
            for i, (mine, theirs) in enumerate(pairs)
        )


def either(one: tuple[bool, ...], other: tuple[bool, ...]) -> tuple[bool, ...]:
    """Per link, whether one of two holds. An empty one holds for none."""
    if not one or not other:
        return one or other
    return tuple(a or b for a, b in zip(one, other, strict=True))


@dataclass(frozen=True)
class Situation:
    """Measurements for a decision. Seconds; one entry per stage or link.

    ``wire_times``: current one-way times of a message; ``slow``: which of them are longer than
    normal; ``delays``: by how much; ``transfers``: which part of them a message occupies the link,
    alone. ``rooms``: memory limits of the stages, from which the limits
    in ``stages`` follow; empty if nothing is limited. ``barrier``: whether stages wait for each
    other between iterations, so that the makespan counts, and not the period. ``own``: the links of
    every replica, where some are slow; the other fields have the worst of each link.
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
    own: tuple[ReplicaLinks, ...] = ()
    """Empty if there is one replica, or all links are well."""
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

    def well(self) -> Situation:
        """The situation once all slow links have recovered."""
        links = range(len(self.slow))
        return replace(
            self,
            wire_times=tuple(
                max(0.0, self.wire_times[i] - self.delays[i] * self.slow[i]) for i in links
            ),
            delays=tuple(0.0 if self.slow[i] else self.delays[i] for i in links),
            slow=(False,) * len(self.slow),
            transfers=tuple(0.0 if self.slow[i] else self.transfer(i) for i in links),
            recent=(),
            own=(),
        )

    def strained(self) -> Situation:
        """The situation with all delays longer by :data:`STRAIN`."""
        own = (replace(each, wire_times=_strained(each)) for each in self.own)
        return replace(self, wire_times=_strained(self), own=tuple(own))

    def longer(self, by: Iterable[float]) -> Situation:
        """The situation of replicas that are alike, with longer delays."""
        wires = [wire + each for wire, each in zip(self.wire_times, by, strict=True)]
        return replace(self, wire_times=tuple(wires), own=())

    def at(self, links: ReplicaLinks) -> Situation:
        """The situation with the links of some replicas."""
        return replace(
            self,
            wire_times=links.wire_times,
            delays=links.delays,
            slow=links.slow,
            unknown=links.unknown,
            transfers=links.transfers,
            recent=links.recent,
            failed_over=links.failed_over,
            own=(),
        )

    def links_of(self, replicas: tuple[int, ...]) -> ReplicaLinks:
        """The links, as those of some replicas: the inverse of :meth:`at`."""
        return ReplicaLinks(
            replicas=replicas,
            wire_times=self.wire_times,
            delays=self.delays,
            slow=self.slow,
            unknown=self.unknown,
            transfers=self.transfers or (0.0,) * len(self.delays),
            recent=self.recent,
            failed_over=self.failed_over,
        )

    def of(self, replicas: Sequence[int]) -> Situation:
        """The situation of some replicas: of those that are named together, the least delayed
        ones."""
        rows = {row for replica in replicas if (row := self._rows.get(replica)) is not None}
        if not rows:
            return self
        return self.at(min((self.own[row] for row in sorted(rows)), key=lambda each: each.late))

    def beside(self, other: Situation) -> Iterator[tuple[Situation, Situation]]:
        """The situations of the same replicas, here and in ``other``."""
        if not self.own and not other.own:
            yield self, other
            return
        mine, theirs = self._rows, other._rows
        pairs = dict.fromkeys(
            (mine.get(replica, -1), theirs.get(replica, -1)) for replica in mine or theirs
        )
        for i, k in pairs:
            here = self if i < 0 else self.at(self.own[i])
            yield here, other if k < 0 else other.at(other.own[k])

    @cached_property
    def _rows(self) -> dict[int, int]:
        """Index in ``own`` of each replica."""
        return {replica: row for row, each in enumerate(self.own) for replica in each.replicas}

    def slow_as(self, other: Situation) -> bool:
        """Whether the same links of the same replicas are slow."""
        return all(here.slow == there.slow for here, there in self.beside(other))


def _strained(links: Situation | ReplicaLinks) -> tuple[float, ...]:
    return tuple(w + STRAIN * d for w, d in zip(links.wire_times, links.delays, strict=True))


# --- differences ------------------------------------------------------------------------------


def seen(
    expected: Situation,
    links: Sequence[LinkState],
    own: Sequence[tuple[tuple[int, ...], Sequence[LinkState]]] = (),
) -> Situation:
    """``expected`` with the present state of its links. What is unknown or in doubt stays.

    ``own``: the links of every replica, where some are slow.
    """
    each = (_seen(expected.of(replicas), row).links_of(replicas) for replicas, row in own)
    return replace(_seen(expected, links), own=tuple(each))


def _seen(before: Situation, links: Sequence[LinkState]) -> Situation:
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
    changes = [_change(here, earlier, least, part) for here, earlier in now.beside(before)]
    return next((cause for cause in _LINK_CAUSES if cause in changes), None)


def _change(now: Situation, before: Situation, least: float, part: float) -> Cause | None:
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
        for here, earlier in now.beside(before)
        for i, is_slow in enumerate(here.slow)
        if is_slow
        and (
            not earlier.slow[i]
            or max(
                abs(here.delays[i] - earlier.delays[i]),
                abs(here.transfer(i) - earlier.transfer(i)),
            )
            > max(least, MATERIAL * earlier.delays[i])
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
    scale = max(op for stage in now.stages for op in _ops(stage))
    ops = any(
        abs(new - old) > MATERIAL_OP * max(old, scale / 2)
        for new_stage, old_stage in zip(now.stages, before.stages, strict=True)
        for new, old in zip(_ops(new_stage), _ops(old_stage), strict=True)
    )
    tails = any(
        abs((new.reduction or 0.0) - (old.reduction or 0.0))
        > MATERIAL_OP * max(old.reduction or 0.0, scale / 2)
        for new, old in zip(now.stages, before.stages, strict=True)
    )
    wires = any(
        abs(new - old) > MATERIAL_OP * scale
        for new, old in zip(now.wire_times, before.wire_times, strict=True)
    )
    # A fused backward that was unknown, and is shorter.
    fused = any(
        old.fused_backward is None and new.fusing_pays
        for new, old in zip(now.stages, before.stages, strict=True)
    )
    return ops or tails or wires or fused


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
    own = tuple(
        without(situation.at(each), sources, before.of(each.replicas)).links_of(each.replicas)
        for each in situation.own
    )
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
            stages = tuple(
                new.model_copy(
                    update={
                        "forward": unit * old.forward,
                        "backward_input": unit * old.backward_input,
                        "backward_weight": unit * old.backward_weight,
                        "fused_backward": None
                        if old.fused_backward is None
                        else unit * old.fused_backward,
                    }
                )
                for new, old in zip(stages, before.stages, strict=True)
            )
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
        own=own,
    )


def _total(stages: Iterable[StageTimes]) -> float:
    return sum(s.forward + s.backward_input + s.backward_weight for s in stages)


def _ops(stage: StageTimes) -> tuple[float, float, float]:
    return stage.forward, stage.backward_input, stage.backward_weight
