"""The jobs of ``watched_jobs`` as status, reports, explanations and terminals tell of them, and
replays of what happened to them."""

from __future__ import annotations

import json
from typing import Any, Literal

from cluster_jobs import at, found
from watched_jobs import LATE, NOW, SLOW_AT, WELL_AT, WIRE

from pipemorph.api.status import AdaptationSummary, JobStatus, TrainingStatus
from pipemorph.api.status_links import SlowLink
from pipemorph.explain.cluster_job import ClusterJob, read_job
from pipemorph.local.processes.supervise import End, Ending
from pipemorph.local.results.history import View
from pipemorph.local.results.report import AttemptRecord, Recovery, RunRecord
from pipemorph.planning import Link, Problem, StageTimes
from pipemorph.replay.contenders import Replay, replay
from pipemorph.replay.trace import LinkTrace, parse_trace
from pipemorph.watch.build import Watched
from pipemorph.wire import AdaptationRecord, Health

BEGAN = NOW - 75
GOODPUT = 0.97
LARGE = 32
"""Stages."""


def _view(known: Watched) -> View:
    plan = known.outlook.running if known.outlook is not None else None
    return View(
        state=known.state,
        links=tuple(known.lanes.at(known.samples[-1].index + 1)),
        adaptations=tuple(known.changes),
        applied_plan_version=known.plan_version,
        wanted_plan_version=known.wanted_version or known.plan_version,
        routes=plan.routes if plan is not None else (),
        peak_memory=tuple(known.peak_memory),
        worth=known.worth,
    )


def _recoveries(known: Watched) -> list[Recovery]:
    return [
        Recovery(
            Ending(End.FAILED, each.cause, at=each.at), attempt=0, generation=number,
            rung="ranks", done=each.iteration or 0, went_on_with=each.iteration,
            seconds=each.seconds,
        )
        for number, each in enumerate(known.recoveries, 1)
    ]  # fmt: skip


def told_job(known: Watched, namespace: str = "team") -> ClusterJob:
    """The job with the status that a table and an explanation need."""
    view, newest = _view(known), known.samples[-1]
    slow = [link for link in view.links if link.health is Health.SLOW]
    conditions = [
        found("LinksHealthy", "False", "SlowLinks", f"{len(slow)} slow", 60)
        if slow
        else found("LinksHealthy", "True", "LinksHealthy", "all links healthy", 60)
    ]
    if known.state == "failed":
        conditions.append(found("Failed", "True", "RanksFailed", known.reason, 5))
    status = JobStatus(
        state="Failed" if known.state == "failed" else "Running",
        conditions=conditions,
        goodput=GOODPUT,
        training=TrainingStatus(
            iteration=newest.index + 1,
            iteration_seconds=newest.seconds,
            routes=[route.value for route in view.routes],
            applied_plan_version=view.applied_plan_version,
            wanted_plan_version=view.wanted_plan_version,
            slow_link_count=len(slow),
            slow_links=[
                SlowLink(
                    link=each.link,
                    replica=each.replica,
                    direction=each.direction,
                    delay_ms=1e3 * each.delay,
                    wire_time_ms=1e3 * each.wire_time,
                    confidence=each.confidence,
                )
                for each in slow
            ],
            adaptations=len(known.changes),
            saved_seconds=view.worth.seconds,
            saved_error_seconds=view.worth.error,
            last_adaptation=_summary(known.changes[-1]) if known.changes else None,
        ),
    )
    content = known.job.model_dump(mode="json", by_alias=True, exclude_none=True)
    content["metadata"]["namespace"] = namespace
    return read_job(content | {"status": status.model_dump(mode="json", by_alias=True)})


def _summary(record: AdaptationRecord) -> AdaptationSummary:
    return AdaptationSummary(
        plan_version=record.plan_version,
        kind=record.kind,
        reason=record.reason,
        detected_at=at(60),
        detected_at_iteration=record.detected_at_iteration,
        applied_at_iteration=record.applied_at_iteration,
        warmup_before=list(record.warmup_before),
        warmup_after=list(record.warmup_after),
        iteration_seconds_before=record.iteration_seconds_before,
        iteration_seconds_after=record.iteration_seconds_after,
        promised=record.promised,
        measured=record.measured,
    )


def report_of(known: Watched) -> dict[str, Any]:
    """``report.json`` of a run that ended so: failed, or else completed with what it has done."""
    end = Ending(End.FAILED if known.state == "failed" else End.COMPLETED, known.reason, at=NOW)
    spec = known.job.spec
    if end.end is End.COMPLETED:
        trainer = spec.trainer.model_copy(update={"iterations": len(known.samples)})
        spec = spec.model_copy(update={"trainer": trainer})
    run = RunRecord(
        known.job.model_copy(update={"spec": spec}),
        BEGAN,
        attempts=[AttemptRecord(0, BEGAN, NOW, end)],
        recoveries=_recoveries(known),
    )
    slow = known.lanes.slow_times()
    run.finish(end, list(known.samples), list(known.changes), _view(known), slow=slow)
    content: dict[str, Any] = json.loads(json.dumps(run.content([], [])))
    return content


Fate = Literal["healthy", "slow", "recovered", "failed"]


def replayed(stages: int, microbatches: int, fate: Fate) -> tuple[Replay, LinkTrace]:
    """The job of so many stages, in which a link is slow from an iteration on until another, or
    until it ends, or breaks then. Large jobs have fewer iterations: each takes a while."""
    begin, end, count = (SLOW_AT, WELL_AT, 56) if stages < LARGE else (4, 12, 18)
    link = stages // 2 - 1 if stages > 2 else 0
    times = StageTimes(forward=10.0, backward_input=10.5, backward_weight=5.5)
    problem = Problem(
        microbatches=microbatches,
        stages=[times] * stages,
        links=[Link(delay=1e3 * WIRE)] * (stages - 1),
    )
    slow = {"delay_ms": 1e3 * LATE}
    after = {"recovered": {}, "failed": {str(link): slow | {"down": True}}}
    lines = [{"at_iteration": begin, "links": {str(link): slow}}] if fate != "healthy" else []
    if fate in after:
        lines.append({"at_iteration": end, "links": after[fate]})
    text = "\n".join(json.dumps(each) for each in lines or [{"at_iteration": 0, "links": {}}])
    trace = parse_trace(text, stages - 1, "a trace", replicas=1)
    return replay(problem, trace, iterations=count), trace
