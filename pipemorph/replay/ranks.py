"""Ranks of a job in one process: their monitors, between what they measure and their agent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from pipemorph.api.mesh import MeshShape
from pipemorph.control.observe.observer import Observer
from pipemorph.control.observe.rank_monitor import RankMonitor
from pipemorph.wire import (
    IterationSample,
    LinkSample,
    RailSample,
    ReductionSample,
    StageProfile,
    TransportSample,
)
from pipemorph.wire.ranks import RankReport, State


@dataclass(frozen=True)
class JobTelemetry:
    """What the ranks of a job have measured at one moment. ``ports``: RDMA ports of all ranks
    together; None until every rank has looked."""

    state: State = "training"
    iteration: int = 0
    applied_plan_version: int = 0
    iterations: Sequence[IterationSample] = ()
    links: Sequence[LinkSample] = ()
    stages: Sequence[StageProfile] = ()
    reductions: Sequence[ReductionSample] = ()
    rails: Sequence[RailSample] = ()
    ports: int | None = None
    transports: Sequence[TransportSample] = ()
    message: str | None = None


class PlayedRanks:
    """All ranks of ``mesh``, whose reports ``observer`` gets at once. Its answers arrive before the
    next windows."""

    def __init__(self, mesh: MeshShape, observer: Observer) -> None:
        self._mesh, self._observer = mesh, observer
        self._monitors = [RankMonitor(mesh, rank) for rank in range(mesh.world_size)]
        self._state: State = "starting"
        for rank, monitor in enumerate(self._monitors):
            monitor.connected()
            observer.connect(rank)

    def observe(self, telemetry: JobTelemetry, now: float, *, refresh: bool = False) -> None:
        """Process what the ranks have measured until ``now``, seconds, as the agent does then."""
        self._hear(now)
        windows: dict[int, list[LinkSample]] = {}
        for sample in telemetry.links:
            stage = sample.link + 1 if sample.direction == "forward" else sample.link
            windows.setdefault(self._mesh.rank(stage, sample.replica), []).append(sample)
        profiles: dict[int, list[StageProfile]] = {}
        for profile in telemetry.stages:
            rank = self._mesh.rank(profile.stage, profile.replica)
            profiles.setdefault(rank, []).append(profile)
        began = telemetry.state != self._state
        self._state = telemetry.state
        for rank, monitor in enumerate(self._monitors):
            mine = profiles.get(rank, ())
            monitor.observe(windows.get(rank, ()), now, profiles=mine)
            if began or rank == 0 or monitor.due(now):
                self._observer.hear(self._report(rank, telemetry, monitor, now), now)
        events = zip_longest(telemetry.iterations, telemetry.reductions)
        for finished, reduction in events:
            more = RankReport(
                rank=0, state=telemetry.state, iteration=telemetry.iteration,
                applied_plan_version=telemetry.applied_plan_version,
                finished_iteration=finished, reduction=reduction, ports=telemetry.ports,
            )  # fmt: skip
            self._observer.hear(more, now)
        self._observer.observe(now, refresh=refresh)
        self._hear(now)

    def _report(
        self, rank: int, telemetry: JobTelemetry, monitor: RankMonitor, now: float
    ) -> RankReport:
        first = rank == 0
        ports = None if telemetry.ports is None else telemetry.ports if first else 0
        return RankReport(
            rank=rank,
            state=telemetry.state,
            iteration=telemetry.iteration,
            applied_plan_version=telemetry.applied_plan_version,
            rails=list(telemetry.rails) if first else [],
            ports=ports,
            transports=list(telemetry.transports) if first else [],
            message=telemetry.message if first else None,
            **monitor.take(now),
        )

    def _hear(self, now: float) -> None:
        for ranks, answer in self._observer.answers(range(len(self._monitors))):
            for rank in ranks:
                self._monitors[rank].hear(answer, now)
