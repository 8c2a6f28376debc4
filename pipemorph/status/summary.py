"""Turns a job's controller into the ingest's part of status, and its conditions. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from math import isfinite

from pipemorph.api.mesh import MeshShape
from pipemorph.api.spec import JobSpec
from pipemorph.api.status import AdaptationSummary, Condition, ConditionStatus, TrainingStatus
from pipemorph.api.status_base import MAX_SLOW_LINKS
from pipemorph.api.status_links import (
    FallenLink,
    RailsStatus,
    SickPort,
    SlowLink,
    SlowReduction,
    SlowStage,
)
from pipemorph.control import (
    AdaptationRecord,
    Health,
    JobController,
    JobView,
    LinkState,
    ReductionHealth,
)
from pipemorph.explain.story import few, link_name
from pipemorph.planning import Route
from pipemorph.status import names, words
from pipemorph.status.conditions import format_time, updated
from pipemorph.wire import FallenLink as Fallen
from pipemorph.wire import RailHealth, RailsView

NAMED = 5
"""Most ports or links named in a message; status lists more."""
MESSAGE_LENGTH = 1024


@dataclass(frozen=True)
class Source:
    """The input of a summary. ``reported_at``: wall clock of the newest report; ``ended``: the job
    is Complete or Failed, so its links are idle; ``taken_over_at``: wall clock from which this
    process has a job whose ranks had reported to another one; ``whole``: replicas of the job, if
    fewer may train, ``left_out``: those that do not, and ``stays``: why the others do not leave for
    one that could join; ``on_trial``: whether ranks have another layout that does not count yet;
    ``moves``: what was decided and done about the layout."""

    controller: JobController
    reported_at: float | None
    generation: int | None = None
    ended: bool = False
    taken_over_at: float | None = None
    whole: int | None = None
    left_out: tuple[int, ...] = ()
    stays: str = ""
    on_trial: bool = False
    moves: str = ""


def summarize(
    source: Source, now: float, view: JobView | None = None, last: TrainingStatus | None = None
) -> TrainingStatus:
    """The job's figures, with at most ``MAX_SLOW_LINKS`` slow links, slowest first.

    ``last``: the figures in status. They stay until this process gets a report of the attempt, so
    that a restarted ingest does not reset the job to iteration 0.
    """
    summary = _summarize(source, now, view, last)
    if last is not None and last.attempt == summary.attempt:
        # Totals of the agent, which a new process hears in a later report than its first.
        totals = ("link_fallbacks", "link_failbacks")
        most = {name: max(getattr(last, name), getattr(summary, name)) for name in totals}
        summary = summary.model_copy(update=most)
    if source.ended:
        nothing = {"slow_link_count": 0, "slow_links": [], "unknown_link_count": 0}
        nothing |= {"slow_reduction_count": 0, "slow_reductions": []}
        nothing |= {"fallen_link_count": 0, "fallen_links": [], "rails": None}
        nothing |= {"slow_stage_count": 0, "slow_stages": [], "left": None}
        nothing |= {"progress": words.without_left(summary.progress)}
        return summary.model_copy(update=nothing)
    return summary


def _summarize(
    source: Source, now: float, view: JobView | None, last: TrainingStatus | None
) -> TrainingStatus:
    unheard = source.reported_at is None
    if unheard and last is not None and last.attempt == source.controller.attempt:
        return last
    view = view or source.controller.view(now)
    records = source.controller.records
    iterations = source.controller.spec.trainer.iterations
    mesh = source.controller.spec.parallelism.mesh
    slow = sorted(_slow(view), key=lambda link: -link.delay)
    return TrainingStatus(
        attempt=source.controller.attempt,
        state=view.state,
        message=view.message,
        last_report_time=_time(source.reported_at),
        progress=words.progress(view, iterations),
        done=words.done(view, iterations),
        left=words.left(view, iterations),
        gain=words.gain(records) if records or last is None else last.gain,
        iteration=view.iteration,
        iteration_seconds=_round(view.iteration_seconds),
        bubble_fraction=_round(view.bubble_fraction),
        # JSON has no other numbers.
        loss=view.loss if view.loss is not None and isfinite(view.loss) else None,
        warmup=list(view.warmup),
        routes=[route.value for route in view.routes],
        offloaded_microbatches=list(view.offloaded),
        recomputed_microbatches=list(view.recomputed),
        wanted_plan_version=view.wanted_plan_version,
        observed_plan_version=view.observed_plan_version,
        applied_plan_version=view.applied_plan_version,
        slow_link_count=len(slow),
        slow_links=[
            SlowLink(
                name=link_name(link.link, link.column),
                link=link.link,
                replica=link.replica,
                direction=link.direction,
                delay_ms=round(link.delay * 1e3, 3),
                wire_time_ms=round(link.wire_time * 1e3, 3),
                confidence=round(link.confidence, 3),
                since=_time(link.since),
            )
            for link in slow[:MAX_SLOW_LINKS]
        ],
        unknown_link_count=sum(link.health is Health.UNKNOWN for link in view.links),
        slow_reduction_count=sum(each.slow for each in view.reductions),
        slow_reductions=[
            SlowReduction(
                stage=each.stage,
                replica=each.replica,
                time_ms=round(each.seconds * 1e3, 3),
                normal_ms=round((each.normal or 0.0) * 1e3, 3),
                exposed_ms=round(each.exposed * 1e3, 3),
                bytes=each.bytes,
            )
            for each in _slow_reductions(view)[:MAX_SLOW_LINKS]
        ],
        transports=list(view.transports.links),
        fallen_link_count=view.transports.fallen_count,
        fallen_links=[fallen_link(link, mesh) for link in view.transports.fallen],
        link_fallbacks=view.transports.fallbacks,
        link_failbacks=view.transports.failbacks,
        rails=rails_status(view.rails),
        slow_stage_count=view.stragglers.count,
        slow_stages=[
            SlowStage(
                stage=each.stage,
                replica=each.column,
                microbatch_ms=round(each.seconds * 1e3, 1),
                usual_ms=round(each.usual * 1e3, 1),
            )
            for each in view.stragglers.slowest
        ],
        peak_memory=_memory(view.peak_memory),
        adaptations=source.controller.changes,
        saved_seconds=round(view.worth.seconds, 1),
        saved_error_seconds=round(view.worth.error, 1),
        last_adaptation=_last_adaptation(records, last),
    )


def judge(
    source: Source, old: Sequence[Condition], now: float, view: JobView | None = None
) -> list[Condition]:
    """The conditions in :data:`names.INGEST_CONDITIONS`; ``ReductionsHealthy`` only of jobs whose
    ranks reduce gradients, and ``ReplicasComplete`` only of those that may do with fewer
    replicas."""
    view = view or source.controller.view(now)
    conditions = [c for c in old if c.type in names.INGEST_CONDITIONS]
    when = datetime.fromtimestamp(now, UTC)
    for kind, (status, reason, message) in verdicts(source, view, now).items():
        conditions = updated(
            conditions, kind, status, reason, message, generation=source.generation, now=when
        )
    return conditions


def verdicts(source: Source, view: JobView, now: float) -> dict[str, Verdict]:
    """Status, reason and message of each condition that can be told: cheap enough for every report.

    A job that was taken over is as another process found it, until its ranks have had the time to
    report here; where they do not, what needs their reports is stale."""
    if source.reported_at is None and source.taken_over_at is not None and not source.ended:
        stale = _without_reports(source, now)
        needing = [names.LINKS_HEALTHY, names.RAILS_HEALTHY, names.STAGES_EVEN]
        if source.controller.spec.parallelism.mesh.data > 1:
            needing.append(names.REDUCTIONS_HEALTHY)
        return dict.fromkeys(needing, stale) if stale is not None else {}
    found = {
        names.LINKS_HEALTHY: _links_healthy(source, view, now),
        names.SCHEDULE_ADAPTED: _schedule_adapted(source, view),
        names.LINKS_DELEGATED: _links_delegated(source, view),
        names.RAILS_HEALTHY: _without_reports(source, now)
        or rails_healthy(source.controller.spec, view),
        names.STAGES_EVEN: _stages_even(source, view, now),
    }
    if source.controller.spec.parallelism.mesh.data > 1:
        found[names.REDUCTIONS_HEALTHY] = _reductions_healthy(source, view, now)
    elif source.left_out:
        one = "one replica trains, which reduces its gradients with no other"
        found[names.REDUCTIONS_HEALTHY] = "Unknown", names.R_REPLICAS_FEWER, one
    if source.whole is not None:
        found[names.REPLICAS_COMPLETE] = _replicas_complete(source, source.whole)
    return found


Verdict = tuple[ConditionStatus, str, str]
"""Status, reason, message."""


def _without_reports(source: Source, now: float) -> Verdict | None:
    """The Unknown verdict if the job has no recent reports; else None."""
    if source.ended:
        return "Unknown", names.R_FINISHED, "the job has finished; its links are no longer tracked"
    stale_after = source.controller.spec.adaptation.stale_after_seconds
    heard_at = source.taken_over_at if source.reported_at is None else source.reported_at
    if heard_at is None:
        return "Unknown", names.R_NO_REPORTS, "no rank of this attempt has reported yet"
    silent = now - heard_at
    if silent > stale_after:
        # Without the age of the report, which would change status every second.
        return "Unknown", names.R_STALE, f"no report for more than {stale_after:g} s"
    return None


def _links_healthy(source: Source, view: JobView, now: float) -> Verdict:
    unheard = _without_reports(source, now)
    if unheard is not None:
        return unheard
    slow, links = _slow(view), view.links
    if slow:
        shown = sorted(slow, key=lambda link: -link.delay)
        return "False", names.R_LINKS_SLOW, f"{few(map(_name, shown), 5)} slow"
    unknown = [link.link for link in links if link.health is Health.UNKNOWN]
    if unknown:
        return (
            "Unknown",
            names.R_LINKS_UNKNOWN,
            f"{len(unknown)} of {len(links)} links have no recent samples",
        )
    return "True", names.R_LINKS_OK, f"{len(links)} links, all healthy"


def _reductions_healthy(source: Source, view: JobView, now: float) -> Verdict:
    unheard = _without_reports(source, now)
    if unheard is not None:
        return unheard
    slow = _slow_reductions(view)
    if slow:
        shown = few((f"{each.name} (+{each.delay * 1e3:.0f} ms)" for each in slow), 5)
        return "False", names.R_REDUCTIONS_SLOW, f"{shown} slow"
    return "True", names.R_REDUCTIONS_OK, f"{len(view.reductions)} groups, none slow"


def _replicas_complete(source: Source, whole: int) -> Verdict:
    left_out = source.left_out
    if source.ended:
        last = f"{whole - len(left_out)} of {whole} replicas trained last"
        return "Unknown", names.R_FINISHED, f"the job has finished; {last}"
    if not left_out:
        return "True", names.R_REPLICAS_ALL, f"all {whole} replicas train"
    several = len(left_out) > 1
    missing = f"replica{'s' if several else ''} {few(map(str, left_out), NAMED)}"
    told = f"{whole - len(left_out)} of {whole} replicas train; {missing}"
    if source.stays:
        told += f" could join, but the ranks cannot leave, and are asked again: {source.stays}"
    else:
        told += f" wait{'' if several else 's'} for lost pods to be back"
    return "False", names.R_REPLICAS_FEWER, told[:MESSAGE_LENGTH]


def _schedule_adapted(source: Source, view: JobView) -> Verdict:
    records = source.controller.records
    if view.wanted_plan_version == 0 or not records:
        return "False", names.R_INITIAL_PLAN, "the ranks run the plan of the spec"
    newest = records[-1]
    if view.applied_plan_version < view.wanted_plan_version:
        return (
            "False",
            names.R_ADAPTING,
            f"changing to plan v{view.wanted_plan_version}; v{view.applied_plan_version} is in"
            " effect",
        )
    if newest.kind == "return":
        return "False", names.R_RETURNED, f"plan v{newest.plan_version}: {newest.reason}"
    return "True", names.R_ADAPTED, f"plan v{newest.plan_version}: {newest.reason}"


def _links_delegated(source: Source, view: JobView) -> Verdict:
    moved = [str(i) for i, route in enumerate(view.routes) if route is Route.DELEGATED]
    if source.controller.spec.transport.route != "auto":
        fixed = source.controller.spec.transport.route
        return "False", names.R_FIXED_ROUTE, f"transport.route is {fixed} for all links"
    if moved and view.applied_plan_version < view.wanted_plan_version:
        return "False", names.R_ADAPTING, f"links {few(moved, 20)} will be delegated to the engine"
    if moved:
        return "True", names.R_DELEGATED, f"links {few(moved, 20)} are delegated to the engine"
    return "False", names.R_DIRECT, "all links are direct"


def _stages_even(source: Source, view: JobView, now: float) -> Verdict:
    unheard = _without_reports(source, now)
    if unheard is not None:
        return unheard
    parallelism, found = source.controller.spec.parallelism, view.stragglers
    done = _done_for_stages(source)
    if not found.slowest:
        if not found.known:
            told = f"not every stage has reported op times{done}"
            return "Unknown", names.R_STAGES_UNMEASURED, told[:MESSAGE_LENGTH]
        told = f"{parallelism.stages} stages, none slow{done}"
        return "True", names.R_STAGES_EVEN, told[:MESSAGE_LENGTH]
    told = "; ".join(each.text(parallelism.mesh) for each in found.slowest[:NAMED])
    if found.count > NAMED:
        told += f"; and {found.count - NAMED} more"
    split = found.better_split(parallelism.layers, source.controller.layers)
    if split is not None:
        told += f"; {split.text()}"
    return "False", names.R_STAGES_SLOW, f"{told}{done}"[:MESSAGE_LENGTH]


def _done_for_stages(source: Source) -> str:
    """Which layers have moved between stages, and what was decided on the layout last."""
    told, layers = "", source.controller.layers
    if layers:
        told = f"; by stage they hold {', '.join(map(str, layers))} layers"
        told += " on trial" if source.on_trial else ""
    return f"{told}; {source.moves}" if source.moves else told


def _slow(view: JobView) -> list[LinkState]:
    return [link for link in view.links if link.health is Health.SLOW]


def _slow_reductions(view: JobView) -> list[ReductionHealth]:
    """The slow ones, slowest first."""
    return sorted((each for each in view.reductions if each.slow), key=lambda each: -each.delay)


def _name(link: LinkState) -> str:
    # Rounded to milliseconds, so that the message does not change with every sample.
    return f"{link.name} (+{link.delay * 1e3:.0f} ms {link.direction})"


def _last_adaptation(
    records: Sequence[AdaptationRecord], last: TrainingStatus | None
) -> AdaptationSummary | None:
    """The newest record; without any, what status says, which another ingest has written."""
    if records:
        return _adaptation(records[-1])
    return last.last_adaptation if last is not None else None


def _adaptation(record: AdaptationRecord) -> AdaptationSummary:
    return AdaptationSummary(
        plan_version=record.plan_version,
        kind=record.kind,
        reason=record.reason,
        effect=words.effect(record),
        detected_at=format_time(datetime.fromtimestamp(record.detected_at, UTC)),
        detected_at_iteration=record.detected_at_iteration,
        applied_at_iteration=record.applied_at_iteration,
        links=[link.link for link in record.links],
        warmup_before=list(record.warmup_before),
        warmup_after=list(record.warmup_after),
        iteration_seconds_before=_round(record.iteration_seconds_before),
        iteration_seconds_after=_round(record.iteration_seconds_after),
        promised=_round(record.promised),
        measured=_round(record.measured),
        bubble_before=_round(record.bubble_before),
        bubble_after=_round(record.bubble_after),
        peak_memory_before=_memory(record.peak_memory_before),
        peak_memory_after=_memory(record.peak_memory_after),
        offloaded_microbatches=list(record.offloaded),
        recomputed_microbatches=list(record.recomputed),
        fused_stages=list(record.fused_stages),
    )


def _memory(peaks: Sequence[int | None]) -> list[int]:
    return [peak or 0 for peak in peaks]


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


def _time(wall: float | None) -> str | None:
    return None if wall is None else format_time(datetime.fromtimestamp(wall, UTC))


# --- rails and transports, and the condition RailsHealthy ----------------------------------------


def rails_status(view: RailsView) -> RailsStatus:
    """Counts of ports, and the ports with problems."""
    return RailsStatus(
        ports=view.ports,
        expected_ports=view.expected,
        sick_count=view.sick_count,
        sick_ports=[
            SickPort(
                stage=port.stage,
                replica=port.replica,
                device=port.device,
                port=port.port,
                state=port.state,
                message=port.what[:MESSAGE_LENGTH],
            )
            for port in view.sick
        ],
        congested_count=view.congested_count,
        unavailable_count=view.unreadable,
    )


def fallen_link(link: Fallen, mesh: MeshShape) -> FallenLink:
    """Status of a link that fell back from the agreed transport."""
    return FallenLink(
        name=link_name(link.link, mesh.column_name(link.replica)),
        link=link.link,
        replica=link.replica,
        direction=link.direction,
        agreed=link.agreed,
        transport=link.transport,
        fallbacks=link.fallbacks,
        message=link.trouble,
    )


def wants_rdma(spec: JobSpec) -> bool:
    """Whether the spec requests RDMA, as opposed to using it where available."""
    placed = spec.placement is not None and spec.placement.rdma is not None
    return placed or spec.transport.engine == "rdma" or spec.transport.require == "rdma"


def rails_healthy(spec: JobSpec, view: JobView) -> tuple[ConditionStatus, str, str]:
    """Status, reason and message, for a job with recent reports. Unknown, never True, if ports
    cannot be observed."""
    rails, fallen = view.rails, view.transports.fallen
    mesh = spec.parallelism.mesh
    sick = _listed([port.text(mesh) for port in rails.sick], rails.sick_count)
    if fallen:
        # Both ends of a link report it: name the link once, preferably with the cause.
        ends = sorted(fallen, key=lambda end: bool(end.trouble))
        links = {(f.link, f.replica): f.text(mesh) for f in ends}
        told = _listed([links[key] for key in sorted(links)], view.transports.fallen_count)
        return "False", names.R_FELL_BACK, _bounded(f"{told}; {sick}" if sick else told)
    match rails.health:
        case RailHealth.SICK:
            return "False", names.R_RAILS_SICK, _bounded(sick)
        case RailHealth.NONE if wants_rdma(spec):
            return (
                "False",
                names.R_NO_RDMA,
                "the spec requests RDMA, but no rank sees a device: check placement.rdma and the"
                " device plugin",
            )
        case RailHealth.NONE:
            return "True", names.R_NO_RDMA, "no rank sees an RDMA device, and none is requested"
        case RailHealth.UNKNOWN:
            return ("Unknown", *_unknown(rails))
        case RailHealth.CONGESTED:
            crowded = [port.text(mesh) for port in rails.congested]
            text = _listed(crowded, rails.congested_count)
            return "True", names.R_RAILS_CONGESTED, _bounded(f"congestion: {text}")
        case RailHealth.HEALTHY:
            return "True", names.R_RAILS_OK, f"{rails.ports} ports, all healthy"


def _unknown(rails: RailsView) -> tuple[str, str]:
    if rails.expected is None:
        return names.R_PORTS_UNREPORTED, "not every rank has reported its ports"
    missing = rails.expected - rails.ports + rails.silent
    if missing > 0:
        return (
            names.R_PORTS_UNREPORTED,
            f"no recent reports of {missing} of {rails.expected} ports",
        )
    return (
        names.R_PORTS_UNSEEN,
        f"state or counters of {rails.unreadable} of {rails.ports} ports cannot be read in the"
        " pods",
    )


def _listed(texts: list[str], count: int) -> str:
    shown = "; ".join(texts[:NAMED])
    more = count - min(len(texts), NAMED)
    return f"{shown}; and {more} more" if more > 0 else shown


def _bounded(text: str) -> str:
    return text if len(text) <= MESSAGE_LENGTH else text[: MESSAGE_LENGTH - 1] + "…"
