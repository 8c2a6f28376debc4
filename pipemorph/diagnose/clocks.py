"""Clocks of ranks, aligned by messages in both directions.

A message arrives after it was sent. So the least (arrival by b's clock − sending by a's clock) is
at least the difference of the clocks, and that of the other direction at least its negative. Half
the difference of the two is the offset; half their sum bounds its error. A negative bound is
impossible: then messages are matched wrongly, as those of different runs are.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from typing import NamedTuple

ROUNDING_SECONDS = 2e-5
"""Bounds that are negative by less are no mismatch: profilers round, and convert clocks."""


class Delivery(NamedTuple):
    """A message that was sent and received, each time by its rank's own clock, in seconds."""

    source: int
    target: int
    sent: float
    arrived: float


class ClockAlignment(NamedTuple):
    """``offsets``: seconds by which each rank's clock is ahead of the first one's. ``bounds``:
    bound of the error between two ranks, in seconds, by ranks. ``unaligned``: ranks without
    messages in both directions, whose offset is taken as 0."""

    offsets: dict[int, float]
    bounds: dict[tuple[int, int], float]
    unaligned: list[int]

    @property
    def mismatched(self) -> list[tuple[int, int]]:
        """Pairs of ranks whose messages cannot belong together."""
        return [pair for pair, bound in self.bounds.items() if bound < -ROUNDING_SECONDS]


def align_clocks(ranks: Iterable[int], deliveries: Iterable[Delivery]) -> ClockAlignment:
    """Offsets of the ranks' clocks, along the pairs with the smallest bounds."""
    least: dict[tuple[int, int], float] = {}
    for source, target, sent, arrived in deliveries:
        key = source, target
        least[key] = min(least.get(key, float("inf")), arrived - sent)
    neighbours: dict[int, list[int]] = {}
    for a, b in least:
        if (b, a) in least:
            neighbours.setdefault(a, []).append(b)
    return _span_ranks(sorted(ranks), least, neighbours)


def _span_ranks(
    ranks: list[int],
    least: Mapping[tuple[int, int], float],
    neighbours: Mapping[int, list[int]],
) -> ClockAlignment:
    """Prim's tree of the smallest bounds, from the first rank on."""
    offsets: dict[int, float] = {}
    bounds: dict[tuple[int, int], float] = {}
    unaligned: list[int] = []
    for root in ranks:
        if root in offsets:
            continue
        if offsets:
            unaligned.append(root)
        queue = [(0.0, root, root, 0.0)]
        while queue:
            bound, origin, rank, offset = heapq.heappop(queue)
            if rank in offsets:
                continue
            offsets[rank] = offset
            if rank != origin:
                bounds[origin, rank] = bound
            for other in neighbours.get(rank, ()):
                there, back = least[rank, other], least[other, rank]
                step = (there - back) / 2
                heapq.heappush(queue, ((there + back) / 2, rank, other, offset + step))
    return ClockAlignment(offsets, bounds, unaligned)
