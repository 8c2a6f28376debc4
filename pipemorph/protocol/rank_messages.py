"""Messages between a rank and its job's agent.

The rank judges the link directions that it receives, and sends changed states as whole values: a
duplicate does no harm, and states that may be lost are sent again over the next connection. The
agent answers with facts about the whole job.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pipemorph.protocol.agent_messages import MOST_ITERATIONS, MOST_STAGES, ObserverSettings
from pipemorph.protocol.message_base import Count, PlanVersion, ProtocolModel, Seconds
from pipemorph.protocol.op_traces import OpsTrace
from pipemorph.protocol.samples import IterationSample, RailSample, ReductionSample, TransportSample
from pipemorph.protocol.states import MOST_SLOW, LinkState, RouteTimes, StageState
from pipemorph.spec.mesh import MeshShape

RANK_PROTOCOL = 4
"""Version of these messages. An agent refuses ranks of another version."""
MOST_DIRECTIONS = 2 * MOST_STAGES
"""Most link directions that a rank receives."""
MOST_RAILS = 256

RankState = Literal["starting", "training", "finished", "failed"]


class RankReport(ProtocolModel):
    """Changes on a rank."""

    rank: Count
    state: RankState
    iteration: Count
    applied_plan_version: PlanVersion
    links: list[LinkState] = Field(default_factory=list, max_length=MOST_DIRECTIONS)
    """Directions that the rank receives."""
    suspects: list[Count] = Field(default_factory=list, max_length=MOST_STAGES)
    """Links with at least a quarter of an alarm's evidence."""
    suspicion: Count = 0
    """Number of times that a link has become a suspect; the agent answers with it."""
    stages: list[StageState] = Field(default_factory=list, max_length=MOST_STAGES)
    finished_iteration: IterationSample | None = None
    """Iteration, sent by rank 0 once, and again if the agent may have missed it. Its bubble
    fraction is over the op times of all stages."""
    reduction: ReductionSample | None = None
    """Reduction of the newest iteration with known times of all ranks of the group; sent by the
    first rank of the group."""
    rails: list[RailSample] = Field(default_factory=list, max_length=MOST_RAILS)
    ports: Count | None = None
    """Number of RDMA ports of this rank; None before it has counted them."""
    transports: list[TransportSample] = Field(default_factory=list, max_length=MOST_DIRECTIONS)
    ops: OpsTrace | None = None
    """Ops of the iteration that the agent requested."""
    message: Annotated[str, Field(max_length=1024)] | None = None

    def find_mismatch(self, mesh: MeshShape) -> str | None:
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
            if find_receiving_rank(mesh, row) != self.rank:
                return (
                    f"the state of a direction that rank {find_receiving_rank(mesh, row)} receives"
                )
        return None


def find_receiving_rank(mesh: MeshShape, row: LinkState) -> int:
    """Rank that receives a direction."""
    stage = row.link + 1 if row.direction == "forward" else row.link
    return mesh.find_rank(stage, row.replica)


class RankAnswer(ProtocolModel):
    """Answer of the job's agent to a rank that has connected or reported a suspicion, and to all
    ranks when it changes. Fields without a value are unchanged."""

    settings: ObserverSettings | None = None
    usual: RouteTimes = Field(default_factory=dict)
    """Normal wire time of the job's directions, per route."""
    rare: RouteTimes = Field(default_factory=dict)
    """Normal wire time per route whose directions are too few to represent the others."""
    most_late: bool = False
    """True if most links of the job are late at this moment: ranks raise no alarm."""
    answered: Count = 0
    """Newest suspicion of the rank that this answer takes into account."""
    pause: Seconds | None = None
    """Least time between two reports without urgent content."""
    slow: list[LinkState] = Field(default_factory=list, max_length=MOST_SLOW)
    """Directions that were slow when earlier ranks ended, for detectors without samples."""
    reported: list[Count] = Field(default_factory=list, max_length=MOST_ITERATIONS)
    """Iterations that the host has. Rank 0 holds the others."""


class RankFrame(ProtocolModel):
    """Frame of an answer, which distinguishes it from a plan."""

    answer: RankAnswer

    @staticmethod
    def is_answer(payload: bytes) -> bool:
        """True if a frame's payload is an answer."""
        return payload.startswith(b'{"answer":')
