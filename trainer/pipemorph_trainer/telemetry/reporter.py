"""Sends a rank's telemetry to its agent, at op boundaries and at a limited rate."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from time import monotonic

from pipemorph.detection.rank_monitor import RankMonitor
from pipemorph.planning import Route
from pipemorph.protocol import (
    IterationSample,
    LinkSample,
    OpsTrace,
    ReductionSample,
    StageProfile,
    TransportSample,
)
from pipemorph.protocol.rank_messages import RankReport, RankState
from pipemorph.spec.mesh import Coordinate
from pipemorph_trainer.agent import AgentProcess, connect_to_agent, start_agent
from pipemorph_trainer.agent.messages import (
    ControlClient,
    NullControlClient,
    OffloadStats,
    RankTelemetry,
)
from pipemorph_trainer.agent.rank_plan import RankPlan
from pipemorph_trainer.context import TrainerContext
from pipemorph_trainer.telemetry.metrics import RankMetrics
from pipemorph_trainer.telemetry.rail_sampler import RailSampler
from pipemorph_trainer.telemetry.run_queue import RunQueue
from pipemorph_trainer.topology.world import World
from pipemorph_trainer.transport.link import LinkEnd
from pipemorph_trainer.transport.message import Direction, SenderLoad

PUBLISH_SECONDS = 0.05
SAMPLE_SECONDS = 1.0
"""Least seconds between two samples of the links' transports."""
MOST_UNACKNOWLEDGED = 4096
"""Most iterations that rank 0 stores while the host acknowledges none."""
REFRESH_SECONDS = 60.0
"""Interval in which all transports are reported again, since the ingest may have restarted."""


class TransportSampler:
    """Reads the transports of this rank's links from the engine, at a limited rate. They show
    whether a slow link has only fallen back from its rails to TCP.
    """

    def __init__(
        self,
        ends: Sequence[LinkEnd],
        replica: int,
        *,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._ends, self._replica, self._clock = ends, replica, clock
        self._sampled_at = float("-inf")
        self._refreshed_at = float("-inf")
        self._reported: dict[int, TransportSample] = {}

    def take_changed(self, *, now: bool = False) -> list[TransportSample]:
        """Return the link ends that have changed since the last call; once a minute, all ends.
        ``now``: ignore the rate limit."""
        at = self._clock()
        if at - self._sampled_at < SAMPLE_SECONDS and not now:
            return []
        self._sampled_at = at
        if at - self._refreshed_at >= REFRESH_SECONDS:
            self._refreshed_at = at
            self._reported = {}
        changed = []
        for i, end in enumerate(self._ends):
            sample = self._make_sample(end)
            if sample is not None and self._reported.get(i) != sample:
                self._reported[i] = sample
                changed.append(sample)
        return changed

    def _make_sample(self, end: LinkEnd) -> TransportSample | None:
        link = end.engine_link
        if link is None:
            return None
        stats = link.stats()
        lost = dict.fromkeys(
            f"{p.rail or p.kind}: {p.last_error}" for p in stats.paths if p.last_error
        )
        trouble = "; ".join(lost)
        return TransportSample(
            link=end.link,
            replica=self._replica,
            direction="forward" if end.sends is Direction.FORWARD else "backward",
            agreed=link.transport,  # type: ignore[arg-type]
            transport=stats.transport,
            fallbacks=stats.fallbacks,
            failbacks=stats.failbacks,
            reconnects=stats.reconnects,
            trouble=" ".join(trouble.split())[:200],
        )


class TelemetryReporter:
    """Judges the link samples of a rank, and sends changes to its agent, with profiles and finished
    iterations. Updates the rank's ``metrics``, if it has any.

    ``rails``: of the engine, such as ``rxe0 port 1``; None without an engine. ``crowding``: of this
    host's processors, see :class:`~pipemorph.protocol.StageProfile`. ``load``: of this rank; it is
    sent in notes.
    """

    def __init__(
        self,
        coordinate: Coordinate,
        control: ControlClient,
        ends: list[LinkEnd],
        *,
        rails: Collection[str] | None = None,
        crowding: float | None = None,
        load: SenderLoad | None = None,
        metrics: RankMetrics | None = None,
    ) -> None:
        self._metrics = metrics
        self._coordinate, self._control, self._ends = coordinate, control, ends
        # Under torchrun alone, without metrics, reports would only cost time.
        self.has_listener = metrics is not None or type(control) is not NullControlClient
        for end in ends:
            end.recorder.paused = not self.has_listener
        self._monitor = RankMonitor(coordinate.mesh, coordinate.rank)
        self._connections = 0
        self._unsent: list[LinkSample] = []
        self._published_at = 0.0
        self._run_queue, self._crowding = RunQueue(), crowding
        self._load = load if load is not None else SenderLoad()
        self._rails = RailSampler(coordinate.stage, coordinate.column, used=rails)
        self._transports = TransportSampler(ends, coordinate.column)
        self._sent: tuple[RankState, int] | None = None
        """State of the newest report; on rank 0 also its applied plan."""
        self.unacknowledged: dict[int, IterationSample] = {}
        """Iterations that were sent and that the host has not acknowledged, by index."""
        self.state: RankState = "starting"
        self.iteration = 0
        self.applied = 0
        self.prepared = 0

    def begin_iteration(self, iteration: int, plan: RankPlan) -> None:
        """Begin an iteration: later samples get its index and the links' current routes."""
        if self._metrics is not None and plan.version != self.applied:
            self._metrics.record_plan(plan)
        self.iteration, self.applied = iteration, plan.version
        for end in self._ends:
            self.record_route(end)

    def record_route(self, end: LinkEnd) -> None:
        """Record later samples of a link end under its present route."""
        unsent = end.recorder.begin_iteration(
            end.route, end.transport, self.iteration, failed_over=end.failed_over
        )
        if unsent is not None:
            self._unsent.append(unsent)

    def publish_between_ops(self) -> None:
        """Judge new link samples, at most every :data:`PUBLISH_SECONDS`."""
        if self.has_listener and monotonic() - self._published_at >= PUBLISH_SECONDS:
            self.publish()

    def wants_ops(self, iteration: int) -> bool:
        """True if the agent has requested the ops of this iteration."""
        return self._control.requested_ops_iteration == iteration

    def publish(
        self,
        *,
        profile: StageProfile | None = None,
        finished: IterationSample | None = None,
        offloaded: OffloadStats | None = None,
        reduction: ReductionSample | None = None,
        ops: OpsTrace | None = None,
        message: str | None = None,
        lost_checkpoint: bool = False,
    ) -> None:
        """Judge all link samples so far, and publish the changes."""
        if not self.has_listener:
            return
        now = self._published_at = monotonic()
        windows, self._unsent = self._unsent, []
        waited = self._run_queue.take_waited_seconds()
        for end in self._ends:
            if not end.recorder:
                continue
            if end.route is Route.DELEGATED or not end.same_host:
                end.refresh_clock()
            sample = end.recorder.drain_window(waited)
            if sample is not None:
                windows.append(sample)
        if profile is not None:
            self._load.forwards.append(profile.forward)
        if profile is not None and self._crowding is not None:
            profile = profile.model_copy(update={"crowding": self._crowding})
        if finished is not None and self._control.acknowledges:
            self.unacknowledged[finished.index] = finished
            if len(self.unacknowledged) > MOST_UNACKNOWLEDGED:
                del self.unacknowledged[next(iter(self.unacknowledged))]
        for answer in self._control.pop_answers():
            self._monitor.process_answer(answer, now)
            for index in answer.reported:
                self.unacknowledged.pop(index, None)
        again: Sequence[IterationSample] = ()
        if self._control.connections != self._connections:
            if self._connections:
                # Iterations sent over the previous connection may be lost with its agent.
                again = [each for each in self.unacknowledged.values() if each is not finished]
            self._connections = self._control.connections
            self._monitor.record_connection()
        self._monitor.observe_windows(windows, now, profiles=() if profile is None else (profile,))
        self._load.waited, self._load.inflated = waited or 0.0, self._monitor.ops_inflated
        rails, transports = self._rails.take_changed(), self._transports.take_changed()
        telemetry = RankTelemetry(
            stage=self._coordinate.stage,
            state=self.state,
            iteration=self.iteration,
            applied_plan_version=self.applied,
            prepared_plan_version=self.prepared,
            links=windows,
            profile=profile,
            offloaded=offloaded,
            reduction=reduction,
            rails=rails,
            ports=self._rails.port_count,
            transports=transports,
            lost_checkpoint=lost_checkpoint,
        )
        rank = self._coordinate.rank
        sent = (self.state, self.applied if rank == 0 else 0)
        if reduction is not None and reduction.replica != reduction.group:
            reduction = None  # The first rank of the group reports it.
        given = (finished, reduction, ops, message)
        changed = sent != self._sent or bool(rails or transports) or given != (None,) * len(given)
        connected = self._connections > 0
        if changed or (connected and self._monitor.is_report_due(now)):
            self._sent = sent
            report = RankReport(
                rank=rank,
                state=self.state,
                iteration=self.iteration,
                applied_plan_version=self.applied,
                finished_iteration=finished,
                reduction=reduction,
                rails=rails,
                ports=self._rails.port_count,
                transports=transports,
                ops=ops,
                message=message[:1024] if message else None,
                **(self._monitor.take_changes(now) if connected else {}),
            )
            telemetry = replace(telemetry, report=report)
        for held in again:
            bare = RankReport(
                rank=rank, state=self.state, iteration=self.iteration,
                applied_plan_version=self.applied, finished_iteration=held,
            )  # fmt: skip
            self._control.publish(replace(telemetry, report=bare))
        self._control.publish(telemetry)
        if self._metrics is not None:
            self._metrics.record_telemetry(telemetry)


def join_agent(context: TrainerContext, world: World) -> tuple[ControlClient, AgentProcess | None]:
    """Connect this rank to the job's agent, if there is one. Rank 0 starts and owns the agent."""
    if context.ingest_url is None:
        return NullControlClient(), None
    agent, where = None, ("", 0)  # Only rank 0 has the address.
    if world.coordinate.rank == 0:
        agent = start_agent(context, world.coordinate.mesh)
        where = (agent.host, agent.port)
    host, port = world.broadcast_value(where, tuple[str, int])
    return connect_to_agent(context, host, port), agent
