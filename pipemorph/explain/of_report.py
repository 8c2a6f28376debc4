"""Explains a finished run from its ``report.json``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from pydantic import Field, ValidationError

from pipemorph.api.mesh import MeshShape
from pipemorph.api.sections.parallelism import Parallelism
from pipemorph.control.record.worth import worth
from pipemorph.errors import InputError, one_line
from pipemorph.explain.advice import advice, undelivered
from pipemorph.explain.lenient import Adaptation, Lenient, Trainer
from pipemorph.explain.story import (
    Story,
    brought,
    duration,
    link_name,
    plural,
    what_changed,
    worth_line,
)
from pipemorph.planning.ir import dashed
from pipemorph.wire import AdaptationRecord, IterationSample, Split

NEWEST = 8
"""Iterations in the median of what an iteration takes at the end."""


class _Schedule(Lenient):
    policy: str = "pipemorph"
    microbatches: int = 1


class _Spec(Lenient):
    parallelism: Parallelism
    schedule: _Schedule
    trainer: Trainer
    adaptation: Adaptation = Field(default_factory=Adaptation)


class _Recovery(Lenient):
    cause: str = ""
    repeated: int | None = None
    seconds: float | None = None


class _SlowTime(Lenient):
    """See :class:`~pipemorph.watch.lanes.SlowTime`."""

    link: int
    begin: int
    end: int | None = None
    delay: float
    column: int = 0

    def text(self, mesh: MeshShape) -> str:
        name = link_name(self.link, mesh.column_name(self.column))
        when = f"from iteration {self.begin} "
        when += "to the end" if self.end is None else f"to {self.end}"
        return f"{name} was late by up to {self.delay * 1e3:.0f} ms, {when}"


class _Links(Lenient):
    slow: list[_SlowTime] | None = None
    """None: of an earlier version, which did not say."""
    fallen: list[dict[str, Any]] = Field(default_factory=list)


class _Rails(Lenient):
    sick: list[dict[str, Any]] = Field(default_factory=list)


class _Report(Lenient):
    """What an explanation is made of. Reports of earlier versions lack some of it."""

    job: str
    end: str
    reason: str | None = None
    emulated: bool = False
    started_at: float
    ended_at: float | None = None
    iterations: list[IterationSample]
    adaptations: list[AdaptationRecord]
    links: _Links = Field(default_factory=_Links)
    rails: _Rails = Field(default_factory=_Rails)
    reductions: list[dict[str, Any]] = Field(default_factory=list)
    stragglers: list[dict[str, Any]] = Field(default_factory=list)
    better_layers: Split | None = None
    recoveries: list[_Recovery] = Field(default_factory=list)
    relayouts: list[dict[str, Any]] = Field(default_factory=list)
    goodput: float | None = None
    spec: _Spec


def explain_report(content: Mapping[str, Any]) -> Story:
    """The explanation of a report's JSON data. Raises :class:`InputError`, one line, if it is no
    report."""
    try:
        report = _Report.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise InputError(one_line(f"{where}: {first['msg']}; expected a run's report")) from None
    mesh = report.spec.parallelism.mesh
    slow = sorted(report.links.slow or (), key=lambda each: -each.delay)
    story = Story(_outcome(report, mesh))
    story.seen = [each.text(mesh) for each in slow]
    if report.links.slow is None:
        story.seen.append("which links were slow is not in this report of an earlier version")
    story.seen += _other_findings(report, mesh)
    story.decided = [*_recoveries(report), *_changes(report.adaptations)]
    # Reports of earlier versions do not say what a change has saved.
    known = [record for record in report.adaptations if record.saving is not None]
    total = worth(known)
    story.worth = worth_line(total.seconds, total.error, mesh.world_size, len(known))
    story.advice = advice(_causes(report))
    return story


def _outcome(report: _Report, mesh: MeshShape) -> str:
    done = report.iterations[-1].index + 1 if report.iterations else 0
    shape = f"{mesh}, {plural(report.spec.schedule.microbatches, 'microbatch', 'microbatches')}"
    took = ""
    if report.ended_at is not None:
        took = f" in {duration(report.ended_at - report.started_at)}"
    text = f"{report.job} {report.end}"
    text += f" ({report.reason})" if report.reason else ""
    text += f": {done:,} of {plural(report.spec.trainer.iterations, 'iteration')}{took}; {shape}"
    if newest := [each.seconds for each in report.iterations[-NEWEST:]]:
        text += f"; {median(newest):.3g} s per iteration at the end"
    if report.goodput is not None and report.recoveries:
        text += f"; goodput {report.goodput:.0%}"
    return text + (" (EMULATED)" if report.emulated else "")


def _other_findings(report: _Report, mesh: MeshShape) -> Iterator[str]:
    """What was wrong at the end beside slow links."""
    for port in report.rails.sick:
        yield (
            f"port {port.get('device')}/{port.get('port')} of stage {port.get('stage')}"
            f" {port.get('what', 'is sick')}"
        )
    for link in report.links.fallen:
        name = link_name(int(link.get("link", 0)), mesh.column_name(int(link.get("replica", 0))))
        yield f"{name} fell back from {link.get('agreed')} to {link.get('transport')}"
    for stage in report.stragglers:
        yield (
            f"stage {stage.get('stage')} computes {float(stage.get('ratio', 1.0)):.1f} times as"
            " long as usual"
        )
    if report.better_layers is not None:
        yield report.better_layers.text()
    for each in _slow_reductions(report):
        normal = float(each.get("normal") or 0.0)
        yield (
            f"the gradient reduction of stage {each.get('stage')} takes"
            f" {float(each.get('seconds', 0.0)) * 1e3:.0f} ms, usually {normal * 1e3:.0f} ms"
        )


def _slow_reductions(report: _Report) -> list[dict[str, Any]]:
    return [each for each in report.reductions if each.get("slow")]


def _changes(records: Sequence[AdaptationRecord]) -> list[str]:
    """The changes of plan, by gain."""
    return [change_text(r) for r in sorted(records, key=lambda r: (-r.saved, r.plan_version))]


def change_text(record: AdaptationRecord) -> str:
    """One change of plan, what it did and what it brought."""
    if record.applied_at_iteration is None:
        return f"plan {record.plan_version} was decided on, but never in force"
    when = f"plan {record.plan_version} from iteration {record.applied_at_iteration}"
    if record.kind == "return":
        return f"{when}: back to the plan for healthy links"
    if record.kind == "revert":
        return f"{when}: the plan before returned, since the last one did not bring its promise"
    effect = brought(
        record.iteration_seconds_before,
        record.iteration_seconds_after,
        record.promised,
        record.measured,
    )
    return f"{when}: {what_changed(record)}{'; ' if effect else ''}{effect}"


def _recoveries(report: _Report) -> Iterator[str]:
    found = report.recoveries
    if found:
        known = [each.seconds for each in found if each.seconds is not None]
        slowest = f", the slowest in {duration(max(known))}" if known else ""
        again = sum(each.repeated or 0 for each in found)
        last = found[-1]
        yield (
            f"ranks were started again {plural(len(found), 'time')}{slowest};"
            f" {plural(again, 'finished iteration')} ran again; last cause: {last.cause}"
        )
    moved = [each for each in report.relayouts if each.get("measured") is not None]
    for each in moved:
        layers, before = each.get("layers"), each.get("layers_before")
        what = "ranks changed places"
        if layers and before and layers != before:
            what = f"layers moved ({dashed(before)} became {dashed(layers)} per stage)"
        yield (
            f"{what} at iteration {each.get('iteration')}: an iteration takes"
            f" {float(each['measured']):.0%} less"
        )


def _causes(report: _Report) -> Iterator[str]:
    if report.end not in ("completed", "interrupted"):
        yield "failed"
    if report.rails.sick:
        yield "port"
    if report.links.fallen:
        yield "fell-back"
    if _slow_reductions(report):
        yield "reduction"
    if any(each.end is None for each in report.links.slow or ()):
        yield "link"
    if report.stragglers:
        yield "stage"
    if any(undelivered(r.kind, r.promised, r.measured) for r in report.adaptations):
        yield "undelivered"
