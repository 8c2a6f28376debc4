"""CEL rules of the CRD: checks by the API server, each with a message and a field.

They repeat the checks of the models (:mod:`pipemorph.api.spec`) that CEL can express, and add
immutability, which only the API server can enforce. Keys are paths as in :mod:`descriptions`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pipemorph.api.layout import MAX_PLACED
from pipemorph.api.mesh import DIMENSIONS
from pipemorph.api.sections.parallelism import MAX_RANKS
from pipemorph.api.sections.template import RESERVED_ENV, RESERVED_ENV_PREFIXES, TRAINER_CONTAINER
from pipemorph.planning.ir import Policy
from pipemorph.planning.problem import MAX_CELLS


@dataclass(frozen=True)
class Rule:
    """A CEL rule. ``field_path``: relative to the rule's node, such as ``.layers``."""

    rule: str
    message: str = ""
    field_path: str = ""
    reason: str = "FieldValueInvalid"

    def dump(self) -> dict[str, Any]:
        out: dict[str, Any] = {"rule": self.rule, "reason": self.reason}
        if self.message:
            out["message"] = self.message
        if self.field_path:
            out["fieldPath"] = self.field_path
        return out


COLUMN_SIZES = ("replicas", "shard", "context", "tensor")
LOCKSTEP_SIZES = COLUMN_SIZES[1:]
PP_RANKS = "(self.stages / self.stagesPerRank)"
SEVERAL = ", ".join(f"'{policy.value}'" for policy in Policy if policy.interleaved)
"""Policies for several stages per rank."""


def _product(of: str, sizes: Iterable[str]) -> str:
    return "(" + " * ".join(f"{of}.{size}" for size in sizes) + ")"


def _frozen(name: str) -> Rule:
    """A rule for an optional field of spec that must not be changed, added or removed."""
    return Rule(
        rule=f"has(self.{name}) == has(oldSelf.{name})"
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

_STARTS_AGAIN = (
    "(has(self.failurePolicy) && self.failurePolicy.maxRestarts > 0)",
    "needs failurePolicy.maxRestarts of at least 1: ranks have to start again",
    ".failurePolicy",
)

WITH_MIN_REPLICAS = (
    _STARTS_AGAIN,
    (
        "!has(self.recovery) || !self.recovery.neighbour",
        "does not go with recovery.neighbour: replicas have each other's state",
        ".recovery.neighbour",
    ),
    (
        "!has(self.recovery) || !has(self.recovery.snapshotIterations)"
        " || self.recovery.snapshotIterations > 0",
        "needs recovery.snapshotIterations of at least 1: a replica that comes back has its state"
        " from another one's memory",
        ".recovery.snapshotIterations",
    ),
    (
        "!has(self.adaptation) || !self.adaptation.relayout",
        "does not go with adaptation.relayout, which is to be left out: ranks of fewer replicas"
        " have other numbers",
        ".adaptation.relayout",
    ),
)
"""What a job with ``parallelism.minReplicas`` needs: rule, message and field."""

WITH_RELAYOUT = (
    _STARTS_AGAIN,
    (
        "!has(self.recovery) || !has(self.recovery.snapshotIterations)"
        " || self.recovery.snapshotIterations > 0",
        "needs recovery.snapshotIterations of at least 1: ranks that leave keep copies of their"
        " state",
        ".recovery.snapshotIterations",
    ),
    (
        "self.parallelism.stagesPerRank == 1",
        "does not go with parallelism.stagesPerRank above 1",
        ".parallelism.stagesPerRank",
    ),
    (
        "has(self.parallelism.layers) || (self.parallelism.replicas > 1"
        f" && {_product('self.parallelism', LOCKSTEP_SIZES)} == 1"
        f" && self.parallelism.stages * self.parallelism.replicas <= {MAX_PLACED})",
        "needs parallelism.layers where there is one replica, several ranks share a stage, or there"
        f" are more than {MAX_PLACED} ranks: these change no places",
        ".parallelism.layers",
    ),
)
"""What a job with ``adaptation.relayout`` needs: rule, message and field."""

RULES: dict[str, list[Rule]] = {
    "": [
        Rule(
            rule="size(self.metadata.name) <= 63 && !self.metadata.name.contains('.')",
            message="metadata.name must be at most 63 characters without dots: it becomes part "
            "of host names and labels",
        ),
    ],
    "spec": [
        *(
            _frozen(name)
            for name in (
                "parallelism", "schedule", "trainer", "transport",
                "emulation", "checkpoint", "faults", "managedBy",
            )
        ),
        Rule(
            rule=f"self.parallelism.stages * self.schedule.microbatches <= {MAX_CELLS}",
            message=f"stages × microbatches must be at most {MAX_CELLS}, the planner's limit",
            field_path=".schedule.microbatches",
        ),
        Rule(
            rule="!has(self.schedule.globalBatchSize) || self.schedule.globalBatchSize"
            " % (self.parallelism.replicas * self.parallelism.shard"
            " * self.schedule.microbatches) == 0",
            message="schedule.globalBatchSize must be a multiple of replicas × shard ×"
            " microbatches",
            field_path=".schedule.globalBatchSize",
        ),
        Rule(
            rule="!has(self.schedule.warmup)"
            " || size(self.schedule.warmup) == self.parallelism.stages",
            message="schedule.warmup must have one entry per stage",
            field_path=".schedule.warmup",
        ),
        Rule(
            rule="!has(self.schedule.stageTimes)"
            " || size(self.schedule.stageTimes) == self.parallelism.stages",
            message="schedule.stageTimes must have one entry per stage",
            field_path=".schedule.stageTimes",
        ),
        Rule(
            rule="!has(self.emulation) || size(self.emulation.stageTimes) == 1"
            " || size(self.emulation.stageTimes) == self.parallelism.stages",
            message="emulation.stageTimes must have one entry, or one per stage",
            field_path=".emulation.stageTimes",
        ),
        Rule(
            rule="!has(self.faults) || self.faults.all(f,"
            " (!has(f.link) || f.link < self.parallelism.stages - 1)"
            " && (!has(f.reduction) || f.reduction < self.parallelism.stages))",
            message="faults: link must be below stages - 1, and reduction below stages; both are"
            " numbered from 0",
            field_path=".faults",
        ),
        Rule(
            rule="!has(self.faults)"
            " || self.faults.all(f, !has(f.replica)"
            f" || f.replica < {_product('self.parallelism', COLUMN_SIZES)})",
            message="faults: replica must be below the number of columns, replicas × shard ×"
            " context × tensor",
            field_path=".faults",
        ),
        Rule(
            rule=f"self.schedule.policy == 'pipemorph' || (self.schedule.policy in [{SEVERAL}])"
            " == (self.parallelism.stagesPerRank > 1)",
            message="with several stages per rank use policy pipemorph, 1f1b-interleaved or"
            " zero-bubble-v; with one pipemorph, 1f1b, gpipe or zero-bubble",
            field_path=".schedule.policy",
        ),
        Rule(
            rule=f"!has(self.schedule.warmup) || !(self.schedule.policy in [{SEVERAL}])",
            message="schedule.warmup: policies 1f1b-interleaved and zero-bubble-v set their own;"
            " leave it out",
            field_path=".schedule.warmup",
        ),
        Rule(
            rule="self.schedule.dispatch != 'guided'"
            f" || {_product('self.parallelism', LOCKSTEP_SIZES)} == 1",
            message="dispatch guided needs shard, context and tensor to be 1",
            field_path=".schedule.dispatch",
        ),
        *(
            Rule(
                rule=f"!has(self.parallelism.minReplicas) || {rule}",
                message=f"parallelism.minReplicas {message}",
                field_path=field_path,
            )
            for rule, message, field_path in WITH_MIN_REPLICAS
        ),
        *(
            Rule(
                rule=f"!has(self.adaptation) || !self.adaptation.relayout || {rule}",
                message=f"adaptation.relayout {message}",
                field_path=field_path,
            )
            for rule, message, field_path in WITH_RELAYOUT
        ),
    ],
    "spec.parallelism": [
        Rule(
            rule="!has(self.layers) || self.layers % self.stages == 0",
            message="layers must be a multiple of stages",
            field_path=".layers",
        ),
        Rule(
            rule="!has(self.minReplicas) || self.minReplicas <= self.replicas",
            message="minReplicas must be at most replicas",
            field_path=".minReplicas",
        ),
        Rule(
            rule="self.batch == 'shrink' || has(self.minReplicas)",
            message="batch keep needs minReplicas",
            field_path=".batch",
        ),
        Rule(
            rule="self.stages % self.stagesPerRank == 0",
            message="stagesPerRank must divide stages",
            field_path=".stagesPerRank",
        ),
        Rule(
            rule=f"{PP_RANKS} * {_product('self', COLUMN_SIZES)} <= {MAX_RANKS}",
            message=f"there must be at most {MAX_RANKS} ranks: stages ÷ stagesPerRank × replicas ×"
            " shard × context × tensor",
            field_path=".replicas",
        ),
        *(
            Rule(
                rule=f"{ranks} == 1 || '{name}' in self.order",
                message=f"order must name {name} if it has more than one rank",
                field_path=".order",
            )
            for name, ranks in zip(
                DIMENSIONS, (PP_RANKS, *(f"self.{size}" for size in COLUMN_SIZES)), strict=True
            )
        ),
        Rule(
            rule=f"{PP_RANKS} * {_product('self', COLUMN_SIZES)} % self.ranksPerPod == 0",
            message="ranksPerPod must divide the job's ranks",
            field_path=".ranksPerPod",
        ),
    ],
    "spec.schedule": [
        Rule(
            rule="!has(self.warmup) || self.warmup.all(x, x <= self.microbatches)",
            message="warmup must not exceed microbatches",
            field_path=".warmup",
        ),
    ],
    "spec.adaptation": [
        Rule(
            rule="!has(self.allowOffload) || !self.allowOffload || has(self.hostMemory)",
            message="allowOffload needs hostMemory: the bytes of host memory per rank that"
            " offloaded activations may take",
            field_path=".hostMemory",
        ),
    ],
    "status": [
        Rule(
            rule="!has(oldSelf.attempt) || (has(self.attempt) && self.attempt >= oldSelf.attempt)",
            message="attempt must not decrease: the writer's copy is outdated",
            field_path=".attempt",
            reason="FieldValueForbidden",
        ),
        Rule(
            rule="!has(oldSelf.control) || has(self.control)",
            message="control must not be removed: the writer's copy is outdated",
            field_path=".control",
            reason="FieldValueForbidden",
        ),
    ],
    "status.control": [
        Rule(
            rule="self.planVersion >= oldSelf.planVersion",
            message="planVersion must not decrease: the writer's copy is outdated",
            field_path=".planVersion",
            reason="FieldValueForbidden",
        ),
    ],
    "spec.faults[]": [
        Rule(
            rule="has(self.delayMs) || has(self.jitterMs) || has(self.bandwidthMbps)"
            " || has(self.sever) || has(self.slowdown) || has(self.pauseMs)",
            message="a fault needs an effect: delayMs, jitterMs, bandwidthMbps, sever, slowdown or"
            " pauseMs",
        ),
        Rule(
            rule="[has(self.link), has(self.reduction), has(self.between), has(self.device)]"
            ".exists_one(given, given) && (has(self.link) || !has(self.sever))"
            " && !(has(self.reduction) && has(self.jitterMs))",
            message="give one of link, reduction, between and device; only a link is severed, and a"
            " reduction has no jitterMs",
        ),
        Rule(
            rule="!has(self.between) || self.between[0] != self.between[1]",
            message="between names two pods",
            field_path=".between",
        ),
        Rule(
            rule="has(self.device) == (has(self.slowdown) || has(self.pauseMs))"
            " && !(has(self.device) && (has(self.delayMs) || has(self.jitterMs)"
            " || has(self.bandwidthMbps) || has(self.sever)))",
            message="a device has slowdown or pauseMs and no other effect, and only a device does",
        ),
        Rule(
            rule="!((has(self.fromIteration) || has(self.toIteration))"
            " && (has(self.fromSeconds) || has(self.toSeconds)))",
            message="a fault is bounded by iterations or by seconds, not both",
        ),
        Rule(
            rule="!(has(self.fromIteration) && has(self.toIteration))"
            " || self.fromIteration < self.toIteration",
            message="toIteration must be after fromIteration",
            field_path=".toIteration",
        ),
        Rule(
            rule="!(has(self.fromSeconds) && has(self.toSeconds))"
            " || self.fromSeconds < self.toSeconds",
            message="toSeconds must be after fromSeconds",
            field_path=".toSeconds",
        ),
    ],
    "spec.trainer": [
        Rule(
            rule="has(self.module) != has(self.command)",
            message="give one of module and command",
        ),
    ],
    "spec.placement": [
        Rule(
            rule="!has(self.topology) || !has(self.topology.per) || self.topology.per == 'job'"
            " || (self.topology.mode == 'pack' && has(self.gang)"
            " && ((has(self.gang.kueue) && self.topology.required)"
            " || (has(self.gang.volcano) && has(self.gang.volcano.tier))))",
            message="topology.per pipeline needs mode pack, and gang.kueue with required, or"
            " gang.volcano with tier",
            field_path=".topology",
        ),
    ],
    "spec.placement.gang": [
        Rule(
            rule="[has(self.kueue), has(self.volcano), has(self.coscheduling)]"
            ".filter(x, x).size() == 1",
            message="give exactly one of kueue, volcano, coscheduling",
        ),
    ],
    "spec.template": [
        Rule(
            rule=f"self.spec.containers.exists(c, c.name == '{TRAINER_CONTAINER}')",
            message=f"template needs a container named {TRAINER_CONTAINER}, which runs the stage",
            field_path=".spec.containers",
        ),
        Rule(
            rule=f"self.spec.containers.all(c, {_RESERVED})",
            message="the trainer's env sets a reserved variable (RANK, WORLD_SIZE, LOCAL_RANK, "
            "LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, PIPEMORPH_*, PET_*, TORCHELASTIC_*); "
            "the operator sets these",
            field_path=".spec.containers",
        ),
    ],
}  # fmt: skip
