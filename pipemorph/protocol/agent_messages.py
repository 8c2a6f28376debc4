"""Messages between a job's agent and the ingest: reports up, directives down.

JSON over HTTP, on a cluster as on one machine; times are seconds, sizes are bytes. Unknown fields
are rejected, so that a typo is not silently ignored.

Protocol, version 7:

* ``POST /v1/jobs/{namespace}/{name}/reports`` with a :class:`LinkHealthReport` (at most
  ``MAX_REPORT_BYTES``); the response is a :class:`DirectiveEnvelope`. A report whose
  ``sequence`` is not above the last accepted one of that attempt is rejected with 409; the
  response has the last accepted one as ``last``, and the agent continues above it. A report has
  the changes since the last accepted one, as whole values, so a duplicate does no harm.
* ``GET /v1/jobs/{namespace}/{name}/directive?attempt=A&after=E&wait=S`` answers as soon as a
  directive with a plan version above ``E`` exists, or with an empty envelope after ``S`` seconds.
* ``POST /v1/jobs/{namespace}/{name}/snapshot`` with a :class:`SnapshotMessage` (at most
  ``MAX_SNAPSHOT_MESSAGE_BYTES``), if an answer to a report had ``wants_snapshot``: the ingest lacks
  the job, or the plan that its ranks run.

All need ``Authorization: Bearer``: a projected service-account token on a cluster, the
run's token on one machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from pipemorph.planning.ir import Dispatch, Plan, Policy, Route, Schedule
from pipemorph.planning.problem import StageTimes
from pipemorph.protocol.adaptation_record import AdaptationRecord
from pipemorph.protocol.message_base import (
    Count,
    Microbatches,
    ObjectName,
    PlanVersion,
    ProtocolModel,
    ResponseModel,
    Seconds,
    WallClock,
)
from pipemorph.protocol.samples import IterationSample
from pipemorph.protocol.states import (
    MOST_SLOW,
    PRINTABLE,
    Device,
    LinkState,
    RailsView,
    ReductionHealth,
    StageState,
    StragglersView,
    Text,
    TransportsView,
)

PROTOCOL: Literal[7] = 7
MAX_REPORT_BYTES = 64 * 1024
MAX_SNAPSHOT_BYTES = 1 << 20
"""Limit of a packed snapshot. The largest plan, of 1,048,576 stages × microbatches, takes a quarter
of it."""
MAX_SNAPSHOT_MESSAGE_BYTES = MAX_SNAPSHOT_BYTES + 4096
MAX_WAIT_SECONDS = 30.0
MAX_SEQUENCE = 2**53 - 1

MOST_ITERATIONS, MOST_STAGES, MOST_EVENTS = 256, 512, 64
"""Most entries of each in a message."""
MOST_REPLICAS, MOST_RESIZED = 512, 8
"""Most shares of a plan, and most of its parts for other numbers of microbatches."""

Revision = Annotated[str, Field(max_length=32)]


class EventReport(ProtocolModel):
    """Event of rails, transports, reductions or stragglers, as text for the display."""

    iteration: Count
    text: Text


class LinkHealthReport(ProtocolModel):
    """Progress of a job, and the states of its links and stages that have changed since the last
    report; sent by rank 0's agent. A state replaces the earlier one of its link or stage."""

    protocol: Literal[7]
    job: ObjectName
    namespace: ObjectName
    attempt: Count
    sequence: Annotated[int, Field(ge=1, le=MAX_SEQUENCE)]
    sent_at: WallClock
    """Wall clock of the agent, seconds since the epoch."""
    state: Literal["starting", "training", "finished", "failed"]
    iteration: Count
    """Iteration in progress at stage 0."""
    observed_plan_version: PlanVersion
    """Highest directive that the agent has received."""
    plan_issued_at: WallClock | None = None
    """``issued_at`` of that directive, which distinguishes directives of equal version; None if
    there is none."""
    term: PlanVersion | None = None
    """Highest term of an ingest that has answered the agent; None before the first."""
    snapshot: Revision = ""
    """Revision of the snapshot that the agent holds, see :func:`compute_revision`; empty: none."""
    applied_plan_version: PlanVersion
    """Plan version of the iteration in progress."""
    settings: Revision = ""
    """Revision of the :class:`ObserverSettings` that the states follow; empty: none yet."""
    fresh: bool = False
    """True if the agent has just started: no report of it has been answered."""
    iterations: list[IterationSample] = Field(default_factory=list, max_length=MOST_ITERATIONS)
    directions: list[LinkState] = Field(default_factory=list, max_length=MOST_SLOW)
    links: list[LinkState] = Field(default_factory=list, max_length=MOST_STAGES)
    """States of links. Empty while slow directions wait for the next report, without which a link
    would seem healthy."""
    stages: list[StageState] = Field(default_factory=list, max_length=MOST_STAGES)
    reductions: list[ReductionHealth] = Field(default_factory=list, max_length=MOST_STAGES)
    rails: RailsView | None = None
    transports: TransportsView | None = None
    stragglers: StragglersView | None = None
    events: list[EventReport] = Field(default_factory=list, max_length=MOST_EVENTS)
    message: Annotated[str, Field(max_length=1024), PRINTABLE] | None = None

    @property
    def is_progress(self) -> bool:
        """True if the report has only iterations, as most reports do."""
        views = self.rails, self.transports, self.stragglers, self.message
        states = self.directions, self.links, self.stages, self.reductions, self.events
        return not any(states) and views == (None,) * len(views)


class PlannedOpTimes(ProtocolModel):
    """Op times of a stage, in the unit of a problem."""

    forward: Seconds
    backward_input: Seconds
    backward_weight: Seconds
    fused_backward: Seconds | None = None


class PlannedTimes(ProtocolModel):
    """Times for which a plan was made, in one unit: of the ops by stage, and one way by link."""

    stages: Annotated[list[PlannedOpTimes], Field(max_length=MOST_STAGES)]
    delays: Annotated[list[Seconds], Field(max_length=MOST_STAGES)]

    @staticmethod
    def from_stages(stages: Sequence[StageTimes], delays: Sequence[float]) -> PlannedTimes:
        """Times of a problem's stages, and the delays of its links."""
        rows = [
            PlannedOpTimes(
                forward=stage.forward,
                backward_input=stage.backward_input,
                backward_weight=stage.backward_weight,
                fused_backward=stage.fused_backward,
            )
            for stage in stages
        ]
        return PlannedTimes(stages=rows, delays=list(delays))


class ResizedPlan(ProtocolModel):
    """Part of a plan that replicas with another number of microbatches run. The fields have the
    meaning of those of :class:`PlanMessage`."""

    microbatches: Microbatches
    ranks: list[str]
    in_flight_limits: list[Microbatches | None]
    warmup: list[Microbatches]
    device_limits: list[Microbatches | None] = Field(default_factory=list)
    recompute: list[bool] = Field(default_factory=list)
    waits: list[list[Count]] = Field(default_factory=list)


class PlanMessage(ProtocolModel):
    """Encoded :class:`~pipemorph.planning.ir.Plan`, with an op string per rank."""

    version: Count
    policy: Policy
    microbatches: Microbatches
    ranks: list[str]
    routes: list[Route]
    in_flight_limits: list[Microbatches | None]
    warmup: list[Microbatches]
    dispatch: Dispatch = Dispatch.STATIC
    device_limits: list[Microbatches | None] = Field(default_factory=list)
    """Device limit of each stage; empty: activations of all stages stay on the device."""
    recompute: list[bool] = Field(default_factory=list)
    """True for stages that drop activations beyond their device limit and run the forward again,
    instead of moving them to host memory; empty: none."""
    placement: list[Count] = Field(default_factory=list)
    """Rank of each stage if ranks have several; else empty."""
    waits: list[list[Count]] = Field(default_factory=list)
    """Positions, by rank, of the ops for which guided dispatch waits when they are in turn; empty:
    none."""
    times: PlannedTimes | None = None
    """Times that the plan was made for, if ranks order the microbatches of each iteration by their
    costs. No part of what ranks run."""
    shares: list[Microbatches] = Field(default_factory=list, max_length=MOST_REPLICAS)
    """Microbatches of each replica; empty: those of the plan."""
    resized: list[ResizedPlan] = Field(default_factory=list, max_length=MOST_RESIZED)
    """Parts for the other numbers of microbatches in ``shares``."""

    @staticmethod
    def from_plan(plan: Plan) -> PlanMessage:
        """Encode a plan."""
        return PlanMessage(
            version=plan.version,
            policy=plan.policy,
            microbatches=plan.schedule.microbatches,
            ranks=plan.schedule.encode(),
            routes=list(plan.routes),
            in_flight_limits=list(plan.in_flight_limits),
            warmup=list(plan.warmup),
            dispatch=plan.dispatch,
            device_limits=list(plan.device_limits) if any(plan.device_limits) else [],
            recompute=list(plan.recompute) if plan.recomputing_stages else [],
            placement=[] if plan.schedule.one_stage_each else list(plan.schedule.placement),
            waits=[list(positions) for positions in plan.waits] if any(plan.waits) else [],
            shares=list(plan.shares),
            resized=[
                ResizedPlan.model_validate(
                    PlanMessage.from_plan(each).model_dump(include={*ResizedPlan.model_fields})
                )
                for each in plan.resized
            ],
        )

    def to_plan(self) -> Plan:
        """Decode the plan. Raises :class:`~pipemorph.errors.InputError` for bad op strings."""
        resized = [self.model_copy(update={**dict(each), **_NO_SHARES}) for each in self.resized]
        return Plan(
            version=self.version,
            policy=self.policy,
            schedule=Schedule.decode(self.microbatches, self.ranks, self.placement),
            routes=tuple(self.routes),
            in_flight_limits=tuple(self.in_flight_limits),
            dispatch=self.dispatch,
            warmup=tuple(self.warmup),
            device_limits=tuple(self.device_limits),
            recompute=tuple(self.recompute),
            waits=tuple(map(tuple, self.waits)),
            shares=tuple(self.shares),
            resized=tuple(each.to_plan() for each in resized),
        )


_NO_SHARES: dict[str, Any] = {"shares": [], "resized": []}


class Directive(ProtocolModel):
    """Plan for the ranks to apply. ``plan_version`` equals ``plan.version`` and only grows."""

    plan_version: Annotated[int, Field(ge=1)]
    issued_at: WallClock
    """Wall clock of the controller, seconds since the epoch."""
    reason: str
    plan: PlanMessage
    record: AdaptationRecord | None = None
    """Record of the change as of its issue. None in directives saved by earlier versions."""


class SnapshotMessage(ProtocolModel):
    """Newest snapshot of the job's controller that the agent holds, for a host without the job, as
    after the crash of another host."""

    job: ObjectName
    namespace: ObjectName
    attempt: Count
    snapshot: Annotated[str, Field(max_length=MAX_SNAPSHOT_BYTES)]
    """Snapshot as packed by a host; only hosts read it."""


def compute_revision(snapshot: str) -> str:
    """Name of a packed snapshot; empty for none."""
    return hashlib.blake2s(snapshot.encode(), digest_size=8).hexdigest() if snapshot else ""


class StatedOpTimes(ProtocolModel):
    """Op times of a stage in its job's spec, seconds."""

    forward: Seconds
    backward_input: Seconds
    backward_weight: Seconds


class ObserverSettings(ProtocolModel):
    """Values of the job's spec by which an agent judges links, stages and rails. The defaults hold
    until an ingest sends others."""

    revision: Revision = ""
    """Revision that changes with the other fields."""
    min_delay: Seconds = 0.002
    stale_after: Seconds = 30.0
    rails: list[Device] = Field(default_factory=list, max_length=256)
    """RDMA devices that the spec names, such as ``mlx5_0`` or ``mlx5_0:2``."""
    offloads: bool = False
    """True if activations may move to host memory, so that ops may take a copy longer."""
    ops: list[StatedOpTimes] = Field(default_factory=list, max_length=4096)
    """Op times by stage; empty if the spec has none."""


class DirectiveEnvelope(ResponseModel):
    """Response to a report or poll: the newest directive above the agent's version, if any. The
    other fields answer reports only."""

    protocol: Literal[7] = 7
    term: Count = 0
    """Term of this host. The agent refuses answers of a lower term than it has received."""
    directive: Directive | None = None
    snapshot: str | None = None
    """State of the job's controller, for the agent to hold until the next one. Sent with a
    directive, and in answer to an agent that holds another one."""
    memory: Revision = ""
    """Name of the host's memory of this attempt's reports. If it changes, the host has lost that
    memory, and the next report has every state again."""
    attentive: bool = False
    """True to request reports of iterations as they finish: a decision waits for them."""
    seldom: Seconds = 1.0
    """Least time between two reports without urgent content; longer if many agents report."""
    wants_snapshot: bool = False
    """True if the host waits for the snapshot that the agent holds."""
    settings: ObserverSettings | None = None
    """Settings, sent if the report followed others."""
    slow: list[LinkState] = Field(default_factory=list, max_length=MOST_SLOW)
    """Directions that were slow when the agent before ended, sent to a fresh agent."""
