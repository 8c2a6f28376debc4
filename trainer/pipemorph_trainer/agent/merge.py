"""Merges the telemetry of ranks into that of their job, or part of it. Pure, without a clock."""

from __future__ import annotations

from pipemorph.control.observe.merge import State, merged_state
from pipemorph.control.observe.observer import JobTelemetry
from pipemorph.wire import (
    IterationSample,
    LinkSample,
    RailSample,
    ReductionSample,
    StageProfile,
    TransportSample,
)
from pipemorph_trainer.agent.messages import RankTelemetry

MOST_WINDOWS = 65_536
"""Most windows between two telemetries of the job: more do not come in a second that the agent
can process."""


class TelemetryMerger:
    """What ``ranks`` have told since the last :meth:`take`. ``dirty``: whether that is anything."""

    def __init__(self, ranks: range) -> None:
        self._ranks = ranks
        self._states: dict[int, State] = {}
        self._iteration = 0
        self._applied_plan_version = 0
        self._ports: dict[int, int | None] = {}
        self._clear()

    def _clear(self) -> None:
        self.dirty = False
        self._iterations: list[IterationSample] = []
        self._links: list[LinkSample] = []
        self._stages: list[StageProfile] = []
        self._reductions: list[ReductionSample] = []
        self._rails: list[RailSample] = []
        self._transports: list[TransportSample] = []
        self._message: str | None = None

    def add(self, telemetry: RankTelemetry) -> None:
        """Add one message of one rank."""
        self.dirty = True
        self._states[telemetry.rank] = telemetry.state
        if telemetry.rank == self._ranks.start:
            self._iteration = telemetry.iteration
            self._applied_plan_version = telemetry.applied_plan_version
        self._links += telemetry.links[: MOST_WINDOWS - len(self._links)]
        if telemetry.profile is not None:
            self._stages.append(telemetry.profile)
        reduced = telemetry.reduction
        if reduced is not None and reduced.replica == reduced.group:
            self._reductions.append(reduced)
        self._rails += telemetry.rails
        self._ports[telemetry.rank] = telemetry.ports
        self._transports += telemetry.transports
        if telemetry.finished_iteration is not None:
            self._iterations.append(telemetry.finished_iteration)
        if telemetry.message:
            who = "" if telemetry.message.startswith("rank ") else f"rank {telemetry.rank}: "
            self.say(f"{who}{telemetry.message}")

    def say(self, message: str) -> None:
        """Report a message."""
        self._message, self.dirty = message[:1024], True

    def take(self) -> JobTelemetry:
        """What has come since the last call."""
        found = JobTelemetry(
            state=merged_state(self._states.values(), missing=len(self._states) < len(self._ranks)),
            iteration=self._iteration,
            applied_plan_version=self._applied_plan_version,
            iterations=self._iterations,
            links=self._links,
            stages=self._stages,
            reductions=self._reductions,
            rails=self._rails,
            ports=self._seen_ports(),
            transports=self._transports,
            message=self._message,
        )
        self._clear()
        return found

    def _seen_ports(self) -> int | None:
        """Number of RDMA ports of all ranks; None until every rank has looked."""
        counts = list(self._ports.values())
        if len(counts) < len(self._ranks) or None in counts:
            return None
        return sum(count or 0 for count in counts)
