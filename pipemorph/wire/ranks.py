"""Messages between a rank and its job's agent.

The rank judges the directions of links that it receives, and sends states that have changed, as
whole values: one twice does no harm, and whatever may have been lost is sent again over the next
connection. The agent answers with what only it can see.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pipemorph.api.mesh import MeshShape
from pipemorph.wire.base import Count, PlanVersion, Seconds, WireModel
from pipemorph.wire.messages import MOST_ITERATIONS, MOST_STAGES, ObserverSettings
from pipemorph.wire.ops import OpsTrace
from pipemorph.wire.samples import (
    IterationSample,
    RailSample,
    ReductionSample,
    TransportSample,
)
from pipemorph.wire.states import MOST_SLOW, LinkState, RouteTimes, StageState

RANK_PROTOCOL = 3
"""Version of these messages. An agent refuses ranks of another version."""
MOST_DIRECTIONS = 2 * MOST_STAGES
"""Most directions of links that one rank receives."""
MOST_RAILS = 256

State = Literal["starting", "training", "finished", "failed"]


class RankReport(WireModel):
    """What has changed on one rank."""

    rank: Count
    state: State
    iteration: Count
    applied_plan_version: PlanVersion
    links: list[LinkState] = Field(default_factory=list, max_length=MOST_DIRECTIONS)
    """Directions that the rank receives."""
    suspects: list[Count] = Field(default_factory=list, max_length=MOST_STAGES)
    """Links that have at least a quarter of an alarm's evidence."""
    suspicion: Count = 0
    """Number of times that a link has become one of these; the agent answers with it."""
    stages: list[StageState] = Field(default_factory=list, max_length=MOST_STAGES)
    finished_iteration: IterationSample | None = None
    """Set by rank 0 once per iteration, and again if the agent may not have got it. Its bubble
    fraction is over the op times of all stages."""
    reduction: ReductionSample | None = None
    """Of the newest iteration of which the times of all ranks of the group are known; sent by the
    first rank of the group."""
    rails: list[RailSample] = Field(default_factory=list, max_length=MOST_RAILS)
    ports: Count | None = None
    """RDMA ports that this rank sees; None before it has looked."""
    transports: list[TransportSample] = Field(default_factory=list, max_length=MOST_DIRECTIONS)
    ops: OpsTrace | None = None
    """Of an iteration that the agent has asked for."""
    message: Annotated[str, Field(max_length=1024)] | None = None

    def misfit(self, mesh: MeshShape) -> str | None:
        """Reason why the report cannot be one of its rank in ``mesh``; None if it can."""
        links, stages = mesh.stages - 1, mesh.stages
        rows = [("link", row.link, links, row.replica) for row in self.links]
        rows += [("link", link, links, 0) for link in self.suspects]
        rows += [("link", row.link, links, row.replica) for row in self.transports]
        rows += [("stage", row.stage, stages, row.replica) for row in self.rails]
        rows += [("stage", row.stage, stages, row.replica) for row in self.stages]
        if self.reduction is not None:
            rows.append(("stage", self.reduction.stage, stages, self.reduction.replica))
        if self.ops is not None:
            if self.ops.rank != self.rank:
                return f"ops of rank {self.ops.rank}"
            rows.append(("stage", self.ops.stage, stages, self.ops.column))
        for what, number, count, column in rows:
            if number >= count:
                return f"a report of {what} {number}; the job has {count}"
            if column >= mesh.columns:
                return f"a report of column {column}; the job has {mesh.columns}"
        for row in self.links:
            if receiver(mesh, row) != self.rank:
                return f"the state of a direction that rank {receiver(mesh, row)} receives"
        return None


def receiver(mesh: MeshShape, row: LinkState) -> int:
    """The rank that receives a direction."""
    stage = row.link + 1 if row.direction == "forward" else row.link
    return mesh.rank(stage, row.replica)


class RankAnswer(WireModel):
    """What the job's agent sends a rank that has connected or reported a suspicion, and all ranks
    when it has changed. Fields without a value are unchanged."""

    settings: ObserverSettings | None = None
    usual: RouteTimes = Field(default_factory=dict)
    """Normal wire time of the job's directions, per route."""
    rare: RouteTimes = Field(default_factory=dict)
    """The same on routes of so few directions that it says nothing of the others."""
    most_late: bool = False
    """Whether most links of the job are late at this moment: no alarm then."""
    answered: Count = 0
    """The newest suspicion of the rank that this takes into account."""
    pause: Seconds | None = None
    """Least time between two reports that have nothing urgent."""
    slow: list[LinkState] = Field(default_factory=list, max_length=MOST_SLOW)
    """Directions that were slow when earlier ranks ended, for detectors that know nothing yet."""
    reported: list[Count] = Field(default_factory=list, max_length=MOST_ITERATIONS)
    """Iterations that the host has. Until then rank 0 holds them."""


class ToRank(WireModel):
    """Frame of an answer, which tells it from a plan."""

    answer: RankAnswer

    @staticmethod
    def is_one(payload: bytes) -> bool:
        return payload.startswith(b'{"answer":')
