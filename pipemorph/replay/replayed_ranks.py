"""Ranks of a job in one process: their monitors, between their measurements and their agent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from pipemorph.detection.job_observer import JobObserver
from pipemorph.detection.rank_monitor import RankMonitor
from pipemorph.protocol import (
    IterationSample,
    LinkSample,
    RailSample,
    ReductionSample,
    StageProfile,
    TransportSample,
)
from pipemorph.protocol.rank_messages import RankReport, RankState
from pipemorph.spec.mesh import MeshShape


@dataclass(frozen=True)
class JobTelemetry:
    """Measurements of a job's ranks at one moment. ``ports``: number of RDMA ports of all ranks;
    None until every rank has counted its own."""

    state: RankState = "training"
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


class ReplayedRanks:
    """Ranks of ``mesh`` whose reports reach ``observer`` at once. Its answers arrive before the
    next windows."""

    def __init__(self, mesh: MeshShape, observer: JobObserver) -> None:
        self._mesh, self._observer = mesh, observer
        self._monitors = [RankMonitor(mesh, rank) for rank in range(mesh.world_size)]
        self._state: RankState = "starting"
        for rank, monitor in enumerate(self._monitors):
            monitor.record_connection()
            observer.record_connection(rank)

    def process_telemetry(
        self, telemetry: JobTelemetry, now: float, *, refresh: bool = False
    ) -> None:
        """Process the measurements until ``now``, in seconds, as the ranks and their agent do."""
        self._deliver_answers(now)
        windows: dict[int, list[LinkSample]] = {}
        for sample in telemetry.links:
            stage = sample.link + 1 if sample.direction == "forward" else sample.link
            windows.setdefault(self._mesh.find_rank(stage, sample.replica), []).append(sample)
        profiles: dict[int, list[StageProfile]] = {}
        for profile in telemetry.stages:
            rank = self._mesh.find_rank(profile.stage, profile.replica)
            profiles.setdefault(rank, []).append(profile)
        began = telemetry.state != self._state
        self._state = telemetry.state
        for rank, monitor in enumerate(self._monitors):
            mine = profiles.get(rank, ())
            monitor.observe_windows(windows.get(rank, ()), now, profiles=mine)
            if began or rank == 0 or monitor.is_report_due(now):
                self._observer.process_report(
                    self._build_report(rank, telemetry, monitor, now), now
                )
        events = zip_longest(telemetry.iterations, telemetry.reductions)
        for finished, reduction in events:
            more = RankReport(
                rank=0, state=telemetry.state, iteration=telemetry.iteration,
                applied_plan_version=telemetry.applied_plan_version,
                finished_iteration=finished, reduction=reduction, ports=telemetry.ports,
            )  # fmt: skip
            self._observer.process_report(more, now)
        self._observer.update_states(now, refresh=refresh)
        self._deliver_answers(now)

    def _build_report(
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
            **monitor.take_changes(now),
        )

    def _deliver_answers(self, now: float) -> None:
        for ranks, answer in self._observer.take_answers(range(len(self._monitors))):
            for rank in ranks:
                self._monitors[rank].process_answer(answer, now)
