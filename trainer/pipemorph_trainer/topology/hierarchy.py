"""Collectives of a few numbers over very many ranks, which take few messages one after another.

gloo's collectives go round a ring. Over 10,240 ranks that is 20,478 messages, each of which waits
for the one before. Here the ranks are a grid, such as 16 × 10 × 8 × 8, and a collective goes along
one dimension after another, in groups of at most :data:`WIDEST` ranks: 76 messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import ceil, log, prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

WIDEST = 16
"""Most ranks of a group, if their number has no larger prime factor. With fewer in each there are
more rounds, and each waits for its slowest rank."""


def factors(count: int) -> tuple[int, ...]:
    """The grid of ``count`` ranks: few dimensions, about equally wide, widest first."""
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


def groups_of(rank: int, ranks: Sequence[int]) -> list[list[int]]:
    """The group of ``rank`` in each round. In the first one they are neighbours in ``ranks``."""
    place, stride, found = ranks.index(rank), 1, []
    for size in factors(len(ranks)):
        first = place - place // stride % size * stride
        found.append([ranks[first + stride * k] for k in range(size)])
        stride *= size
    return found


class Pending:
    """A collective of several rounds, of which the first has begun. :meth:`advance` now and then,
    so that the others begin early; :meth:`wait` for the result."""

    def __init__(self, rounds: Iterator[Any]) -> None:
        self._rounds = rounds
        self._work = next(rounds, None)

    @property
    def over(self) -> bool:
        """Whether the result is there, and nothing is left to wait for."""
        return self._work is None

    def advance(self) -> None:
        """Begin the next round if the one before is over. Never waits."""
        while self._work is not None and self._work.is_completed():
            try:
                self._work.wait()
            except RuntimeError:
                return  # wait() raises it, where it is known what was waited for.
            self._work = next(self._rounds, None)

    def wait(self, wait: Callable[[Any], None]) -> None:
        """Wait for the last round. ``wait``: waits for the collective of one."""
        while self._work is not None:
            wait(self._work)
            self._work = next(self._rounds, None)


class Hierarchy:
    """Some ranks, this one among them. ``groups``: its group in each round, see :func:`groups_of`.

    One collective at a time: all ranks begin the next one when they have waited for the last.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup]) -> None:
        self._groups = tuple(groups)
        self.size = prod(group.size() for group in self._groups)

    def all_reduce(self, values: Tensor, op: Any = dist.ReduceOp.SUM) -> Pending:
        """Begin to reduce ``values`` in place. All ranks get the same bits: a round adds up what
        the groups of the round before have, in the order of the ranks of each."""
        return Pending(
            dist.all_reduce(values, op=op, group=group, async_op=True) for group in self._groups
        )

    def all_gather(self, row: Tensor, found: list[Tensor]) -> Pending:
        """Begin to gather the ``row`` of each rank into ``found``, which has them in the order of
        the ranks when this is over."""

        def rounds() -> Iterator[Any]:
            rows = row.unsqueeze(0)
            for group in self._groups:
                blocks = [torch.empty_like(rows) for _ in range(group.size())]
                yield dist.all_gather(blocks, rows, group=group, async_op=True)
                rows = torch.cat(blocks)
            found.extend(rows)

        return Pending(rounds())
