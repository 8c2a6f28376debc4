"""What became of an iteration: each rank's part in it, gathered from all, and the report of it.

At the end of iteration t every rank contributes the plans it has prepared to one small
collective. The newest plan that **all** have prepared is used from iteration t+2, so the
collective has a whole iteration to finish and nothing waits for it.

A round is over an iteration after its own has ended, so that nobody waits for it; until then
what this rank knows of the iteration is kept here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from pipemorph.wire import IterationSample
from pipemorph_trainer.executor.waiting import CollectiveWait, Waiting
from pipemorph_trainer.topology.world import World

CANDIDATES = 4
"""Plans a rank offers per round: the one in force and its newest three."""
_WIDTH = CANDIDATES + 3


class RankRow(NamedTuple):
    """What one rank contributes at the end of an iteration. Times are wall clock, seconds."""

    versions: tuple[int, ...]
    began: float
    ended: float
    busy: float

    def encode(self) -> list[float]:
        padded = (*self.versions, *([-1] * CANDIDATES))[:CANDIDATES]
        return [*map(float, padded), self.began, self.ended, self.busy]

    @staticmethod
    def decode(values: Sequence[float]) -> RankRow:
        versions = tuple(int(v) for v in values[:CANDIDATES] if v >= 0)
        return RankRow(versions, *values[CANDIDATES:])


def agree(rows: Sequence[RankRow], in_force: int) -> int:
    """The newest version in every row, never below ``in_force``."""
    common = set(rows[0].versions).intersection(*(row.versions for row in rows[1:]))
    return max([in_force, *common])


def bubble_fraction(rows: Sequence[RankRow]) -> float:
    """Idle time over ranks × span, from first op to last op anywhere."""
    span = max(row.ended for row in rows) - min(row.began for row in rows)
    if span <= 0:
        return 0.0
    return min(1.0, max(0.0, 1.0 - sum(row.busy for row in rows) / (len(rows) * span)))


class Round:
    """One iteration's collective, under way."""

    def __init__(self, iteration: int, row: RankRow, group: dist.ProcessGroup) -> None:
        self.iteration = iteration
        size = dist.get_world_size(group)
        self._mine = torch.tensor(row.encode(), dtype=torch.float64)
        self._all = [torch.empty(_WIDTH, dtype=torch.float64) for _ in range(size)]
        self.work: Any = dist.all_gather(self._all, self._mine, group=group, async_op=True)

    def done(self) -> bool:
        return bool(self.work.is_completed())

    def rows(self) -> list[RankRow]:
        """Everyone's rows, once :attr:`work` has been waited for."""
        return [RankRow.decode(values.tolist()) for values in self._all]


@dataclass
class _Open:
    """An iteration that has begun and is not reported yet. Monotonic clock, seconds."""

    plan_version: int
    began: float
    ended: float = 0.0
    loss: float = 0.0
    round: Round | None = None


class Rounds:
    """One round per iteration: :meth:`begin`, :meth:`offer`, :meth:`end`, :meth:`finish`.

    ``report`` gets every iteration once all ranks have told of it.
    """

    def __init__(
        self,
        first_version: int,
        *,
        world: World,
        waiting: Waiting,
        wait: CollectiveWait,
        report: Callable[[IterationSample], None],
    ) -> None:
        # Not its group: a world that is left has the last reference to it.
        self._world = world
        self._waiting, self._wait_for = waiting, wait
        self._report = report
        self._open: dict[int, _Open] = {}
        self.agreed = first_version
        """The plan that all ranks have agreed on so far."""

    def begin(self, iteration: int, *, plan_version: int, at: float) -> None:
        """``plan_version``: of the plan it runs. ``at``: when its step() was called, monotonic."""
        self._open[iteration] = _Open(plan_version, at)

    def drop(self, iteration: int) -> None:
        """Forget an iteration that was refused before it had an effect."""
        del self._open[iteration]

    def offer(self, iteration: int, row: RankRow, loss: float) -> None:
        """Tell all ranks of this rank's part. Does not wait for theirs."""
        found = self._open[iteration]
        found.loss = loss
        found.round = Round(iteration, row, self._world.control)

    def wait(self, iteration: int) -> None:
        """Wait until the collective of an iteration is through, for which ranks need no more than
        to get to the end of it as well."""
        found = self._open[iteration]
        if found.round is not None:
            self._waiting.begin(f"all ranks to finish iteration {iteration}")
            self._wait_for(found.round.work)
            self._waiting.end()

    def end(self, iteration: int, at: float) -> None:
        """The next step() has begun, or nothing follows.

        An iteration lasts from its step() to the next one, less the time a checkpoint took: the
        optimizer, the gradient norm and the data are part of what a user waits for.
        """
        self._open[iteration].ended = at

    def finish(self, iteration: int) -> None:
        """Wait for an iteration's collective (long done), take its agreement and report it."""
        found = self._open.get(iteration)
        if found is None or found.round is None:
            return
        del self._open[iteration]
        self._waiting.begin(f"all ranks to finish iteration {iteration}")
        self._wait_for(found.round.work)
        rows = found.round.rows()
        self._waiting.end()
        self.agreed = agree(rows, self.agreed)
        self._report(
            IterationSample(
                index=iteration,
                seconds=max(0.0, found.ended - found.began),
                loss=found.loss,
                plan_version=found.plan_version,
                bubble_fraction=bubble_fraction(rows),
            )
        )

    def finish_if_done(self, iteration: int) -> None:
        """As :meth:`finish`, but only if that does not wait."""
        found = self._open.get(iteration)
        if found is not None and found.round is not None and found.round.done():
            self.finish(iteration)

    def finish_all(self) -> None:
        for iteration in sorted(self._open):
            self.finish(iteration)
