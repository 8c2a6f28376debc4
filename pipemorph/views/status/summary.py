"""Derives the ingest's part of status, and its conditions, from a job's controller. Pure.

The ingest calls :func:`judge_conditions` regularly, to decide if status has to be written soon, and
:func:`summarize_training` and :func:`update_conditions` when it writes. A run on one machine shows
the same status.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from math import isfinite

from pipemorph.control import (
    AdaptationRecord,
    Health,
    JobController,
    JobView,
    LinkState,
    ReductionHealth,
)
from pipemorph.planning import Route
from pipemorph.protocol import RailHealth, RailsView
from pipemorph.protocol import TransportFallback as Fallen
from pipemorph.spec.job_spec import JobSpec
from pipemorph.spec.job_status import AdaptationSummary, Condition, ConditionStatus, TrainingStatus
from pipemorph.spec.mesh import MeshShape
from pipemorph.spec.status_base import MAX_SLOW_LINKS
from pipemorph.spec.status_links import (
    FallenLinkStatus,
    FaultyPort,
    RailsStatus,
    SlowLink,
    SlowReduction,
    SlowStage,
)
from pipemorph.views.explanation.explanation_text import format_link, join_few
from pipemorph.views.status import condition_names, status_text
from pipemorph.views.status.conditions import format_time, update_condition

MOST_NAMED = 5
"""Most ports or links named in a message; status has more."""
MESSAGE_LENGTH = 1024


@dataclass(frozen=True)
class StatusInput:
    """Input of a summary. ``reported_at``: wall clock of the newest report; ``is_over``: the job is
    Complete or Failed, so its links are idle; ``taken_over_at``: wall clock at which this process
    took over a job whose ranks had reported to another one; ``total_replicas``: replicas of the
    job, if fewer may train; ``excluded_replicas``: those that do not train; ``stay_reason``: why
    the others do not stop for one that could join; ``on_trial``: ranks try another layout;
    ``layout_note``: text about the last decision and change of the layout."""

    controller: JobController
    reported_at: float | None
    generation: int | None = None
    is_over: bool = False
    taken_over_at: float | None = None
    total_replicas: int | None = None
    excluded_replicas: tuple[int, ...] = ()
    stay_reason: str = ""
    on_trial: bool = False
    layout_note: str = ""


def summarize_training(
    source: StatusInput, now: float, view: JobView | None = None, last: TrainingStatus | None = None
) -> TrainingStatus:
    """Figures of the job, with at most ``MAX_SLOW_LINKS`` slow links, slowest first.

    ``last``: the figures in status. They stay until this process gets a report of the attempt, so
    that a restarted ingest does not reset the job to iteration 0.
    """
    summary = _build_summary(source, now, view, last)
    if last is not None and last.attempt == summary.attempt:
        # Totals of the agent, which a new process may receive only after its first report.
        totals = ("link_fallbacks", "link_failbacks")
        most = {name: max(getattr(last, name), getattr(summary, name)) for name in totals}
        summary = summary.model_copy(update=most)
    if source.is_over:
        nothing = {"slow_link_count": 0, "slow_links": [], "unknown_link_count": 0}
        nothing |= {"slow_reduction_count": 0, "slow_reductions": []}
        nothing |= {"fallen_link_count": 0, "fallen_links": [], "rails": None}
        nothing |= {"slow_stage_count": 0, "slow_stages": [], "left": None}
        nothing |= {"progress": status_text.drop_time_remaining(summary.progress)}
        return summary.model_copy(update=nothing)
    return summary


def _build_summary(
    source: StatusInput, now: float, view: JobView | None, last: TrainingStatus | None
) -> TrainingStatus:
    silent = source.reported_at is None
    if silent and last is not None and last.attempt == source.controller.attempt:
        return last
    view = view or source.controller.get_job_view(now)
    records = source.controller.records
    iterations = source.controller.spec.trainer.iterations
    mesh = source.controller.spec.parallelism.mesh
    slow = sorted(_list_slow_links(view), key=lambda link: -link.delay)
    return TrainingStatus(
        attempt=source.controller.attempt,
        state=view.state,
        message=view.message,
        last_report_time=_format_wall_time(source.reported_at),
        progress=status_text.format_progress(view, iterations),
        done=status_text.format_done(view, iterations),
        left=status_text.format_time_remaining(view, iterations),
        gain=status_text.format_gain(records) if records or last is None else last.gain,
        iteration=view.iteration,
        iteration_seconds=_round_optional(view.iteration_seconds),
        bubble_fraction=_round_optional(view.bubble_fraction),
        idle_seconds={cause: round(each, 4) for cause, each in view.idle_seconds.items()},
        # JSON has only finite numbers.
        loss=view.loss if view.loss is not None and isfinite(view.loss) else None,
        warmup=list(view.warmup_counts),
        routes=[route.value for route in view.routes],
        shares=list(view.shares),
        offloaded_microbatches=list(view.offloaded_microbatches),
        recomputed_microbatches=list(view.recomputed_microbatches),
        wanted_plan_version=view.wanted_plan_version,
        observed_plan_version=view.observed_plan_version,
        applied_plan_version=view.applied_plan_version,
        slow_link_count=len(slow),
        slow_links=[
            SlowLink(
                name=format_link(link.link, link.column),
                link=link.link,
                replica=link.replica,
                direction=link.direction,
                delay_ms=round(link.delay * 1e3, 3),
                wire_time_ms=round(link.wire_time * 1e3, 3),
                confidence=round(link.confidence, 3),
                since=_format_wall_time(link.since),
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
            for each in _list_slow_reductions(view)[:MAX_SLOW_LINKS]
        ],
        transports=list(view.transports.links),
        fallen_link_count=view.transports.fallen_count,
        fallen_links=[summarize_fallback(link, mesh) for link in view.transports.fallen],
        link_fallbacks=view.transports.fallbacks,
        link_failbacks=view.transports.failbacks,
        rails=summarize_rails(view.rails),
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
        peak_memory=_fill_missing_peaks(view.peak_memory),
        adaptations=source.controller.change_count,
        saved_seconds=round(view.saved_time.seconds, 1),
        saved_error_seconds=round(view.saved_time.error_seconds, 1),
        last_adaptation=_summarize_last_adaptation(records, last),
    )


def update_conditions(
    source: StatusInput, old: Sequence[Condition], now: float, view: JobView | None = None
) -> list[Condition]:
    """Conditions in :data:`condition_names.INGEST_CONDITIONS`; ``ReductionsHealthy`` only for jobs
    whose ranks reduce gradients, ``ReplicasComplete`` only for jobs that may run with fewer
    replicas."""
    view = view or source.controller.get_job_view(now)
    conditions = [c for c in old if c.type in condition_names.INGEST_CONDITIONS]
    when = datetime.fromtimestamp(now, UTC)
    for kind, (status, reason, message) in judge_conditions(source, view, now).items():
        conditions = update_condition(
            conditions, kind, status, reason, message, generation=source.generation, now=when
        )
    return conditions


def judge_conditions(source: StatusInput, view: JobView, now: float) -> dict[str, Verdict]:
    """Status, reason and message of each known condition: cheap enough for every report.

    The conditions of a job that was taken over do not change until its ranks have had time to
    report here. If they do not report, the conditions that need reports are stale."""
    if source.reported_at is None and source.taken_over_at is not None and not source.is_over:
        stale = _judge_report_age(source, now)
        needing = [
            condition_names.LINKS_HEALTHY,
            condition_names.RAILS_HEALTHY,
            condition_names.STAGES_EVEN,
        ]
        if source.controller.spec.parallelism.mesh.data_size > 1:
            needing.append(condition_names.REDUCTIONS_HEALTHY)
        return dict.fromkeys(needing, stale) if stale is not None else {}
    found = {
        condition_names.LINKS_HEALTHY: _judge_links(source, view, now),
        condition_names.SCHEDULE_ADAPTED: _judge_adaptation(source, view),
        condition_names.LINKS_DELEGATED: _judge_delegation(source, view),
        condition_names.RAILS_HEALTHY: _judge_report_age(source, now)
        or judge_rails(source.controller.spec, view),
        condition_names.STAGES_EVEN: _judge_stages(source, view, now),
    }
    if source.controller.spec.parallelism.mesh.data_size > 1:
        found[condition_names.REDUCTIONS_HEALTHY] = _judge_reductions(source, view, now)
    elif source.excluded_replicas:
        one = "one replica trains, and reduces gradients with no other"
        found[condition_names.REDUCTIONS_HEALTHY] = "Unknown", condition_names.R_REPLICAS_FEWER, one
    if source.total_replicas is not None:
        found[condition_names.REPLICAS_COMPLETE] = _judge_replicas(source, source.total_replicas)
    return found


Verdict = tuple[ConditionStatus, str, str]
"""Status, reason, message."""


def _judge_report_age(source: StatusInput, now: float) -> Verdict | None:
    """Verdict Unknown if the job has no recent reports; else None."""
    if source.is_over:
        return (
            "Unknown",
            condition_names.R_FINISHED,
            "the job has finished; its links are no longer tracked",
        )
    stale_after = source.controller.spec.adaptation.stale_after_seconds
    newest = source.taken_over_at if source.reported_at is None else source.reported_at
    if newest is None:
        return "Unknown", condition_names.R_NO_REPORTS, "no rank of this attempt has reported yet"
    if now - newest > stale_after:
        # Without the age of the report, which would change status every second.
        return "Unknown", condition_names.R_STALE, f"no report for more than {stale_after:g} s"
    return None


def _judge_links(source: StatusInput, view: JobView, now: float) -> Verdict:
    if (stale := _judge_report_age(source, now)) is not None:
        return stale
    slow, links = _list_slow_links(view), view.links
    if slow:
        shown = sorted(slow, key=lambda link: -link.delay)
        return (
            "False",
            condition_names.R_LINKS_SLOW,
            f"{join_few(map(_describe_link, shown), 5)} slow",
        )
    unknown = [link.link for link in links if link.health is Health.UNKNOWN]
    if unknown:
        return (
            "Unknown",
            condition_names.R_LINKS_UNKNOWN,
            f"{len(unknown)} of {len(links)} links have no recent samples",
        )
    return "True", condition_names.R_LINKS_OK, f"{len(links)} links, all healthy"


def _judge_reductions(source: StatusInput, view: JobView, now: float) -> Verdict:
    if (stale := _judge_report_age(source, now)) is not None:
        return stale
    slow = _list_slow_reductions(view)
    if slow:
        shown = join_few((f"{each.name} (+{each.delay * 1e3:.0f} ms)" for each in slow), 5)
        return "False", condition_names.R_REDUCTIONS_SLOW, f"{shown} slow"
    return "True", condition_names.R_REDUCTIONS_OK, f"{len(view.reductions)} groups, none slow"


def _judge_replicas(source: StatusInput, whole: int) -> Verdict:
    excluded_replicas = source.excluded_replicas
    if source.is_over:
        last = f"{whole - len(excluded_replicas)} of {whole} replicas trained last"
        return "Unknown", condition_names.R_FINISHED, f"the job has finished; {last}"
    if not excluded_replicas:
        return "True", condition_names.R_REPLICAS_ALL, f"all {whole} replicas train"
    several = len(excluded_replicas) > 1
    missing = f"replica{'s' if several else ''} {join_few(map(str, excluded_replicas), MOST_NAMED)}"
    text = f"{whole - len(excluded_replicas)} of {whole} replicas train; {missing}"
    if source.stay_reason:
        text += f" could join, but the ranks cannot stop for it ({source.stay_reason}); retrying"
    else:
        text += f" wait{'' if several else 's'} for lost pods to return"
    return "False", condition_names.R_REPLICAS_FEWER, text[:MESSAGE_LENGTH]


def _judge_adaptation(source: StatusInput, view: JobView) -> Verdict:
    status, reason, message = _judge_plan(source, view)
    held = None if source.is_over else source.controller.explain_held_change(view.links)
    if held is None or reason == condition_names.R_ADAPTING:
        return status, reason, message
    return status, condition_names.R_HELD_BACK, f"{message}; a change is held back: {held}"


def _judge_plan(source: StatusInput, view: JobView) -> Verdict:
    records = source.controller.records
    if view.wanted_plan_version == 0 or not records:
        return "False", condition_names.R_INITIAL_PLAN, "the ranks run the plan of the spec"
    newest = records[-1]
    if view.applied_plan_version < view.wanted_plan_version:
        return (
            "False",
            condition_names.R_ADAPTING,
            f"changing to plan v{view.wanted_plan_version}; v{view.applied_plan_version} is in"
            " effect",
        )
    if newest.kind == "return":
        return "False", condition_names.R_RETURNED, f"plan v{newest.plan_version}: {newest.reason}"
    return "True", condition_names.R_ADAPTED, f"plan v{newest.plan_version}: {newest.reason}"


def _judge_delegation(source: StatusInput, view: JobView) -> Verdict:
    moved = [str(i) for i, route in enumerate(view.routes) if route is Route.DELEGATED]
    if source.controller.spec.transport.route != "auto":
        fixed = source.controller.spec.transport.route
        return "False", condition_names.R_FIXED_ROUTE, f"transport.route is {fixed} for all links"
    if moved and view.applied_plan_version < view.wanted_plan_version:
        return (
            "False",
            condition_names.R_ADAPTING,
            f"links {join_few(moved, 20)} will be delegated to the engine",
        )
    if moved:
        return (
            "True",
            condition_names.R_DELEGATED,
            f"links {join_few(moved, 20)} are delegated to the engine",
        )
    return "False", condition_names.R_DIRECT, "all links are direct"


def _judge_stages(source: StatusInput, view: JobView, now: float) -> Verdict:
    if (stale := _judge_report_age(source, now)) is not None:
        return stale
    parallelism, found = source.controller.spec.parallelism, view.stragglers
    done = _describe_layout(source)
    if not found.slowest:
        if not found.known:
            text = f"not every stage has reported op times{done}"
            return "Unknown", condition_names.R_STAGES_UNMEASURED, text[:MESSAGE_LENGTH]
        if uneven := source.controller.describe_uneven_stages():
            return "True", condition_names.R_STAGES_UNEQUAL, f"{uneven}{done}"[:MESSAGE_LENGTH]
        text = f"{parallelism.stages} stages, none slow{done}"
        return "True", condition_names.R_STAGES_EVEN, text[:MESSAGE_LENGTH]
    text = "; ".join(each.format_text(parallelism.mesh) for each in found.slowest[:MOST_NAMED])
    if found.count > MOST_NAMED:
        text += f"; and {found.count - MOST_NAMED} more"
    split = found.suggest_split(parallelism.layers, source.controller.layers)
    if split is not None:
        text += f"; {split.format_text()}"
    return "False", condition_names.R_STAGES_SLOW, f"{text}{done}"[:MESSAGE_LENGTH]


def _describe_layout(source: StatusInput) -> str:
    """Text about layers that have moved between stages, and the last decision on the layout."""
    text, layers = "", source.controller.layers
    if layers:
        text = f"; layers per stage are {', '.join(map(str, layers))}"
        text += " on trial" if source.on_trial else ""
    return f"{text}; {source.layout_note}" if source.layout_note else text


def _list_slow_links(view: JobView) -> list[LinkState]:
    return [link for link in view.links if link.health is Health.SLOW]


def _list_slow_reductions(view: JobView) -> list[ReductionHealth]:
    """Slow reductions, slowest first."""
    return sorted((each for each in view.reductions if each.slow), key=lambda each: -each.delay)


def _describe_link(link: LinkState) -> str:
    # Rounded to milliseconds, so that the message does not change with every sample.
    return f"{link.name} (+{link.delay * 1e3:.0f} ms {link.direction})"


def _summarize_last_adaptation(
    records: Sequence[AdaptationRecord], last: TrainingStatus | None
) -> AdaptationSummary | None:
    """Newest record; without any, the one in status, which another ingest has written."""
    if records:
        return _summarize_adaptation(records[-1])
    return last.last_adaptation if last is not None else None


def _summarize_adaptation(record: AdaptationRecord) -> AdaptationSummary:
    return AdaptationSummary(
        plan_version=record.plan_version,
        kind=record.kind,
        reason=record.reason,
        effect=status_text.format_effect(record),
        detected_at=format_time(datetime.fromtimestamp(record.detected_at, UTC)),
        detected_at_iteration=record.detected_at_iteration,
        applied_at_iteration=record.applied_at_iteration,
        links=[link.link for link in record.links],
        warmup_before=list(record.warmup_before),
        warmup_after=list(record.warmup_after),
        iteration_seconds_before=_round_optional(record.iteration_seconds_before),
        iteration_seconds_after=_round_optional(record.iteration_seconds_after),
        promised=_round_optional(record.promised),
        measured=_round_optional(record.measured),
        bubble_before=_round_optional(record.bubble_before),
        bubble_after=_round_optional(record.bubble_after),
        peak_memory_before=_fill_missing_peaks(record.peak_memory_before),
        peak_memory_after=_fill_missing_peaks(record.peak_memory_after),
        offloaded_microbatches=list(record.offloaded),
        recomputed_microbatches=list(record.recomputed),
        fused_stages=list(record.fused_stages),
        shares=list(record.shares),
    )


def _fill_missing_peaks(peaks: Sequence[int | None]) -> list[int]:
    return [peak or 0 for peak in peaks]


def _round_optional(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


def _format_wall_time(wall: float | None) -> str | None:
    return None if wall is None else format_time(datetime.fromtimestamp(wall, UTC))


# --- rails and transports, and the condition RailsHealthy ----------------------------------------


def summarize_rails(view: RailsView) -> RailsStatus:
    """Counts of ports, and the ports with problems."""
    return RailsStatus(
        ports=view.ports,
        expected_ports=view.expected,
        faulty_count=view.faulty_count,
        faulty_ports=[
            FaultyPort(
                stage=port.stage,
                replica=port.replica,
                device=port.device,
                port=port.port,
                state=port.state,
                message=port.what[:MESSAGE_LENGTH],
            )
            for port in view.faulty
        ],
        congested_count=view.congested_count,
        unavailable_count=view.unreadable,
    )


def summarize_fallback(link: Fallen, mesh: MeshShape) -> FallenLinkStatus:
    """Status of a link that fell back from the agreed transport."""
    return FallenLinkStatus(
        name=format_link(link.link, mesh.format_column_name(link.replica)),
        link=link.link,
        replica=link.replica,
        direction=link.direction,
        agreed=link.agreed,
        transport=link.transport,
        fallbacks=link.fallbacks,
        message=link.trouble,
    )


def requests_rdma(spec: JobSpec) -> bool:
    """True if the spec requires RDMA, as opposed to using it where available."""
    placed = spec.placement is not None and spec.placement.rdma is not None
    return placed or spec.transport.engine == "rdma" or spec.transport.require == "rdma"


def judge_rails(spec: JobSpec, view: JobView) -> tuple[ConditionStatus, str, str]:
    """Status, reason and message, for a job with recent reports. Unknown, never True, if ports
    cannot be observed."""
    rails, fallen = view.rails, view.transports.fallen
    mesh = spec.parallelism.mesh
    faulty = _join_limited([port.format_text(mesh) for port in rails.faulty], rails.faulty_count)
    if fallen:
        # Both ends of a link report it: name the link once, preferably with the cause.
        ends = sorted(fallen, key=lambda end: bool(end.trouble))
        links = {(f.link, f.replica): f.format_text(mesh) for f in ends}
        text = _join_limited([links[key] for key in sorted(links)], view.transports.fallen_count)
        return (
            "False",
            condition_names.R_FELL_BACK,
            _limit_length(f"{text}; {faulty}" if faulty else text),
        )
    match rails.health:
        case RailHealth.FAULTY:
            return "False", condition_names.R_RAILS_SICK, _limit_length(faulty)
        case RailHealth.NONE if requests_rdma(spec):
            return (
                "False",
                condition_names.R_NO_RDMA,
                "the spec requests RDMA, but no rank sees a device: check placement.rdma and the"
                " device plugin",
            )
        case RailHealth.NONE:
            return (
                "True",
                condition_names.R_NO_RDMA,
                "no rank sees an RDMA device, and none is requested",
            )
        case RailHealth.UNKNOWN:
            return ("Unknown", *_explain_unknown_rails(rails))
        case RailHealth.CONGESTED:
            crowded = [port.format_text(mesh) for port in rails.congested]
            text = _join_limited(crowded, rails.congested_count)
            return "True", condition_names.R_RAILS_CONGESTED, _limit_length(f"congestion: {text}")
        case RailHealth.HEALTHY:
            return "True", condition_names.R_RAILS_OK, f"{rails.ports} ports, all healthy"


def _explain_unknown_rails(rails: RailsView) -> tuple[str, str]:
    if rails.expected is None:
        return condition_names.R_PORTS_UNREPORTED, "not every rank has reported its ports"
    missing = rails.expected - rails.ports + rails.silent
    if missing > 0:
        return (
            condition_names.R_PORTS_UNREPORTED,
            f"no recent reports of {missing} of {rails.expected} ports",
        )
    return (
        condition_names.R_PORTS_UNSEEN,
        f"state or counters of {rails.unreadable} of {rails.ports} ports cannot be read in the"
        " pods",
    )


def _join_limited(texts: list[str], count: int) -> str:
    shown = "; ".join(texts[:MOST_NAMED])
    more = count - min(len(texts), MOST_NAMED)
    return f"{shown}; and {more} more" if more > 0 else shown


def _limit_length(text: str) -> str:
    return text if len(text) <= MESSAGE_LENGTH else text[: MESSAGE_LENGTH - 1] + "…"
