"""Which plan a column runs next: the newest one that all its stages hold.

A *column* is one pipeline: the stages that are connected by links. Each stage tells the stage
above which versions it and all stages below hold, as soon as there is a new one. So stage 0 knows
what its whole column holds. At the beginning of an iteration it chooses the newest of these
versions, without waiting, and the token that starts the iteration tells it to the other stages. So
all stages of a column run one version in an iteration, and a plan that has reached all of them
during iteration t runs from iteration t+1 on.

Ranks receive plans at different times, and may miss one that was soon replaced. So what counts is
whether all stages hold exactly that version, not the oldest of their newest ones.

A version names a directive, which may have another plan for some replicas: a rank holds that of
its own. Replicas may change their version in different iterations, since sums of gradients do not
depend on the plan. Columns of one replica share collectives inside ops, such as those of a tensor
parallel group: they run one plan and must change it together. Their first stages agree in a small
collective at the beginning of every iteration.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist

from pipemorph_trainer.executor.waiting import CollectiveWait
from pipemorph_trainer.plans.book import PlanBook

CANDIDATES = 4
"""Versions that a column offers to those that must run the same one: the current one and the newest
others."""


class Line(Protocol):
    """The part of a control socket that the agreement uses."""

    held: frozenset[int]
    """Versions that the neighbour and all stages below it hold."""
    on_held: Callable[[], None]
    """Called after :attr:`held` has changed."""

    def send_held(self, versions: frozenset[int]) -> None: ...


class Agreement:
    """One stage's part of the agreement of its column. Main thread only.

    ``up``, ``down``: the control sockets to the neighbours. ``together``: the first stages of the
    columns that must run one version; None if this column may differ from all others.
    """

    def __init__(
        self,
        book: PlanBook,
        up: Line | None,
        down: Line | None,
        *,
        together: dist.ProcessGroup | None = None,
        wait: CollectiveWait | None = None,
    ) -> None:
        self._book, self._up, self._down = book, up, down
        self._together, self._wait_for = together, wait
        self._told: frozenset[int] = frozenset()
        if down is not None:
            down.on_held = self.tell

    @property
    def current(self) -> int:
        """The version that this stage runs now."""
        return self._book.in_force.version

    def digest(self, version: int) -> int:
        """Names the whole plan of a version; 0 if this stage does not hold it."""
        return int(self._book.digest(version) or "0", 16)

    def held(self) -> frozenset[int]:
        """Versions newer than the current one that this stage and all stages below hold."""
        mine = self._book.held()
        return mine if self._down is None else mine & self._down.held

    def tell(self) -> None:
        """Tell the stage above what is held, if there is a new version. Call it after a plan was
        prepared."""
        held = self.held()
        if self._up is not None and not held <= self._told:
            self._up.send_held(held)
            self._told = held

    def choose(self) -> int:
        """The version of the next iteration. Only on stage 0."""
        current = self.current
        if self._together is None:
            return max(self.held(), default=current)
        newest = [current, *sorted(self.held(), reverse=True)[: CANDIDATES - 1]]
        mine = torch.tensor([*newest, *[-1] * (CANDIDATES - len(newest))])
        rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(self._together))]
        work = dist.all_gather(rows, mine, group=self._together, async_op=True)
        assert self._wait_for is not None
        self._wait_for(work, "the other columns to begin the iteration")
        common: set[int] = set(newest).intersection(*(row.tolist() for row in rows))
        return max(common)
