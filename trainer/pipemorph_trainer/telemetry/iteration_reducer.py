"""Reduction of all ranks' times of an iteration to a sample, which rank 0 reports.

Every rank has the times of its ops. They are reduced over the stages of a column (a pipeline), and
then on the first stages over all columns. Training waits for this only at its end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from time import monotonic
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from pipemorph.protocol import FittedCosts, IterationSample
from pipemorph_trainer.executor.collector_pauses import PauseTimes
from pipemorph_trainer.executor.device_times import MeasuredOp
from pipemorph_trainer.executor.waiting import CollectiveWaiter
from pipemorph_trainer.executor.work_spread import WorkVariance
from pipemorph_trainer.telemetry.reporter import TelemetryReporter
from pipemorph_trainer.topology.world import World
from pipemorph_trainer.trackers.listeners import IterationListeners


class IterationSummary(NamedTuple):
    """Summary of an iteration of one or several ranks. Times are wall clock, seconds.

    ``version``: of the plan; the oldest one if columns differ. ``busy``: sum of the times of all
    ops. ``ranks``: number of ranks. ``paused``: longest pauses of a rank, inside the iteration and
    after it. ``cost``: mean cost of the microbatches, the most of any column; 0 if unknown.
    ``work``: sum of the variances of the microbatches' work over ``measured`` stages.
    """

    version: int
    began: float
    ended: float
    busy: float
    ranks: int
    paused: PauseTimes = PauseTimes()
    cost: float = 0.0
    work: WorkVariance = WorkVariance()
    measured: int = 0

    def compute_bubble_fraction(self, seconds: float) -> float:
        """Compute idle time over ranks × span. The span goes from the first op of any rank to the
        last, but is at most ``seconds``: the next iteration may begin before this one ends."""
        span = min(seconds, self.ended - self.began)
        if span <= 0:
            return 0.0
        return min(1.0, max(0.0, 1.0 - self.busy / (self.ranks * span)))


class SummaryReduction:
    """Reduction of the summaries of a group's ranks; begins at once, and all ranks get the result.

    ``group``: None for this rank alone.
    """

    def __init__(self, mine: IterationSummary, group: dist.ProcessGroup | None) -> None:
        ends = [-float(mine.version), -mine.began, mine.ended, mine.cost, *mine.paused]
        self._most = torch.tensor(ends, dtype=torch.float64)
        sums = [mine.busy, mine.ranks, mine.measured, *mine.work]
        self._sum = torch.tensor(sums, dtype=torch.float64)
        self._works: list[Any] = [
            dist.all_reduce(values, op=how, group=group, async_op=True)
            for values, how in (
                (self._most, dist.ReduceOp.MAX),
                (self._sum, dist.ReduceOp.SUM),
            )
            if group is not None
        ]

    def is_done(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self, wait: CollectiveWaiter, what: str) -> IterationSummary:
        """Wait for the group, and return the summary of all its ranks."""
        for work in self._works:
            wait(work, what)
        version, began, ended, cost, *paused = self._most.tolist()
        busy, ranks, measured, *work = self._sum.tolist()
        return IterationSummary(
            int(-version), -began, ended, busy, int(ranks), PauseTimes(*paused), cost,
            WorkVariance(*work), int(measured),
        )  # fmt: skip


class _OpenIteration:
    """Iteration that has not been reported yet. Times are monotonic, seconds."""

    def __init__(self, began: float) -> None:
        self.began, self.ended = began, 0.0
        self.loss = 0.0
        self.barrier: bool | None = None
        self.fitted: FittedCosts | None = None
        self.mine: IterationSummary | None = None
        """Summary of this rank; None before :meth:`IterationReducer.record_ops`."""
        self.column: SummaryReduction | None = None
        """Reduction over the column; None before the next iteration begins."""
        self.columns: SummaryReduction | None = None
        """Reduction over all columns; only on first stages, and if there are several columns."""

    @property
    def last_reduction(self) -> SummaryReduction | None:
        return self.columns or self.column

    def is_done(self) -> bool:
        return self.last_reduction is not None and self.last_reduction.is_done()


class IterationReducer:
    """Reduces each iteration: :meth:`begin_iteration`, :meth:`record_ops`, :meth:`end_iteration`.
    Collective.

    ``report`` is called with every iteration in order, when all ranks have begun the next one: a
    reported iteration never runs again after a failure.
    """

    def __init__(
        self, *, world: World, wait: CollectiveWaiter, report: Callable[[IterationSample], None]
    ) -> None:
        # References the world and not its groups: World.leave() must drop their last references.
        self._world = world
        self._wait_for, self._report = wait, report
        self._open: dict[int, _OpenIteration] = {}

    def begin_iteration(self, iteration: int, *, at: float) -> None:
        """Begin an iteration, or begin it again. ``at``: time of the call of step(), monotonic.
        Does not wait for the previous iteration of other ranks."""
        self._open.setdefault(iteration, _OpenIteration(at))
        self._reduce_over_column(iteration - 1)

    def drop_iteration(self, iteration: int) -> None:
        """Drop a refused iteration, which had no effect."""
        del self._open[iteration]

    def record_ops(
        self,
        iteration: int,
        version: int,
        ops: Sequence[MeasuredOp],
        loss: float,
        *,
        costs: Sequence[float] = (),
        fitted: FittedCosts | None = None,
        work: Sequence[WorkVariance] = (),
    ) -> None:
        """Add the times of this rank's ops, run under plan ``version``. ``costs``: of the
        microbatches; ``fitted``: those that were fitted in this iteration; ``work``: variance of
        the work on each of its stages, if known. Waits until the other ranks have begun this
        iteration, which they usually have, but not until they end it."""
        self._reduce_over_columns(iteration - 1)
        busy = sum([end - start for _, _, start, end in ops])
        found = self._open[iteration]
        found.loss, found.fitted = loss, fitted
        cost = fmean(costs) if costs else 0.0
        found.mine = IterationSummary(
            version, ops[0].start, ops[-1].end, busy, 1, cost=cost,
            work=WorkVariance(*map(math.fsum, zip(*work, strict=True))), measured=len(work),
        )  # fmt: skip

    def _reduce_over_column(self, iteration: int) -> None:
        """Begin to reduce an iteration over the column."""
        found = self._open.get(iteration)
        if found is not None and found.mine is not None and found.column is None:
            found.column = SummaryReduction(found.mine, self._world.column)

    def _reduce_over_columns(self, iteration: int) -> None:
        """Wait for a column's summary, and begin to reduce it over the columns. All columns do this
        in the order of iterations, since their group is used for nothing else."""
        found = self._open.get(iteration)
        if found is None or found.column is None or found.columns is not None:
            return
        of_column = found.column.wait(self._wait_for, _describe_wait(iteration))
        if self._world.columns is not None:
            found.columns = SummaryReduction(of_column, self._world.columns)

    def wait_for_iteration(self, iteration: int) -> None:
        """Wait for all reductions that this rank has begun, up to this iteration."""
        for each, found in self._open.items():
            if each <= iteration and found.last_reduction is not None:
                found.last_reduction.wait(self._wait_for, _describe_wait(each))

    def end_iteration(
        self, iteration: int, at: float, barrier: bool | None, paused: PauseTimes
    ) -> None:
        """End an iteration at the time ``at``: the next step() has begun, or none follows.
        ``barrier``: all stages waited for each other after it; None if unknown. ``paused``: pauses
        of this rank.

        An iteration lasts from its step() to the next, without checkpoints. It includes the
        optimizer, the gradient norm and data loading.
        """
        found = self._open[iteration]
        found.ended, found.barrier = at, barrier
        if found.mine is not None:
            found.mine = found.mine._replace(paused=paused)

    def report_finished(self) -> None:
        """Report the iterations that all ranks have ended, without waiting."""
        for iteration, found in list(self._open.items()):
            if not found.ended or not found.is_done():
                return
            self._reduce_over_columns(iteration)
            if not found.is_done():
                return
            self._finish_iteration(iteration)

    def list_unreported(self, at: float) -> list[IterationSample]:
        """List the unreported iterations with the times of this rank alone. Those that have not
        ended count as ended at the time ``at``."""
        return [
            _make_sample(iteration, found, found.mine, found.ended or at)
            for iteration, found in self._open.items()
            if found.mine is not None
        ]

    def finish_all(self) -> None:
        """Wait until all ranks of the column have finished, on the first stage all columns, and
        report the remaining iterations."""
        for iteration in sorted(self._open):
            self._reduce_over_column(iteration)
            self._reduce_over_columns(iteration)
            self._finish_iteration(iteration)

    def _finish_iteration(self, iteration: int) -> None:
        found = self._open.pop(iteration)
        if found.last_reduction is None:
            return
        summary = found.last_reduction.wait(self._wait_for, _describe_wait(iteration))
        self._report(_make_sample(iteration, found, summary, found.ended))


def _make_sample(
    iteration: int, found: _OpenIteration, summary: IterationSummary, ended: float
) -> IterationSample:
    seconds = max(0.0, ended - found.began)
    spreads: list[float | None] = [None, None]
    if summary.measured:
        # The mean of the variances, since the error of each is about as large as a small one.
        spreads = [math.sqrt(max(0.0, each) / summary.measured) for each in summary.work]
    return IterationSample(
        index=iteration,
        seconds=seconds,
        loss=found.loss,
        plan_version=summary.version,
        bubble_fraction=summary.compute_bubble_fraction(seconds),
        barrier=found.barrier,
        ops_seconds=min(seconds, max(0.0, summary.ended - summary.began)),
        gc_inside=summary.paused.inside,
        gc_between=summary.paused.between,
        cost=summary.cost or None,
        work_spread=spreads[0],
        unexplained_spread=spreads[1],
        fitted_costs=found.fitted,
    )


def _describe_wait(iteration: int) -> str:
    return f"all ranks to finish iteration {iteration}"


class IterationPublisher:
    """Publishes a job's iterations, on rank 0, to its host and to the script's listeners."""

    def __init__(
        self,
        *,
        world: World,
        wait: CollectiveWaiter,
        reporter: TelemetryReporter,
        listeners: IterationListeners,
    ) -> None:
        self._rank = world.coordinate.rank
        self._reporter, self._listeners = reporter, listeners
        self.reducer = IterationReducer(world=world, wait=wait, report=self._publish_reduced)
        """Reducer of the iterations. The pipeline ends each of them."""
        self._adopted: list[IterationSample] = []
        """Iterations that an earlier generation of ranks may not have reported."""

    def adopt_unreported(self, samples: Iterable[IterationSample]) -> None:
        """Report iterations that an earlier generation may not have reported, but after the first
        iteration of this generation, from which the host learns where it resumed."""
        self._adopted = list(samples)

    def list_unreported(self) -> list[IterationSample]:
        """List the iterations that the host may not have if rank 0 ends now."""
        sent = self._reporter.unacknowledged.values()
        return [*self._adopted, *sent, *self.reducer.list_unreported(monotonic())]

    def finish_all(self) -> None:
        """Report all iterations, after waiting for their ranks."""
        self.reducer.finish_all()
        self._publish_adopted()

    def _publish_reduced(self, sample: IterationSample) -> None:
        """Publish an iteration on rank 0, with the times of all ranks."""
        if self._rank == 0:
            self._publish_sample(sample)
            self._publish_adopted()

    def _publish_adopted(self) -> None:
        samples, self._adopted = self._adopted, []
        for sample in samples:
            self._publish_sample(sample)

    def _publish_sample(self, sample: IterationSample) -> None:
        if self._reporter.has_listener:
            self._reporter.publish(finished=sample)
        if self._listeners.any:
            self._listeners.publish_iteration(sample)
