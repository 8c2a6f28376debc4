"""Jobs of a cluster as a table: one row each, sorted by name."""

from __future__ import annotations

from collections.abc import Sequence

from pipemorph.api.status import condition
from pipemorph.explain.cluster_job import ClusterJob
from pipemorph.explain.story import duration, percent_done
from pipemorph.terminal import GAP, Table, table

HEADINGS = (
    "NAMESPACE",
    "NAME",
    "STATE",
    "READY",
    "DONE",
    "LEFT",
    "S/ITER",
    "SLOW LINKS",
    "PLAN",
    "GAIN (PROMISED)",
    "GOODPUT",
    "SAVED",
    "RECOVERIES",
)
RIGHT = {"DONE", "LEFT", "S/ITER", "PLAN", "GOODPUT", "SAVED", "RECOVERIES"}
"""Columns that are aligned to the right."""
STYLES = {"Running": "green", "Complete": "green", "Failed": "bold red", "no reports": "yellow"}
"""By cell."""


def job_table(
    jobs: Sequence[ClusterJob], *, namespaced: bool = True, most: int | None = None
) -> Table:
    """A row for each job. ``namespaced``: with the namespaces; ``most``: columns of characters that
    there is room for, beyond which the last headings are left out."""
    found = sorted(jobs, key=lambda job: job.name)
    first = 0 if namespaced else 1
    rows = [(*HEADINGS,), *(_cells(job) for job in found)]
    widths = [max(map(len, column)) + GAP for column in zip(*rows, strict=True)]
    last = len(HEADINGS)
    while most is not None and sum(widths[first:last]) - GAP > most and last > first + 2:
        last -= 1
    shown = (cells[first:last] for cells in rows[1:])
    return table(HEADINGS[first:last], shown, right=RIGHT, styles=STYLES)


def _cells(job: ClusterJob) -> list[str]:
    status = job.status
    name = [job.metadata.namespace, job.metadata.name]
    if status is None:
        return [*name, *["-"] * (len(HEADINGS) - len(name))]
    training, left = status.training, job.left_seconds
    seconds = training.iteration_seconds if training is not None else None
    saved = training.saved_seconds if training is not None and training.adaptations else None
    return [
        *name,
        status.state or "-",
        status.ready or "-",
        "-" if job.done is None else percent_done(job.done),
        "-" if left is None else duration(left),
        f"{seconds:.3g}" if seconds else "-",
        _slow_links(job),
        "-" if training is None else f"v{training.applied_plan_version}",
        _gain(job),
        "-" if status.goodput is None else f"{status.goodput:.0%}",
        "-" if saved is None else ("-" if saved < 0 else "") + duration(abs(saved)),
        str(status.recoveries.count if status.recoveries is not None else 0),
    ]


def _slow_links(job: ClusterJob) -> str:
    """Slowest link with its delay and the number of others; ``none`` if all are healthy."""
    status = job.status
    training = status.training if status is not None else None
    found = condition(status, "LinksHealthy") if status is not None else None
    if training is None or found is None:
        return "-"
    if training.slow_links:
        worst = max(training.slow_links, key=lambda each: each.delay_ms)
        rest = training.slow_link_count - 1
        return f"link {worst.link} +{worst.delay_ms:.0f} ms" + (f", {rest} more" if rest else "")
    if found.status == "True":
        return "none"
    return {"ReportsStale": "no reports", "JobFinished": "-"}.get(found.reason, "unknown")


def _gain(job: ClusterJob) -> str:
    """Measured and promised gain of the newest adaptation."""
    training = job.status.training if job.status is not None else None
    change = training.last_adaptation if training is not None else None
    if change is None or change.kind != "adapt" or change.promised is None:
        return "-"
    measured = "not yet" if change.measured is None else f"{change.measured:.0%}"
    return f"{measured} ({change.promised:.0%})"
