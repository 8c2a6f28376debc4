"""``pipemorph timeline JOB --out FILE``: a trace of iterations of a job of a cluster."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from pipemorph.argument_types import number_type, whole_number_type
from pipemorph.commands.cluster import kubectl, page_forward
from pipemorph.commands.output_file import write_output
from pipemorph.errors import InputError, one_line
from pipemorph.planning.simulation.simulator import TimedOp
from pipemorph.views.live_page.page_document import IterationPicture, PageDocument
from pipemorph.views.pictures.colours import LETTERS

SECONDS, MOST_SECONDS = 10.0, 600.0
EVERY_SECONDS = 0.5
"""Interval of requests; a document has one iteration."""
FIRST_SECONDS = 30.0
"""Extra wait for the first iteration: ranks report it when it is finished."""
PASSING = (429, 503)
"""HTTP statuses that are retried: the page is busy, or starts."""
KINDS = {letter: kind for kind, letter in LETTERS.items()}


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "timeline",
        help="write a trace of a job of a cluster, for Perfetto",
        description="Watch a job for some seconds, and write the ops of the iterations that were"
        " seen, about one a second, as a trace for Perfetto or chrome://tracing. Access is as for"
        " pipemorph watch. Exit status: 0, or 2 for invalid input, or if no iteration was seen.",
    )
    parser.add_argument("job", metavar="JOB", help="[NAMESPACE/]NAME of the job")
    kubectl.add_kubectl_arguments(parser)
    parser.add_argument("--out", metavar="FILE", required=True, help="where to write the trace")
    parser.add_argument(
        "--seconds",
        type=number_type(0.001, MOST_SECONDS),
        default=SECONDS,
        help=f"how long to watch, up to {MOST_SECONDS:g} (default: {SECONDS:g})",
    )
    parser.add_argument(
        "--column",
        type=whole_number_type(0),
        help="pipeline to trace (default: that with the slowest link)",
    )


def run(args: argparse.Namespace) -> int:
    page = page_forward.find_page_pod(args.job, args.namespace, args.context)
    token = page_forward.read_page_token(page, args.context)
    with page_forward.PagePortForward(page, token, args.context) as forward:
        newest, seen = _collect_iterations(page, forward, args.seconds, args.column)
    if args.column is not None and newest.column != args.column:
        raise InputError(f"--column: is {args.column}; the job has {len(newest.columns)}")
    if not seen:
        raise InputError(f"{page.job}: no iteration was seen: {newest.no_alternative}")
    write_output(json.dumps(build_trace(newest, seen)).encode() + b"\n", args.out)
    print(f"timeline: {args.out}: {len(seen)} iterations")
    return 0


def _collect_iterations(
    page: page_forward.PagePod,
    forward: page_forward.PagePortForward,
    seconds: float,
    column: int | None,
) -> tuple[PageDocument, dict[int, tuple[int, IterationPicture]]]:
    """The newest document, and the measured iterations, each with its column. An error after the
    first iteration is printed and ends the requests; an earlier one raises :class:`InputError`."""
    seen: dict[int, tuple[int, IterationPicture]] = {}
    newest: PageDocument | None = None
    query = {} if column is None else {"column": str(column)}
    end = time.monotonic() + seconds
    status = 503
    while time.monotonic() < end + (0.0 if seen else FIRST_SECONDS):
        after = {} if newest is None else {"after": str(newest.number)}
        try:
            status, body = forward.request_document(query | after)
            if status != 200 and status not in PASSING:
                raise InputError(page_forward.explain_missing_page(page, status))
            view = _parse_watch_view(page.job, body) if status == 200 and body != b"null" else None
        except InputError as error:
            if newest is None or not seen:
                raise
            print(f"timeline: {one_line(str(error), 500)}; the trace ends here", file=sys.stderr)
            break
        if view is not None:
            newest = view
            if newest.measured is not None:
                seen[newest.measured.iteration] = newest.column, newest.measured
            if not newest.live:
                break
        time.sleep(EVERY_SECONDS)
    if newest is None:
        raise InputError(page_forward.explain_missing_page(page, status))
    return newest, seen


def _parse_watch_view(name: str, body: bytes) -> PageDocument:
    try:
        return PageDocument.model_validate_json(body)
    except ValidationError:
        raise InputError(
            f"{name}: its page is of another release than this command; use one of that release"
        ) from None


def build_trace(
    newest: PageDocument, seen: dict[int, tuple[int, IterationPicture]]
) -> dict[str, Any]:
    """Trace Event Format, as ``timeline.json`` of a run."""
    # Imported late: it takes a while.
    from pipemorph.local.results.timeline import TraceSubject, chrome_trace

    about = TraceSubject(
        newest.job, emulated=newest.emulated, columns=newest.columns, changes=newest.adaptations
    )
    stages = {
        iteration: list(_iterate_stages(column, picture))
        for iteration, (column, picture) in sorted(seen.items())
    }
    return chrome_trace(stages, about, len(stages))


def _iterate_stages(column: int, picture: IterationPicture) -> Iterator[Any]:
    from pipemorph.views.live_page.page_builder import StageTrace

    begin = picture.at or 0.0
    for rank, row in enumerate(picture.rows):
        ops: dict[int, list[TimedOp]] = {}
        at = 0
        for i, letter in enumerate(row.kinds):
            start = at + row.gaps[i]
            at = start + row.durations[i]
            stage = row.stages[i] if row.stages else rank
            op = TimedOp(KINDS[letter], row.microbatches[i], begin + start / 1e6, begin + at / 1e6)
            ops.setdefault(stage, []).append(op)
        for stage, own in sorted(ops.items()):
            yield StageTrace(
                rank, stage, column, picture.iteration, picture.plan_version, tuple(own)
            )
