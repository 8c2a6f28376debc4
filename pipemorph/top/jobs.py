"""Many jobs as a table: one line each, in the order of one of the columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pipemorph.api.status import condition
from pipemorph.explain.cluster_job import ClusterJob
from pipemorph.explain.story import duration
from pipemorph.top.job import gain, percent, state_of, state_style
from pipemorph.top.page import BARS, Column, Line, Span, Style, sparkline, table
from pipemorph.top.seen import Seen

BARS_SHOWN = 8

COLUMNS = (
    Column(""),
    Column("NAMESPACE", 1),
    Column("NAME", cut=True),
    Column("STATE"),
    Column("READY", 7),
    Column("DONE", right=True),
    Column("LEFT", 5, right=True),
    Column("S/ITER", right=True),
    Column("", 3),
    Column("SLOW LINKS"),
    Column("PLAN", 6, right=True),
    Column("GAIN (PROMISED)", 2),
    Column("GOODPUT", 3, right=True),
    Column("SAVED", right=True),
    Column("RECOVERIES", 4, right=True),
)

Order = Callable[[ClusterJob], tuple[float | str, ...]]


def _known(value: float | None) -> float:
    """Large values first, unknown ones last."""
    return 1.0 if value is None else -value


def _worst(job: ClusterJob) -> float:
    training = job.status.training if job.status is not None else None
    return max((each.delay_ms for each in training.slow_links), default=0.0) if training else -1.0


def _seconds(job: ClusterJob) -> float | None:
    training = job.status.training if job.status is not None else None
    return training.iteration_seconds if training is not None else None


def _saved(job: ClusterJob) -> float | None:
    training = job.status.training if job.status is not None else None
    return training.saved_seconds if training is not None and training.adaptations else None


def _goodput(job: ClusterJob) -> float | None:
    return job.status.goodput if job.status is not None else None


def _recoveries(job: ClusterJob) -> int:
    found = job.status.recoveries if job.status is not None else None
    return found.count if found is not None else 0


ORDERS: Mapping[str, Order] = {
    "name": lambda job: (),
    "state": lambda job: (state_of(job),),
    "done": lambda job: (_known(job.done),),
    "left": lambda job: (job.left_seconds is None, job.left_seconds or 0.0),
    "s/iter": lambda job: (_known(_seconds(job)),),
    "slow links": lambda job: (-_worst(job),),
    "goodput": lambda job: (_goodput(job) is None, _goodput(job) or 0.0),
    "saved": lambda job: (_saved(job) is None, -(_saved(job) or 0.0)),
    "recoveries": lambda job: (-_recoveries(job),),
}
"""Orders of the table: the job that one looks for first."""


def ordered(jobs: Sequence[ClusterJob], order: str, *, reverse: bool = False) -> list[ClusterJob]:
    """Jobs that are alike are in the order of their names, whatever the direction."""
    named = sorted(jobs, key=lambda job: job.name)
    return sorted(named, key=ORDERS[order], reverse=reverse)


def jobs_table(
    jobs: Sequence[ClusterJob],
    seen: Mapping[str, Seen],
    *,
    width: int | None = None,
    bars: str = BARS,
    chosen: str | None = None,
    namespaced: bool = True,
) -> list[Line]:
    """A heading and a line per job. ``chosen``: name of the job that is marked."""
    rows = [
        _row(job, seen.get(job.name, Seen()), bars, job.name == chosen, namespaced) for job in jobs
    ]
    return table(COLUMNS, rows, width)


def _row(job: ClusterJob, seen: Seen, bars: str, chosen: bool, namespaced: bool) -> list[Span]:
    status = job.status
    training = status.training if status is not None else None
    change = training.last_adaptation if training is not None else None
    found = gain(change) if change is not None and change.kind == "adapt" else None
    left, seconds, saved = job.left_seconds, _seconds(job), _saved(job)
    useful = _goodput(job)
    slow, style = _slow(job)
    return [
        Span(">" if chosen else "", "chosen" if chosen else "plain"),
        Span(job.metadata.namespace if namespaced else ""),
        Span(job.metadata.name, "chosen" if chosen else "plain"),
        Span(state_of(job), state_style(job)),
        Span((status.ready or "-") if status is not None else "-"),
        Span(percent(job)),
        Span("-" if left is None else duration(left)),
        Span("-" if not seconds else f"{seconds:.3g}"),
        Span(sparkline(list(seen.times)[-BARS_SHOWN:], bars)),
        Span(slow, style),
        Span("-" if training is None else f"v{training.applied_plan_version}"),
        Span("-" if found is None else f"{found[1]} ({found[0]})"),
        Span("-" if useful is None else f"{useful:.0%}"),
        Span("-" if saved is None else ("-" if saved < 0 else "") + duration(abs(saved))),
        Span("-" if status is None else str(_recoveries(job))),
    ]


def _slow(job: ClusterJob) -> tuple[str, Style]:
    status = job.status
    training = status.training if status is not None else None
    found = condition(status, "LinksHealthy") if status is not None else None
    if training is None or found is None:
        return "-", "plain"
    if training.slow_links:
        worst = max(training.slow_links, key=lambda each: each.delay_ms)
        rest = training.slow_link_count - 1
        more = f", {rest} more" if rest else ""
        return f"link {worst.link} +{worst.delay_ms:.0f} ms{more}", "bad"
    if found.status == "True":
        return "none", "good"
    return {"ReportsStale": "no reports", "JobFinished": "-"}.get(found.reason, "unknown"), "plain"
