"""Writes and reads ``page.json``: the document of the live page of a run that is over.

It has the pictures of several iterations: those around each change of plan, and others at equal
distances.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from math import ceil
from pathlib import Path

from pydantic import ValidationError

from pipemorph.errors import InputError, one_line
from pipemorph.local.processes.locked_folder import is_locked
from pipemorph.local.results.journal import RunJournal
from pipemorph.local.results.page_source import (
    FolderTraceSource,
    LivePageSource,
    RunState,
    TraceSource,
)
from pipemorph.local.results.report import RunRecord
from pipemorph.local.results.result_folder import LOCK, OUTPUTS, ResultFolder, write_atomically
from pipemorph.views.explanation import explain_job
from pipemorph.views.live_page.page_builder import (
    MOST_STEPS,
    WatchedJob,
    build_page_document,
    build_stored_iteration,
    find_slowest_column,
)
from pipemorph.views.live_page.page_document import PageDocument, StoredIteration
from pipemorph.yaml_json import display_name, read_text

MOST_PICTURES = 64
"""Most iterations with pictures, besides the newest."""
MOST_OPS = 100_000
"""Most ops of these, measured: about 5 MB of JSON with the same ones under the initial plan."""
MAX_BYTES = 256 << 20


def write_page(
    folder: ResultFolder, run: RunRecord, journal: RunJournal, traces: TraceSource | None = None
) -> None:
    """Write the document of a run that is over. ``traces``: ops of its iterations, by default from
    the folder."""
    traces = traces or FolderTraceSource(folder.trace, newest=None)
    source = LivePageSource(run.job, journal, traces, lambda: read_final_state(run))
    known = replace(source.collect_state(), changes=run.adaptations)
    column = find_slowest_column(known)
    iterations = traces.list_iterations(column)
    known = replace(known, available=iterations)
    stored = _build_pictures(known, traces, column, iterations)
    newest = traces.read_iteration(column, iterations[-1]) if iterations else []
    made = build_page_document(known, newest, column=column, live=False)
    content = replace(run, iterations=run.iterations[-MOST_STEPS:]).build_report([], [])
    made = made.model_copy(
        update={
            "explanation": explain_job(content).label_rows(),
            "available": sorted({each.measured.iteration for each in stored}),
            "stored": stored,
        }
    )
    write_atomically(folder.page, made.model_dump_json().encode() + b"\n")


def read_final_state(run: RunRecord) -> RunState:
    """State of a run that is over, for its page."""
    return RunState(run.to_status(), run.outlook, run.list_recovery_entries())


def _build_pictures(
    known: WatchedJob, traces: TraceSource, column: int, iterations: Sequence[int]
) -> list[StoredIteration]:
    """Pictures of chosen iterations in a column, and of the last one in the others."""
    found: list[StoredIteration] = []
    columns = known.job.spec.parallelism.mesh.columns
    here = set(iterations)
    applied = [each.applied_at_iteration for each in known.changes]
    # The first iteration under a plan still has what the change costs, a later one only the plan.
    around = [each for at in applied if at is not None for each in (at + 2, at, at - 1)]
    notable = [*iterations[-1:], *(each for each in around if each in here)]
    notable = list(dict.fromkeys(notable))[: MOST_PICTURES // 2]
    spread = iterations[:: -ceil(len(iterations) / (MOST_PICTURES - len(notable))) or None]
    places = [(column, each) for each in (*notable, *spread)]
    places[1:1] = [(other, each) for other in range(columns) for each in iterations[-1:]]
    ops = 0
    for place in dict.fromkeys(places):
        where, iteration = place
        rows = traces.read_iteration(where, iteration)
        made = build_stored_iteration(known, rows, where)
        ops += sum(len(row.ops) for row in rows if row.replica == where)
        if ops > MOST_OPS and found:
            break
        if made is not None:
            found.append(made)
    return found


def find_run_folder(name: str) -> ResultFolder:
    """Folder of a run, by its name or that of a file of the run in it."""
    root = Path(name)
    return ResultFolder(root.parent if root.is_file() and root.name in OUTPUTS else root)


def read_page(folder: ResultFolder) -> PageDocument:
    """The page of a run from its folder. Raises :class:`InputError` if the folder has none."""
    if not folder.page.is_file():
        raise InputError(f"{display_name(str(folder.root))}: {_explain_missing_page(folder)}")
    text = read_text(folder.page, MAX_BYTES)
    try:
        return PageDocument.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        found = ": ".join([*map(str, first["loc"]), first["msg"]])
        raise InputError(
            f"{display_name(str(folder.page))}: {one_line(found)}; expected a page that this"
            " version of PipeMorph wrote: view it with the version of the run"
        ) from None


def _explain_missing_page(folder: ResultFolder) -> str:
    root = folder.root
    if not root.exists():
        return "no such folder; name the folder of a run, that of --out"
    if not root.is_dir():
        return "is no folder; name the folder of a run, that of --out"
    with suppress(OSError):  # No lock was made, or the file system has none.
        if is_locked(root / LOCK):
            return "the run is not over; --watch serves its live page"
    if folder.report.exists():
        return (
            "has a report but no page.json: an earlier version of PipeMorph wrote it, or the page"
            " could not be written; pipemorph explain reads the report"
        )
    if folder.trace.exists():
        return (
            "the run was cut off before it wrote its report and its page; logs/ has the output of"
            " its ranks, and pipemorph diagnose reads their ops"
        )
    return "is not the folder of a run: it has no report.json and no page.json"
