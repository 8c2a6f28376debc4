"""Reports the finished iterations on rank 0."""

from __future__ import annotations

from collections.abc import Iterable
from time import monotonic

from pipemorph.wire import IterationSample
from pipemorph_trainer.executor.waiting import CollectiveWait
from pipemorph_trainer.telemetry.reporter import Reporter
from pipemorph_trainer.telemetry.rounds import Rounds
from pipemorph_trainer.topology.world import World
from pipemorph_trainer.trackers.listeners import Listeners


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
        """The iterations that may not be reported if rank 0 ends now."""
        return [*self._left, *self.rounds.unreported(monotonic())]

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
        self._reporter.publish(finished=sample)
        self._listeners.finished(sample)
