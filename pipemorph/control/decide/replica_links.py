"""Links of the data-parallel replicas of a job, where they differ.

Links fail in one place, so most replicas of a large job have no slow link. An iteration takes as
long as its slowest replica, and a plan for the delays of all of them together is slower than one
for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush

from pipemorph.planning import Plan

ALIKE = 0.25
"""Delays that differ by less, as a fraction, are planned as one."""


@dataclass(frozen=True)
class ReplicaLinks:
    """The links of some ``replicas``, see :class:`~pipemorph.control.decide.forecast.Situation`.
    Seconds, one entry per link."""

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


def folded(own: Iterable[ReplicaLinks], *, least: float, most: int) -> list[ReplicaLinks]:
    """Replicas that are to run one plan, the most delayed first: those with equal delays, and of
    more than ``most`` groups those that are delayed least. ``least``: seconds of delay that do not
    matter."""
    groups: list[ReplicaLinks] = []
    for each in sorted(own, key=lambda links: (-links.late, links.replicas)):
        for i, group in enumerate(groups):
            if group.alike(each, least):
                groups[i] = group.joined(each)
                break
        else:
            groups.append(each)
    queue = [(group.late, group.replicas, group) for group in groups]
    heapify(queue)
    while len(queue) > most:
        joined = heappop(queue)[2].joined(heappop(queue)[2])
        heappush(queue, (joined.late, joined.replicas, joined))
    return [group for _, _, group in sorted(queue, key=lambda row: (-row[0], row[1]))]


def together(found: Sequence[tuple[tuple[int, ...], Plan]]) -> Plan:
    """One plan from those of the ``replicas``, the most delayed first. The plan of most replicas,
    and among equals of the less delayed ones, is that of all that have no other."""
    groups: list[tuple[tuple[int, ...], Plan]] = []
    for replicas, plan in found:
        for i, (others, other) in enumerate(groups):
            if plan.runs_as(other) and plan.dispatch is other.dispatch:
                groups[i] = (tuple(sorted(others + replicas)), other)
                break
        else:
            groups.append((replicas, plan))
    main = max(range(len(groups)), key=lambda i: (len(groups[i][0]), i))
    own = (group for i, group in enumerate(groups) if i != main)
    return replace(groups[main][1], own=tuple(sorted(own, key=lambda group: group[0])))
