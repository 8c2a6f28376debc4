"""Messages between a rank and its job's agent, and the interface of a rank's side.

The agent is a process beside rank 0, so that it does not compete with the executor for the
interpreter. Every rank has one socket to it: telemetry goes up, plans come down. Neither call of
:class:`ControlClient` blocks. If the agent is lost, telemetry is lost but no iteration.
"""

from __future__ import annotations

from typing import Literal, Protocol

from pydantic import Field

from pipemorph.api.mesh import MeshShape
from pipemorph.wire import (
    IterationSample,
    LinkSample,
    OpsTrace,
    RailSample,
    ReductionSample,
    StageProfile,
    TransportSample,
    WireModel,
)
from pipemorph_trainer.agent.rank_plan import RankPlan


class Offloaded(WireModel):
    """Activations that one iteration on one rank moved to host memory and back."""

    microbatches: int
    bytes: int
    """One way."""
    seconds: float
    """Time of the copies, both ways; included in the ops that they are part of."""
    host_bytes: int
    """Size of the host memory for offload."""


class RankTelemetry(WireModel):
    """One telemetry message of one rank. Sent at op boundaries, at most every 50 ms or so, and at
    the end of every iteration. So a slow link is noticed during the iteration."""

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
    """Set by rank 0 once per iteration. Its bubble fraction is over the op times of all stages."""
    offloaded: Offloaded | None = None
    """Set at the end of an iteration that offloaded."""
    reduction: ReductionSample | None = None
    """Of the newest iteration of which the times of all ranks of the group are known."""
    rails: list[RailSample] = Field(default_factory=list)
    ports: int | None = None
    """RDMA ports that this rank sees; None before it has looked."""
    transports: list[TransportSample] = Field(default_factory=list)
    ops: OpsTrace | None = None
    """Of an iteration that the agent has asked for."""
    message: str | None = None

    def misfit(self, mesh: MeshShape) -> str | None:
        """What of it is of no link, stage or column of ``mesh``; None if all is."""
        links, stages = mesh.stages - 1, mesh.stages
        rows = [("link", row.link, links, row.replica) for row in self.links]
        rows += [("link", row.link, links, row.replica) for row in self.transports]
        rows += [("stage", row.stage, stages, row.replica) for row in self.rails]
        if self.profile is not None:
            rows.append(("stage", self.profile.stage, stages, self.profile.replica))
        if self.reduction is not None:
            rows.append(("stage", self.reduction.stage, stages, self.reduction.replica))
        if self.ops is not None:
            if self.ops.rank != self.rank:
                return f"ops of rank {self.ops.rank}"
            rows.append(("stage", self.ops.stage, stages, self.ops.column))
        for what, number, count, column in rows:
            if number >= count:
                return f"telemetry of {what} {number}; the job has {count}"
            if column >= mesh.columns:
                return f"telemetry of column {column}; the job has {mesh.columns}"
        return None


class ControlClient(Protocol):
    """A rank's connection to the agent."""

    def publish(self, telemetry: RankTelemetry) -> None:
        """Queue one message. Drops the oldest one if the agent does not keep up."""

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

    def publish(self, telemetry: RankTelemetry) -> None:
        """Does nothing."""

    def newest_plan(self) -> RankPlan | None:
        return None

    @property
    def ops_asked(self) -> int:
        return -1

    def close(self) -> None:
        """Does nothing."""
