"""What passes between a rank and its job's agent. Pure data, and the interface of both sides.

The agent is a process beside rank 0, so that it never competes with the executor for the
interpreter. Every rank holds one socket to it: telemetry up, plans down. Neither call of
:class:`ControlClient` blocks; a lost agent costs telemetry, never an iteration.
"""

from __future__ import annotations

from typing import Literal, Protocol

from pydantic import Field

from pipemorph.planning.ir import Plan
from pipemorph.wire import (
    IterationSample,
    LinkSample,
    RailSample,
    StageProfile,
    TransportSample,
    WireModel,
)


class Offloaded(WireModel):
    """What one iteration moved to host memory on one rank; all of it came back."""

    microbatches: int
    bytes: int
    """One way."""
    seconds: float
    """Of the copies, both ways, within the ops they are parts of."""
    host_bytes: int
    """Host memory held for it."""


class RankTelemetry(WireModel):
    """One telemetry message of one rank. Sent at op boundaries, at most every ~50 ms, and
    at the end of every iteration; so a slow link is seen in mid-iteration."""

    rank: int
    stage: int
    replica: int
    state: Literal["starting", "training", "finished", "failed"]
    iteration: int
    applied_plan_version: int
    prepared_plan_version: int
    links: list[LinkSample] = Field(default_factory=list)
    profile: StageProfile | None = None
    finished_iteration: IterationSample | None = None
    """Set by rank 0 once per iteration; its bubble fraction is over all stages' op times."""
    offloaded: Offloaded | None = None
    """Set at the end of an iteration that moved any."""
    rails: list[RailSample] = Field(default_factory=list)
    ports: int | None = None
    """RDMA ports that this rank sees; None before it has looked."""
    transports: list[TransportSample] = Field(default_factory=list)
    message: str | None = None


class ControlClient(Protocol):
    """A rank's line to the agent."""

    def publish(self, telemetry: RankTelemetry) -> None:
        """Queue one message; drops the oldest if the agent does not keep up."""

    def newest_plan(self) -> Plan | None:
        """The newest plan received and not yet returned by this call, else None."""

    def close(self) -> None:
        """Flush what is queued (bounded to a second) and close."""


class NoControl:
    """Under plain torchrun there is no agent: the plan of the spec stays."""

    def publish(self, telemetry: RankTelemetry) -> None:
        """Nobody listens."""

    def newest_plan(self) -> Plan | None:
        return None

    def close(self) -> None:
        """Nothing is open."""
