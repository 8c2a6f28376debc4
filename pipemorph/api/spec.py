"""The PipeMorphJob spec, group ``pipemorph.io/v1alpha1``.

The CRD is generated from these models. Manifests use camelCase; code uses snake_case.
Fields that end in ``Ms`` are milliseconds, other times are seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import gcd
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from pipemorph.api.base import FieldError as FieldError  # noqa: PLC0414 - public here
from pipemorph.api.base import SpecModel as SpecModel  # noqa: PLC0414
from pipemorph.api.parallelism import Parallelism as Parallelism  # noqa: PLC0414
from pipemorph.api.placement import Placement
from pipemorph.api.recovery import Recovery
from pipemorph.api.template import check_template
from pipemorph.planning.ir import Dispatch, Policy
from pipemorph.planning.problem import MAX_CELLS

API_GROUP = "pipemorph.io"
API_VERSION = f"{API_GROUP}/v1alpha1"
KIND = "PipeMorphJob"

# An hour exceeds any op or delay; much larger values overflow timers.
Milliseconds = Annotated[float, Field(ge=0, le=3_600_000, allow_inf_nan=False)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)]


MODULE = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$"


class StageTime(SpecModel):
    """Expected op times of one stage, milliseconds per microbatch."""

    forward: Milliseconds
    backward_input: Milliseconds
    backward_weight: Milliseconds
    fused_backward: Milliseconds | None = Field(
        default=None,
        description="Time of one fused backward. Default: backwardInput + backwardWeight.",
    )
    offload_copy: Milliseconds = Field(
        default=0.0,
        description="Time to copy one microbatch's activations to host memory, or back.",
    )


ONE_ORDER_IN_LOCKSTEP = (
    "ranks of one stage that run collectives inside ops (shard, context or tensor above 1) need "
    "one order of ops: use dispatch static"
)


class ScheduleSpec(SpecModel):
    """What is scheduled, and by which policy."""

    microbatches: int = Field(ge=1, le=65536, description="Microbatches per iteration, N.")
    global_batch_size: int | None = Field(
        default=None,
        ge=1,
        description="Samples per iteration of all replicas and shards; divisible by replicas × "
        "shard × microbatches.",
    )
    policy: Literal[
        "pipemorph", "zero-bubble", "1f1b", "gpipe", "exact", "1f1b-interleaved", "zero-bubble-v"
    ] = "pipemorph"
    dispatch: Literal["static", "online", "guided", "auto"] = "auto"
    objective: Literal["auto", "makespan", "period"] = Field(
        default="auto",
        description="What plans make short: the iteration of all stages together (makespan), or "
        "the time each stage is occupied, which is the time per iteration if stages do not wait "
        "for each other between iterations (period). auto: the period once the trainer reports "
        "that nothing, such as the gradient norm of all stages, makes them wait.",
    )
    in_flight_limit: (
        Annotated[int, Field(ge=1)]
        | Annotated[list[Annotated[int, Field(ge=1)]], Field(max_length=512)]
        | None
    ) = Field(
        default=None,
        description="Most microbatches in flight (F started, W not finished) per stage: "
        "one number, or one per stage. A stage that offloads counts those on its device.",
    )
    activation_memory: int | None = Field(
        default=None,
        ge=1,
        description="Bytes of device memory per rank for the activations of microbatches in "
        "flight. Divided by the measured bytes of one microbatch it is a limit like inFlightLimit; "
        "the lower limit applies.",
    )
    recompute: Literal["never", "auto"] = Field(
        default="never",
        description="Whether plans may drop activations of a stage and run its forward again in "
        "the backward, to have more microbatches in flight than inFlightLimit or activationMemory "
        "allow. auto: where it is predicted to save time. Results are the same to the bit.",
    )
    warmup: list[Annotated[int, Field(ge=1)]] | None = Field(
        default=None, max_length=512, description="Fixed warm-up counts, one per stage."
    )
    stage_times: list[StageTime] | None = Field(
        default=None,
        max_length=512,
        description="Expected op times, one entry per stage; used until they are measured.",
    )

    @field_validator("policy")
    @classmethod
    def _policy_can_run(cls, policy: str) -> str:
        if policy == Policy.EXACT:
            raise FieldError(
                "",
                "is exact, which jobs cannot run; use pipemorph, 1f1b, gpipe or zero-bubble",
            )
        return policy

    @property
    def policy_kind(self) -> Policy:
        return Policy(self.policy)

    @property
    def dispatch_kind(self) -> Dispatch:
        """Of the first plan."""
        return Dispatch.STATIC if self.dispatch == "auto" else Dispatch(self.dispatch)


class Adaptation(SpecModel):
    """When to change to a new plan."""

    enabled: bool = True
    min_gain: float = Field(
        default=0.02,
        ge=0,
        lt=1,
        description="Fraction of iteration time that a new plan must save, as predicted.",
    )
    min_delay_ms: Milliseconds = Field(
        default=2.0, description="Changes of link delay below this count as noise."
    )
    min_delay_fraction: float = Field(
        default=0.25,
        ge=0,
        le=100,
        allow_inf_nan=False,
        description="Changes of link delay below this fraction of its normal wire time count as "
        "noise.",
    )
    stale_after_seconds: float = Field(
        default=30.0,
        gt=0,
        allow_inf_nan=False,
        description="Time without samples after which a link is Unknown.",
    )
    crowded_hosts: bool = Field(
        default=False,
        description="Whether to adapt even if more ranks compute on a host than it has processors. "
        "There, iterations and wire times tell of the processors, not of links.",
    )
    allow_delegation: bool = Field(
        default=True, description="Whether a slow link may move to the delegated route."
    )
    allow_offload: bool = Field(
        default=False,
        description="Whether plans may move activations to host memory, to have more microbatches "
        "in flight than fit on the device if that outweighs the copies.",
    )
    host_memory: int | None = Field(
        default=None,
        ge=1,
        description="Bytes of host memory per rank for offloaded activations; a hard limit. "
        "Required by allowOffload.",
    )
    relayout: bool = Field(
        default=False,
        description="Whether ranks may change places when a wire of a gradient reduction is slow, "
        "and layers may move between stages (parallelism.layers) when one computes slowly, if the "
        "iterations left pay for it. In pods only layers move, so there parallelism.layers is "
        "required; places change under `pipemorph run`, which numbers pods by ranksPerPod. Needs "
        "failurePolicy.maxRestarts, snapshots and one stage per rank. Ranks that share a stage "
        "with tensor, context or FSDP ranks keep their places, since what a slow wire costs those "
        "is not known; their layers may move.",
    )

    @model_validator(mode="after")
    def _offload_has_memory(self) -> Adaptation:
        if self.allow_offload and self.host_memory is None:
            raise FieldError(
                "hostMemory",
                "is missing, but allowOffload is true; give the bytes of host memory per rank"
                " that offloaded activations may take",
            )
        return self


class Rdma(SpecModel):
    """How the transfer engine uses RDMA devices."""

    devices: list[Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,63}(:\d{1,2})?$")]] = Field(
        default_factory=list,
        max_length=16,
        description="Devices to use, such as mlx5_0, or mlx5_0:2 for its second port. Empty: one "
        "active port of every card, or this rank's share of them if its host has several ranks.",
    )
    gid_index: int | None = Field(
        default=None,
        ge=0,
        le=255,
        description="Index in the port's GID table. Default: a routable RoCE v2 entry, chosen at "
        "every connection.",
    )
    traffic_class: int = Field(
        default=0, ge=0, le=255, description="Traffic class of the packets (DSCP × 4)."
    )
    service_level: int = Field(default=0, ge=0, le=15, description="Service level.")
    queue_pairs: int = Field(
        default=1,
        ge=1,
        le=16,
        description="Queue pairs of a link over each pair of devices; the smaller number of both "
        "ends. More than 1 helps where the network spreads flows over several ways by their "
        "addresses: the number of ways, mostly 2 or 4.",
    )


class Transport(SpecModel):
    """How stages exchange data."""

    route: Literal["auto", "direct", "delegated"] = Field(
        default="auto",
        description="auto: direct, but delegated to the engine while a link is slow; direct and "
        "delegated: fixed for all links.",
    )
    direct_duplex: Literal["full", "half"] = Field(
        default="full",
        description="Direct route: full gives each direction of a link its own communicator and "
        "queue; half gives both directions one, as torch.distributed does with NCCL, so that a "
        "send waits for the neighbour's sends. half is for comparisons, on CPU.",
    )
    engine: Literal["auto", "tcp", "shm", "rdma", "libfabric"] = Field(
        default="auto",
        description="Transport of the transfer engine. auto: shm within a host, rdma if both "
        "ends have a device, libfabric if both have one of EFA, else tcp; rdma and libfabric fall "
        "back to tcp while no device works. libfabric: EFA's devices, or those of the provider "
        "that FI_PROVIDER names in the pod template's env.",
    )
    require: Literal["rdma"] | None = Field(
        default=None, description="rdma: fail instead of falling back to tcp."
    )
    integrity: Literal["crc", "mac", "aead"] = Field(
        default="crc",
        description="Payloads of the engine over TCP, libfabric and shared memory; its control "
        "frames and headers are authenticated in any case. crc: errors of the network are found, "
        "not in shared memory. mac: altered or added payloads are refused, too. aead: as mac, and "
        "encrypted between hosts. "
        "With mac and aead the engine uses no RDMA device, which writes payloads on its own.",
    )
    rdma: Rdma = Field(default_factory=Rdma)
    queues: int = Field(default=8, ge=1, le=64, description="Engine queues per direction, K.")
    flight_bytes: int = Field(
        default=512 << 20,
        ge=1 << 20,
        description="Bytes of a link that may be under way between hosts, which is host memory at "
        "both ends. Links take what bandwidth times round trip needs, up to this: 400 Gb/s over "
        "20 ms need 2 GiB.",
    )
    deadline_seconds: float = Field(
        default=300.0,
        gt=0,
        allow_inf_nan=False,
        description="Longest wait for one message; then the rank fails.",
    )

    @model_validator(mode="after")
    def _integrity_can_be_kept(self) -> Transport:
        if self.integrity != "crc" and self.engine == "rdma":
            raise FieldError(
                "integrity",
                f"is {self.integrity}, but engine is rdma, whose payloads have no MAC; use engine "
                "auto, tcp, shm or libfabric, or integrity crc",
            )
        return self

    @model_validator(mode="after")
    def _requirement_can_be_met(self) -> Transport:
        if self.require is None:
            return self
        if self.integrity != "crc":
            raise FieldError(
                "require",
                f"is {self.require}, but integrity is {self.integrity}, with which the engine uses "
                "no RDMA device; use integrity crc",
            )
        if self.engine not in ("auto", "rdma"):
            raise FieldError(
                "require", f"is {self.require}, but engine is {self.engine}; use engine rdma"
            )
        if self.route == "direct":
            raise FieldError(
                "require",
                f"is {self.require}, but route is direct, which never uses the engine; use route "
                "auto or delegated",
            )
        return self


class Trainer(SpecModel):
    """What runs in every rank: a module or a command."""

    module: str | None = Field(
        default=None,
        pattern=MODULE,
        max_length=253,
        description="Python module, run as `python -m MODULE` on every rank.",
    )
    command: list[Annotated[str, Field(max_length=4096)]] | None = Field(
        default=None,
        min_length=1,
        max_length=256,
        description="Program and its arguments, run on every rank instead of a module: "
        '`[python, train.py, --lr, "3e-4"]`. No shell reads it. On one machine `python` is the one '
        "that runs `pipemorph`.",
    )
    preload: list[Annotated[str, Field(pattern=MODULE, max_length=253)]] = Field(
        default_factory=lambda: ["pipemorph_trainer.launcher.preload"],
        max_length=64,
        description="Python modules that the launcher of the ranks imports once, before it forks "
        "them: a rank of `module`, or of a command `python ...`, then starts in milliseconds. They "
        "must start no thread and use no device. Empty: every rank is a program of its own.",
    )
    args: dict[str, Any] = Field(
        default_factory=dict, description="Arguments, passed as JSON in PIPEMORPH_ARGS."
    )
    iterations: int = Field(ge=1, description="Iterations to train.")
    seed: int = Field(default=0, ge=0)
    threads: int = Field(default=1, ge=1, le=1024, description="torch intra-op threads per rank.")
    metrics_port: int = Field(
        default=9464,
        ge=0,
        le=65535,
        description="Port of each rank's Prometheus metrics in its pod; 0 disables them. Ignored "
        "on one machine.",
    )

    @model_validator(mode="after")
    def _one_program(self) -> Trainer:
        if (self.module is None) == (self.command is None):
            found = "neither" if self.module is None else "both"
            raise FieldError("", f"has {found} of module and command; give one of them")
        return self

    def argv(self, python: str) -> list[str]:
        """The program of a rank and its arguments; ``python``: the interpreter that it means."""
        program, *rest = self.command or ("python", "-m", str(self.module))
        return [python if program == "python" else program, *rest]


class Emulation(SpecModel):
    """Emulated stages, which hold the interpreter for a set time instead of computing."""

    stage_times: list[StageTime] = Field(
        min_length=1, max_length=512, description="One for all stages, or one per stage."
    )
    message_bytes: int = Field(ge=1, le=1 << 30, description="Bytes sent per message.")
    stands_for_bytes: int | None = Field(
        default=None, ge=1, description="Message size of the emulated model, if scaled down."
    )
    activation_bytes: int | None = Field(
        default=None,
        ge=1,
        description="Bytes that an emulated microbatch reports to hold between its F and its W.",
    )
    input_bytes: int | None = Field(
        default=None,
        ge=1,
        description="Bytes that it holds if only its inputs are kept, for schedule.recompute. "
        "Default: an emulated stage does not recompute.",
    )
    gradient_bytes: int | None = Field(
        default=None,
        ge=1,
        le=1 << 30,
        description="Bytes of gradients per stage that replicas reduce. Default: none.",
    )


class Fault(SpecModel):
    """One entry of a fault trace, injected in the transport and recorded in the report. It is of a
    link, of the gradient reduction of a stage, of the wire between two pods, or of a device.

    A fault of a link, wire or device belongs to the places that its ranks have in the beginning,
    and stays there when ranks change places.

    Bounds are iterations (``fromIteration`` inclusive, ``toIteration`` exclusive) or
    seconds since training began; exactly one kind of bound.
    """

    link: int | None = Field(default=None, ge=0)
    reduction: int | None = Field(
        default=None,
        ge=0,
        description="Instead of a link: the stage whose replicas reduce their gradients slowly. A "
        "fault of one replica slows its whole group.",
    )
    between: list[Annotated[int, Field(ge=0)]] | None = Field(
        default=None,
        min_length=2,
        max_length=2,
        description="Instead of a link: two pods, by number, and all that goes between them: links "
        "and edges of reduction rings. A reduction goes round its ring in chunks of 512 KiB, or of "
        "less for small buckets, as NCCL's do; each step takes as long as its slowest edge.",
    )
    device: int | None = Field(
        default=None,
        ge=0,
        description="Instead of a link: the device of the rank that has this number in the "
        "beginning, on which each op takes slowdown times as long.",
    )
    replica: int = Field(
        default=0,
        ge=0,
        description="Pipeline column of the link or stage: with replicas alone, the replica; else "
        "the index of (replica, shard, context, tensor), the last running fastest.",
    )
    from_iteration: int | None = Field(default=None, ge=0)
    to_iteration: int | None = Field(default=None, ge=1)
    from_seconds: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    to_seconds: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    delay_ms: Milliseconds | None = Field(
        default=None,
        description="Delays every message on its queue by this time, or every bucket of gradients.",
    )
    bandwidth_mbps: float | None = Field(
        default=None,
        ge=0.001,
        allow_inf_nan=False,
        description="Limits the link, or the gradients that each rank reduces, to this many "
        "megabits per second.",
    )
    sever: Literal["data", "control", "direct"] | None = Field(
        default=None,
        description="Cuts the engine's data or control connection, or the direct route, once.",
    )
    slowdown: float | None = Field(
        default=None,
        gt=1,
        le=1000,
        description="How many times as long each op takes on the device: its rank waits after it. "
        "Of emulated stages, and of stages on the CPU.",
    )

    @model_validator(mode="after")
    def _one_effect_one_clock(self) -> Fault:
        effects = [
            n
            for n in ("delay_ms", "bandwidth_mbps", "sever", "slowdown")
            if getattr(self, n) is not None
        ]
        if not effects:
            raise FieldError(
                "", "has no effect; give one of delayMs, bandwidthMbps, sever, slowdown"
            )
        given = sum(
            each is not None for each in (self.link, self.reduction, self.between, self.device)
        )
        if given != 1:
            found = "several" if given else "none"
            raise FieldError(
                "", f"has {found} of link, reduction, between and device; give one of them"
            )
        if (self.device is not None) != (effects == ["slowdown"]):
            raise FieldError(
                "slowdown" if self.device is None else "device",
                "is given; a device has slowdown and nothing else, and only a device has it",
            )
        if self.link is None and self.sever is not None:
            raise FieldError(
                "sever",
                f"is {self.sever}, which cuts a link; others take delayMs or bandwidthMbps",
            )
        if self.between is not None and self.between[0] == self.between[1]:
            raise FieldError("between", f"is pod {self.between[0]} twice; expected two pods")
        by_iteration = self.from_iteration is not None or self.to_iteration is not None
        by_seconds = self.from_seconds is not None or self.to_seconds is not None
        if by_iteration and by_seconds:
            raise FieldError("", "is bounded by iterations and by seconds; use one kind of bound")
        for low, high, end in (
            (self.from_iteration, self.to_iteration, "toIteration"),
            (self.from_seconds, self.to_seconds, "toSeconds"),
        ):
            if low is not None and high is not None and low >= high:
                raise FieldError(end, f"is {high}, which is not after its start, {low}")
        return self


class Checkpoint(SpecModel):
    """Where and how often state is saved (torch.distributed.checkpoint)."""

    directory: str = Field(min_length=1)
    every: int = Field(ge=1, description="Iterations between checkpoints.")
    resume: bool = Field(default=True, description="Continue from the newest checkpoint there.")
    keep: int = Field(default=2, ge=1, description="Newest checkpoints to keep.")
    asynchronous: bool = Field(
        default=False,
        alias="async",
        description="Write while training goes on, from a copy in host memory.",
    )


class FailurePolicy(SpecModel):
    max_restarts: int = Field(default=0, ge=0, le=1000)
    hang_seconds: int | None = Field(
        default=None,
        ge=1,
        le=86400,
        description="Longest time without a finished iteration, once there was one. Then all "
        "ranks print their stacks, and it is a failure. Must be longer than an evaluation, and "
        "than a checkpoint that is waited for; with recovery.neighbour than "
        "`transport.deadlineSeconds`, as long as a copy may be waited for. Default: only messages "
        "have a deadline, that one.",
    )
    start_seconds: int | None = Field(
        default=None,
        ge=1,
        le=86400,
        description="Longest time from the start of a pod's ranks to their first finished "
        "iteration; else they hang, too. Pods that wait for others are included, as are the "
        "program's imports and its data. Default: with hangSeconds, that much longer than twice "
        "the longest start so far of these ranks, and any time for the first.",
    )
    replacement_seconds: int = Field(
        default=10,
        ge=0,
        le=300,
        description="With parallelism.minReplicas: how long all replicas wait for the pod that "
        "takes the place of a lost one, before those that are whole train on.",
    )
    late_pod_seconds: int = Field(
        default=60,
        ge=1,
        le=86400,
        description="With parallelism.spares: at the first start of the ranks, how long a pod is "
        "waited for after the last one that has come, before a spare takes its place. If it comes "
        "later it is a spare.",
    )


class JobSpec(SpecModel):
    parallelism: Parallelism
    schedule: ScheduleSpec
    trainer: Trainer
    adaptation: Adaptation = Field(default_factory=Adaptation)
    transport: Transport = Field(default_factory=Transport)
    emulation: Emulation | None = None
    checkpoint: Checkpoint | None = None
    faults: list[Fault] = Field(default_factory=list, max_length=256)
    template: dict[str, Any] | None = Field(
        default=None, description="Pod template; its container `trainer` runs the stage."
    )
    placement: Placement | None = Field(
        default=None, description="Where and how a cluster places the ranks."
    )
    failure_policy: FailurePolicy = Field(default_factory=FailurePolicy)
    recovery: Recovery = Field(default_factory=Recovery)
    suspend: bool = False
    managed_by: str | None = None
    active_deadline_seconds: int | None = Field(default=None, ge=1)
    ttl_seconds_after_finished: int | None = Field(default=None, ge=0)

    @field_validator("template")
    @classmethod
    def _template_runs_the_trainer(cls, template: dict[str, Any] | None) -> dict[str, Any] | None:
        if template is not None:
            check_template(template)
        return template

    @model_validator(mode="after")
    def _fits_together(self) -> JobSpec:
        for problem in self._lengths():
            raise problem
        self._check_size()
        self._check_batch()
        self._check_policy()
        self._check_dispatch()
        self._check_warmup()
        self._check_relayout()
        self._check_min_replicas()
        self._check_spares()
        self._check_hang()
        self._check_faults()
        self._check_memory()
        self._check_topology()
        return self

    def _lengths(self) -> Iterator[FieldError]:
        """Errors of lists that must have one entry per stage."""
        stages = self.parallelism.stages
        schedule = self.schedule
        lists: list[tuple[str, Sequence[object] | None]] = [
            ("schedule.warmup", schedule.warmup),
            ("schedule.stageTimes", schedule.stage_times),
        ]
        if isinstance(schedule.in_flight_limit, list):
            lists.append(("schedule.inFlightLimit", schedule.in_flight_limit))
        for where, values in lists:
            if values is not None and len(values) != stages:
                yield FieldError(where, f"has {len(values)} entries; {stages} stages need {stages}")
        if self.emulation is not None and len(self.emulation.stage_times) not in (1, stages):
            yield FieldError(
                "emulation.stageTimes",
                f"has {len(self.emulation.stage_times)} entries; expected 1 for all stages,"
                f" or {stages}",
            )

    def _check_size(self) -> None:
        stages, microbatches = self.parallelism.stages, self.schedule.microbatches
        if stages * microbatches > MAX_CELLS:
            raise FieldError(
                "schedule.microbatches",
                f"is {microbatches}; at {stages} stages at most {MAX_CELLS // stages} can be"
                " planned",
            )

    def _check_batch(self) -> None:
        batch, cut = self.schedule.global_batch_size, self.parallelism
        parts = cut.replicas * cut.shard * self.schedule.microbatches
        if batch is not None and batch % parts:
            shards = f" × {cut.shard} shards" if cut.shard > 1 else ""
            raise FieldError(
                "schedule.globalBatchSize",
                f"is {batch}, which {cut.replicas} replicas{shards} × {self.schedule.microbatches}"
                f" microbatches do not divide; use a multiple of {parts}",
            )

    def _check_policy(self) -> None:
        """One stage per rank and several have different policies."""
        policy, cut = self.schedule.policy_kind, self.parallelism
        several = cut.stages_per_rank > 1
        if policy is not Policy.PIPEMORPH and policy.interleaved != several:
            raise FieldError(
                "schedule.policy",
                f"is {policy.value}, with parallelism.stagesPerRank {cut.stages_per_rank}; with"
                f" {'several stages' if several else 'one stage'} per rank use pipemorph, "
                + (
                    "1f1b-interleaved or zero-bubble-v" if several else "1f1b, gpipe or zero-bubble"
                ),
            )
        needs = "v" if policy is Policy.ZERO_BUBBLE_V else "interleaved"
        if policy.interleaved and cut.stage_placement != needs:
            raise FieldError(
                "parallelism.stagePlacement",
                f"is {cut.stage_placement}; policy {policy.value} needs {needs}",
            )
        if policy.interleaved and self.schedule.warmup is not None:
            raise FieldError(
                "schedule.warmup",
                f"is {self.schedule.warmup}; policy {policy.value} sets its own: leave it out, or"
                " use pipemorph",
            )
        if not several:
            return
        for i, fault in enumerate(self.faults):
            placed = cut.mesh.placed
            if fault.link is None:
                continue
            if fault.link < len(placed) - 1 and placed[fault.link] == placed[fault.link + 1]:
                raise FieldError(
                    f"faults[{i}].link", f"is {fault.link}, which joins two stages of one rank"
                )

    def _check_dispatch(self) -> None:
        dispatch = self.schedule.dispatch_kind
        if dispatch.varies and self.parallelism.mesh.lockstep > 1:
            raise FieldError("schedule.dispatch", f"is {dispatch}; {ONE_ORDER_IN_LOCKSTEP}")

    def _check_topology(self) -> None:
        """Schedulers keep pods with consecutive numbers together."""
        topology, cut = self.placement.topology if self.placement else None, self.parallelism
        if topology is None or topology.per == "job":
            return
        if cut.mesh.block == cut.world_size and cut.replicas > 1:
            raise FieldError(
                "placement.topology.per",
                "is pipeline, and the ranks of a pipeline are not consecutive; name dp_replicate "
                "before pp in parallelism.order",
            )
        if cut.mesh.block % cut.ranks_per_pod:
            raise FieldError(
                "placement.topology.per",
                f"is pipeline, and {cut.mesh.block} ranks, which are whole pipelines, are not a "
                f"multiple of parallelism.ranksPerPod ({cut.ranks_per_pod})",
            )

    def _check_warmup(self) -> None:
        warmup, most = self.schedule.warmup, self.schedule.microbatches
        for i, x in enumerate(warmup or ()):
            if x > most:
                raise FieldError(f"schedule.warmup[{i}]", f"is {x}; there are {most} microbatches")
            if i and warmup is not None and x > warmup[i - 1]:
                raise FieldError(
                    f"schedule.warmup[{i}]",
                    f"is {x}, more than {warmup[i - 1]} before it: the two stages would wait"
                    " for each other",
                )

    def _check_memory(self) -> None:
        memory = self.schedule.activation_memory
        size = self.emulation.activation_bytes if self.emulation is not None else None
        if memory is not None and size is not None and size > memory:
            raise FieldError(
                "schedule.activationMemory",
                f"is {memory}, less than emulation.activationBytes ({size}), the size of one"
                " microbatch",
            )

    def _check_relayout(self) -> None:
        if not self.adaptation.relayout:
            return
        for lacks, why in (
            (not self.failure_policy.max_restarts, "failurePolicy.maxRestarts is 0"),
            (self.recovery.snapshot_iterations == 0, "recovery.snapshotIterations is 0"),
            (self.parallelism.stages_per_rank > 1, "a rank has several stages"),
            (
                self.parallelism.mesh.data == 1 and self.parallelism.layers is None,
                "no gradients are reduced, and parallelism.layers is not given",
            ),
            (
                self.parallelism.mesh.lockstep > 1 and self.parallelism.layers is None,
                "several ranks share a stage of a replica, and parallelism.layers is not given",
            ),
        ):
            if lacks:
                raise FieldError("adaptation.relayout", f"is true, but {why}; leave it out")

    def _check_min_replicas(self) -> None:
        if self.parallelism.min_replicas is None:
            return
        rdma = self.placement.rdma if self.placement else None
        for where, wrong, why in (
            (
                "failurePolicy.maxRestarts",
                self.failure_policy.max_restarts == 0,
                "is 0, with parallelism.minReplicas: without starts of the ranks within their pods"
                " none goes on; expected at least 1",
            ),
            (
                "recovery.neighbour",
                self.recovery.neighbour,
                "is true, with parallelism.minReplicas: replicas have each other's state; leave it"
                " out",
            ),
            (
                "recovery.snapshotIterations",
                self.recovery.snapshot_iterations == 0,
                "is 0, with parallelism.minReplicas: a replica that comes back has its state from"
                " another one's memory; expected at least 1",
            ),
            (
                "adaptation.relayout",
                self.adaptation.relayout,
                "is true, with parallelism.minReplicas: ranks of fewer replicas have other numbers,"
                " and places belong to numbers; leave one of them out",
            ),
            (
                "placement.rdma.check",
                rdma is not None and rdma.check != "never",
                f"is {rdma.check if rdma else ''}, with parallelism.minReplicas: pods that check"
                " their ports together cannot begin one by one; use never",
            ),
        ):
            if wrong:
                raise FieldError(where, why)
        if self.parallelism.batch == "keep":
            self._check_kept_batch(self.parallelism.min_replicas)

    def _check_spares(self) -> None:
        spares, placement = self.parallelism.spares, self.placement
        if not spares:
            return
        rdma, topology = (placement.rdma, placement.topology) if placement else (None, None)
        for where, wrong, why in (
            (
                "failurePolicy.maxRestarts",
                self.failure_policy.max_restarts == 0,
                "is 0, with parallelism.spares: without starts of the ranks within their pods no"
                " spare takes a place; expected at least 1",
            ),
            (
                "placement.rdma.check",
                rdma is not None and rdma.check != "never",
                f"is {rdma.check if rdma else ''}, with parallelism.spares: pods that check their"
                " ports together cannot begin one by one; use never",
            ),
            (
                "placement.topology.per",
                topology is not None and topology.per == "pipeline",
                "is pipeline, with parallelism.spares: a spare is of no pipeline; use job, or no"
                " spares",
            ),
        ):
            if wrong:
                raise FieldError(where, why)

    def _check_kept_batch(self, least: int) -> None:
        cut, each = self.parallelism, self.schedule.microbatches
        whole = cut.replicas * each
        for count in range(least, cut.replicas):
            if whole % count:
                raise FieldError(
                    "parallelism.batch",
                    f"is keep, and {count} replicas cannot share out {whole} microbatches, those of"
                    f" {cut.replicas} × {each}; use a multiple of"
                    f" {count // gcd(count, cut.replicas)} microbatches, a larger minReplicas, or"
                    " shrink",
                )
        if cut.stages * whole > MAX_CELLS * least:
            raise FieldError(
                "parallelism.batch",
                f"is keep, and of {least} replicas each would have {whole // least} microbatches;"
                f" at {cut.stages} stages at most {MAX_CELLS // cut.stages} can be planned; use a"
                " larger minReplicas, or shrink",
            )

    def _check_hang(self) -> None:
        hang, deadline = self.failure_policy.hang_seconds, self.transport.deadline_seconds
        if self.recovery.neighbour and hang is not None and hang <= deadline:
            raise FieldError(
                "failurePolicy.hangSeconds",
                f"is {hang}, and with recovery.neighbour an iteration may wait for a copy for"
                f" transport.deadlineSeconds ({deadline:g}); expected more than that",
            )

    def _check_faults(self) -> None:
        cut = self.parallelism
        columns = "replicas" if cut.mesh.lockstep == 1 else "columns"
        for i, fault in enumerate(self.faults):
            for name, value, count, what in (
                ("link", fault.link, cut.stages - 1, "links"),
                ("reduction", fault.reduction, cut.stages, "stages"),
                ("device", fault.device, cut.world_size, "ranks"),
                ("replica", fault.replica, cut.mesh.columns, columns),
            ):
                if value is not None and value >= count:
                    raise FieldError(
                        f"faults[{i}].{name}",
                        f"is {value}; {_counted(count, what)}, numbered from 0",
                    )
            if max(fault.between or [0]) >= cut.pods:
                raise FieldError(
                    f"faults[{i}].between",
                    f"is {fault.between}; {_counted(cut.pods, 'pods')}, numbered from 0",
                )
            if fault.reduction is not None and cut.mesh.data == 1:
                raise FieldError(
                    f"faults[{i}].reduction",
                    f"is {fault.reduction}; the job has one replica, which reduces no gradients",
                )


def _counted(count: int, what: str) -> str:
    return f"the job has {count or 'no'} {what[:-1] if count == 1 else what}"


class Metadata(SpecModel):
    """The fields of a Kubernetes ObjectMeta that a manifest may have."""

    name: Name
    namespace: Name = "default"
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)


class PipeMorphJob(SpecModel):
    api_version: Literal["pipemorph.io/v1alpha1"]
    kind: Literal["PipeMorphJob"]
    metadata: Metadata
    spec: JobSpec
