"""What the ranks of a job tell of each finished iteration, reduced to one sample.

Every rank knows when its ops ran. This is reduced over the stages of a column (one pipeline), then,
on their first stages, over all columns. Nothing waits for it, except at the end of training. Rank 0
reports the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from time import monotonic
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from pipemorph.wire import IterationSample
from pipemorph_trainer.executor.device_times import TimedOp
from pipemorph_trainer.executor.waiting import CollectiveWait
from pipemorph_trainer.telemetry.reporter import Reporter
from pipemorph_trainer.topology.world import World
from pipemorph_trainer.trackers.listeners import Listeners


class Summary(NamedTuple):
    """An iteration of one rank, or of several. Times are wall clock, seconds.

    ``version``: of the plan; the oldest one if columns differ. ``busy``: sum of the times of all
    ops. ``ranks``: their number.
    """

    version: int
    began: float
    ended: float
    busy: float
    ranks: int

    def bubble_fraction(self, seconds: float) -> float:
        """Idle time over ranks × span, from the first op of any rank to the last; or over ranks ×
        ``seconds``, if the next iteration begins before the end of this one."""
        span = min(seconds, self.ended - self.began)
        if span <= 0:
            return 0.0
        return min(1.0, max(0.0, 1.0 - self.busy / (self.ranks * span)))


class Reduction:
    """Reduces the summaries of a group's ranks to one. Does not wait; all ranks get it.

    ``group``: None for this rank alone.
    """

    def __init__(self, mine: Summary, group: dist.ProcessGroup | None) -> None:
        ends = [-float(mine.version), -mine.began, mine.ended]
        self._most = torch.tensor(ends, dtype=torch.float64)
        self._sum = torch.tensor([mine.busy, mine.ranks], dtype=torch.float64)
        self._works: list[Any] = [
            dist.all_reduce(values, op=how, group=group, async_op=True)
            for values, how in (
                (self._most, dist.ReduceOp.MAX),
                (self._sum, dist.ReduceOp.SUM),
            )
            if group is not None
        ]

    def done(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self, wait: CollectiveWait, what: str) -> Summary:
        """Wait for the group; returns the summary of all its ranks."""
        for work in self._works:
            wait(work, what)
        version, began, ended = self._most.tolist()
        busy, ranks = self._sum.tolist()
        return Summary(int(-version), -began, ended, busy, int(ranks))


class _Round:
    """An iteration that has not been reported yet. Times are monotonic, seconds."""

    def __init__(self, began: float) -> None:
        self.began, self.ended = began, 0.0
        self.loss = 0.0
        self.barrier: bool | None = None
        self.mine: Summary | None = None
        """None before :meth:`Rounds.offer`."""
        self.column: Reduction | None = None
        """None before the next iteration begins."""
        self.columns: Reduction | None = None
        """Of all columns; only on their first stages, and if there are several."""

    @property
    def last(self) -> Reduction | None:
        return self.columns or self.column

    def done(self) -> bool:
        return self.last is not None and self.last.done()


class Rounds:
    """One round per iteration: :meth:`begin`, :meth:`offer`, :meth:`end`.

    ``report`` is called with every iteration in turn, when all ranks have begun the next one: what
    is reported is never run again after a failure. Collective.
    """

    def __init__(
        self, *, world: World, wait: CollectiveWait, report: Callable[[IterationSample], None]
    ) -> None:
        # Not its groups: a world that is left has the last references to them.
        self._world = world
        self._wait_for, self._report = wait, report
        self._open: dict[int, _Round] = {}

    def begin(self, iteration: int, *, at: float) -> None:
        """Begin an iteration, or begin it again. ``at``: time of the call of step(), monotonic.

        Does not wait for the other ranks of the last iteration."""
        self._open.setdefault(iteration, _Round(at))
        self._reduce(iteration - 1)

    def drop(self, iteration: int) -> None:
        """Drop a refused iteration, which had no effect."""
        del self._open[iteration]

    def offer(self, iteration: int, version: int, ops: Sequence[TimedOp], loss: float) -> None:
        """Offer when the ops of this rank ran, under plan ``version``. Does not wait for the other
        ranks of this iteration, but until they have begun it, which they usually have."""
        self._share(iteration - 1)
        busy = sum([end - start for _, _, start, end in ops])
        found = self._open[iteration]
        found.loss = loss
        found.mine = Summary(version, ops[0].start, ops[-1].end, busy, 1)

    def _reduce(self, iteration: int) -> None:
        """Begin to reduce an iteration over the column."""
        found = self._open.get(iteration)
        if found is not None and found.mine is not None and found.column is None:
            found.column = Reduction(found.mine, self._world.column)

    def _share(self, iteration: int) -> None:
        """Wait for a column's summary, and begin to reduce it over the columns. In order of
        iterations on all columns, since their group is used for nothing else."""
        found = self._open.get(iteration)
        if found is None or found.column is None or found.columns is not None:
            return
        of_column = found.column.wait(self._wait_for, _what(iteration))
        if self._world.columns is not None:
            found.columns = Reduction(of_column, self._world.columns)

    def wait(self, iteration: int) -> None:
        """Wait for all that this rank has begun to reduce up to this iteration."""
        for each, found in self._open.items():
            if each <= iteration and found.last is not None:
                found.last.wait(self._wait_for, _what(each))

    def end(self, iteration: int, at: float, barrier: bool | None) -> None:
        """End an iteration at the time ``at``: the next step() has begun, or none follows.
        ``barrier``: whether all stages waited for each other after it, None if unknown.

        An iteration lasts from its step() to the next one, without the time for a checkpoint. So it
        includes the optimizer, the gradient norm and data loading.
        """
        found = self._open[iteration]
        found.ended, found.barrier = at, barrier

    def advance(self) -> None:
        """Report the iterations that are over, without waiting."""
        for iteration, found in list(self._open.items()):
            if not found.ended or not found.done():
                return
            self._share(iteration)
            if not found.done():
                return
            self._finish(iteration)

    def unreported(self, at: float) -> list[IterationSample]:
        """The iterations that have not been reported, as this rank knows them, without the others;
        those that have not ended, as if they did at the time ``at``."""
        return [
            _sample(iteration, found, found.mine, found.ended or at)
            for iteration, found in self._open.items()
            if found.mine is not None
        ]

    def finish_all(self) -> None:
        """Wait until all ranks of the column have finished, and on the first stage all columns; and
        report what is left."""
        for iteration in sorted(self._open):
            self._reduce(iteration)
            self._share(iteration)
            self._finish(iteration)

    def _finish(self, iteration: int) -> None:
        found = self._open.pop(iteration)
        if found.last is None:
            return
        summary = found.last.wait(self._wait_for, _what(iteration))
        self._report(_sample(iteration, found, summary, found.ended))


def _sample(iteration: int, found: _Round, summary: Summary, ended: float) -> IterationSample:
    seconds = max(0.0, ended - found.began)
    return IterationSample(
        index=iteration,
        seconds=seconds,
        loss=found.loss,
        plan_version=summary.version,
        bubble_fraction=summary.bubble_fraction(seconds),
        barrier=found.barrier,
        ops_seconds=min(seconds, max(0.0, summary.ended - summary.began)),
    )


def _what(iteration: int) -> str:
    return f"all ranks to finish iteration {iteration}"


class IterationReports:
    """The iterations of a job, as rank 0 tells its host and the script's listeners of them."""

    def __init__(
        self, *, world: World, wait: CollectiveWait, reporter: Reporter, listeners: Listeners
    ) -> None:
        self._rank = world.coordinate.rank
        self._reporter, self._listeners = reporter, listeners
        self.rounds = Rounds(world=world, wait=wait, report=self._report)
        """Results of the iterations. The pipeline ends each of them."""
        self._left: list[IterationSample] = []
        """What an earlier generation of ranks may not have reported."""

    def adopt(self, samples: Iterable[IterationSample]) -> None:
        """Report iterations that an earlier generation of ranks may not have reported, after the
        first of this one: what is reported first tells what it went on with."""
        self._left = list(samples)

    def unreported(self) -> list[IterationSample]:
        """The iterations that the host may not have if rank 0 ends now."""
        held = self._reporter.held.values()
        return [*self._left, *held, *self.rounds.unreported(monotonic())]

    def finish(self) -> None:
        """Report all iterations. Waits for their ranks."""
        self.rounds.finish_all()
        self._report_left()

    def _report(self, sample: IterationSample) -> None:
        """On rank 0, publish an iteration after the times of all ranks have arrived."""
        if self._rank == 0:
            self._tell(sample)
            self._report_left()

    def _report_left(self) -> None:
        left, self._left = self._left, []
        for sample in left:
            self._tell(sample)

    def _tell(self, sample: IterationSample) -> None:
        if self._reporter.listened_to:
            self._reporter.publish(finished=sample)
        if self._listeners.any:
            self._listeners.finished(sample)
