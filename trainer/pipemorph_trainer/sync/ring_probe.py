"""Measures the edges of the ring in which a group of ranks reduces its gradients.

A reduction takes as long as its slowest edge, but does not identify it. So ranks measure the edges
with messages of the size of a reduction's chunk: once at the start as a reference, and every few
iterations while reductions take much longer than the shortest one.
"""

from __future__ import annotations

from statistics import median
from time import time
from typing import Any

import torch
import torch.distributed as dist

from pipemorph.protocol import SlowestEdge
from pipemorph.spec.mesh import DATA_DIMENSIONS
from pipemorph_trainer.sync.reduction import ReductionRecord, WaitForCollective
from pipemorph_trainer.topology.world import World
from pipemorph_trainer.transport.fault_injection import CHUNK_BYTES, ReductionFaults

MEASUREMENT_INTERVAL = 4
"""Iterations from one measurement to the next."""
SLOW_FACTOR, SLOW_SECONDS = 1.5, 0.005
"""Factor and seconds by which a reduction must exceed the shortest one to be measured."""
_ROUNDS, _TAG = 3, 7


class RingProbe:
    """Probe for the ring of this rank's group, whose ranks all call :meth:`measure_if_due`.
    ``faults``: of the fault trace; they do not delay these messages, so their delays are added to
    the results."""

    def __init__(
        self, world: World, wait: WaitForCollective, faults: ReductionFaults | None = None
    ) -> None:
        self._world, self._wait, self._faults = world, wait, faults
        self._ring = world.coordinate.mesh.find_group(world.coordinate, DATA_DIMENSIONS)
        self._shortest = self._usual = float("inf")
        self._measured_at: int | None = None
        self._was_long = False
        self._found: SlowestEdge | None = None

    def measure_if_due(self, reduced: ReductionRecord | None) -> None:
        """Measure the edges if the newest reduction makes that due. Collective over the group,
        whose ranks all have the same ``reduced``."""
        if reduced is None or len(self._ring) < 2:
            return
        self._shortest = min(self._shortest, reduced.seconds)
        is_long = reduced.seconds > self._shortest * SLOW_FACTOR + SLOW_SECONDS
        if not self._is_due(reduced.iteration, is_long or self._was_long):
            return
        self._measured_at, self._was_long = reduced.iteration, is_long
        times = self._measure_edges()
        self._usual = min(self._usual, median(times))
        worst = max(range(len(times)), key=times.__getitem__)
        self._found = SlowestEdge(at=worst, seconds=times[worst], usual=self._usual)

    def _is_due(self, iteration: int, is_long: bool) -> bool:
        last = self._measured_at
        return last is None or (is_long and iteration - last >= MEASUREMENT_INTERVAL)

    def take_slowest_edge(self) -> SlowestEdge | None:
        """Return the slowest edge if the ring was measured since the last call."""
        found, self._found = self._found, None
        return found

    def _measure_edges(self) -> list[float]:
        """Measure the seconds of each edge, one way."""
        ring, me = self._ring, self._ring.index(self._world.coordinate.rank)
        count = len(ring)
        group = self._world.get_group(DATA_DIMENSIONS)
        assert group is not None
        times = torch.zeros(count, dtype=torch.float64)
        # Two ranks share an edge. Edges that are measured at the same time share no rank.
        edges = range(1 if count == 2 else count)
        for phase in range(3):
            for edge in edges:
                if phase != (2 if count % 2 and edge == count - 1 else edge % 2):
                    continue
                if edge == me:
                    times[edge] = self._time_round_trip(ring[(edge + 1) % count], group)
                    if self._faults is not None:
                        times[edge] += self._faults.compute_edge_delay(edge, CHUNK_BYTES, time())
                elif (edge + 1) % count == me:
                    self._echo_chunks(ring[edge], group)
        self._wait(dist.all_reduce(times, group=group, async_op=True))
        if count == 2:
            times[1] = times[0]
        found: list[float] = times.tolist()
        return found

    def _time_round_trip(self, other: int, group: dist.ProcessGroup) -> float:
        """Return half of the shortest round trip, seconds."""
        chunk, best = torch.empty(CHUNK_BYTES, dtype=torch.uint8), float("inf")
        for _ in range(_ROUNDS):
            # The first round trip includes the wait for the other rank.
            began = time()
            self._post_chunk(dist.isend, chunk, other, group)
            self._post_chunk(dist.irecv, chunk, other, group)
            best = min(best, (time() - began) / 2)
        return best

    def _echo_chunks(self, other: int, group: dist.ProcessGroup) -> None:
        chunk = torch.empty(CHUNK_BYTES, dtype=torch.uint8)
        for _ in range(_ROUNDS):
            self._post_chunk(dist.irecv, chunk, other, group)
            self._post_chunk(dist.isend, chunk, other, group)

    def _post_chunk(
        self, how: Any, chunk: torch.Tensor, other: int, group: dist.ProcessGroup
    ) -> None:
        self._wait(how(chunk, other, group=group, tag=_TAG))
