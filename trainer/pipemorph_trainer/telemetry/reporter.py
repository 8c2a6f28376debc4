"""Sends a rank's telemetry to the agent, at op boundaries and at a limited rate."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from time import monotonic

from pipemorph.api.mesh import Coordinate
from pipemorph.control.observe.rank_monitor import RankMonitor
from pipemorph.planning import Route
from pipemorph.wire import (
    IterationSample,
    LinkSample,
    OpsTrace,
    ReductionSample,
    StageProfile,
    TransportSample,
)
from pipemorph.wire.ranks import RankReport, State
from pipemorph_trainer.agent import AgentHandle, connect, start_agent
from pipemorph_trainer.agent.messages import ControlClient, NoControl, Offloaded, RankTelemetry
from pipemorph_trainer.agent.rank_plan import RankPlan
from pipemorph_trainer.context import TrainerContext
from pipemorph_trainer.links.link import LinkEnd
from pipemorph_trainer.links.message import Direction, SenderLoad
from pipemorph_trainer.telemetry.metrics import RankMetrics
from pipemorph_trainer.telemetry.processors import RunQueue
from pipemorph_trainer.telemetry.rails import RailWatch
from pipemorph_trainer.topology.world import World

PUBLISH_SECONDS = 0.05
LOOK_SECONDS = 1.0
"""Least seconds between two looks at the transports of links."""
MOST_HELD = 4096
"""Most iterations that rank 0 holds while the host acknowledges none."""
REFRESH_SECONDS = 60.0
"""Interval in which those of all links are reported again, since the ingest may have restarted."""


class TransportWatch:
    """Reads the transports of this rank's links from the engine, at a limited rate.

    A link that fell back from its rails to TCP looks like a slow link; only the engine knows which
    it is.
    """

    def __init__(
        self,
        ends: Sequence[LinkEnd],
        replica: int,
        *,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._ends, self._replica, self._clock = ends, replica, clock
        self._looked_at = float("-inf")
        self._told_at = float("-inf")
        self._told: dict[int, TransportSample] = {}

    def take(self, *, now: bool = False) -> list[TransportSample]:
        """The ends that have changed since the last call; once a minute, all ends. ``now``: ignore
        the rate limit."""
        at = self._clock()
        if at - self._looked_at < LOOK_SECONDS and not now:
            return []
        self._looked_at = at
        if at - self._told_at >= REFRESH_SECONDS:
            self._told_at = at
            self._told = {}
        changed = []
        for i, end in enumerate(self._ends):
            sample = self._sample(end)
            if sample is not None and self._told.get(i) != sample:
                self._told[i] = sample
                changed.append(sample)
        return changed

    def _sample(self, end: LinkEnd) -> TransportSample | None:
        link = end.engine_link
        if link is None:
            return None
        stats = link.stats()
        lost = dict.fromkeys(f"{p.rail or p.kind}: {p.trouble}" for p in stats.paths if p.trouble)
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


class Reporter:
    """Judges the link samples of one rank, and sends its agent what has changed, with profiles and
    finished iterations. Updates the rank's ``metrics``, if it has any.

    ``rails``: of the engine, such as ``rxe0 port 1``; None without an engine. ``crowding``: of this
    host's processors, see :class:`~pipemorph.wire.StageProfile`. ``load``: what notes say of this
    rank.
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
        # Not under torchrun alone, with no metrics either: to make reports would only take time.
        self.listened_to = metrics is not None or type(control) is not NoControl
        for end in ends:
            end.recorder.paused = not self.listened_to
        self._monitor = RankMonitor(coordinate.mesh, coordinate.rank)
        self._connections = 0
        self._left_over: list[LinkSample] = []
        self._published_at = 0.0
        self._run_queue, self._crowding = RunQueue(), crowding
        self._load = load if load is not None else SenderLoad()
        self._rails = RailWatch(coordinate.stage, coordinate.column, used=rails)
        self._transports = TransportWatch(ends, coordinate.column)
        self._sent: tuple[State, int] | None = None
        """State, and on rank 0 the applied plan, of the newest report."""
        self.held: dict[int, IterationSample] = {}
        """Iterations that were sent, and that the host may not have, by index."""
        self.state: State = "starting"
        self.iteration = 0
        self.applied = 0
        self.prepared = 0

    def begin_iteration(self, iteration: int, plan: RankPlan) -> None:
        """Begin an iteration: later samples have its index and the links' current routes."""
        if self._metrics is not None and plan.version != self.applied:
            self._metrics.plan(plan)
        self.iteration, self.applied = iteration, plan.version
        for end in self._ends:
            self.reroute(end)

    def reroute(self, end: LinkEnd) -> None:
        """Later samples of this end are of the route that it has now."""
        left = end.recorder.begin(
            end.route, end.transport, self.iteration, failed_over=end.failed_over
        )
        if left is not None:
            self._left_over.append(left)

    def between_ops(self) -> None:
        """Judge new link samples, at most every :data:`PUBLISH_SECONDS`."""
        if self.listened_to and monotonic() - self._published_at >= PUBLISH_SECONDS:
            self.publish()

    def wants_ops(self, iteration: int) -> bool:
        """Whether the agent has asked for the ops of this iteration."""
        return self._control.ops_asked == iteration

    def publish(
        self,
        *,
        profile: StageProfile | None = None,
        finished: IterationSample | None = None,
        offloaded: Offloaded | None = None,
        reduction: ReductionSample | None = None,
        ops: OpsTrace | None = None,
        message: str | None = None,
        lost_checkpoint: bool = False,
    ) -> None:
        """Judge all link samples so far, and publish what has changed."""
        if not self.listened_to:
            return
        now = self._published_at = monotonic()
        windows, self._left_over = self._left_over, []
        waited = self._run_queue.waited()
        for end in self._ends:
            if not end.recorder:
                continue
            if end.route is Route.DELEGATED or not end.same_host:
                end.refresh_clock()
            sample = end.recorder.drain(waited)
            if sample is not None:
                windows.append(sample)
        if profile is not None and self._crowding is not None:
            profile = profile.model_copy(update={"crowding": self._crowding})
        if finished is not None and self._control.acknowledges:
            self.held[finished.index] = finished
            if len(self.held) > MOST_HELD:
                del self.held[next(iter(self.held))]
        for answer in self._control.answers():
            self._monitor.hear(answer, now)
            for index in answer.reported:
                self.held.pop(index, None)
        again: Sequence[IterationSample] = ()
        if self._control.connections != self._connections:
            if self._connections:
                # What was sent over the connection before may be lost with another agent.
                again = [each for each in self.held.values() if each is not finished]
            self._connections = self._control.connections
            self._monitor.connected()
        self._monitor.observe(windows, now, profiles=() if profile is None else (profile,))
        self._load.waited, self._load.inflated = waited or 0.0, self._monitor.inflated
        rails, transports = self._rails.take(), self._transports.take()
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
            ports=self._rails.ports,
            transports=transports,
            lost_checkpoint=lost_checkpoint,
        )
        rank = self._coordinate.rank
        sent = (self.state, self.applied if rank == 0 else 0)
        if reduction is not None and reduction.replica != reduction.group:
            reduction = None  # The first rank of the group reports it.
        given = (finished, reduction, ops, message)
        has_news = sent != self._sent or bool(rails or transports) or given != (None,) * len(given)
        connected = self._connections > 0
        if has_news or (connected and self._monitor.due(now)):
            self._sent = sent
            report = RankReport(
                rank=rank,
                state=self.state,
                iteration=self.iteration,
                applied_plan_version=self.applied,
                finished_iteration=finished,
                reduction=reduction,
                rails=rails,
                ports=self._rails.ports,
                transports=transports,
                ops=ops,
                message=message[:1024] if message else None,
                **(self._monitor.take(now) if connected else {}),
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
            self._metrics.hear(telemetry)


def join_agent(context: TrainerContext, world: World) -> tuple[ControlClient, AgentHandle | None]:
    """Connect this rank to the job's agent, if it has one. Rank 0 starts the agent and owns it."""
    if context.ingest_url is None:
        return NoControl(), None
    agent, where = None, ("", 0)  # Ranks that have not started an agent have no address of one.
    if world.coordinate.rank == 0:
        agent = start_agent(context, world.coordinate.mesh)
        where = (agent.host, agent.port)
    host, port = world.share(where, tuple[str, int])
    return connect(context, host, port), agent
