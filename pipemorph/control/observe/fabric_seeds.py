"""What a check of the RDMA ports before training says of how long messages should take. Pure.

A link that is slow from its first message on has no healthy past to compare it with. What the ports
between its two pods could do before is a seed of what is normal: half a round trip, and the bytes
at the rate of a connection. Of a pair that the check found sick, and of one that it did not meet,
the seed is made of the medians of all, since a link is not well because it was slow before.

A seed is not what a message takes: no staging, no queues, perhaps another transport. So it is never
more than a hint: see :meth:`~pipemorph.control.observe.link_book.LinkBook.compare_seeds`.
"""

from __future__ import annotations

from pipemorph.api.mesh import MeshShape
from pipemorph.wire import FabricView


class FabricSeeds:
    """The seeds of a job's links, from the check of its attempt."""

    def __init__(self, view: FabricView, mesh: MeshShape) -> None:
        self._mesh, self._size = mesh, view.ranks_per_pod
        self._usual = (view.round_trip or 0.0, view.rate)
        self._pairs: dict[tuple[int, int], tuple[float, float]] = {}
        """Of pods, round trip and rate of the slowest ports that are well."""
        for pair in view.pairs:
            if pair.sick or pair.rate is None or pair.round_trip is None:
                continue
            pods = min(pair.first, pair.second), max(pair.first, pair.second)
            trip, rate = self._pairs.get(pods, (pair.round_trip, pair.rate))
            self._pairs[pods] = max(trip, pair.round_trip), min(rate, pair.rate)

    def wire_time(self, link: int, column: int, message_bytes: float) -> float | None:
        """Seconds that a message of so many bytes should take on a link; None if nothing was
        measured, or if the link is within a pod."""
        ranks = (self._mesh.rank(link, column), self._mesh.rank(link + 1, column))
        first, second = sorted(rank // self._size for rank in ranks)
        trip, rate = self._pairs.get((first, second), self._usual)
        if first == second or not rate:
            return None
        return trip / 2 + message_bytes / rate
