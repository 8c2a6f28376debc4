"""The PipeMorphJob spec, group ``pipemorph.io/v1alpha1``.

The CRD is generated from these models. Manifests use camelCase; code uses snake_case.
Fields that end in ``Ms`` are milliseconds, other times are seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import gcd
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from pipemorph.planning.ir import Dispatch, Policy
from pipemorph.planning.problem import MAX_CELLS
from pipemorph.spec.base import FieldError, SpecModel
from pipemorph.spec.layout import MAX_PLACED
from pipemorph.spec.sections.faults import Fault
from pipemorph.spec.sections.parallelism import Parallelism
from pipemorph.spec.sections.placement import PlacementSpec
from pipemorph.spec.sections.recovery import FailurePolicy, RecoverySpec
from pipemorph.spec.sections.schedule import ONE_ORDER_IN_LOCKSTEP, Adaptation, ScheduleSpec
from pipemorph.spec.sections.template import check_template
from pipemorph.spec.sections.trainer import Checkpoint, Emulation, Trainer
from pipemorph.spec.sections.transport import Transport
from pipemorph.spec.status_base import MAX_STAGES

API_GROUP = "pipemorph.io"
API_VERSION = f"{API_GROUP}/v1alpha1"
KIND = "PipeMorphJob"

Name = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)]


class JobSpec(SpecModel):
    """Spec of a job. Checks across sections raise :class:`FieldError`."""

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
    placement: PlacementSpec | None = Field(
        default=None, description="Where and how a cluster places the ranks."
    )
    failure_policy: FailurePolicy = Field(default_factory=FailurePolicy)
    recovery: RecoverySpec = Field(default_factory=RecoverySpec)
    suspend: bool = False
    managed_by: str | None = None
    active_deadline_seconds: int | None = Field(default=None, ge=1)
    ttl_seconds_after_finished: int | None = Field(default=None, ge=0)

    @property
    def is_observed(self) -> bool:
        """True if PipeMorph observes the job and does not run it. No manifest has such a spec: its
        number of iterations is 0, for unknown."""
        return self.trainer.iterations == 0

    @field_validator("template")
    @classmethod
    def _check_pod_template(cls, template: dict[str, Any] | None) -> dict[str, Any] | None:
        if template is not None:
            check_template(template)
        return template

    @model_validator(mode="after")
    def _check_sections_together(self) -> JobSpec:
        for problem in self._find_length_errors():
            raise problem
        self._check_size()
        self._check_batch()
        self._check_policy()
        self._check_dispatch()
        self._check_warmup()
        self._check_relayout()
        self._check_rebalance()
        self._check_min_replicas()
        self._check_hang()
        self._check_faults()
        self._check_memory()
        self._check_topology()
        return self

    def _find_length_errors(self) -> Iterator[FieldError]:
        """Errors of lists that need one entry per stage."""
        stages = self.parallelism.stages
        schedule = self.schedule
        lists: list[tuple[str, Sequence[object] | None]] = [("schedule.warmup", schedule.warmup)]
        if isinstance(schedule.in_flight_limit, list):
            lists.append(("schedule.inFlightLimit", schedule.in_flight_limit))
        for where, values in lists:
            if values is not None and len(values) != stages:
                yield FieldError(where, f"has {len(values)} entries; {stages} stages need {stages}")
        # One entry counts for all stages.
        times: list[tuple[str, Sequence[object] | None]] = [
            ("schedule.stageTimes", schedule.stage_times),
            ("emulation.stageTimes", self.emulation.stage_times if self.emulation else None),
        ]
        for where, values in times:
            if values is not None and len(values) not in (1, stages):
                yield FieldError(
                    where, f"has {len(values)} entries; expected 1 for all stages, or {stages}"
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
        """Check the policy: one stage per rank and several stages need different ones."""
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
                f"is {self.schedule.warmup}; policy {policy.value} sets its own: omit warmup, or"
                " use pipemorph",
            )
        if not several:
            return
        for i, fault in enumerate(self.faults):
            placed = cut.mesh.pp_indices
            if fault.link is None:
                continue
            if fault.link < len(placed) - 1 and placed[fault.link] == placed[fault.link + 1]:
                raise FieldError(
                    f"faults[{i}].link", f"is {fault.link}, which joins two stages of one rank"
                )

    def _check_dispatch(self) -> None:
        dispatch = self.schedule.dispatch_kind
        if dispatch is Dispatch.GUIDED and self.parallelism.mesh.lockstep_size > 1:
            raise FieldError("schedule.dispatch", f"is {dispatch}; {ONE_ORDER_IN_LOCKSTEP}")

    def _check_topology(self) -> None:
        """Check that pipelines are consecutive: schedulers place consecutive pods together."""
        topology, cut = self.placement.topology if self.placement else None, self.parallelism
        if topology is None or topology.per == "job":
            return
        if cut.mesh.pipeline_block_size == cut.world_size and cut.replicas > 1:
            raise FieldError(
                "placement.topology.per",
                "is pipeline, but the ranks of a pipeline are not consecutive; name dp_replicate "
                "before pp in parallelism.order",
            )
        if cut.mesh.pipeline_block_size % cut.ranks_per_pod:
            raise FieldError(
                "placement.topology.per",
                f"is pipeline, but the {cut.mesh.pipeline_block_size} ranks of the smallest block "
                f"of pipelines are not a multiple of parallelism.ranksPerPod ({cut.ranks_per_pod})",
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
        several = self.parallelism.stages_per_rank
        if memory is not None and size is not None and size * several > memory:
            stages = f" on each of the {several} stages of a rank" if several > 1 else ""
            raise FieldError(
                "schedule.activationMemory",
                f"is {memory}, less than emulation.activationBytes ({size}), the size of one"
                f" microbatch{stages}",
            )

    def _check_relayout(self) -> None:
        if not self.adaptation.relayout:
            return
        for lacks, why in (
            (not self.failure_policy.max_restarts, "failurePolicy.maxRestarts is 0"),
            (self.recovery.snapshot_iterations == 0, "recovery.snapshotIterations is 0"),
            (self.parallelism.stages_per_rank > 1, "a rank has several stages"),
            (
                self.parallelism.mesh.data_size == 1 and self.parallelism.layers is None,
                "no gradients are reduced, and parallelism.layers is not given",
            ),
            (
                self.parallelism.mesh.lockstep_size > 1 and self.parallelism.layers is None,
                "several ranks share a stage of a replica, and parallelism.layers is not given",
            ),
            (
                self.parallelism.world_size > MAX_PLACED and self.parallelism.layers is None,
                f"of more than {MAX_PLACED} ranks ({self.parallelism.world_size}) none change"
                " places, and parallelism.layers is not given",
            ),
        ):
            if lacks:
                raise FieldError("adaptation.relayout", f"is true, but {why}; omit relayout")

    def _check_rebalance(self) -> None:
        if not self.adaptation.rebalance:
            return
        cut, schedule = self.parallelism, self.schedule
        for lacks, why in (
            (cut.replicas == 1, "the job has one replica"),
            (cut.replicas > MAX_STAGES, f"the job has more than {MAX_STAGES} replicas"),
            (
                cut.shard > 1,
                f"parallelism.shard is {cut.shard}: ranks that share parameters wait for each other"
                " in every microbatch",
            ),
            (
                schedule.policy_kind is not Policy.PIPEMORPH,
                f"policy {schedule.policy} keeps its schedule",
            ),
            (schedule.warmup is not None, "schedule.warmup fixes the warm-up"),
        ):
            if lacks:
                raise FieldError("adaptation.rebalance", f"is true, but {why}; omit rebalance")

    def _check_min_replicas(self) -> None:
        if self.parallelism.min_replicas is None:
            return
        for where, wrong, why in (
            (
                "failurePolicy.maxRestarts",
                self.failure_policy.max_restarts == 0,
                "is 0, with parallelism.minReplicas: replicas can train on only if ranks may start"
                " again; expected at least 1",
            ),
            (
                "recovery.neighbour",
                self.recovery.neighbour,
                "is true, with parallelism.minReplicas: replicas hold each other's state; omit"
                " neighbour",
            ),
            (
                "recovery.snapshotIterations",
                self.recovery.snapshot_iterations == 0,
                "is 0, with parallelism.minReplicas: a returning replica gets its state from the"
                " memory of another one; expected at least 1",
            ),
            (
                "adaptation.relayout",
                self.adaptation.relayout,
                "is true, with parallelism.minReplicas: ranks have other numbers with fewer"
                " replicas, and a layout depends on the numbers; omit adaptation.relayout",
            ),
        ):
            if wrong:
                raise FieldError(where, why)
        if self.parallelism.batch == "keep":
            self._check_shared_batch(self.parallelism.min_replicas)

    def _check_shared_batch(self, least: int) -> None:
        cut, each = self.parallelism, self.schedule.microbatches
        whole = cut.replicas * each
        for count in range(least, cut.replicas):
            if whole % count:
                raise FieldError(
                    "parallelism.batch",
                    f"is keep, but {count} replicas cannot share {whole} microbatches evenly, those"
                    f" of {cut.replicas} × {each}; use a multiple of"
                    f" {count // gcd(count, cut.replicas)} microbatches, a larger minReplicas, or"
                    " shrink",
                )
        if cut.stages * whole > MAX_CELLS * least:
            raise FieldError(
                "parallelism.batch",
                f"is keep, but each of {least} replicas would have {whole // least} microbatches;"
                f" at {cut.stages} stages at most {MAX_CELLS // cut.stages} can be planned; use a"
                " larger minReplicas, or shrink",
            )

    def _check_hang(self) -> None:
        hang, deadline = self.failure_policy.hang_seconds, self.transport.deadline_seconds
        if self.recovery.neighbour and hang is not None and hang <= deadline:
            raise FieldError(
                "failurePolicy.hangSeconds",
                f"is {hang}, but with recovery.neighbour an iteration may wait for a copy for"
                f" transport.deadlineSeconds ({deadline:g}); expected more than that",
            )

    def _check_faults(self) -> None:
        cut = self.parallelism
        columns = "replicas" if cut.mesh.lockstep_size == 1 else "columns"
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
                        f"is {value}; {_format_count(count, what)}, numbered from 0",
                    )
            if max(fault.between or [0]) >= cut.pods:
                raise FieldError(
                    f"faults[{i}].between",
                    f"is {fault.between}; {_format_count(cut.pods, 'pods')}, numbered from 0",
                )
            if fault.reduction is not None and cut.mesh.data_size == 1:
                raise FieldError(
                    f"faults[{i}].reduction",
                    f"is {fault.reduction}; the job has one replica, which reduces no gradients",
                )


def _format_count(count: int, what: str) -> str:
    return f"the job has {count or 'no'} {what[:-1] if count == 1 else what}"


class Metadata(SpecModel):
    """Fields of a Kubernetes ObjectMeta that a manifest may have."""

    name: Name
    namespace: Name = "default"
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)


class PipeMorphJob(SpecModel):
    """Manifest of a job, as ``pipemorph run`` and ``kubectl apply`` read it."""

    api_version: Literal["pipemorph.io/v1alpha1"]
    kind: Literal["PipeMorphJob"]
    metadata: Metadata
    spec: JobSpec
