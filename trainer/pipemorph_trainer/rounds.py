"""What became of an iteration: each rank's part in it, told to all, and the report of it.

A round is over an iteration after its own has ended, so that nobody waits for it; until then
what this rank knows of the iteration is kept here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pipemorph.wire import IterationSample
from pipemorph_trainer.commit import RankRow, Round, agree, bubble_fraction
from pipemorph_trainer.executor.waiting import CollectiveWait, Waiting
from pipemorph_trainer.world import World


@dataclass
class _Open:
    """An iteration that has begun and is not reported yet. Monotonic clock, seconds."""

    epoch: int
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

    def begin(self, iteration: int, *, epoch: int, at: float) -> None:
        """``epoch``: the plan the iteration runs. ``at``: when its step() was called, monotonic."""
        self._open[iteration] = _Open(epoch, at)

    def drop(self, iteration: int) -> None:
        """Forget an iteration that was refused before it had an effect."""
        del self._open[iteration]

    def offer(self, iteration: int, row: RankRow, loss: float) -> None:
        """Tell all ranks of this rank's part. Does not wait for theirs."""
        found = self._open[iteration]
        found.loss = loss
        found.round = Round(iteration, row, self._world.control)

    def settle(self, iteration: int) -> None:
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
                epoch=found.epoch,
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
