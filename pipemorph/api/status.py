"""The status of a PipeMorphJob on a cluster.

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

from pipemorph.api.status_base import (
    MAX_SLOW_LINKS,
    MAX_STAGES,
    StatusModel,
    Text,
    Timestamp,
    at_most,
    number,
)
from pipemorph.api.status_links import (
    AttemptNodes,
    FallenLink,
    RailsStatus,
    SlowLink,
    SlowReduction,
    SlowStage,
)
from pipemorph.api.status_recoveries import PodReplacement, Recoveries

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
    last_transition_time: Timestamp = Field(description="When status last changed.")
    reason: str = Field(
        min_length=1,
        max_length=1024,
        pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$",
        description="Reason, for programs.",
    )
    message: Text = Field(description="Reason, for people.")


class PodCounts(StatusModel):
    """Pods of the current attempt, each with ``parallelism.ranksPerPod`` ranks."""

    wanted: int = number("Pods of an attempt.")
    active: int = number("Pending or running pods.")
    ready: int = number("Running pods.")
    succeeded: int = number("Pods whose ranks have finished.")
    failed: int = number("Pods that failed.")


class AttemptRecord(StatusModel):
    """Record of an ended attempt."""

    attempt: int = Field(ge=0, description="Number of the attempt, from 0.")
    started_at: Timestamp | None = Field(default=None, description="When its Job was created.")
    ended_at: Timestamp = Field(description="When the operator found that it had ended.")
    reason: str = Field(max_length=1024, description="Why it ended, for programs.")
    message: Text = Field(default="", description="Why it ended, for people.")
    counted: bool = Field(
        default=True, description="Whether it counts against failurePolicy.maxRestarts."
    )


class NodeRecord(StatusModel):
    """A node that was at an end of a slow link when an attempt ended."""

    name: str = Field(max_length=253, description="Name of the node.")
    attempts: list[int] = at_most(
        MAX_ATTEMPTS_KEPT, "Attempts at whose end one of its links was slow."
    )
    excluded: bool = Field(default=False, description="Whether the next attempt avoids it.")


class AdaptationSummary(StatusModel):
    """One plan change and its effect; times in seconds, memory in bytes per stage."""

    plan_version: int = Field(ge=1, description="Version of the plan.")
    kind: str = Field(
        max_length=16,
        description="adapt; return to the initial plan; or revert: back to the plan before a "
        "change that did not bring its promise.",
    )
    reason: Text = Field(description="Why, with the prediction.")
    effect: Text | None = Field(
        default=None, description="What it did to iteration time and bubble, for people."
    )
    detected_at: Timestamp = Field(description="When the controller decided.")
    detected_at_iteration: int = Field(ge=0, description="Iteration then in progress.")
    applied_at_iteration: int | None = Field(
        default=None, ge=0, description="First iteration under the new plan."
    )
    links: list[int] = at_most(MAX_STAGES, "Slow links that caused it.")
    warmup_before: list[int] = at_most(MAX_STAGES, "Warm-up per stage before.")
    warmup_after: list[int] = at_most(MAX_STAGES, "Warm-up per stage after.")
    iteration_seconds_before: float | None = Field(
        default=None, description="Median iteration time of the old plan under the disturbance."
    )
    iteration_seconds_after: float | None = Field(
        default=None, description="Median iteration time under the new plan."
    )
    promised: float | None = Field(
        default=None,
        description="Fraction of an iteration that the plan was predicted to save; effect has it"
        " in percent.",
    )
    measured: float | None = Field(
        default=None,
        description="Fraction of an iteration that it saves; effect has it in percent.",
    )
    bubble_before: float | None = Field(
        default=None, description="Bubble fraction before; effect has it in percent."
    )
    bubble_after: float | None = Field(
        default=None, description="Bubble fraction after; effect has it in percent."
    )
    peak_memory_before: list[int] = at_most(
        MAX_STAGES, "Peak bytes per stage before; 0 where not reported."
    )
    peak_memory_after: list[int] = at_most(
        MAX_STAGES, "Peak bytes per stage after; 0 where not reported."
    )
    offloaded_microbatches: list[int] = at_most(
        MAX_STAGES,
        "Microbatches per iteration whose activations the new plan moves to host "
        "memory, per stage.",
    )
    recomputed_microbatches: list[int] = at_most(
        MAX_STAGES,
        "Microbatches per iteration whose forward the new plan runs again, per stage.",
    )
    fused_stages: list[int] = at_most(MAX_STAGES, "Stages whose backwards the new plan fuses.")


class TrainingStatus(StatusModel):
    """Summary of the ranks' reports. Written by the ingest every few seconds."""

    attempt: int = number("Attempt of the reports.")
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
        description="Part of the iterations that is done, in percent, such as 43%: 100% is all of"
        " them.",
    )
    left: str | None = Field(
        default=None,
        max_length=32,
        description="Time left as of lastReportTime, such as 2h10m: iterations left at"
        " iterationSeconds.",
    )
    gain: str | None = Field(
        default=None,
        max_length=32,
        description="Gain of the newest measured change of plan, promised/measured, in percent of"
        " an iteration.",
    )
    iteration: int = number("Iteration in progress at stage 0.")
    iteration_seconds: float | None = Field(
        default=None, ge=0, description="Median time of the newest iterations."
    )
    bubble_fraction: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Idle time over stages × iteration time; progress has it in percent.",
    )
    loss: float | None = Field(default=None, description="Loss of the newest iteration.")
    warmup: list[int] = at_most(MAX_STAGES, "Warm-up per stage, by the newest plan.")
    routes: list[str] = at_most(
        MAX_STAGES,
        "Route per link, by the newest plan.",
    )
    offloaded_microbatches: list[int] = at_most(
        MAX_STAGES,
        "Microbatches per iteration whose activations go to host memory, per stage, "
        "by the newest plan.",
    )
    recomputed_microbatches: list[int] = at_most(
        MAX_STAGES,
        "Microbatches per iteration whose forward runs again before their backward, per stage, "
        "by the newest plan.",
    )
    wanted_plan_version: int = number("Version of the newest plan of this attempt.")
    observed_plan_version: int = number("Newest version that the ranks have received.")
    applied_plan_version: int = number("Version of the plan in effect.")
    slow_link_count: int = number("Number of slow links.")
    slow_links: list[SlowLink] = at_most(MAX_SLOW_LINKS, "The slowest links, slowest first.")
    unknown_link_count: int = number("Links without recent samples.")
    slow_reduction_count: int = number("Number of slow gradient reductions.")
    slow_reductions: list[SlowReduction] = at_most(
        MAX_SLOW_LINKS, "The slowest gradient reductions, slowest first."
    )
    transports: list[str] = at_most(
        MAX_STAGES,
        "Transport of each link, as reported: gloo, nccl, tcp, shm or rdma; joined "
        "by + if replicas or directions differ, empty if unknown.",
    )
    fallen_link_count: int = number("Links that fell back from the agreed transport.")
    fallen_links: list[FallenLink] = at_most(MAX_FALLEN_LINKS, "Ends of some such links.")
    link_fallbacks: int = number("Times an end of a link lost its last rail.")
    link_failbacks: int = number("Times a link recovered a rail.")
    rails: RailsStatus | None = Field(default=None, description="Health of the ranks' RDMA ports.")
    slow_stage_count: int = number("Stages that compute slower than they should.")
    slow_stages: list[SlowStage] = at_most(MAX_SLOW_STAGES, "The slowest of them, slowest first.")
    peak_memory: list[int] = at_most(MAX_STAGES, "Peak bytes per stage; 0 where not reported.")
    adaptations: int = number("Plan changes so far.")
    saved_seconds: float = Field(
        default=0.0,
        description="What all plan changes saved so far: with the plan of the start, iterations"
        " would have taken so much longer, as predicted.",
    )
    saved_error_seconds: float = Field(
        default=0.0,
        ge=0,
        description="How far savedSeconds may be from the truth, by the gains that were measured.",
    )
    last_adaptation: AdaptationSummary | None = Field(
        default=None, description="The newest plan change, with figures before and after."
    )


class ControlState(StatusModel):
    """The plan versions that are in use."""

    plan_version: int = Field(ge=0, description="Highest plan version issued; never decreases.")


class UsefulTime(StatusModel):
    """The finished iterations of a job, each counted once, over all attempts."""

    seconds: float = Field(default=0.0, ge=0, description="Their time.")
    iterations: int = number("How many iterations of the job are finished, as reported.")


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
        default=None, description="When the job first started, or last resumed."
    )
    job_start_time: Timestamp | None = Field(
        default=None,
        description="When that Job was last started or resumed; a change means that its queue"
        " suspended it in between.",
    )
    ran_seconds: int = number(
        "Seconds the job ran before startTime, counted by spec.activeDeadlineSeconds."
    )
    attempt_start_time: Timestamp | None = Field(
        default=None, description="When the attempt in progress started."
    )
    completion_time: Timestamp | None = Field(
        default=None, description="When the job reached Complete or Failed."
    )
    restarts: int = number("Restarts counted against failurePolicy.maxRestarts.")
    disruptions: int = number("Restarts not counted: evictions, preemptions, lost nodes.")
    pods: PodCounts | None = Field(default=None, description="Pods of the current attempt.")
    attempts: list[AttemptRecord] = at_most(MAX_ATTEMPTS_KEPT, "Ended attempts, newest last.")
    nodes: list[NodeRecord] = at_most(MAX_NODES_KEPT, "Nodes that were at an end of a slow link.")
    attempt_nodes: AttemptNodes | None = Field(
        default=None, description="Nodes at the slow links of the attempt in progress."
    )
    replacements: list[PodReplacement] = at_most(
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
    control: ControlState | None = Field(
        default=None, description="Versions of the plans that were issued."
    )
    recoveries: Recoveries | None = Field(
        default=None, description="Starts of the ranks within their pods, after failures."
    )
    goodput: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Useful time over the time in which the job had its place: since it first"
        " started, without the time in which it was suspended or queued; as of lastReportTime."
        " goodputPercent has it for people.",
    )
    goodput_percent: str | None = Field(
        default=None, max_length=8, description="goodput in percent, such as 91%."
    )
    useful_time: UsefulTime | None = Field(
        default=None, description="The iterations that goodput is made of."
    )


def condition(status: JobStatus, kind: str) -> Condition | None:
    """The condition of a type; None if it does not exist."""
    return next((c for c in status.conditions if c.type == kind), None)
