"""The status of a PipeMorphJob on a cluster.

Two processes write it, each its own fields (server-side apply, one field owner each):

* the operator: everything at the top level, and the conditions ``Suspended``, ``PodsReady``,
  ``Running``, ``PreflightPassed``, ``Complete``, ``Failed``, ``Ready``, ``Reconciling`` and
  ``Stalled``;
* the ingest: ``training``, ``control``, ``recoveries``, ``goodput``, ``goodputPercent``,
  ``usefulTime``, and the conditions ``LinksHealthy``, ``ScheduleAdapted``, ``LinksDelegated``,
  ``RailsHealthy``, ``StagesEven``, ``ReductionsHealthy``, ``ReplicasComplete`` and
  ``SparesReady``.

Times are RFC 3339 text at the top level and seconds elsewhere, sizes are bytes.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

MAX_SLOW_LINKS = 32
MAX_SICK_PORTS = 32
MAX_FALLEN_LINKS = 32
MAX_SLOW_STAGES = 32
MAX_ATTEMPTS_KEPT = 16
MAX_NODES_KEPT = 64
MAX_RECOVERIES_KEPT = 10
MAX_REPLICAS = 4096
MAX_REPLACED_KEPT = 16
MAX_PLACES = 512
MAX_REPLACEMENTS_KEPT = 16
MAX_STAGES = 512
MAX_REFUSED_KEPT = 8
MAX_PLANS = 8
"""Most different plans of a job's replicas at a time."""

Timestamp = Annotated[str, Field(json_schema_extra={"format": "date-time"})]
Text = Annotated[str, Field(max_length=32768)]
ConditionStatus = Literal["True", "False", "Unknown"]
JobState = Literal[
    "Pending", "Queued", "Starting", "Running", "Restarting", "Suspended", "Complete", "Failed"
]


def _number(description: str) -> Any:
    """A number from 0, by default 0."""
    return Field(default=0, ge=0, description=description)


def _link_name() -> Any:
    """A text, by default empty."""
    text = "The link for people, such as link 1 (stage 1 to 2)."
    return Field(default="", max_length=128, description=text)


def _at_most(items: int, description: str) -> Any:
    """A list with at most so many items, by default empty."""
    return Field(default_factory=list, max_length=items, description=description)


class StatusModel(BaseModel):
    """Base of every status model. Lenient, so that status of older versions stays readable."""

    model_config = ConfigDict(extra="ignore", alias_generator=to_camel, populate_by_name=True)


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
    """Pods of the current attempt, each with ``parallelism.ranksPerPod`` ranks, and spares."""

    wanted: int = _number("Pods of an attempt.")
    active: int = _number("Pending or running pods.")
    ready: int = _number("Running pods.")
    succeeded: int = _number("Pods whose ranks have finished.")
    failed: int = _number("Pods that failed.")


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
    attempts: list[int] = _at_most(
        MAX_ATTEMPTS_KEPT, "Attempts at whose end one of its links was slow."
    )
    excluded: bool = Field(default=False, description="Whether the next attempt avoids it.")


class SlowLink(StatusModel):
    """A slow link, with its measurements."""

    name: str = Field(
        default="",
        max_length=128,
        description="The link for people, such as link 1 (stage 1 to 2).",
    )
    link: int = Field(ge=0, description="Between stage link and stage link + 1.")
    replica: int = _number("Pipeline column where it is slowest; with replicas alone, the replica.")
    direction: str = Field(max_length=16, description="The slower direction: forward or backward.")
    delay_ms: float = Field(ge=0, description="One-way time above normal, milliseconds.")
    wire_time_ms: float = Field(ge=0, description="One-way time now, milliseconds.")
    confidence: float = Field(ge=0, le=1, description="Probability that it is slow, 0 to 1.")
    since: Timestamp | None = Field(default=None, description="When it was found to be slow.")


class SlowReduction(StatusModel):
    """A data-parallel group that reduces its gradients slowly, with its measurements."""

    stage: int = Field(ge=0, description="Stage whose gradients it reduces.")
    replica: int = _number("First pipeline column of the group.")
    time_ms: float = Field(ge=0, description="Time of a reduction now, milliseconds.")
    normal_ms: float = Field(ge=0, description="Usual time, milliseconds.")
    exposed_ms: float = Field(
        ge=0, description="Time after the last op of the stage, milliseconds."
    )
    bytes: int = _number("Gradients of each rank.")


class LinkNodes(StatusModel):
    """The nodes of a link's two ends."""

    link: int = Field(ge=0, description="Between stage link and stage link + 1.")
    replica: int = _number("Replica of the link.")
    nodes: list[str] = Field(
        max_length=2, description="Nodes of the ends; fewer than two where one is not known."
    )


class AttemptNodes(StatusModel):
    """Nodes of the attempt in progress, noted while a link is slow: when an attempt ends, its pods
    may be gone before the operator can ask where they ran."""

    links: list[LinkNodes] = _at_most(MAX_SLOW_LINKS, "Links that are or were slow.")
    count: int = _number("Nodes on which the attempt runs.")
    others: int = _number("Those of them that are neither here nor in status.nodes.")


class FallenLink(StatusModel):
    """A link that fell back from the agreed transport, as one of its ends reports."""

    name: str = Field(
        default="",
        max_length=128,
        description="The link for people, such as link 1 (stage 1 to 2).",
    )
    link: int = Field(ge=0, description="Between stage link and stage link + 1.")
    replica: int = _number("Pipeline column of the link; with replicas alone, the replica.")
    direction: str = Field(
        max_length=16, description="Direction in which that end sends: forward or backward."
    )
    agreed: str = Field(max_length=16, description="Transport agreed on, such as rdma.")
    transport: str = Field(max_length=16, description="Transport in use now, such as tcp.")
    fallbacks: int = _number("Number of fallbacks.")
    message: Text = Field(default="", description="The engine's reason.")


class SlowStage(StatusModel):
    """A stage that computes slower than its peers, or than before."""

    stage: int = Field(ge=0, description="Number of the stage.")
    replica: int | None = Field(
        default=None,
        ge=0,
        description="Pipeline column of the slow rank; with replicas alone, the replica. None: the"
        " stage is slow in all columns.",
    )
    microbatch_ms: float = Field(ge=0, description="Milliseconds of F, B and W of one microbatch.")
    usual_ms: float = Field(ge=0, description="The same of its peers, or in its best iterations.")


class SickPort(StatusModel):
    """An RDMA port of a rank's host with a problem."""

    stage: int = Field(ge=0, description="Stage of the rank that sees it.")
    replica: int = _number("Pipeline column of that rank; with replicas alone, the replica.")
    device: str = Field(max_length=64, description="RDMA device, such as mlx5_0.")
    port: int = Field(ge=1, description="Port of the device.")
    state: str = Field(max_length=32, description="State of the port, such as ACTIVE or DOWN.")
    message: Text = Field(description="The problem, for people.")


class RailsStatus(StatusModel):
    """Health of the ranks' RDMA ports, by state and counters."""

    ports: int = _number("Ports reported.")
    expected_ports: int | None = Field(
        default=None, ge=0, description="Ports of all ranks, once every rank has reported."
    )
    sick_count: int = _number("Ports with a problem.")
    sick_ports: list[SickPort] = _at_most(MAX_SICK_PORTS, "Some of them, by stage.")
    congested_count: int = _number("Ports with a high rate of congestion notifications.")
    unavailable_count: int = _number("Ports whose state or counters cannot be read in the pod.")


class FabricDirectionStatus(StatusModel):
    """What carries from one RDMA port to another."""

    source: Text = Field(description="Pod and port that write.")
    target: Text = Field(description="Pod and port that they write to.")
    gbps: float | None = Field(default=None, ge=0, description="Gigabits per second.")
    round_trip_us: float | None = Field(
        default=None, ge=0, description="Median round trip, microseconds."
    )
    path_mtu: int | None = Field(
        default=None, ge=0, description="Largest MTU whose packets arrive; none if nothing does."
    )
    resent: int | None = Field(default=None, ge=0, description="Packets that were sent again.")


class FabricStatus(StatusModel):
    """The check of the RDMA ports between the pods, before training (placement.rdma.check)."""

    message: Text = Field(default="", description="Why it was not made; empty if it was.")
    pods: int = _number("Pods that took part.")
    directions: int = _number("Directions between RDMA ports that were measured.")
    gbps: float | None = Field(default=None, ge=0, description="Their median rate.")
    round_trip_us: float | None = Field(
        default=None, ge=0, description="Their median round trip, microseconds."
    )
    sick_count: int = _number("Findings.")
    sick: list[Text] = _at_most(MAX_SICK_PORTS, "Some of them, for people.")
    slowest: list[FabricDirectionStatus] = _at_most(
        MAX_SICK_PORTS, "Some directions: sick ones first, then the slowest."
    )


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
    links: list[int] = _at_most(MAX_STAGES, "Slow links that caused it.")
    warmup_before: list[int] = _at_most(MAX_STAGES, "Warm-up per stage before.")
    warmup_after: list[int] = _at_most(MAX_STAGES, "Warm-up per stage after.")
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
    peak_memory_before: list[int] = _at_most(
        MAX_STAGES, "Peak bytes per stage before; 0 where not reported."
    )
    peak_memory_after: list[int] = _at_most(
        MAX_STAGES, "Peak bytes per stage after; 0 where not reported."
    )
    offloaded_microbatches: list[int] = _at_most(
        MAX_STAGES,
        "Microbatches per iteration whose activations the new plan moves to host "
        "memory, per stage.",
    )
    recomputed_microbatches: list[int] = _at_most(
        MAX_STAGES,
        "Microbatches per iteration whose forward the new plan runs again, per stage.",
    )
    fused_stages: list[int] = _at_most(MAX_STAGES, "Stages whose backwards the new plan fuses.")


class TrainingStatus(StatusModel):
    """Summary of the ranks' reports. Written by the ingest every few seconds."""

    attempt: int = _number("Attempt of the reports.")
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
    iteration: int = _number("Iteration in progress at stage 0.")
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
    warmup: list[int] = _at_most(MAX_STAGES, "Warm-up per stage, by the newest plan.")
    routes: list[str] = _at_most(
        MAX_STAGES,
        "Route per link, by the newest plan: delegated if it is in any replica.",
    )
    own_plans: list[Annotated[str, Field(max_length=512)]] = _at_most(
        MAX_PLANS - 1,
        "Replicas that run another plan than warmup tells, and for what delays; empty if all "
        "run one.",
    )
    offloaded_microbatches: list[int] = _at_most(
        MAX_STAGES,
        "Microbatches per iteration whose activations go to host memory, per stage, "
        "by the newest plan.",
    )
    recomputed_microbatches: list[int] = _at_most(
        MAX_STAGES,
        "Microbatches per iteration whose forward runs again before their backward, per stage, "
        "by the newest plan.",
    )
    wanted_plan_version: int = _number("Version of the newest plan of this attempt.")
    observed_plan_version: int = _number("Newest version that the ranks have received.")
    applied_plan_version: int = _number("Version of the plan in effect.")
    slow_link_count: int = _number("Number of slow links.")
    slow_links: list[SlowLink] = _at_most(MAX_SLOW_LINKS, "The slowest links, slowest first.")
    unknown_link_count: int = _number("Links without recent samples.")
    slow_reduction_count: int = _number("Number of slow gradient reductions.")
    slow_reductions: list[SlowReduction] = _at_most(
        MAX_SLOW_LINKS, "The slowest gradient reductions, slowest first."
    )
    transports: list[str] = _at_most(
        MAX_STAGES,
        "Transport of each link, as reported: gloo, nccl, tcp, shm, rdma or libfabric; joined "
        "by + if replicas or directions differ, empty if unknown.",
    )
    fallen_link_count: int = _number("Links that fell back from the agreed transport.")
    fallen_links: list[FallenLink] = _at_most(MAX_FALLEN_LINKS, "Ends of some such links.")
    link_fallbacks: int = _number("Times an end of a link lost its last rail.")
    link_failbacks: int = _number("Times a link recovered a rail.")
    rails: RailsStatus | None = Field(default=None, description="Health of the ranks' RDMA ports.")
    fabric: FabricStatus | None = Field(
        default=None, description="The check of the RDMA ports before training."
    )
    slow_stage_count: int = _number("Stages that compute slower than they should.")
    slow_stages: list[SlowStage] = _at_most(MAX_SLOW_STAGES, "The slowest of them, slowest first.")
    peak_memory: list[int] = _at_most(MAX_STAGES, "Peak bytes per stage; 0 where not reported.")
    adaptations: int = _number("Plan changes so far.")
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
    """The plan versions that may be in use. The plan is in an object of its own
    (:mod:`pipemorph.api.plan`)."""

    attempt: int = Field(ge=0, description="Attempt of the directive.")
    plan_version: int = Field(ge=0, description="Highest plan version issued; never decreases.")
    reserved: int | None = Field(
        default=None,
        ge=0,
        description="Plans of versions up to this one may be in force though they are not saved:"
        " another ingest begins above it. Never decreases.",
    )
    writer: str | None = Field(
        default=None,
        max_length=64,
        description="The ingest that wrote this, as a random word: tells two of them apart that"
        " write the same.",
    )
    snapshot: str | None = Field(
        default=None,
        max_length=1 << 20,
        description="Of a job that an earlier version of the ingest wrote: what the PipeMorphPlan"
        " of the job has now. Removed with the next write.",
    )


class SpareUsed(StatusModel):
    """A spare that has ranks from then on."""

    pod: int = _number("Index of its pod.")
    instead_of: int = _number("Index of the lost pod that had these ranks.")


class RecoveryRecord(StatusModel):
    """One start of all ranks within their pods, after some had ended."""

    attempt: int = _number("Attempt in which it was.")
    generation: int = Field(ge=1, description="Generation of ranks that began.")
    lost_at: Timestamp = Field(description="When the ingest was told of the loss.")
    cause: Text = Field(description="What was lost, and how.")
    pod: int | None = Field(default=None, ge=0, description="Pod of the rank that failed first.")
    rank: int | None = Field(default=None, ge=0, description="That rank.")
    iterations_done: int = _number("Iterations that were finished before.")
    went_on_with: int | None = Field(
        default=None, ge=0, description="First iteration that was finished afterwards."
    )
    repeated: int | None = Field(
        default=None, ge=0, description="Iterations that had been finished and were run again."
    )
    seconds: float | None = Field(
        default=None, ge=0, description="From lostAt to the end of that first iteration."
    )
    state: str | None = Field(
        default=None,
        max_length=32,
        description="Where the state came from: kept, replica, neighbour, checkpoint or beginning.",
    )
    replaced: list[int] = _at_most(
        MAX_REPLACED_KEPT,
        "Pods that were lost, and in whose places others began; empty if all pods stayed.",
    )
    spares: list[SpareUsed] = _at_most(
        MAX_REPLACED_KEPT, "Spares that took the places of lost pods (parallelism.spares)."
    )
    replicas: int | None = Field(
        default=None,
        ge=1,
        description="Replicas that train from then on; only with parallelism.minReplicas.",
    )
    layers: list[int] = _at_most(
        MAX_STAGES, "Layers of each stage from then on; empty if they are those of before."
    )
    promised: float | None = Field(
        default=None,
        description="If layers moved since that pays: fraction of an iteration that it was"
        " predicted to save.",
    )
    measured: float | None = Field(
        default=None, description="Fraction of an iteration that it saves, once that is known."
    )


class PodReplacement(StatusModel):
    """A pod that was lost, and in whose place the attempt's Job makes another one."""

    attempt: int = _number("Attempt in which it was.")
    pod: int = _number("Index of the pod.")
    uid: str = Field(max_length=64, description="UID of the pod that was lost.")
    at: Timestamp = Field(description="When the operator noticed.")
    gone_by: Timestamp | None = Field(
        default=None,
        description="When its ranks have ended at the latest: after its grace period, if it is "
        "being deleted. Its node may be lost, and no connection end.",
    )
    cause: Text = Field(description="Which ranks, on which node, and how it was lost.")
    counted: bool = Field(
        default=True,
        description="False for evictions, deletions and lost nodes: they do not count against "
        "failurePolicy.maxRestarts.",
    )


class PlaceInPod(StatusModel):
    """A place that a pod of another number has: the ranks from place × ranksPerPod on."""

    place: int = _number("Number of the place: of the pod that had it first.")
    pod: int = _number("Index of the pod that has it.")


LayersOfStages = Annotated[list[int], Field(max_length=MAX_STAGES)]


class Recoveries(StatusModel):
    """Generations of ranks: their starts within living pods, after failures."""

    attempt: int = _number("Attempt that generation counts for.")
    generation: int = _number("Generation of ranks in progress, from 0; begins anew with attempts.")
    count: int = _number("Generations that have followed a failure, over all attempts.")
    counted: int = _number(
        "Those of them that count against failurePolicy.maxRestarts: no further iteration had been "
        "finished."
    )
    finished: int = _number("Most iterations that were finished at a failure.")
    idle: int = _number("Failures since then.")
    error: Text | None = Field(
        default=None, description="The exception in which a rank ended, at the last failure."
    )
    left_out: list[int] = _at_most(
        MAX_REPLICAS,
        "Replicas that do not train in this generation, since pods of them are missing, while the "
        "others do (parallelism.minReplicas).",
    )
    places: list[PlaceInPod] = _at_most(
        MAX_PLACES,
        "Places that are not in the pods of their numbers, since a spare has taken the place of a "
        "lost pod; these pods, and no others, have ranks of another number.",
    )
    spares_ready: int | None = Field(
        default=None,
        ge=0,
        description="Spares that stand by, ready to take the place of a pod; only with "
        "parallelism.spares.",
    )
    layers: list[int] = _at_most(
        MAX_STAGES,
        "Layers of each stage in this generation; empty: evenly many (adaptation.relayout).",
    )
    layers_before: list[int] | None = Field(
        default=None,
        max_length=MAX_STAGES,
        description="While these layers are on trial, those that a failure goes back to, as layers."
        " Absent: they count.",
    )
    layers_refused: list[LayersOfStages] = _at_most(
        MAX_REFUSED_KEPT,
        "Layers of each stage with which ranks have failed, newest last: they are not tried again.",
    )
    layers_fixed: Text | None = Field(
        default=None,
        description="Why no layers move between stages, as ranks say. Absent: they may.",
    )
    completed: bool = Field(
        default=False,
        description="Whether all iterations are finished, so that pods without ranks, and those "
        "that come back, only have to end.",
    )
    last: list[RecoveryRecord] = _at_most(MAX_RECOVERIES_KEPT, "The newest, newest last.")

    @property
    def moved(self) -> tuple[tuple[int, int], ...]:
        """:attr:`places`, as :data:`pipemorph.api.running.Places`."""
        return tuple((each.place, each.pod) for each in self.places)


class UsefulTime(StatusModel):
    """The finished iterations of a job, each counted once, over all attempts."""

    seconds: float = Field(default=0.0, ge=0, description="Their time.")
    iterations: int = _number("How many iterations of the job are finished, as reported.")


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
    ran_seconds: int = _number(
        "Seconds the job ran before startTime, counted by spec.activeDeadlineSeconds."
    )
    attempt_start_time: Timestamp | None = Field(
        default=None, description="When the attempt in progress started."
    )
    completion_time: Timestamp | None = Field(
        default=None, description="When the job reached Complete or Failed."
    )
    restarts: int = _number("Restarts counted against failurePolicy.maxRestarts.")
    disruptions: int = _number("Restarts not counted: evictions, preemptions, lost nodes.")
    pods: PodCounts | None = Field(default=None, description="Pods of the current attempt.")
    attempts: list[AttemptRecord] = _at_most(MAX_ATTEMPTS_KEPT, "Ended attempts, newest last.")
    nodes: list[NodeRecord] = _at_most(MAX_NODES_KEPT, "Nodes that were at an end of a slow link.")
    attempt_nodes: AttemptNodes | None = Field(
        default=None, description="Nodes at the slow links of the attempt in progress."
    )
    replacements: list[PodReplacement] = _at_most(
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
        " ReplicasComplete, SparesReady, Complete, Failed; and Ready, Reconciling and Stalled, as"
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
