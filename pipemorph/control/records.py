"""Makes the record of a change of plan, as far as known when it is issued."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from pipemorph.control.decide import reasons
from pipemorph.control.decide.forecast import Option, Situation
from pipemorph.control.decide.replan import Proposal, Replan, own_links
from pipemorph.planning import Plan
from pipemorph.planning.offload import most_left
from pipemorph.wire import AdaptationRecord, Health, LinkState, OwnPlanRecord


class Issued(NamedTuple):
    """When a change was issued. ``at``: wall clock, seconds; ``iteration``: the newest that ranks
    had begun; ``detectable_at``: the one that first showed its reason. ``peak_memory``: bytes per
    stage until then."""

    version: int
    at: float
    iteration: int
    detectable_at: int
    peak_memory: list[int | None]


def record_of(
    asked: Replan,
    proposal: Proposal,
    chosen: Option,
    links: Sequence[LinkState],
    issued: Issued,
) -> AdaptationRecord:
    """The record of the change to ``chosen``. ``links``: as they were when it was asked for."""
    plan, current = chosen.plan, proposal.current
    kind: Literal["adapt", "return", "revert"] = "adapt"
    if asked.cause == "undelivered":
        kind = "revert"
    elif asked.cause not in ("slow", "worse", "memory") and plan.runs_as(asked.baseline):
        kind = "return"
    promised = None
    if proposal.promise is not None:
        promised = proposal.promise.gain
    elif current is not None and current.seconds > 0:
        promised = 1 - chosen.seconds / current.seconds
    away = most_left(plan)
    return AdaptationRecord(
        plan_version=issued.version,
        kind=kind,
        detected_at=issued.at,
        detected_at_iteration=issued.iteration,
        detectable_at=issued.detectable_at,
        reason=reasons.reason(asked.cause, links, proposal),
        links=[link.without_windows() for link in links if link.health is not Health.HEALTHY],
        warmup_before=list(asked.current.warmup),
        warmup_after=list(plan.warmup),
        routes=list(plan.all_routes),
        predicted_seconds_before=current.seconds if current else None,
        predicted_seconds_after=chosen.seconds,
        promised=promised,
        peak_memory_before=issued.peak_memory,
        device_limits_before=list(asked.current.device_limits),
        device_limits_after=list(plan.device_limits),
        offloaded=away.offloaded,
        recomputed=away.recomputed,
        fused_stages=list(plan.fused),
        saving=None if proposal.start is None else proposal.start - chosen.seconds,
        own_plans=_own_plans(plan, asked.situation),
    )


def _own_plans(plan: Plan, situation: Situation) -> list[OwnPlanRecord]:
    """The plans that only some replicas run."""
    return [
        OwnPlanRecord(
            replicas=list(replicas), text=text, warmup=list(own.warmup), routes=list(own.routes)
        )
        for (replicas, own), text in zip(
            plan.own, reasons.own_plans(own_links(situation, plan)), strict=True
        )
    ]
