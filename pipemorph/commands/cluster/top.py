"""``pipemorph top``: a table of the jobs of a cluster, or of runs on this machine, that
refreshes."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipemorph.argument_types import number_type
from pipemorph.commands.cluster import kubectl
from pipemorph.commands.output_file import write_output
from pipemorph.errors import InputError, one_line
from pipemorph.spec.job_status import find_condition
from pipemorph.terminal import (
    GAP,
    Group,
    RenderableType,
    StreamConsole,
    Table,
    make_live_display,
    make_single_line,
    make_table,
    render_parts,
)
from pipemorph.views.explanation.explained_job import ExplainedJob, parse_job_object
from pipemorph.views.explanation.explanation_text import format_duration, format_percent_done
from pipemorph.views.explanation.job_explanation import build_explanation

LEAST_EVERY, EVERY = 1.0, 5.0
RUN_FILES = ("status.json", "report.json")
"""Files of a run's folder, while it runs and afterwards."""
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
"""Styles of cells by their text."""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "top",
        help="watch jobs: which links are slow, what was done, what it saved",
        description="Print a table of the PipeMorphJobs of a cluster, or of one of them with its"
        " explanation, and refresh it until interrupted. kubectl reads the jobs. Runs of this"
        " machine, by pipemorph run or serve, are read from their folders. Without a terminal, or"
        " on a dumb one, print once. Exit status: 0, or 2 for invalid input.",
    )
    parser.add_argument(
        "job",
        metavar="JOB",
        nargs="?",
        help="[NAMESPACE/]NAME of one job (default: all jobs); or the --out folder of a run, or a"
        " folder with such folders",
    )
    kubectl.add_kubectl_arguments(parser)
    parser.add_argument(
        "-A", "--all-namespaces", action="store_true", help="jobs of all namespaces"
    )
    parser.add_argument("--once", action="store_true", help="print once")
    parser.add_argument(
        "--every",
        metavar="SECONDS",
        type=number_type(LEAST_EVERY, 3600),
        default=EVERY,
        help=f"time between two refreshes, at least {LEAST_EVERY:g} (default: {EVERY:g})",
    )


def run(args: argparse.Namespace) -> int:
    if args.all_namespaces and (args.job or args.namespace):
        raise InputError("--all-namespaces: does not go with a job or --namespace; give one")
    what, arguments = _describe_target(args)
    console = StreamConsole(sys.stdout)
    most = console.width if console.is_interactive else None
    parts = _format_page(args, what, arguments, most)
    if args.once or not console.is_interactive:
        write_output(render_parts(*parts).encode(), None)
        return 0
    read_at = time.gmtime()
    note: list[str] = []
    with make_live_display(console) as shown:
        while True:
            head = f"pipemorph top  {what}  {time.strftime('%H:%M:%S', read_at)} UTC"
            shown.update(Group(*map(make_single_line, [head, *note, ""]), *parts), refresh=True)
            time.sleep(args.every)
            try:
                parts = _format_page(args, what, arguments, console.width)
                read_at, note = time.gmtime(), []
            except InputError as error:
                note = [f"! {error}; table as of {time.strftime('%H:%M:%S', read_at)} UTC"]


def _describe_target(args: argparse.Namespace) -> tuple[str, list[str]]:
    """The target in words, and as arguments of kubectl."""
    if args.job is None:
        if args.all_namespaces:
            return "all namespaces", ["--all-namespaces"]
        if args.namespace:
            return f"namespace {args.namespace}", ["--namespace", args.namespace]
        return "current namespace", []
    if _find_folder(args) is not None:
        return one_line(args.job), []
    arguments = kubectl.parse_job_arguments(args.job, args.namespace)
    if arguments is None:
        raise kubectl.invalid_job_name_error(args.job)
    return args.job, arguments


def _format_page(
    args: argparse.Namespace, what: str, arguments: list[str], most: int | None
) -> list[RenderableType]:
    """The table, with the explanation if there is one job, and the jobs that cannot be read."""
    folder = _find_folder(args)
    content = (
        kubectl.query_kubectl(what, arguments, args.context)
        if folder is None
        else _read_runs(folder)
    )
    only = "items" not in content
    jobs, notes = _read_jobs(content, only=only)
    if only:
        return [build_job_table(jobs, most=most), "", *map(_explain_job, jobs)]
    found = [build_job_table(jobs, namespaced=args.all_namespaces, most=most)] if jobs else []
    lines = [f"! {note}" for note in notes]
    return [*found, *map(make_single_line, lines)] or ["no PipeMorphJob was found"]


def _find_folder(args: argparse.Namespace) -> Path | None:
    """Folder that the arguments name; None: a job of the cluster."""
    if args.job is None or args.namespace or args.context or not Path(args.job).is_dir():
        return None
    return Path(args.job)


def _read_runs(folder: Path) -> dict[str, Any]:
    """Run of a folder, or list of the runs in its folders, each with its folder's name. Raises
    :class:`InputError` if there is none."""
    # Imported late: jobs of a cluster do not need it.
    from pipemorph.local.results.status_file import read_run_folder

    found = [each.parent for name in RUN_FILES for each in folder.glob(f"*/{name}")]
    if not found or any((folder / name).exists() for name in RUN_FILES):
        return read_run_folder(folder)
    runs = []
    for root in sorted(set(found)):
        try:
            run = read_run_folder(root)
        except InputError as error:
            run = {"kind": one_line(str(error))}
        runs.append({**run, "metadata": {"name": root.name, "namespace": ""}})
    return {"items": runs}


def _read_jobs(content: dict[str, Any], *, only: bool) -> tuple[list[ExplainedJob], list[str]]:
    """The jobs of an object or list, and the errors of those that cannot be read. ``only``: raise
    :class:`InputError` for such a job."""
    jobs, notes = [], []
    for each in content.get("items", [content]):
        try:
            jobs.append(parse_job_object(each))
        except InputError as error:
            metadata = each.get("metadata", {})
            names = filter(None, (metadata.get("namespace"), metadata.get("name")))
            note = f"{'/'.join(map(str, names))}: {error}"
            if only:
                raise InputError(note) from None
            notes.append(one_line(note))
    return jobs, notes


def _explain_job(job: ExplainedJob) -> RenderableType:
    try:
        return build_explanation(job).to_table()
    except InputError as error:
        return make_single_line(str(error))


# --- the table: a row for each job, sorted by name ------------------------------------------------


def build_job_table(
    jobs: Sequence[ExplainedJob], *, namespaced: bool = True, most: int | None = None
) -> Table:
    """A row for each job. ``namespaced``: with the namespaces; ``most``: width in characters,
    beyond which last columns are dropped."""
    found = sorted(jobs, key=lambda job: job.name)
    first = 0 if namespaced else 1
    rows = [(*HEADINGS,), *(_format_cells(job) for job in found)]
    widths = [max(map(len, column)) + GAP for column in zip(*rows, strict=True)]
    last = len(HEADINGS)
    while most is not None and sum(widths[first:last]) - GAP > most and last > first + 2:
        last -= 1
    shown = (cells[first:last] for cells in rows[1:])
    return make_table(HEADINGS[first:last], shown, right=RIGHT, styles=STYLES)


def _format_cells(job: ExplainedJob) -> list[str]:
    status = job.status
    name = [job.metadata.namespace, job.metadata.name]
    if status is None:
        return [*name, *["-"] * (len(HEADINGS) - len(name))]
    training, remaining = status.training, job.seconds_remaining
    seconds = training.iteration_seconds if training is not None else None
    saved = training.saved_seconds if training is not None and training.adaptations else None
    return [
        *name,
        status.state or "-",
        status.ready or "-",
        "-" if job.fraction_done is None else format_percent_done(job.fraction_done),
        "-" if remaining is None else format_duration(remaining),
        f"{seconds:.3g}" if seconds else "-",
        _format_slow_links(job),
        "-" if training is None or job.is_observed else f"v{training.applied_plan_version}",
        _format_gain(job),
        "-" if status.goodput is None else f"{status.goodput:.0%}",
        "-" if saved is None else ("-" if saved < 0 else "") + format_duration(abs(saved)),
        str(status.recoveries.count if status.recoveries is not None else 0),
    ]


def _format_slow_links(job: ExplainedJob) -> str:
    """Slowest link with its delay and the number of others; ``none`` if all are healthy."""
    status = job.status
    training = status.training if status is not None else None
    found = find_condition(status, "LinksHealthy") if status is not None else None
    if training is None or found is None:
        return "-"
    if training.slow_links:
        worst = max(training.slow_links, key=lambda each: each.delay_ms)
        rest = training.slow_link_count - 1
        return f"link {worst.link} +{worst.delay_ms:.0f} ms" + (f", {rest} more" if rest else "")
    if found.status == "True":
        return "none"
    return {"ReportsStale": "no reports", "JobFinished": "-"}.get(found.reason, "unknown")


def _format_gain(job: ExplainedJob) -> str:
    """Measured and promised gain of the newest adaptation."""
    training = job.status.training if job.status is not None else None
    change = training.last_adaptation if training is not None else None
    if change is None or change.kind != "adapt" or change.promised is None:
        return "-"
    measured = "not yet" if change.measured is None else f"{change.measured:.0%}"
    return f"{measured} ({change.promised:.0%})"
