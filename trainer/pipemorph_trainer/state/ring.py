"""Measures the edges of the ring in which a group of ranks reduces its gradients.

A reduction takes as long as its slowest edge, and does not say which that is. So ranks measure the
edges with messages of the size of a reduction's chunk: once in the beginning, to know what is
usual, and every few iterations while reductions take much longer than they did.
"""

from __future__ import annotations

from statistics import median
from time import time
from typing import Any

import torch
import torch.distributed as dist

from pipemorph.api.mesh import DATA
from pipemorph.wire import SlowestEdge
from pipemorph_trainer.links.faults import CHUNK_BYTES, ReductionFaults
from pipemorph_trainer.state.reduction import Reduced, Wait
from pipemorph_trainer.topology.world import World

EVERY = 4
"""Iterations from one measurement to the next."""
LONGER, MORE = 1.5, 0.005
"""A reduction is measured that takes as many times the shortest one, and so many seconds more."""
_ROUNDS, _TAG = 3, 7


class RingProbe:
    """The ring of this rank's group. All ranks of it call :meth:`after`. ``faults``: of the trace;
    they are added to what is measured, as nothing holds these messages."""

    def __init__(self, world: World, wait: Wait, faults: ReductionFaults | None = None) -> None:
        self._world, self._wait, self._faults = world, wait, faults
        self._ring = world.coordinate.mesh.others(world.coordinate, DATA)
        self._shortest = self._usual = float("inf")
        self._measured_at: int | None = None
        self._was_long = False
        self._found: SlowestEdge | None = None

    def after(self, reduced: Reduced | None) -> None:
        """Measure the edges if the newest reduction makes that due. Collective over the group, of
        which all ranks have the same ``reduced``."""
        if reduced is None or len(self._ring) < 2:
            return
        self._shortest = min(self._shortest, reduced.seconds)
        is_long = reduced.seconds > self._shortest * LONGER + MORE
        if not self._due(reduced.iteration, is_long or self._was_long):
            return
        self._measured_at, self._was_long = reduced.iteration, is_long
        times = self._measure()
        self._usual = min(self._usual, median(times))
        worst = max(range(len(times)), key=times.__getitem__)
        self._found = SlowestEdge(at=worst, seconds=times[worst], usual=self._usual)

    def _due(self, iteration: int, is_long: bool) -> bool:
        last = self._measured_at
        return last is None or (is_long and iteration - last >= EVERY)

    def take(self) -> SlowestEdge | None:
        """What was measured since the last call."""
        found, self._found = self._found, None
        return found

    def _measure(self) -> list[float]:
        """Seconds of each edge, one way."""
        ring, me = self._ring, self._ring.index(self._world.coordinate.rank)
        count = len(ring)
        group = self._world.group(DATA)
        assert group is not None
        times = torch.zeros(count, dtype=torch.float64)
        # Two ranks have one wire. Edges that are measured at once share no rank.
        edges = range(1 if count == 2 else count)
        for turn in range(3):
            for edge in edges:
                if turn != (2 if count % 2 and edge == count - 1 else edge % 2):
                    continue
                if edge == me:
                    times[edge] = self._ask(ring[(edge + 1) % count], group)
                    if self._faults is not None:
                        times[edge] += self._faults.edge(edge, CHUNK_BYTES, time())
                elif (edge + 1) % count == me:
                    self._answer(ring[edge], group)
        self._wait(dist.all_reduce(times, group=group, async_op=True))
        if count == 2:
            times[1] = times[0]
        found: list[float] = times.tolist()
        return found

    def _ask(self, other: int, group: dist.ProcessGroup) -> float:
        """Half of the shortest round trip."""
        chunk, best = torch.empty(CHUNK_BYTES, dtype=torch.uint8), float("inf")
        for _ in range(_ROUNDS):
            # The first finds out when the other is there.
            began = time()
            self._post(dist.isend, chunk, other, group)
            self._post(dist.irecv, chunk, other, group)
            best = min(best, (time() - began) / 2)
        return best

    def _answer(self, other: int, group: dist.ProcessGroup) -> None:
        chunk = torch.empty(CHUNK_BYTES, dtype=torch.uint8)
        for _ in range(_ROUNDS):
            self._post(dist.irecv, chunk, other, group)
            self._post(dist.isend, chunk, other, group)

    def _post(self, how: Any, chunk: torch.Tensor, other: int, group: dist.ProcessGroup) -> None:
        self._wait(how(chunk, other, group=group, tag=_TAG))
