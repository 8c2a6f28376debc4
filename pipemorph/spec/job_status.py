"""Status of a PipeMorphJob on a cluster.

Two processes write it, each its own fields (server-side apply, one field owner each):

* the operator: everything at the top level, and the conditions ``Suspended``, ``PodsReady``,
  ``Running``, ``PreflightPassed``, ``Complete``, ``Failed``, ``Ready``, ``Reconciling`` and
  ``Stalled``;
* the ingest: ``training``, ``control``, ``recoveries``, ``goodput``, ``goodputPercent``,
  ``usefulTime``, and the conditions ``LinksHealthy``, ``ScheduleAdapted``, ``LinksDelegated``,
  ``RailsHealthy``, ``StagesEven``, ``ReductionsHealthy`` and ``ReplicasComplete``.

Times are RFC 3339 text at the top level and seconds elsewhere, sizes are bytes.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pipemorph.spec.status_base import (
    MAX_SLOW_LINKS,
    MAX_STAGES,
    StatusModel,
    Text,
    Timestamp,
    list_field,
    number_field,
)
from pipemorph.spec.status_links import (
    AttemptNodes,
    FallenLinkStatus,
    RailsStatus,
    SlowLink,
    SlowReduction,
    SlowStage,
)
from pipemorph.spec.status_recoveries import PodReplacement, Recoveries

MAX_FALLEN_LINKS = 32
MAX_SLOW_STAGES = 32
MAX_ATTEMPTS_KEPT = 16
MAX_NODES_KEPT = 64
MAX_REPLACEMENTS_KEPT = 16


ConditionStatus = Literal["True", "False", "Unknown"]
JobState = Literal[
    "Pending", "Queued", "Starting", "Running", "Restarting", "Suspended", "Complete", "Failed"
]


class Condition(StatusModel):
    """metav1.Condition."""

    type: str = Field(
        max_length=316, pattern=r"^[A-Za-z][A-Za-z0-9]*$", description="Type of the condition."
    )
    status: ConditionStatus = Field(description="True, False or Unknown.")
    observed_generation: int | None = Field(
        default=None, ge=0, description="Generation of the spec that it describes."
    )
    last_transition_time: Timestamp = Field(description="Time of the last change of status.")
    reason: str = Field(
        min_length=1,
        max_length=1024,
        pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$",
        description="Reason, for programs.",
    )
    message: Text = Field(description="Reason, for people.")


class PodCounts(StatusModel):
    """Pods of the current attempt, each with ``parallelism.ranksPerPod`` ranks."""

    wanted: int = number_field("Pods of an attempt.")
    active: int = number_field("Pending or running pods.")
    ready: int = number_field("Running pods.")
    succeeded: int = number_field("Pods whose ranks have finished.")
    failed: int = number_field("Pods that failed.")


class AttemptStatus(StatusModel):
    """Record of an ended attempt."""

    attempt: int = Field(ge=0, description="Number of the attempt, from 0.")
    started_at: Timestamp | None = Field(default=None, description="Creation time of its Job.")
    ended_at: Timestamp = Field(description="Time at which the operator noticed its end.")
    reason: str = Field(max_length=1024, description="Reason of its end, for programs.")
    message: Text = Field(default="", description="Reason of its end, for people.")
    counted: bool = Field(
        default=True, description="Whether it counts against failurePolicy.maxRestarts."
    )


class NodeRecord(StatusModel):
    """Node that was at an end of a slow link when an attempt ended."""

    name: str = Field(max_length=253, description="Name of the node.")
    attempts: list[int] = list_field(
        MAX_ATTEMPTS_KEPT, "Attempts at whose end one of its links was slow."
    )
    excluded: bool = Field(default=False, description="Whether the next attempt avoids it.")


class AdaptationSummary(StatusModel):
    """Plan change and its effect; times in seconds, memory in bytes per stage."""

    plan_version: int = Field(ge=1, description="Version of the plan.")
    kind: str = Field(
        max_length=16,
        description="adapt; return: to the initial plan; revert: to the plan before a change "
        "whose measured gain was below its prediction.",
    )
    reason: Text = Field(description="Reason, with the prediction.")
    effect: Text | None = Field(
        default=None, description="Effect on iteration time and bubble, for people."
    )
    detected_at: Timestamp = Field(description="Time of the decision.")
    detected_at_iteration: int = Field(ge=0, description="Iteration in progress at that time.")
    applied_at_iteration: int | None = Field(
        default=None, ge=0, description="First iteration under the new plan."
    )
    links: list[int] = list_field(MAX_STAGES, "Slow links that caused it.")
    warmup_before: list[int] = list_field(MAX_STAGES, "Warm-up per stage before.")
    warmup_after: list[int] = list_field(MAX_STAGES, "Warm-up per stage after.")
    iteration_seconds_before: float | None = Field(
        default=None, description="Median iteration time of the old plan under the disturbance."
    )
    iteration_seconds_after: float | None = Field(
        default=None, description="Median iteration time under the new plan."
    )
    promised: float | None = Field(
        default=None,
        description="Predicted saving as a fraction of an iteration; effect shows it in percent.",
    )
    measured: float | None = Field(
        default=None,
        description="Measured saving as a fraction of an iteration; effect shows it in percent.",
    )
    bubble_before: float | None = Field(
        default=None, description="Bubble fraction before; effect shows it in percent."
    )
    bubble_after: float | None = Field(
        default=None, description="Bubble fraction after; effect shows it in percent."
    )
    peak_memory_before: list[int] = list_field(
        MAX_STAGES, "Peak bytes per stage before; 0 where not reported."
    )
    peak_memory_after: list[int] = list_field(
        MAX_STAGES, "Peak bytes per stage after; 0 where not reported."
    )
    offloaded_microbatches: list[int] = list_field(
        MAX_STAGES,
        "Microbatches per iteration whose activations the new plan moves to host "
        "memory, per stage.",
    )
    recomputed_microbatches: list[int] = list_field(
        MAX_STAGES,
        "Microbatches per iteration whose forward the new plan runs again, per stage.",
    )
    fused_stages: list[int] = list_field(MAX_STAGES, "Stages whose backwards the new plan fuses.")
    shares: list[int] = list_field(
        MAX_STAGES, "Microbatches per replica under the new plan; empty: equal numbers."
    )


class TrainingStatus(StatusModel):
    """Summary of the ranks' reports. Written by the ingest every few seconds."""

    attempt: int = number_field("Attempt of the reports.")
    state: str = Field(
        default="starting", max_length=32, description="starting, training, finished or failed."
    )
    message: Text | None = Field(default=None, description="Message of the ranks, if any.")
    last_report_time: Timestamp | None = Field(default=None, description="Newest report.")
    progress: Text | None = Field(
        default=None, description="Iterations, their time and their bubble, for people."
    )
    done: str | None = Field(
        default=None,
        max_length=8,
        description="Finished part of all iterations in percent, such as 43%.",
    )
    left: str | None = Field(
        default=None,
        max_length=32,
        description="Remaining time as of lastReportTime, such as 2h10m: remaining iterations ×"
        " iterationSeconds.",
    )
    gain: str | None = Field(
        default=None,
        max_length=32,
        description="Gain of the newest measured change of plan, promised/measured, in percent of"
        " an iteration.",
    )
    iteration: int = number_field("Iteration in progress at stage 0.")
    iteration_seconds: float | None = Field(
        default=None, ge=0, description="Median time of the newest iterations."
    )
    bubble_fraction: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Idle time over stages × iteration time; progress shows it in percent.",
    )
    idle_seconds: dict[str, float] = Field(
        default_factory=dict,
        description="Idle seconds of an iteration by cause (bubble, link, stage, work, data, gc,"
        " checkpoint, reduction, other), of the newest sampled iterations; mean over ranks.",
    )
    loss: float | None = Field(default=None, description="Loss of the newest iteration.")
    warmup: list[int] = list_field(MAX_STAGES, "Warm-up per stage, by the newest plan.")
    routes: list[str] = list_field(
        MAX_STAGES,
        "Route per link, by the newest plan.",
    )
    shares: list[int] = list_field(
        MAX_STAGES, "Microbatches per replica, by the newest plan; empty: equal numbers."
    )
    offloaded_microbatches: list[int] = list_field(
        MAX_STAGES,
        "Microbatches per iteration whose activations go to host memory, per stage, "
        "by the newest plan.",
    )
    recomputed_microbatches: list[int] = list_field(
        MAX_STAGES,
        "Microbatches per iteration whose forward runs again before their backward, per stage, "
        "by the newest plan.",
    )
    wanted_plan_version: int = number_field("Version of the newest plan of this attempt.")
    observed_plan_version: int = number_field("Newest version that the ranks have received.")
    applied_plan_version: int = number_field("Version of the plan in effect.")
    slow_link_count: int = number_field("Number of slow links.")
    slow_links: list[SlowLink] = list_field(MAX_SLOW_LINKS, "The slowest links, slowest first.")
    unknown_link_count: int = number_field("Links without recent samples.")
    slow_reduction_count: int = number_field("Number of slow gradient reductions.")
    slow_reductions: list[SlowReduction] = list_field(
        MAX_SLOW_LINKS, "The slowest gradient reductions, slowest first."
    )
    transports: list[str] = list_field(
        MAX_STAGES,
        "Transport of each link, as reported: gloo, nccl, tcp, shm or rdma; joined "
        "by + if replicas or directions differ, empty if unknown.",
    )
    fallen_link_count: int = number_field("Links that fell back from the agreed transport.")
    fallen_links: list[FallenLinkStatus] = list_field(MAX_FALLEN_LINKS, "Ends of some such links.")
    link_fallbacks: int = number_field("Losses of the last rail by an end of a link.")
    link_failbacks: int = number_field("Recoveries of a rail by a link.")
    rails: RailsStatus | None = Field(default=None, description="Health of the ranks' RDMA ports.")
    slow_stage_count: int = number_field("Stages that compute slower than they should.")
    slow_stages: list[SlowStage] = list_field(
        MAX_SLOW_STAGES, "The slowest of them, slowest first."
    )
    peak_memory: list[int] = list_field(MAX_STAGES, "Peak bytes per stage; 0 where not reported.")
    adaptations: int = number_field("Plan changes so far.")
    saved_seconds: float = Field(
        default=0.0,
        description="Predicted seconds that all plan changes have saved so far, compared with the"
        " initial plan.",
    )
    saved_error_seconds: float = Field(
        default=0.0,
        ge=0,
        description="Error of savedSeconds, estimated from measured gains.",
    )
    last_adaptation: AdaptationSummary | None = Field(
        default=None, description="The newest plan change, with figures before and after."
    )


class ControlStatus(StatusModel):
    """Plan versions in use."""

    plan_version: int = Field(ge=0, description="Highest plan version issued; never decreases.")


class UsefulTime(StatusModel):
    """Finished iterations of a job, each counted once, over all attempts."""

    seconds: float = Field(default=0.0, ge=0, description="Time of these iterations.")
    iterations: int = number_field("Number of finished iterations, as reported.")


class JobStatus(StatusModel):
    """Observed state of a job, written by the operator and the ingest."""

    observed_generation: int | None = Field(
        default=None, ge=0, description="Generation of the spec last reconciled."
    )
    state: JobState | None = Field(default=None, description="The conditions in one word.")
    ready: str | None = Field(
        default=None, max_length=32, description="Ready pods of all pods, such as 3/4."
    )
    attempt: int | None = Field(
        default=None, ge=0, description="Attempt in progress, from 0; grows with every start."
    )
    job_name: str | None = Field(
        default=None, max_length=63, description="The attempt's batch/v1 Job."
    )
    job_uid: str | None = Field(
        default=None, max_length=64, description="UID of that Job, once it is created."
    )
    start_time: Timestamp | None = Field(
        default=None, description="Time of the job's first start or last resumption."
    )
    job_start_time: Timestamp | None = Field(
        default=None,
        description="Last start or resumption of that Job; a change means that its queue suspended"
        " it in between.",
    )
    ran_seconds: int = number_field(
        "Seconds the job ran before startTime, counted by spec.activeDeadlineSeconds."
    )
    attempt_start_time: Timestamp | None = Field(
        default=None, description="Start of the attempt in progress."
    )
    completion_time: Timestamp | None = Field(
        default=None, description="Time at which the job became Complete or Failed."
    )
    restarts: int = number_field("Restarts counted against failurePolicy.maxRestarts.")
    disruptions: int = number_field("Restarts not counted: evictions, preemptions, lost nodes.")
    pods: PodCounts | None = Field(default=None, description="Pods of the current attempt.")
    attempts: list[AttemptStatus] = list_field(MAX_ATTEMPTS_KEPT, "Ended attempts, newest last.")
    nodes: list[NodeRecord] = list_field(
        MAX_NODES_KEPT, "Nodes that were at an end of a slow link."
    )
    attempt_nodes: AttemptNodes | None = Field(
        default=None, description="Nodes at the slow links of the attempt in progress."
    )
    replacements: list[PodReplacement] = list_field(
        MAX_REPLACEMENTS_KEPT, "Pods that were replaced within their Job, newest last."
    )
    conditions: list[Condition] = Field(
        default_factory=list,
        max_length=24,
        json_schema_extra={
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["type"],
        },
        description="Suspended, PodsReady, Running, PreflightPassed, LinksHealthy,"
        " ScheduleAdapted, LinksDelegated, RailsHealthy, StagesEven, ReductionsHealthy,"
        " ReplicasComplete, Complete, Failed; and Ready, Reconciling and Stalled, as"
        " kstatus reads them.",
    )
    training: TrainingStatus | None = Field(
        default=None, description="Summary of the ranks' reports."
    )
    control: ControlStatus | None = Field(
        default=None, description="Versions of the plans that were issued."
    )
    recoveries: Recoveries | None = Field(
        default=None, description="Starts of the ranks within their pods, after failures."
    )
    goodput: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Useful time over the time in which the job had its place: since its first"
        " start, without suspension and queueing; as of lastReportTime. goodputPercent shows it in"
        " percent.",
    )
    goodput_percent: str | None = Field(
        default=None, max_length=8, description="goodput in percent, such as 91%."
    )
    useful_time: UsefulTime | None = Field(
        default=None, description="Iterations on which goodput is based."
    )


def find_condition(status: JobStatus, kind: str) -> Condition | None:
    """Condition of a type; None if it does not exist."""
    return next((c for c in status.conditions if c.type == kind), None)
