"""Collectives of a few numbers over very many ranks, with few consecutive messages.

gloo's collectives go round a ring. Over 10,240 ranks these are 20,478 messages, each of which waits
for the previous one. Here the ranks form a grid, such as 16 × 10 × 8 × 8, and a collective goes
along one dimension after another, in groups of at most :data:`WIDEST` ranks: 76 messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import ceil, log, prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

WIDEST = 16
"""Largest group, unless the number of ranks has a larger prime factor. Smaller groups would need
more rounds, each of which waits for its slowest rank."""


def choose_grid(count: int) -> tuple[int, ...]:
    """Choose the grid of ``count`` ranks: few dimensions, about equally wide, widest first."""
    primes: list[int] = []
    rest, divisor = count, 2
    while rest > 1:
        while rest % divisor == 0:
            primes.append(divisor)
            rest //= divisor
        divisor = divisor + 1 if divisor * divisor <= rest else rest
    most = max(WIDEST, *primes, 1)
    dimensions = ceil(log(count, WIDEST) - 1e-9) if count > 1 else 1
    while True:
        found = [1] * dimensions
        for prime in reversed(primes):
            found[found.index(min(found))] *= prime
        if max(found) <= most:
            return tuple(sorted((each for each in found if each > 1), reverse=True)) or (1,)
        dimensions += 1


def list_round_groups(rank: int, ranks: Sequence[int]) -> list[list[int]]:
    """List the group of ``rank`` in each round. In the first, they are neighbours in ``ranks``."""
    place, stride, found = ranks.index(rank), 1, []
    for size in choose_grid(len(ranks)):
        first = place - place // stride % size * stride
        found.append([ranks[first + stride * k] for k in range(size)])
        stride *= size
    return found


class PendingCollective:
    """Collective of several rounds, whose first has begun. Call :meth:`advance` now and then, so
    that the next rounds begin early, and :meth:`wait` for the result."""

    def __init__(self, rounds: Iterator[Any]) -> None:
        self._rounds = rounds
        self._work = next(rounds, None)

    @property
    def is_done(self) -> bool:
        """True if all rounds have ended."""
        return self._work is None

    def advance(self) -> None:
        """Begin the next round if the current one has ended. Never waits."""
        while self._work is not None and self._work.is_completed():
            try:
                self._work.wait()
            except RuntimeError:
                return  # wait() raises it, with a description of the collective.
            self._work = next(self._rounds, None)

    def wait(self, wait: Callable[[Any], None]) -> None:
        """Wait for all rounds. ``wait``: waits for the collective of a round."""
        while self._work is not None:
            wait(self._work)
            self._work = next(self._rounds, None)


class RankHierarchy:
    """Set of ranks with this one. ``groups``: its group in each round, see
    :func:`list_round_groups`.

    Runs a single collective at a time: ranks begin the next one after they waited for the last.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup]) -> None:
        self._groups = tuple(groups)
        self.size = prod(group.size() for group in self._groups)

    def all_reduce(self, values: Tensor, op: Any = dist.ReduceOp.SUM) -> PendingCollective:
        """Begin to reduce ``values`` in place. All ranks get the same bits: each round adds up the
        results of the previous round in rank order."""
        return PendingCollective(
            dist.all_reduce(values, op=op, group=group, async_op=True) for group in self._groups
        )

    def all_gather(self, row: Tensor, found: list[Tensor]) -> PendingCollective:
        """Begin to gather the ``row`` of each rank into ``found``, in rank order when it is
        over."""

        def run_rounds() -> Iterator[Any]:
            rows = row.unsqueeze(0)
            for group in self._groups:
                blocks = [torch.empty_like(rows) for _ in range(group.size())]
                yield dist.all_gather(blocks, rows, group=group, async_op=True)
                rows = torch.cat(blocks)
            found.extend(rows)

        return PendingCollective(run_rounds())
