"""What status tells of one job, as lines: for someone who sees it for the first time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipemorph.api.status import AdaptationSummary, Condition, JobStatus, TrainingStatus, condition
from pipemorph.api.status_links import SlowLink
from pipemorph.api.status_recoveries import Recoveries
from pipemorph.errors import one_line
from pipemorph.explain.advice import advice
from pipemorph.explain.cluster_job import ClusterJob
from pipemorph.explain.of_status import causes, what_was_done, why_not_running, wrong
from pipemorph.explain.story import duration, few, link_name, percent_done, plural, worth_line
from pipemorph.top.page import BARS, Column, Line, Span, Style, fact, line, sparkline, table
from pipemorph.top.seen import Seen
from pipemorph.top.times import since, wall

LONG = 300
"""Most characters of a reason or message."""
NAMED = 3
"""Most ports or links that are named in one line."""

LABELS = {
    "StagesEven": "stages",
    "ReductionsHealthy": "gradients",
    "ReplicasComplete": "replicas",
    "SparesReady": "spares",
}
"""Of conditions that have no part of their own."""

LINKS = (
    Column("SLOW LINK"),
    Column("REPLICA", 1),
    Column("LATE BY"),
    Column("", 4),
    Column("SINCE (UTC)"),
    Column("ONE-WAY TIME", 3, right=True),
    Column("ROUTE"),
    Column("TRANSPORT", 2),
)
ORDERS = ("delay", "link")
"""Orders of the slow links."""


def job_page(
    job: ClusterJob,
    seen: Seen,
    now: float,
    *,
    width: int | None = None,
    bars: str = BARS,
    order: str = "delay",
    height: int | None = None,
) -> list[Line]:
    """All of a job. ``now``: wall clock, seconds; ``width``: of the terminal, None for none;
    ``height``: lines that there is room for, without those that say why, if need be; None: any."""
    lines = _job_page(job, seen, now, width=width, bars=bars, order=order, reasons=True)
    if height is not None and len(lines) > height:
        return _job_page(job, seen, now, width=width, bars=bars, order=order, reasons=False)
    return lines


def _job_page(
    job: ClusterJob,
    seen: Seen,
    now: float,
    *,
    width: int | None,
    bars: str,
    order: str,
    reasons: bool,
) -> list[Line]:
    status = job.status
    title = (
        Span(job.name, "head"),
        Span("  "),
        Span(state_of(job), state_style(job)),
        Span(f"  {job.spec.parallelism.mesh}"),
        Span(f"  {status.ready} pods ready" if status and status.ready else ""),
        Span("  EMULATED" if job.spec.emulation is not None else "", "bad"),
    )
    lines: list[Line] = [title]
    if status is None or status.state is None:
        return [*lines, *fact("status", "empty: no operator has looked at the job yet", width)]
    held = why_not_running(status)
    if held is not None:
        lines += fact("why", one_line(f"{held.reason}: {held.message}", LONG), width, "bad")
    training = status.training
    if training is not None:
        lines += _figures(job, training, seen, now, width=width, bars=bars)
        lines += _plan(training, width, reasons=reasons)
        lines += fact("worth", _worth(job, training), width)
    if status.goodput is not None:
        text = f"{status.goodput:.1%} of the time that it had its place went into iterations"
        lines += fact("goodput", text, width)
    lines += fact("recoveries", _recoveries(status, now), width)
    lines.append(())
    lines += links_part(job, now, seen, width=width, bars=bars, order=order)
    lines.append(())
    if training is not None:
        text, style = _rails(training)
        lines += fact("rails", text, width, style)
    for found in wrong(status):
        if found.type not in ("LinksHealthy", "RailsHealthy"):
            lines += fact(LABELS.get(found.type, "seen"), _told(found, now), width, "bad")
    for number, text in enumerate(advice(causes(job, status))):
        lines += fact("to do" if not number else "", text, width)
    return lines


def state_of(job: ClusterJob) -> str:
    return "-" if job.status is None or job.status.state is None else job.status.state


def state_style(job: ClusterJob) -> Style:
    good, bad = ("Running", "Complete"), ("Failed", "Restarting")
    state = state_of(job)
    return "good" if state in good else "bad" if state in bad else "plain"


def progress(job: ClusterJob) -> str:
    """``118 of 1,000 (11%)``; ``-`` if status does not tell."""
    training = job.status.training if job.status is not None else None
    if training is None:
        return "-"
    total = job.spec.trainer.iterations
    return f"{training.iteration:,}" + (f" of {total:,} ({percent(job)})" if total else "")


def percent(job: ClusterJob) -> str:
    return "-" if job.done is None else percent_done(job.done)


def gain(change: AdaptationSummary | None) -> tuple[str, str] | None:
    """Promised and measured gain of a change; None if there is no promise."""
    if change is None or change.promised is None:
        return None
    measured = "not yet" if change.measured is None else f"{change.measured:.0%}"
    return f"{change.promised:.0%}", measured


def links_part(
    job: ClusterJob,
    now: float,
    seen: Seen | None = None,
    *,
    width: int | None = None,
    bars: str = BARS,
    order: str = "delay",
) -> list[Line]:
    """How many links are slow since when, and each of them. ``seen``: their delays before."""
    status = job.status
    training = status.training if status is not None else None
    found = condition(status, "LinksHealthy") if status is not None else None
    if status is None or training is None or found is None:
        return fact("links", "nothing is known of them yet", width)
    if not training.slow_links:
        style: Style = "good" if found.status == "True" else "plain"
        return fact("links", _told(found, now), width, style)
    text, alone = plural(training.slow_link_count, "slow link"), training.slow_link_count == 1
    if found.status == "False":
        each = [wall(link.since) for link in training.slow_links]
        known = [at for at in each if at is not None]
        unhealthy = min(known) if len(known) == len(each) else wall(found.last_transition_time)
        text += f"{'' if alone else ', the first'} since {since(unhealthy, now, ' UTC')}"
    else:
        text += f" by the last report; {found.message}"
    if training.unknown_link_count:
        text += f"; of {training.unknown_link_count} more nothing is known"
    lines = fact("links", text, width, "bad")
    by = {"delay": lambda each: -each.delay_ms, "link": lambda each: each.link}[order]
    rows = [
        _row(job, training, each, since(wall(each.since), now), _delays(seen, each, bars))
        for each in sorted(training.slow_links, key=by)
    ]
    lines += [(), *table(LINKS, rows, width)]
    if training.slow_link_count > len(rows):
        lines.append(line(f"and {training.slow_link_count - len(rows)} more", "faint"))
    if any(each.link < len(training.routes) for each in training.slow_links):
        lines.append(
            line("delegated: the transfer engine carries it beside compute; direct: torch", "faint")
        )
    return lines


def _told(found: Condition, now: float) -> str:
    at = wall(found.last_transition_time)
    return f"{one_line(found.message, LONG)}, since {since(at, now, ' UTC')}"


def _delays(seen: Seen | None, link: SlowLink, bars: str) -> str:
    return "" if seen is None else sparkline(seen.delays.get((link.link, link.replica), ()), bars)


def _row(
    job: ClusterJob, training: TrainingStatus, link: SlowLink, when: str, delays: str
) -> list[Span]:
    def at(values: Sequence[str]) -> str:
        return values[link.link] if link.link < len(values) else ""

    column = job.spec.parallelism.mesh.column_name(link.replica)
    return [
        Span(link_name(link.link), "bad"),
        Span(column.removeprefix("replica ") if column.count(" ") == 1 else column),
        Span(f"+{link.delay_ms:.0f} ms {link.direction}", "bad"),
        Span(delays, "bad"),
        Span(when),
        Span(f"{link.wire_time_ms:.1f} ms"),
        Span(at(training.routes), "good" if at(training.routes) == "delegated" else "plain"),
        Span(at(training.transports)),
    ]


def _figures(
    job: ClusterJob,
    training: TrainingStatus,
    seen: Seen,
    now: float,
    *,
    width: int | None,
    bars: str,
) -> Iterator[Line]:
    left = job.left_seconds
    text = progress(job) + ("" if left is None else f", {duration(left)} left")
    reported = wall(training.last_report_time)
    if reported is not None and job.status is not None and job.status.state == "Running":
        text += f"; as of {since(reported, now, ' UTC', after=' ago')}"
    yield from fact("iteration", text, width)
    if training.iteration_seconds:
        text = f"{training.iteration_seconds:.3g} s per iteration"
        if training.bubble_fraction is not None:
            text += f", stages idle {training.bubble_fraction:.0%} of it"
        if training.loss is not None:
            text += f"; loss {training.loss:.4f}"
        yield from fact("speed", text, width)
        drawn = sparkline(seen.times, bars)
        if drawn:
            low, high = min(seen.times), max(seen.times)
            text = f"{drawn} {low:.3g} to {high:.3g} s, {seen.which}"
            yield from fact("trend", text, width)


def _plan(training: TrainingStatus, width: int | None, *, reasons: bool) -> Iterator[Line]:
    wanted, applied = training.wanted_plan_version, training.applied_plan_version
    newest = training.last_adaptation
    text = f"v{applied}" + (", the one of the start" if not applied else "")
    if applied < wanted:
        text += f"; the ranks are changing to v{wanted}"
    elif newest is not None and newest.plan_version == applied:
        first = newest.applied_at_iteration
        text += "" if first is None else f" since iteration {first:,}"
        text += f": {what_was_done(newest, training)}"
    yield from fact("plan", text, width)
    if newest is not None:
        if reasons:
            yield from fact("because", one_line(newest.reason, LONG), width)
        found = gain(newest) if newest.kind == "adapt" else None
        if found is not None:
            text = f"promised {found[0]}, measured {found[1]}"
            before, after = newest.iteration_seconds_before, newest.iteration_seconds_after
            if before is not None and after is not None:
                text += f": {before:.3g} s per iteration became {after:.3g} s"
            yield from fact("gain", text, width)


def _worth(job: ClusterJob, training: TrainingStatus) -> str:
    seconds, error = training.saved_seconds, training.saved_error_seconds
    ranks = job.spec.parallelism.mesh.world_size
    told = worth_line(seconds, error, ranks, training.adaptations, job.gpus)
    return told or "nothing so far: the plan was never changed"


def _recoveries(status: JobStatus, now: float) -> str:
    found = status.recoveries or Recoveries()
    text = "none"
    if found.count:
        text = f"ranks were started again {plural(found.count, 'time')}"
        text += " within their pods" if status.ready is not None else ""
    if found.last:
        newest = found.last[-1]
        at = since(wall(newest.lost_at), now, " UTC", after=" ago")
        text += f"; the last at {at}: {one_line(newest.cause, LONG)}"
        for each in newest.spares[:NAMED]:
            text += f"; spare pod {each.pod} in the place of pod {each.instead_of}"
        if newest.seconds is not None:
            text += f"; {duration(newest.seconds)} until the next iteration was done"
        if newest.repeated is not None:
            text += f", {plural(newest.repeated, 'iteration')} repeated"
    again = status.restarts + status.disruptions
    return text + (f"; the job started again {plural(again, 'time')}" if again else "")


def _rails(training: TrainingStatus) -> tuple[str, Style]:
    rails, parts = training.rails, []
    if rails is not None and rails.sick_count:
        named = (
            f"{port.device} port {port.port} of stage {port.stage} {port.message}"
            for port in rails.sick_ports
        )
        parts.append(f"{rails.sick_count} of {rails.ports} RDMA ports sick: {few(named, NAMED)}")
    if training.fallen_links:
        named = (
            f"link {each.link} from {each.agreed} to {each.transport} ({one_line(each.message)})"
            for each in training.fallen_links
        )
        parts.append(f"fell back: {few(named, NAMED)}")
    if parts:
        return one_line("; ".join(parts), LONG), "bad"
    if rails is None or not rails.ports:
        return "no RDMA port was reported", "plain"
    congested = f", {rails.congested_count} congested" if rails.congested_count else ""
    return f"{plural(rails.ports, 'RDMA port')}, none sick{congested}", "good"
