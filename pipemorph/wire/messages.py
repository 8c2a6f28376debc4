"""Messages between a job's agent and the ingest: reports up, directives down.

The same on a cluster and on one machine. JSON over HTTP; times are seconds, sizes are
bytes. Unknown fields are rejected, so that a typo is not silently ignored.

Protocol, version 6:

* ``POST /v1/jobs/{namespace}/{name}/reports`` with a :class:`LinkHealthReport` (at most
  ``MAX_REPORT_BYTES``); the response is a :class:`DirectiveEnvelope`. A report whose
  ``sequence`` is not above the last accepted one of that attempt is rejected with 409; the
  response has the last accepted one as ``last``, and the agent continues above it. A report has
  what changed since the last accepted one, as whole values, so that one twice does no harm.
* ``GET /v1/jobs/{namespace}/{name}/directive?attempt=A&after=E&wait=S`` answers as soon as a
  directive with a plan version above ``E`` exists, or with an empty envelope after ``S`` seconds.
* ``POST /v1/jobs/{namespace}/{name}/snapshot`` with a :class:`HandIn` (at most
  ``MAX_HAND_IN_BYTES``), if an answer to a report had ``wants_snapshot``: the ingest does not know
  the job, or not the plan that its ranks run.

All need ``Authorization: Bearer``: a projected service-account token on a cluster, the
run's token on one machine.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal

from pydantic import Field

from pipemorph.planning.ir import Dispatch, Plan, Policy, Route, Schedule
from pipemorph.wire.base import (
    Answer,
    Count,
    Microbatches,
    ObjectName,
    PlanVersion,
    Seconds,
    WallClock,
    WireModel,
)
from pipemorph.wire.records import AdaptationRecord
from pipemorph.wire.samples import IterationSample
from pipemorph.wire.states import (
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

PROTOCOL: Literal[6] = 6
MAX_REPORT_BYTES = 64 * 1024
MAX_SNAPSHOT_BYTES = 1 << 20
"""Of a packed snapshot. One with the largest plan, of 1,048,576 stages × microbatches, takes a
quarter of it."""
MAX_HAND_IN_BYTES = MAX_SNAPSHOT_BYTES + 4096
MAX_WAIT_SECONDS = 30.0
MAX_SEQUENCE = 2**53 - 1

MOST_ITERATIONS, MOST_STAGES, MOST_EVENTS = 256, 512, 64
"""Most of each in one message."""

Revision = Annotated[str, Field(max_length=32)]


class EventReport(WireModel):
    """An event of rails, transports, reductions or stragglers, as text for the display."""

    iteration: Count
    text: Text


class LinkHealthReport(WireModel):
    """The states of a job's links and stages that have changed since the last report, and its
    progress; sent by rank 0's agent. Each state replaces the one of the same link or stage."""

    protocol: Literal[6]
    job: ObjectName
    namespace: ObjectName
    attempt: Count
    sequence: Annotated[int, Field(ge=1, le=MAX_SEQUENCE)]
    sent_at: WallClock
    """Agent's wall clock, seconds since the epoch."""
    state: Literal["starting", "training", "finished", "failed"]
    iteration: Count
    """Iteration in progress at stage 0."""
    observed_plan_version: PlanVersion
    """Highest directive the agent has received."""
    plan_issued_at: WallClock | None = None
    """``issued_at`` of that directive, which tells it from another one of the same version; None if
    there is none."""
    term: PlanVersion | None = None
    """Highest term of an ingest that has answered the agent; None before the first."""
    snapshot: Revision = ""
    """Revision of the snapshot that the agent holds, see :func:`revision_of`; empty: none."""
    applied_plan_version: PlanVersion
    """Plan version of the iteration in progress."""
    settings: Revision = ""
    """Of the :class:`ObserverSettings` that the states are by; empty before the agent has any."""
    fresh: bool = False
    """Whether the agent has just started: no report of it has been answered."""
    iterations: list[IterationSample] = Field(default_factory=list, max_length=MOST_ITERATIONS)
    directions: list[LinkState] = Field(default_factory=list, max_length=MOST_SLOW)
    links: list[LinkState] = Field(default_factory=list, max_length=MOST_STAGES)
    """Empty while slow directions wait for the next report: a link would seem well without."""
    stages: list[StageState] = Field(default_factory=list, max_length=MOST_STAGES)
    reductions: list[ReductionHealth] = Field(default_factory=list, max_length=MOST_STAGES)
    rails: RailsView | None = None
    transports: TransportsView | None = None
    stragglers: StragglersView | None = None
    events: list[EventReport] = Field(default_factory=list, max_length=MOST_EVENTS)
    message: Annotated[str, Field(max_length=1024), PRINTABLE] | None = None

    @property
    def is_progress(self) -> bool:
        """Whether it tells of nothing but iterations, as most reports do."""
        views = self.rails, self.transports, self.stragglers, self.message
        states = self.directions, self.links, self.stages, self.reductions, self.events
        return not any(states) and views == (None,) * len(views)


class PlanMessage(WireModel):
    """A :class:`~pipemorph.planning.ir.Plan` on the wire; one op string per rank."""

    version: Count
    policy: Policy
    microbatches: Microbatches
    ranks: list[str]
    routes: list[Route]
    in_flight_limits: list[Microbatches | None]
    warmup: list[Microbatches]
    dispatch: Dispatch = Dispatch.STATIC
    device_limits: list[Microbatches | None] = Field(default_factory=list)
    """One per stage; empty: activations of all stages stay on the device."""
    recompute: list[bool] = Field(default_factory=list)
    """Whether a stage drops activations beyond its device limit and runs the forward again, instead
    of moving them to host memory. One per stage; empty: none does."""
    placement: list[Count] = Field(default_factory=list)
    """For ranks with several stages, the rank of each stage; else empty."""
    waits: list[list[Count]] = Field(default_factory=list)
    """For guided dispatch, per rank the positions of ops before which nothing runs in their turn;
    empty if there are none."""

    @staticmethod
    def of(plan: Plan) -> PlanMessage:
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
            recompute=list(plan.recompute) if plan.recomputing else [],
            placement=[] if plan.schedule.one_stage_each else list(plan.schedule.placement),
            waits=[list(positions) for positions in plan.waits] if any(plan.waits) else [],
        )

    def plan(self) -> Plan:
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
        )


class Directive(WireModel):
    """A plan for the ranks to apply. ``plan_version`` equals ``plan.version`` and only grows."""

    plan_version: Annotated[int, Field(ge=1)]
    issued_at: WallClock
    """Controller's wall clock, seconds since the epoch."""
    reason: str
    plan: PlanMessage
    record: AdaptationRecord | None = None
    """What is known of the change when it is issued. None in those that earlier versions saved."""


class HandIn(WireModel):
    """The newest snapshot of the job's controller that the agent holds, for a host that does not
    know the job, as after the crash of another."""

    job: ObjectName
    namespace: ObjectName
    attempt: Count
    snapshot: Annotated[str, Field(max_length=MAX_SNAPSHOT_BYTES)]
    """As a host has packed it: only hosts read it."""


def revision_of(snapshot: str) -> str:
    """Name of a packed snapshot; empty for none."""
    return hashlib.blake2s(snapshot.encode(), digest_size=8).hexdigest() if snapshot else ""


class StageOps(WireModel):
    """Op times of a stage as its job's spec states them, seconds."""

    forward: Seconds
    backward_input: Seconds
    backward_weight: Seconds


class ObserverSettings(WireModel):
    """What an agent has to know of its job's spec, to judge links, stages and rails. The defaults
    hold until an ingest has told other values."""

    revision: Revision = ""
    """Changes with the other fields."""
    min_delay: Seconds = 0.002
    stale_after: Seconds = 30.0
    rails: list[Device] = Field(default_factory=list, max_length=256)
    """RDMA devices that the spec names, such as ``mlx5_0`` or ``mlx5_0:2``."""
    offloads: bool = False
    """Whether activations may go to host memory, so that ops may take a copy longer."""
    ops: list[StageOps] = Field(default_factory=list, max_length=4096)
    """One per stage; empty if the spec has none."""


class DirectiveEnvelope(Answer):
    """Response to a report or poll: the newest directive above the agent's version, if any. The
    other fields answer reports only."""

    protocol: Literal[6] = 6
    term: Count = 0
    """Of this host: the agent refuses answers of a lower term than it has seen."""
    directive: Directive | None = None
    snapshot: str | None = None
    """State of the job's controller, for the agent to hold until the next one. Given with a
    directive, and if the report was of an agent that holds another one."""
    memory: Revision = ""
    """Names what the host remembers of this attempt's reports. If it is another than before, the
    host has lost it, and the next report has every state again."""
    attentive: bool = False
    """Whether to report iterations as they finish: a decision waits for them."""
    seldom: Seconds = 1.0
    """Least time between two reports of which nothing is urgent: more where many agents report."""
    wants_snapshot: bool = False
    """Whether the host waits for the snapshot that the agent holds."""
    settings: ObserverSettings | None = None
    """Given if the report was made by other ones."""
    slow: list[LinkState] = Field(default_factory=list, max_length=MOST_SLOW)
    """Given to a fresh agent: directions that were slow when the agent before it ended."""
