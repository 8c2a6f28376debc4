"""Messages between a rank and its job's agent, and the interface of a rank's side.

The agent is a process beside rank 0, so that it does not compete with the executor for the
interpreter. Every rank has one socket to it: telemetry goes up, plans come down. Neither call of
:class:`ControlClient` blocks. If the agent is lost, telemetry is lost but no iteration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from pipemorph.wire import (
    LinkSample,
    RailSample,
    ReductionSample,
    StageProfile,
    TransportSample,
)
from pipemorph.wire.ranks import RankAnswer, RankReport, State
from pipemorph_trainer.agent.rank_plan import RankPlan


class Offloaded(NamedTuple):
    """Activations that one iteration on one rank moved to host memory and back."""

    microbatches: int
    bytes: int
    """One way."""
    seconds: float
    """Time of the copies, both ways; included in the ops that they are part of."""
    host_bytes: int
    """Size of the host memory for offload."""


@dataclass(frozen=True)
class RankTelemetry:
    """What a rank has measured since the last time, at op boundaries. ``report``: what of it the
    agent has to know; None: nothing now."""

    stage: int
    state: State
    iteration: int
    applied_plan_version: int
    prepared_plan_version: int
    links: Sequence[LinkSample] = ()
    profile: StageProfile | None = None
    offloaded: Offloaded | None = None
    """Set at the end of an iteration that offloaded."""
    reduction: ReductionSample | None = None
    rails: Sequence[RailSample] = ()
    ports: int | None = None
    transports: Sequence[TransportSample] = ()
    lost_checkpoint: bool = False
    """Whether the disk has refused a checkpoint."""
    report: RankReport | None = None


class ControlClient(Protocol):
    """A rank's connection to the agent."""

    def publish(self, telemetry: RankTelemetry) -> None:
        """Queue the report. Drops the oldest one if the agent does not keep up."""

    def answers(self) -> list[RankAnswer]:
        """The agent's answers that this call has not returned yet, oldest first."""

    @property
    def acknowledges(self) -> bool:
        """Whether answers say which iterations the host has."""

    @property
    def connections(self) -> int:
        """Number of connections to the agent that were made so far; what was sent over an earlier
        one may be lost."""

    def newest_plan(self) -> RankPlan | None:
        """The newest plan that this call has not returned yet, or None."""

    @property
    def ops_asked(self) -> int:
        """The iteration whose ops the agent has asked for last; -1 before it has."""

    def close(self) -> None:
        """Send what is queued, within a time limit, and close."""


class NoControl:
    """Stands in for the agent where there is none, as under plain torchrun. The plan never
    changes."""

    acknowledges = False

    def publish(self, telemetry: RankTelemetry) -> None:
        """Does nothing."""

    def answers(self) -> list[RankAnswer]:
        return []

    @property
    def connections(self) -> int:
        return 0

    def newest_plan(self) -> RankPlan | None:
        return None

    @property
    def ops_asked(self) -> int:
        return -1

    def close(self) -> None:
        """Does nothing."""
