"""CEL rules of the CRD: checks by the API server, each with a message and a field.

They repeat the checks of the models (:mod:`pipemorph.spec.job_spec`) that CEL can express, and add
immutability, which only the API server can enforce. Keys are paths as in :mod:`descriptions`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pipemorph.planning.ir import Policy
from pipemorph.planning.problem import MAX_CELLS
from pipemorph.spec.layout import MAX_PLACED
from pipemorph.spec.mesh import DIMENSIONS
from pipemorph.spec.sections.parallelism import MAX_RANKS
from pipemorph.spec.sections.template import RESERVED_ENV, RESERVED_ENV_PREFIXES, TRAINER_CONTAINER
from pipemorph.spec.status_base import MAX_STAGES


@dataclass(frozen=True)
class CelRule:
    """CEL rule. ``field_path``: relative to the rule's node, such as ``.layers``."""

    expression: str
    message: str = ""
    field_path: str = ""
    reason: str = "FieldValueInvalid"

    def to_schema(self) -> dict[str, Any]:
        out: dict[str, Any] = {"rule": self.expression, "reason": self.reason}
        if self.message:
            out["message"] = self.message
        if self.field_path:
            out["fieldPath"] = self.field_path
        return out


COLUMN_SIZES = ("replicas", "shard", "context", "tensor")
LOCKSTEP_SIZES = COLUMN_SIZES[1:]
PP_RANKS = "(self.stages / self.stagesPerRank)"
INTERLEAVED_POLICIES = ", ".join(f"'{policy.value}'" for policy in Policy if policy.interleaved)
"""Policies for several stages per rank."""


def _format_product(of: str, sizes: Iterable[str]) -> str:
    return "(" + " * ".join(f"{of}.{size}" for size in sizes) + ")"


def _build_immutable_rule(name: str) -> CelRule:
    """Rule for an optional field of spec that must not be changed, added or removed."""
    return CelRule(
        expression=f"has(self.{name}) == has(oldSelf.{name})"
        f" && (!has(self.{name}) || self.{name} == oldSelf.{name})",
        message=f"{name} is immutable; delete the job and create it again",
        field_path=f".{name}",
        reason="FieldValueForbidden",
    )


_RESERVED = (
    f"c.name != '{TRAINER_CONTAINER}' || !has(c.env) || c.env.all(e, !(e.name in ["
    + ", ".join(f"'{name}'" for name in sorted(RESERVED_ENV))
    + "])"
    + "".join(f" && !e.name.startsWith('{prefix}')" for prefix in RESERVED_ENV_PREFIXES)
    + ")"
)

_RESTARTS_RANKS = (
    "(has(self.failurePolicy) && self.failurePolicy.maxRestarts > 0)",
    "needs failurePolicy.maxRestarts of at least 1, because ranks start again",
    ".failurePolicy",
)

WITH_MIN_REPLICAS = (
    _RESTARTS_RANKS,
    (
        "!has(self.recovery) || !self.recovery.neighbour",
        "excludes recovery.neighbour: replicas hold each other's state",
        ".recovery.neighbour",
    ),
    (
        "!has(self.recovery) || !has(self.recovery.snapshotIterations)"
        " || self.recovery.snapshotIterations > 0",
        "needs recovery.snapshotIterations of at least 1: a returning replica gets its state from"
        " the memory of another one",
        ".recovery.snapshotIterations",
    ),
    (
        "!has(self.adaptation) || !self.adaptation.relayout",
        "excludes adaptation.relayout, because ranks have other numbers with fewer replicas; omit"
        " adaptation.relayout",
        ".adaptation.relayout",
    ),
)
"""Requirements of ``parallelism.minReplicas``: rule, message and field."""

WITH_REBALANCE = (
    (
        f"(self.parallelism.replicas > 1 && self.parallelism.replicas <= {MAX_STAGES})",
        f"needs 2 to {MAX_STAGES} replicas",
        ".parallelism.replicas",
    ),
    (
        "self.parallelism.shard == 1",
        "excludes parallelism.shard above 1: ranks that share parameters wait for each other in"
        " every microbatch",
        ".parallelism.shard",
    ),
    (
        "self.schedule.policy == 'pipemorph'",
        "needs policy pipemorph; others keep their schedule",
        ".schedule.policy",
    ),
    (
        "!has(self.schedule.warmup)",
        "excludes schedule.warmup",
        ".schedule.warmup",
    ),
)
"""Requirements of ``adaptation.rebalance``: rule, message and field."""

WITH_RELAYOUT = (
    _RESTARTS_RANKS,
    (
        "!has(self.recovery) || !has(self.recovery.snapshotIterations)"
        " || self.recovery.snapshotIterations > 0",
        "needs recovery.snapshotIterations of at least 1: departing ranks store copies of their"
        " state",
        ".recovery.snapshotIterations",
    ),
    (
        "self.parallelism.stagesPerRank == 1",
        "needs parallelism.stagesPerRank of 1",
        ".parallelism.stagesPerRank",
    ),
    (
        "has(self.parallelism.layers) || (self.parallelism.replicas > 1"
        f" && {_format_product('self.parallelism', LOCKSTEP_SIZES)} == 1"
        f" && self.parallelism.stages * self.parallelism.replicas <= {MAX_PLACED})",
        "needs parallelism.layers with one replica, with several ranks per stage, or with more than"
        f" {MAX_PLACED} ranks: such ranks never change places",
        ".parallelism.layers",
    ),
)
"""Requirements of ``adaptation.relayout``: rule, message and field."""

RULES: dict[str, list[CelRule]] = {
    "": [
        CelRule(
            expression="size(self.metadata.name) <= 63 && !self.metadata.name.contains('.')",
            message="metadata.name must be at most 63 characters without dots, because it becomes "
            "part of host names and labels",
        ),
    ],
    "spec": [
        *(
            _build_immutable_rule(name)
            for name in (
                "parallelism", "schedule", "trainer", "transport",
                "emulation", "checkpoint", "faults", "managedBy",
            )
        ),
        CelRule(
            expression=f"self.parallelism.stages * self.schedule.microbatches <= {MAX_CELLS}",
            message=f"stages × microbatches must be at most {MAX_CELLS}, the planner's limit",
            field_path=".schedule.microbatches",
        ),
        CelRule(
            expression="!has(self.schedule.globalBatchSize) || self.schedule.globalBatchSize"
            " % (self.parallelism.replicas * self.parallelism.shard"
            " * self.schedule.microbatches) == 0",
            message="schedule.globalBatchSize must be a multiple of replicas × shard ×"
            " microbatches",
            field_path=".schedule.globalBatchSize",
        ),
        CelRule(
            expression="!has(self.schedule.warmup)"
            " || size(self.schedule.warmup) == self.parallelism.stages",
            message="schedule.warmup must have one entry per stage",
            field_path=".schedule.warmup",
        ),
        CelRule(
            expression="!has(self.schedule.stageTimes) || size(self.schedule.stageTimes) == 1"
            " || size(self.schedule.stageTimes) == self.parallelism.stages",
            message="schedule.stageTimes must have one entry, or one per stage",
            field_path=".schedule.stageTimes",
        ),
        CelRule(
            expression="!has(self.emulation) || size(self.emulation.stageTimes) == 1"
            " || size(self.emulation.stageTimes) == self.parallelism.stages",
            message="emulation.stageTimes must have one entry, or one per stage",
            field_path=".emulation.stageTimes",
        ),
        CelRule(
            expression="!has(self.faults) || self.faults.all(f,"
            " (!has(f.link) || f.link < self.parallelism.stages - 1)"
            " && (!has(f.reduction) || f.reduction < self.parallelism.stages))",
            message="faults: link must be below stages - 1, and reduction below stages; both are"
            " numbered from 0",
            field_path=".faults",
        ),
        CelRule(
            expression="!has(self.faults)"
            " || self.faults.all(f, !has(f.replica)"
            f" || f.replica < {_format_product('self.parallelism', COLUMN_SIZES)})",
            message="faults: replica must be below the number of columns, replicas × shard ×"
            " context × tensor",
            field_path=".faults",
        ),
        CelRule(
            expression="self.schedule.policy == 'pipemorph' ||"
            f" (self.schedule.policy in [{INTERLEAVED_POLICIES}])"
            " == (self.parallelism.stagesPerRank > 1)",
            message="with several stages per rank use policy pipemorph, 1f1b-interleaved or"
            " zero-bubble-v; with one pipemorph, 1f1b, gpipe or zero-bubble",
            field_path=".schedule.policy",
        ),
        CelRule(
            expression="!has(self.schedule.warmup) ||"
            f" !(self.schedule.policy in [{INTERLEAVED_POLICIES}])",
            message="schedule.warmup: policies 1f1b-interleaved and zero-bubble-v set their own;"
            " omit it",
            field_path=".schedule.warmup",
        ),
        CelRule(
            expression="self.schedule.dispatch != 'guided'"
            f" || {_format_product('self.parallelism', LOCKSTEP_SIZES)} == 1",
            message="dispatch guided needs shard, context and tensor to be 1",
            field_path=".schedule.dispatch",
        ),
        *(
            CelRule(
                expression=f"!has(self.parallelism.minReplicas) || {rule}",
                message=f"parallelism.minReplicas {message}",
                field_path=field_path,
            )
            for rule, message, field_path in WITH_MIN_REPLICAS
        ),
        *(
            CelRule(
                expression=f"!has(self.adaptation) || !self.adaptation.relayout || {rule}",
                message=f"adaptation.relayout {message}",
                field_path=field_path,
            )
            for rule, message, field_path in WITH_RELAYOUT
        ),
        *(
            CelRule(
                expression=f"!has(self.adaptation) || !self.adaptation.rebalance || {rule}",
                message=f"adaptation.rebalance {message}",
                field_path=field_path,
            )
            for rule, message, field_path in WITH_REBALANCE
        ),
    ],
    "spec.parallelism": [
        CelRule(
            expression="!has(self.layers) || self.layers % self.stages == 0",
            message="layers must be a multiple of stages",
            field_path=".layers",
        ),
        CelRule(
            expression="!has(self.minReplicas) || self.minReplicas <= self.replicas",
            message="minReplicas must be at most replicas",
            field_path=".minReplicas",
        ),
        CelRule(
            expression="self.batch == 'shrink' || has(self.minReplicas)",
            message="batch keep needs minReplicas",
            field_path=".batch",
        ),
        CelRule(
            expression="self.stages % self.stagesPerRank == 0",
            message="stagesPerRank must divide stages",
            field_path=".stagesPerRank",
        ),
        CelRule(
            expression=f"{PP_RANKS} * {_format_product('self', COLUMN_SIZES)} <= {MAX_RANKS}",
            message=f"there must be at most {MAX_RANKS} ranks: stages ÷ stagesPerRank × replicas ×"
            " shard × context × tensor",
            field_path=".replicas",
        ),
        *(
            CelRule(
                expression=f"{ranks} == 1 || '{name}' in self.order",
                message=f"order must name {name} if it has more than one rank",
                field_path=".order",
            )
            for name, ranks in zip(
                DIMENSIONS, (PP_RANKS, *(f"self.{size}" for size in COLUMN_SIZES)), strict=True
            )
        ),
        CelRule(
            expression=f"{PP_RANKS} * {_format_product('self', COLUMN_SIZES)}"
            " % self.ranksPerPod == 0",
            message="ranksPerPod must divide the job's ranks",
            field_path=".ranksPerPod",
        ),
    ],
    "spec.schedule": [
        CelRule(
            expression="!has(self.warmup) || self.warmup.all(x, x <= self.microbatches)",
            message="warmup must not exceed microbatches",
            field_path=".warmup",
        ),
    ],
    "spec.adaptation": [
        CelRule(
            expression="!has(self.allowOffload) || !self.allowOffload || has(self.hostMemory)",
            message="allowOffload needs hostMemory: bytes of host memory per rank for offloaded"
            " activations",
            field_path=".hostMemory",
        ),
    ],
    "status": [
        CelRule(
            expression="!has(oldSelf.attempt) ||"
            " (has(self.attempt) && self.attempt >= oldSelf.attempt)",
            message="attempt must not decrease: the writer's copy is outdated",
            field_path=".attempt",
            reason="FieldValueForbidden",
        ),
        CelRule(
            expression="!has(oldSelf.control) || has(self.control)",
            message="control must not be removed: the writer's copy is outdated",
            field_path=".control",
            reason="FieldValueForbidden",
        ),
    ],
    "status.control": [
        CelRule(
            expression="self.planVersion >= oldSelf.planVersion",
            message="planVersion must not decrease: the writer's copy is outdated",
            field_path=".planVersion",
            reason="FieldValueForbidden",
        ),
    ],
    "spec.faults[]": [
        CelRule(
            expression="has(self.delayMs) || has(self.delayForwards) || has(self.jitterMs)"
            " || has(self.bandwidthMbps) || has(self.sever) || has(self.slowdown)"
            " || has(self.pauseMs)",
            message="a fault needs an effect: delayMs, delayForwards, jitterMs, bandwidthMbps,"
            " sever, slowdown or pauseMs",
        ),
        CelRule(
            expression="[has(self.link), has(self.reduction), has(self.between), has(self.device)]"
            ".exists_one(given, given) && (has(self.link)"
            " || !has(self.sever) && !has(self.delayForwards))"
            " && !(has(self.reduction) && has(self.jitterMs))",
            message="set one of link, reduction, between and device; only a link may have sever or"
            " delayForwards, and a reduction has no jitterMs",
        ),
        CelRule(
            expression="!has(self.between) || self.between[0] != self.between[1]",
            message="between must name two different pods",
            field_path=".between",
        ),
        CelRule(
            expression="has(self.device) == (has(self.slowdown) || has(self.pauseMs))"
            " && !(has(self.device) && (has(self.delayMs) || has(self.jitterMs)"
            " || has(self.bandwidthMbps) || has(self.sever)))",
            message="device needs slowdown or pauseMs, and no other effect; both need device",
        ),
        CelRule(
            expression="!((has(self.fromIteration) || has(self.toIteration))"
            " && (has(self.fromSeconds) || has(self.toSeconds)))",
            message="a fault must be bounded by iterations or by seconds, not both",
        ),
        CelRule(
            expression="!(has(self.fromIteration) && has(self.toIteration))"
            " || self.fromIteration < self.toIteration",
            message="toIteration must be after fromIteration",
            field_path=".toIteration",
        ),
        CelRule(
            expression="!(has(self.fromSeconds) && has(self.toSeconds))"
            " || self.fromSeconds < self.toSeconds",
            message="toSeconds must be after fromSeconds",
            field_path=".toSeconds",
        ),
    ],
    "spec.trainer": [
        CelRule(
            expression="has(self.module) != has(self.command)",
            message="set one of module and command",
        ),
    ],
    "spec.placement": [
        CelRule(
            expression="!has(self.topology) || !has(self.topology.per)"
            " || self.topology.per == 'job' || (self.topology.mode == 'pack' && has(self.gang)"
            " && ((has(self.gang.kueue) && self.topology.required)"
            " || (has(self.gang.volcano) && has(self.gang.volcano.tier))))",
            message="topology.per pipeline needs mode pack, and gang.kueue with required, or"
            " gang.volcano with tier",
            field_path=".topology",
        ),
    ],
    "spec.placement.gang": [
        CelRule(
            expression="[has(self.kueue), has(self.volcano), has(self.coscheduling)]"
            ".filter(x, x).size() == 1",
            message="set exactly one of kueue, volcano, coscheduling",
        ),
    ],
    "spec.template": [
        CelRule(
            expression=f"self.spec.containers.exists(c, c.name == '{TRAINER_CONTAINER}')",
            message=f"template needs a container named {TRAINER_CONTAINER}, which runs the stage",
            field_path=".spec.containers",
        ),
        CelRule(
            expression=f"self.spec.containers.all(c, {_RESERVED})",
            message="the trainer's env sets a reserved variable (RANK, WORLD_SIZE, LOCAL_RANK, "
            "LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, PIPEMORPH_*, PET_*, TORCHELASTIC_*); "
            "the operator sets these",
            field_path=".spec.containers",
        ),
    ],
}  # fmt: skip
