"""``status`` of a PipeMorphJob on a cluster: the CRD's other half, generated like the spec.

Two processes write it, each its own fields (server-side apply, one field owner each):

* the operator: everything at the top level, and the conditions ``Suspended``, ``PodsReady``,
  ``Running``, ``PreflightPassed``, ``Complete`` and ``Failed``;
* the ingest: ``training``, ``control``, and the conditions ``LinksHealthy``,
  ``ScheduleAdapted``, ``LinksDelegated`` and ``RailsHealthy``.

Times are RFC 3339 text at the top level and seconds elsewhere, sizes are bytes.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

MAX_SLOW_LINKS = 32
MAX_SICK_PORTS = 32
MAX_FALLEN_LINKS = 32
MAX_ATTEMPTS_KEPT = 16
MAX_NODES_KEPT = 64
MAX_STAGES = 512

Timestamp = Annotated[str, Field(json_schema_extra={"format": "date-time"})]
Text = Annotated[str, Field(max_length=32768)]
ConditionStatus = Literal["True", "False", "Unknown"]
JobState = Literal[
    "Pending", "Queued", "Starting", "Running", "Restarting", "Suspended", "Complete", "Failed"
]


class StatusModel(BaseModel):
    """Base of every status model. Lenient: what an older version wrote must still be read."""

    model_config = ConfigDict(extra="ignore", alias_generator=to_camel, populate_by_name=True)


class Condition(StatusModel):
    """metav1.Condition."""

    type: str = Field(
        max_length=316, pattern=r"^[A-Za-z][A-Za-z0-9]*$", description="What it is about."
    )
    status: ConditionStatus = Field(description="True, False or Unknown.")
    observed_generation: int | None = Field(
        default=None, ge=0, description="Generation of the spec it was judged for."
    )
    last_transition_time: Timestamp = Field(description="When status last changed.")
    reason: str = Field(
        min_length=1,
        max_length=1024,
        pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$",
        description="Why, for programs.",
    )
    message: Text = Field(description="Why, for people.")


class PodCounts(StatusModel):
    """Ranks of the current attempt."""

    wanted: int = Field(default=0, ge=0, description="Stages × replicas.")
    active: int = Field(default=0, ge=0, description="Pending or running pods.")
    ready: int = Field(default=0, ge=0, description="Running pods.")
    succeeded: int = Field(default=0, ge=0, description="Ranks that finished.")
    failed: int = Field(default=0, ge=0, description="Pods that failed.")


class AttemptRecord(StatusModel):
    """One attempt that has ended."""

    attempt: int = Field(ge=0, description="Number of the attempt, from 0.")
    started_at: Timestamp | None = Field(default=None, description="When its Job was created.")
    ended_at: Timestamp = Field(description="When it was found to have ended.")
    reason: str = Field(max_length=1024, description="Why it ended, for programs.")
    message: Text = Field(default="", description="Why it ended, for people.")
    counted: bool = Field(
        default=True, description="Whether it counts against failurePolicy.maxRestarts."
    )


class NodeRecord(StatusModel):
    """A node that was at an end of a slow link when an attempt ended."""

    name: str = Field(max_length=253, description="Name of the node.")
    attempts: list[int] = Field(
        default_factory=list,
        max_length=MAX_ATTEMPTS_KEPT,
        description="Attempts at whose end one of its links was slow.",
    )
    excluded: bool = Field(default=False, description="Whether the next attempt avoids it.")


class SlowLink(StatusModel):
    """A link that is slow, as measured."""

    link: int = Field(ge=0, description="Between stage link and stage link + 1.")
    replica: int = Field(default=0, ge=0, description="Replica where it is slowest.")
    direction: str = Field(max_length=16, description="forward or backward, the slower one.")
    delay_ms: float = Field(ge=0, description="One-way time above normal, milliseconds.")
    wire_time_ms: float = Field(ge=0, description="One-way time now, milliseconds.")
    confidence: float = Field(ge=0, le=1, description="Probability that it is slow.")


class FallenLink(StatusModel):
    """A link that runs over less than it was made for, as one of its ends says."""

    link: int = Field(ge=0, description="Between stage link and stage link + 1.")
    replica: int = Field(default=0, ge=0, description="Replica of the link.")
    direction: str = Field(max_length=16, description="forward or backward: what that end sends.")
    agreed: str = Field(max_length=16, description="What it was made for, as rdma.")
    transport: str = Field(max_length=16, description="What carries it now, as tcp.")
    fallbacks: int = Field(default=0, ge=0, description="Times that it fell back.")
    message: Text = Field(default="", description="Why, in the engine's words.")


class SickPort(StatusModel):
    """An RDMA port of a rank's host that is not well."""

    stage: int = Field(ge=0, description="Stage of the rank that sees it.")
    replica: int = Field(default=0, ge=0, description="Replica of that rank.")
    device: str = Field(max_length=64, description="RDMA device, as mlx5_0.")
    port: int = Field(ge=1, description="Port of the device.")
    state: str = Field(max_length=32, description="State of the port, as ACTIVE or DOWN.")
    message: Text = Field(description="What is wrong, for people.")


class RailsStatus(StatusModel):
    """RDMA ports that the ranks see, judged by state and counters."""

    ports: int = Field(default=0, ge=0, description="Ports heard of.")
    expected_ports: int | None = Field(
        default=None, ge=0, description="Ports there are, once every rank has looked."
    )
    sick_count: int = Field(default=0, ge=0, description="Ports that are not well.")
    sick_ports: list[SickPort] = Field(
        default_factory=list, max_length=MAX_SICK_PORTS, description="Some of them, by stage."
    )
    congested_count: int = Field(
        default=0, ge=0, description="Ports that see much congestion notification."
    )
    unavailable_count: int = Field(
        default=0, ge=0, description="Ports whose state or counters cannot be read in the pod."
    )


class AdaptationSummary(StatusModel):
    """One change of plan and what it was worth; seconds, and bytes per stage."""

    plan_version: int = Field(ge=1, description="Version of the plan.")
    kind: str = Field(max_length=16, description="adapt, or return to the plan of the start.")
    reason: Text = Field(description="Why, with what was predicted.")
    detected_at: Timestamp = Field(description="When the controller decided.")
    detected_at_iteration: int = Field(ge=0, description="Iteration then in progress.")
    applied_at_iteration: int | None = Field(
        default=None, ge=0, description="First iteration under the new plan."
    )
    links: list[int] = Field(
        default_factory=list, max_length=MAX_STAGES, description="Links it was made for."
    )
    warmup_before: list[int] = Field(
        default_factory=list, max_length=MAX_STAGES, description="Warm-up per stage before."
    )
    warmup_after: list[int] = Field(
        default_factory=list, max_length=MAX_STAGES, description="Warm-up per stage after."
    )
    iteration_seconds_before: float | None = Field(
        default=None, description="Median iteration time of the old plan under the disturbance."
    )
    iteration_seconds_after: float | None = Field(
        default=None, description="Median iteration time under the new plan."
    )
    bubble_before: float | None = Field(default=None, description="Bubble fraction before.")
    bubble_after: float | None = Field(default=None, description="Bubble fraction after.")
    peak_memory_before: list[int] = Field(
        default_factory=list,
        max_length=MAX_STAGES,
        description="Peak bytes per stage before; 0 where not reported.",
    )
    peak_memory_after: list[int] = Field(
        default_factory=list,
        max_length=MAX_STAGES,
        description="Peak bytes per stage after; 0 where not reported.",
    )
    offloaded_microbatches: list[int] = Field(
        default_factory=list,
        max_length=MAX_STAGES,
        description="Microbatches per iteration whose activations the new plan moves to host "
        "memory, per stage.",
    )
    fused_stages: list[int] = Field(
        default_factory=list,
        max_length=MAX_STAGES,
        description="Stages whose backwards the new plan fuses.",
    )


class TrainingStatus(StatusModel):
    """What the ranks report, summed up. Written by the ingest every few seconds."""

    attempt: int = Field(default=0, ge=0, description="Attempt the report is of.")
    state: str = Field(
        default="starting", max_length=32, description="starting, training, finished or failed."
    )
    message: Text | None = Field(default=None, description="What the ranks say, if anything.")
    last_report_time: Timestamp | None = Field(default=None, description="Newest report.")
    iteration: int = Field(default=0, ge=0, description="Iteration in progress at stage 0.")
    iteration_seconds: float | None = Field(
        default=None, ge=0, description="Median time of the newest iterations."
    )
    bubble_fraction: float | None = Field(
        default=None, ge=0, le=1, description="Idle time over stages × iteration time."
    )
    loss: float | None = Field(default=None, description="Loss of the newest iteration.")
    warmup: list[int] = Field(
        default_factory=list, max_length=MAX_STAGES, description="Warm-up per stage, as wanted."
    )
    paths: list[str] = Field(
        default_factory=list, max_length=MAX_STAGES, description="Path per link, as wanted."
    )
    offloaded_microbatches: list[int] = Field(
        default_factory=list,
        max_length=MAX_STAGES,
        description="Microbatches per iteration whose activations go to host memory, per stage, "
        "as wanted.",
    )
    wanted_plan_version: int = Field(
        default=0, ge=0, description="Version of the plan that is wanted, of this attempt."
    )
    observed_plan_version: int = Field(
        default=0, ge=0, description="Newest version the ranks have."
    )
    applied_plan_version: int = Field(default=0, ge=0, description="Version of the plan that runs.")
    slow_link_count: int = Field(default=0, ge=0, description="Links that are slow now.")
    slow_links: list[SlowLink] = Field(
        default_factory=list,
        max_length=MAX_SLOW_LINKS,
        description="The slowest of them, slowest first.",
    )
    unknown_link_count: int = Field(default=0, ge=0, description="Links without recent samples.")
    transports: list[str] = Field(
        default_factory=list,
        max_length=MAX_STAGES,
        description="What carries each link, as reported: gloo, nccl, tcp, shm or rdma; joined "
        "by + where replicas or directions differ, empty where not known.",
    )
    fallen_link_count: int = Field(
        default=0, ge=0, description="Links that run over less than they were made for now."
    )
    fallen_links: list[FallenLink] = Field(
        default_factory=list, max_length=MAX_FALLEN_LINKS, description="Ends of some of them."
    )
    link_fallbacks: int = Field(
        default=0, ge=0, description="Times that an end of a link lost its last rail."
    )
    link_failbacks: int = Field(default=0, ge=0, description="Times that a rail took over again.")
    rails: RailsStatus | None = Field(
        default=None, description="RDMA ports that the ranks see, judged."
    )
    peak_memory: list[int] = Field(
        default_factory=list,
        max_length=MAX_STAGES,
        description="Peak bytes per stage; 0 where not reported.",
    )
    adaptations: int = Field(default=0, ge=0, description="Changes of plan so far.")
    last_adaptation: AdaptationSummary | None = Field(
        default=None, description="The newest change of plan, with figures before and after."
    )


class ControlState(StatusModel):
    """What the controller needs to go on after a restart. Written before a directive is served."""

    attempt: int = Field(ge=0, description="Attempt the directive is of.")
    plan_version: int = Field(ge=0, description="Highest plan version ever given out; only grows.")
    snapshot: str = Field(
        max_length=1 << 20, description="State of the controller: JSON, zlib, base64."
    )


class JobStatus(StatusModel):
    """What is, as the operator and the ingest see it."""

    observed_generation: int | None = Field(
        default=None, ge=0, description="Generation of the spec last acted on."
    )
    state: JobState | None = Field(default=None, description="The conditions in one word.")
    ready: str | None = Field(
        default=None, max_length=32, description="Ready ranks of those wanted, as 3/4."
    )
    attempt: int | None = Field(
        default=None, ge=0, description="Attempt in progress, from 0; grows with every start."
    )
    job_name: str | None = Field(
        default=None, max_length=63, description="The attempt's batch/v1 Job."
    )
    job_uid: str | None = Field(
        default=None, max_length=64, description="UID of that Job, once it was created."
    )
    start_time: Timestamp | None = Field(
        default=None, description="When the job first started, or last resumed."
    )
    job_start_time: Timestamp | None = Field(
        default=None,
        description="When that Job last began to make pods; a change means that its queue stopped"
        " it in between.",
    )
    ran_seconds: int = Field(
        default=0,
        ge=0,
        description="Seconds the job had run before startTime, of spec.activeDeadlineSeconds.",
    )
    attempt_start_time: Timestamp | None = Field(
        default=None, description="When the attempt in progress was decided."
    )
    completion_time: Timestamp | None = Field(
        default=None, description="When the job reached Complete or Failed."
    )
    restarts: int = Field(
        default=0, ge=0, description="Restarts counted against failurePolicy.maxRestarts."
    )
    disruptions: int = Field(
        default=0, ge=0, description="Restarts not counted: evictions, preemptions, lost nodes."
    )
    pods: PodCounts | None = Field(default=None, description="Ranks of the current attempt.")
    attempts: list[AttemptRecord] = Field(
        default_factory=list,
        max_length=MAX_ATTEMPTS_KEPT,
        description="Attempts that have ended, newest last.",
    )
    nodes: list[NodeRecord] = Field(
        default_factory=list,
        max_length=MAX_NODES_KEPT,
        description="Nodes that were at an end of a slow link.",
    )
    conditions: list[Condition] = Field(
        default_factory=list,
        max_length=16,
        json_schema_extra={
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["type"],
        },
        description="Suspended, PodsReady, Running, PreflightPassed, LinksHealthy,"
        " ScheduleAdapted, LinksDelegated, RailsHealthy, Complete, Failed.",
    )
    training: TrainingStatus | None = Field(
        default=None, description="What the ranks report, summed up."
    )
    control: ControlState | None = Field(
        default=None, description="Directives given out; written before they are served."
    )


def condition(status: JobStatus, kind: str) -> Condition | None:
    """The condition of a type, if it is there."""
    return next((c for c in status.conditions if c.type == kind), None)
