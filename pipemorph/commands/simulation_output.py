"""Output of `plan` and `simulate`: JSON, text or a picture, to stdout or a file."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from pipemorph.commands.output_file import choose_output_format, write_output
from pipemorph.errors import InputError
from pipemorph.planning.formats.plan_json import build_plan_json
from pipemorph.planning.formats.torch_csv import dump_communication_csv, dump_csv
from pipemorph.planning.ir import Dispatch, join_dashed
from pipemorph.planning.problem import Problem
from pipemorph.planning.simulation.simulator import Simulation
from pipemorph.views.pictures import Timeline, draw_steps, render_html, render_text

COLUMNS, LEAST_COLUMNS, LABELS = 100, 20, 40
"""Widths in a text picture, characters: time axis, least time axis, labels."""
FORMATS = ("json", "text", "html", "svg", "png", "csv", "csv-comms")
DETAILS = (
    "; html is one file with details of every op, csv is torch.distributed.pipelining's "
    "compute-only format, csv-comms the one with sends and receives"
)
"""Help on the formats."""


def write_simulation(
    args: argparse.Namespace,
    ran: Simulation,
    problem: Problem,
    *,
    policy: str,
    bound: float,
    planning_seconds: float,
    dispatch: Dispatch,
    microbatch_order: Sequence[int] = (),
) -> None:
    """Write the requested output. ``microbatch_order``: see
    :func:`~pipemorph.planning.formats.plan_json.build_plan_json`. Raises
    :class:`InputError` if ``--out`` cannot be written."""
    output = choose_output_format(args, FORMATS, "json")
    fields = build_plan_json(
        ran, problem, policy=policy, lower_bound=min(bound, ran.select_objective(problem)),
        planning_seconds=planning_seconds, dispatch=dispatch, microbatch_order=microbatch_order,
    )  # fmt: skip
    if output == "json":
        write_output((json.dumps(fields) + "\n").encode(), args.out)
        return
    if output in ("csv", "csv-comms"):
        schedule = ran.schedule.rename_microbatches(microbatch_order)
        text = dump_csv(schedule)
        if output == "csv-comms":
            text = dump_communication_csv(schedule, ran.execution.end)
        write_output(text.encode(), args.out)
        return
    headline = format_headline(fields)
    timeline = Timeline.from_simulation(
        ran, problem, title=headline, microbatch_order=microbatch_order
    )
    match output:
        case "text":
            width = COLUMNS
            if args.out is None and sys.stdout.isatty():
                width = max(LEAST_COLUMNS, min(COLUMNS, os.get_terminal_size().columns - LABELS))
            write_output((render_text(timeline, width) + "\n").encode(), args.out)
        case "html":
            write_output(render_html(timeline, collect_stats(fields)).encode(), args.out, headline)
        case "svg":
            write_output(draw_steps("", [timeline]).to_svg().encode(), args.out, headline)
        case _:
            if args.out is None and sys.stdout.isatty():
                raise InputError("--output png needs --out FILE if stdout is a terminal")
            write_output(draw_steps("", [timeline]).to_png(), args.out, headline)


def collect_stats(fields: dict[str, Any]) -> list[tuple[str, str]]:
    """Names and values shown above the picture."""
    objective, bound = fields[fields["objective"]], fields["lower_bound"]
    near = "proven shortest"
    if objective > bound:
        # If all ops take no time the bound is 0.
        near = f"at most {objective / bound - 1:.1%} above the shortest" if bound else "no bound"
    period = [("period", f"{objective:g} ms")] if fields["objective"] == "period" else []
    return [
        ("iteration", f"{fields['makespan']:g} ms"),
        *period,
        ("lower bound", f"{bound:g} ms, {near}"),
        ("idle", f"{fields['bubble_fraction']:.1%}"),
        ("stages × microbatches", f"{len(fields['stages'])} × {fields['microbatches']}"),
        ("warm-up", join_dashed(fields["warmup"], 12)),
        ("dispatch", fields["dispatch"]),
    ]


def format_headline(fields: dict[str, Any]) -> str:
    """Line with policy, makespan or period against its bound, and bubble."""
    what = "a period of " if fields["objective"] == "period" else ""
    return (
        f"{fields['policy']}: {what}{fields[fields['objective']]:g} ms simulated"
        f" (lower bound {fields['lower_bound']:g}), bubble {fields['bubble_fraction']:.1%}"
    )
