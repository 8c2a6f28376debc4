"""Telemetry of a rank for its job's agent, and the interface of the rank's connection.

The agent is a process of its own, so that it does not compete with the executor for the
interpreter. Every rank has one socket to it: telemetry goes up, plans come down. No call of
:class:`ControlClient` blocks. If the agent is lost, telemetry is lost but no iteration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from pipemorph.protocol import (
    LinkSample,
    RailSample,
    ReductionSample,
    StageProfile,
    TransportSample,
)
from pipemorph.protocol.rank_messages import RankAnswer, RankReport, RankState
from pipemorph_trainer.agent.rank_plan import RankPlan


class OffloadStats(NamedTuple):
    """Activations that a rank moved to host memory and back in one iteration."""

    microbatches: int
    bytes: int
    """Bytes copied one way."""
    seconds: float
    """Time of the copies, both ways; it is part of the op times."""
    host_bytes: int
    """Size of the host memory for offload."""


@dataclass(frozen=True)
class RankTelemetry:
    """Measurements of a rank since its last telemetry, taken at op boundaries. ``report``: the part
    for the agent; None if nothing is due."""

    stage: int
    state: RankState
    iteration: int
    applied_plan_version: int
    prepared_plan_version: int
    links: Sequence[LinkSample] = ()
    profile: StageProfile | None = None
    offloaded: OffloadStats | None = None
    """Set at the end of an iteration that offloaded."""
    reduction: ReductionSample | None = None
    rails: Sequence[RailSample] = ()
    ports: int | None = None
    transports: Sequence[TransportSample] = ()
    lost_checkpoint: bool = False
    """True if the disk has refused a checkpoint."""
    report: RankReport | None = None


class ControlClient(Protocol):
    """Connection of a rank to the agent."""

    def publish(self, telemetry: RankTelemetry) -> None:
        """Queue the report. Drops the oldest report if the agent is too slow."""

    def pop_answers(self) -> list[RankAnswer]:
        """New answers of the agent, oldest first; each is returned once."""

    @property
    def acknowledges(self) -> bool:
        """True if answers name the iterations that the host has received."""

    @property
    def connections(self) -> int:
        """Number of connections made to the agent so far. Messages sent over an earlier connection
        may be lost."""

    def pop_newest_plan(self) -> RankPlan | None:
        """Newest plan, returned once; None if no newer plan has arrived."""

    @property
    def requested_ops_iteration(self) -> int:
        """Iteration whose ops the agent requested last; -1 before the first request."""

    def close(self) -> None:
        """Send the queued messages, within a time limit, and close."""


class NullControlClient:
    """Connection of a rank without an agent, as under plain torchrun: the plan never changes."""

    acknowledges = False

    def publish(self, telemetry: RankTelemetry) -> None:
        """Does nothing."""

    def pop_answers(self) -> list[RankAnswer]:
        return []

    @property
    def connections(self) -> int:
        return 0

    def pop_newest_plan(self) -> RankPlan | None:
        return None

    @property
    def requested_ops_iteration(self) -> int:
        return -1

    def close(self) -> None:
        """Does nothing."""
