"""Publishes the ops of a rank's newest iteration, and its other times, once its end is known."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from time import monotonic, time

from pipemorph.protocol import OpsTrace
from pipemorph.protocol.op_traces import RankTimes
from pipemorph.spec.mesh import Coordinate
from pipemorph_trainer.executor.stage_executor import StageRecord
from pipemorph_trainer.telemetry.reporter import TelemetryReporter
from pipemorph_trainer.telemetry.trace import TraceWriter
from pipemorph_trainer.telemetry.window_clock import WindowClock
from pipemorph_trainer.transport.link import LinkEnd


class OpsPublisher:
    """Publisher of ops that the agent has requested, and writer of traces. Main thread only.

    The gradient norm of all stages belongs to the iteration, and follows it: :meth:`end_step`, then
    :meth:`add_norm` if it is computed, :meth:`publish` before the next call. ``above``: end of the
    link to the stage above, if any.
    """

    def __init__(
        self,
        coordinate: Coordinate,
        reporter: TelemetryReporter,
        traces: Mapping[int, TraceWriter],
        above: LinkEnd | None,
    ) -> None:
        self._coordinate, self._reporter, self._traces = coordinate, reporter, traces
        self._above = above
        self.window = WindowClock()
        """Clock of this rank's time outside its ops."""
        self.drain_pauses: Callable[[], list[tuple[float, float]]] = list
        """Source of the garbage collector's pauses: start and end of each since the last call, wall
        clock."""
        self._times: RankTimes | None = None
        """Times of the newest iteration, until it is published."""
        self._ops: list[OpsTrace] = []
        self._lines: dict[int, Callable[..., None]] = {}
        """Functions that write the newest iteration, by stage."""

    def hold_stage(
        self,
        stage: int,
        outcome: StageRecord,
        *,
        iteration: int,
        version: int,
        origin: float,
        reduction: dict[str, float] | None,
    ) -> None:
        """Hold the record of a stage. ``origin``: wall clock at the start of the step;
        ``reduction``: of the gradients over the replicas, on the rank's first stage."""
        if self._reporter.has_listener and self._reporter.wants_ops(iteration):
            place = self._coordinate.rank, stage, self._coordinate.column
            trace = OpsTrace.from_ops(
                place, iteration, version, origin, outcome.ops, waits=outcome.waits
            )
            self._ops += [] if trace is None else [trace]
        if (writer := self._traces.get(stage)) is not None:
            self._lines[stage] = partial(
                writer.write_iteration, iteration, version, origin, outcome, reduction
            )

    def end_step(self, origin: float, reduction: dict[str, float] | None) -> None:
        """End the times of the step that began at ``origin``, wall clock."""
        pauses = self._drain_pauses_since(origin)
        self._times = self.window.end_window(
            paused=sum(end - start for start, end in pauses),
            reduction=None if reduction is None else reduction["waited"],
            pauses=[
                (round(1e6 * (start - origin)), round(1e6 * (end - start))) for start, end in pauses
            ],
            clock_offset=0.0 if self._above is None else self._above.peer_clock.offset,
        )

    def add_norm(self, began: float) -> None:
        """Add the gradient norm of all stages, which began at that monotonic time. The first one
        after a step counts."""
        if self._times is not None:
            norm = monotonic() - began
            pauses = self._drain_pauses_since(time() - norm)
            paused = sum(end - start for start, end in pauses)
            self._times = self.window.extend_window(self._times, norm, paused=paused)
            self.publish()

    def _drain_pauses_since(self, begin: float) -> list[tuple[float, float]]:
        """Drain the pauses, and return those since a time of the wall clock."""
        return [pause for pause in self.drain_pauses() if pause[0] >= begin]

    def publish(self) -> None:
        """Publish the ops of the newest iteration, and write its trace. Idempotent."""
        times, self._times = self._times, None
        held, self._ops = self._ops, []
        lines, self._lines = self._lines, {}
        first = self._coordinate.stage
        for stage, write in lines.items():
            write(times=times if stage == first else None)
        for ops in held:
            self._reporter.publish(
                ops=ops.model_copy(update={"rank_times": times}) if ops.stage == first else ops
            )
