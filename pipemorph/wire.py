"""Messages between a job's agent and the ingest: reports up, directives down.

The same on a cluster and on one machine. JSON over HTTP; times are seconds, sizes are
bytes. Unknown fields are rejected, so that a typo is not silently ignored.

Protocol, version 1:

* ``POST /v1/jobs/{namespace}/{name}/reports`` with a :class:`LinkHealthReport` (at most
  ``MAX_REPORT_BYTES``); the response is a :class:`DirectiveEnvelope`. A report whose
  ``sequence`` is not above the last accepted one of that attempt is rejected with 409; the
  response has the last accepted one as ``last``, and the agent continues above it.
* ``GET /v1/jobs/{namespace}/{name}/directive?attempt=A&after=E&wait=S`` answers as soon as a
  directive with a plan version above ``E`` exists, or with an empty envelope after ``S`` seconds.

Both need ``Authorization: Bearer``: a projected service-account token on a cluster, the
run's token on one machine.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from pipemorph.api.status import MAX_PLANS
from pipemorph.planning.ir import Dispatch, Plan, Policy, Route, Schedule

MAX_REPORT_BYTES = 64 * 1024
MAX_WAIT_SECONDS = 30.0
MAX_SEQUENCE = 2**53 - 1

# Bounds far beyond any job, so that arithmetic on received values cannot overflow.
Seconds = Annotated[float, Field(ge=0, le=1e7, allow_inf_nan=False)]
WallClock = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, le=2**53 - 1)]
# Bound of received plan versions: far below Count, so that the next version is valid too.
PlanVersion = Annotated[int, Field(ge=0, le=2**31 - 1)]
ObjectName = Annotated[str, Field(min_length=1, max_length=253)]


class WireModel(BaseModel):
    """Base of every wire message: immutable, rejects unknown fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def body(self) -> bytes:
        """As JSON, without fields that have their default: most samples lack most optional ones,
        and a report has a limit."""
        return self.model_dump_json(exclude_defaults=True).encode()


class WireTime(WireModel):
    """Distribution of wire times in one window: from the first byte sent to complete reception.

    Excludes queueing before the first byte; includes delays injected by a fault trace. ``count``:
    messages in the window; ``exact``: those whose arrival was observed as it happened. If ``exact``
    is above 0 the values describe only those messages; if 0 they are upper bounds (the receiver was
    computing when the message arrived, so the true time is shorter by at most one receiver op).
    """

    count: Count
    exact: Count
    min: Seconds
    p50: Seconds
    p99: Seconds
    mean: Seconds


class LinkSample(WireModel):
    """Measurements of one direction of one link in one window."""

    link: Count
    replica: Count = 0
    direction: Literal["forward", "backward"]
    route: Route
    transport: Literal["gloo", "nccl", "tcp", "shm", "rdma"]
    iteration: Count
    """Iteration in which the window's last message was sent."""
    bytes: Count
    """Total payload of the window's messages."""
    wire: WireTime
    queue_p50: Seconds
    """Median time a message waited in its queue before the first byte left."""
    spacing: Seconds | None = None
    """Shortest time between two arrivals in a row of which the second message had to wait in its
    queue; None if none had. A link with enough queues and such waits is narrow."""
    latency: Seconds | None = None
    """Shortest time from the start of a message until a few bytes that left with it arrived, if
    they take the same way; None if not measured. A wire time that is much longer is that of a
    narrow link."""
    waited: Seconds | None = None
    """Time for which threads of the receiver have waited for a processor in this window, added up;
    None if unknown. A message may seem late by as much."""
    rtt_min: Seconds | None = None
    """Shortest round trip on the engine's control connection; None if not measured."""


class DeviceClock(WireModel):
    """The clock of a stage's device in MHz, now and at most, and what holds it down."""

    mhz: Count
    most_mhz: Count
    held_by: tuple[Annotated[str, Field(min_length=1, max_length=32)], ...] = Field(
        (), max_length=8
    )
    """``power cap``, ``heat``, …"""


class StageProfile(WireModel):
    """Measured op times of one stage, seconds, mean over the last iteration.

    ``backward_weight`` is 0 while the stage runs fused backwards. ``split``: whether and how the
    stage can run B and W separately.
    """

    stage: Count
    replica: Count = 0
    forward: Seconds
    backward_input: Seconds
    backward_weight: Seconds
    split: Literal["module", "graph", "fused", "emulated"]
    peak_memory: Count
    """Bytes: device peak on CUDA, resident-set peak on CPU."""
    activation_bytes: Count | None = None
    """Bytes one microbatch holds between its F and its W, if measured."""
    input_bytes: Count | None = None
    """Bytes that one microbatch holds if only what its F began with is kept, to run it again; None
    if the stage cannot."""
    offload_copy: Seconds | None = None
    """Time to copy the activations to host memory, or back, if measured. ``forward`` and
    ``backward_input`` exclude copies, and forwards that run again."""
    fused_backward: Seconds | None = None
    """Time of one fused backward (BW), if measured in addition to separate B and W."""
    crowding: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] | None = None
    """Ranks of the job that compute on this host's processors, over the number of those; None for
    a stage that does not compute on them."""
    clock: DeviceClock | None = None
    """None for a stage without device, and where its driver does not say."""


class ReductionSample(WireModel):
    """How the gradients of a stage were reduced over the ranks with other data, in one iteration.

    ``seconds`` and ``exposed`` are the least of all ranks of the group, and so the same for all:
    those of the rank that came last, which waited for the network alone. Only one rank of a group
    reports to the ingest.
    """

    stage: Count
    replica: Count = 0
    group: Count = 0
    """First column of the group: that of the rank that reports."""
    iteration: Count
    bytes: Count
    """Gradients of this rank."""
    buckets: Count
    seconds: Seconds
    """Time during which gradients were under way."""
    exposed: Seconds
    """Of it, after the last op of the rank."""
    waited: Seconds
    """``exposed`` of this rank, which may have waited for others of the group."""


class RailSample(WireModel):
    """State and driver counters of one RDMA port of a stage's host.

    An unreadable value is "unavailable": a 0 would look healthy. Counters never reset while the
    driver is loaded, so health depends on their increase.
    """

    stage: Count
    replica: Count = 0
    device: Annotated[str, Field(min_length=1, max_length=64)]
    port: Annotated[int, Field(ge=1, le=255)]
    state: Annotated[str, Field(max_length=32)]
    """ACTIVE, DOWN, INIT, ARMED, … or "unavailable"."""
    counters: dict[
        Annotated[str, Field(min_length=1, max_length=64)], Count | Literal["unavailable"]
    ] = Field(max_length=64)
    """By their names in sysfs; without those that the driver lacks."""
    used: bool | None = None
    """Whether the engine uses it as a rail; None without an engine."""


class TransportSample(WireModel):
    """The engine's state of one link, at the end that sends in ``direction``."""

    link: Count
    replica: Count = 0
    direction: Literal["forward", "backward"]
    agreed: Literal["tcp", "shm", "rdma"]
    """Transport that both ends agreed on when they connected."""
    transport: Literal["tcp", "shm", "rdma"]
    """Transport in use now: tcp if an rdma link fell back."""
    fallbacks: Count
    failbacks: Count
    """``fallbacks``: times the last rail was lost; ``failbacks``: times a rail recovered."""
    reconnects: Count
    """Times the control connection was lost and restored."""
    trouble: Annotated[str, Field(max_length=200)] = ""
    """The engine's reason why the rails are not in use; empty while they are."""


class IterationSample(WireModel):
    """One finished iteration, as measured by rank 0."""

    index: Count
    seconds: Seconds
    loss: float | None
    plan_version: Count
    bubble_fraction: Annotated[float, Field(ge=0, le=1)]
    barrier: bool | None = None
    """Whether all stages waited for each other between this iteration and the next one, as for the
    gradient norm of all stages; None if unknown."""


class LinkHealthReport(WireModel):
    """Measurements of all ranks since the last report; sent by rank 0's agent."""

    protocol: Literal[1] = 1
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
    applied_plan_version: PlanVersion
    """Plan version of the iteration in progress."""
    iterations: list[IterationSample] = Field(default_factory=list, max_length=256)
    links: list[LinkSample] = Field(default_factory=list, max_length=512)
    stages: list[StageProfile] = Field(default_factory=list, max_length=256)
    reductions: list[ReductionSample] = Field(default_factory=list, max_length=256)
    rails: list[RailSample] = Field(default_factory=list, max_length=256)
    """Ports that have changed since the last report; all of them every minute."""
    ports: Count | None = None
    """Number of RDMA ports of all ranks together; None until every rank has reported."""
    transports: list[TransportSample] = Field(default_factory=list, max_length=512)
    """Ends of links that have changed since the last report; all of them every minute."""
    message: str | None = Field(default=None, max_length=1024)


class OwnPlan(WireModel):
    """Replicas (dp_replicate) that run another plan than the others, and that plan."""

    replicas: Annotated[list[Count], Field(min_length=1)]
    plan: PlanMessage


class PlanMessage(WireModel):
    """A :class:`~pipemorph.planning.ir.Plan` on the wire; one op string per stage."""

    version: Count
    policy: Policy
    microbatches: Annotated[int, Field(ge=1)]
    stages: list[str]
    routes: list[Route]
    in_flight_limits: list[int | None]
    warmup: list[int]
    dispatch: Dispatch = Dispatch.STATIC
    device_limits: list[int | None] = Field(default_factory=list)
    """One per stage; empty: activations of all stages stay on the device."""
    recompute: list[bool] = Field(default_factory=list)
    """Whether a stage drops activations beyond its device limit and runs the forward again, instead
    of moving them to host memory. One per stage; empty: none does."""
    turns: list[list[Count]] = Field(default_factory=list)
    """For ranks with several stages, the stages of each rank's ops in order; else empty."""
    own: list[OwnPlan] = Field(default_factory=list, max_length=MAX_PLANS - 1)
    """Replicas with a plan of their own; empty: all run this one."""

    @staticmethod
    def of(plan: Plan) -> PlanMessage:
        return PlanMessage(
            version=plan.version,
            policy=plan.policy,
            microbatches=plan.schedule.microbatches,
            stages=plan.schedule.encode(),
            routes=list(plan.routes),
            in_flight_limits=list(plan.in_flight_limits),
            warmup=list(plan.warmup),
            dispatch=plan.dispatch,
            device_limits=list(plan.device_limits) if any(plan.device_limits) else [],
            recompute=list(plan.recompute) if plan.recomputing else [],
            turns=[list(stages) for stages in plan.turns],
            own=[
                OwnPlan(replicas=list(replicas), plan=PlanMessage.of(each))
                for replicas, each in plan.own
            ],
        )

    def of_replica(self, replica: int) -> PlanMessage:
        """The plan of one replica, for its ranks."""
        if not self.own:
            return self
        found = next((each.plan for each in self.own if replica in each.replicas), self)
        return found.model_copy(update={"version": self.version, "own": []})

    def plan(self) -> Plan:
        return Plan(
            version=self.version,
            policy=self.policy,
            schedule=Schedule.decode(self.microbatches, self.stages),
            routes=tuple(self.routes),
            in_flight_limits=tuple(self.in_flight_limits),
            dispatch=self.dispatch,
            warmup=tuple(self.warmup),
            device_limits=tuple(self.device_limits),
            recompute=tuple(self.recompute),
            turns=tuple(map(tuple, self.turns)),
            own=tuple((tuple(each.replicas), each.plan.plan()) for each in self.own),
        )


class Directive(WireModel):
    """A plan for the ranks to apply. ``plan_version`` equals ``plan.version`` and only grows: it
    names the plans of all replicas, which may differ."""

    plan_version: Annotated[int, Field(ge=1)]
    issued_at: WallClock
    """Controller's wall clock, seconds since the epoch."""
    reason: str
    plan: PlanMessage


class DirectiveEnvelope(WireModel):
    """Response to a report or poll: the newest directive above the agent's version, if any."""

    protocol: Literal[1] = 1
    directive: Directive | None = None
