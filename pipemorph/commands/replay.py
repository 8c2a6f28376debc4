"""``pipemorph replay TRACE PROBLEM``: the control loop through a trace of link states."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, get_args

from pipemorph.argument_types import number_type, whole_number_type
from pipemorph.commands.output_file import (
    add_output_arguments,
    choose_output_format,
    print_progress,
    write_output,
)
from pipemorph.planning import Dispatch
from pipemorph.planning.problem import load_problem
from pipemorph.removed import DISPATCHES, refuse_removed
from pipemorph.replay.adaptive_trainer import Telemetry
from pipemorph.replay.baselines import ReplayResult, replay_trace
from pipemorph.replay.link_trace import load_trace
from pipemorph.replay.replay_page import render_replay_page
from pipemorph.terminal import RenderableType, make_table, render_parts

FORMATS = ("text", "json", "html")
HEADINGS = ("", "seconds", "it/min", "of the oracle’s gain", " ")


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "replay",
        help="replay a trace of link delays: what adapting is worth",
        description="Drive the real detector, controller and planner, with a simulated trainer, "
        "through TRACE, and compare with fixed schedules and with an oracle that knows the trace. "
        "Nothing is measured on hardware.",
    )
    parser.add_argument("trace", metavar="TRACE", help="JSON lines; see examples/traces")
    parser.add_argument("problem", metavar="PROBLEM", help="YAML or JSON file, as of `plan`")
    parser.add_argument(
        "--telemetry",
        choices=get_args(Telemetry),
        default="exact",
        help="when an arrival is noticed: at once, or at the end of the receiver's op, whose time "
        "is known (python) or not (device) (default: %(default)s)",
    )
    parser.add_argument(
        "--dispatch",
        type=refuse_removed(DISPATCHES),
        choices=[*(d.value for d in Dispatch), "auto"],
        default="auto",
        help="dispatch of the adaptive contender (default: %(default)s, as in a job)",
    )
    parser.add_argument(
        "--delegation",
        type=number_type(0, 1000),
        default=0.0,
        metavar="PERCENT",
        help="share of an op's time that a message over a delegated link costs the processor or "
        "device at either end (default: %(default)s)",
    )
    parser.add_argument(
        "--iterations",
        type=whole_number_type(1),
        metavar="N",
        help="default: to the end of the trace, and 20 more",
    )
    parser.add_argument(
        "--replicas",
        type=whole_number_type(1, 1024),
        default=1,
        metavar="N",
        help="data-parallel replicas, whose links TRACE names as LINK@REPLICA (default: 1)",
    )
    parser.add_argument(
        "--seed",
        type=whole_number_type(0, 2**128 - 1),
        default=0,
        help="seed of the noise (default: %(default)s)",
    )
    more = "; html is one file with charts of every iteration"
    add_output_arguments(parser, FORMATS, "text", more)


def run(args: argparse.Namespace) -> int:
    output = choose_output_format(args, FORMATS, "text")
    problem = load_problem(args.problem)
    trace = load_trace(args.trace, len(problem.links), args.replicas)
    found = replay_trace(
        problem,
        trace,
        telemetry=args.telemetry,
        dispatch="auto" if args.dispatch == "auto" else Dispatch(args.dispatch),
        replicas=args.replicas,
        iterations=args.iterations,
        seed=args.seed,
        delegation=args.delegation / 100,
        note=print_progress,
    )
    match output:
        case "json":
            text = json.dumps(found.to_json()) + "\n"
        case "html":
            title = f"{Path(args.trace).name}, {Path(args.problem).name}"
            text = render_replay_page(found, trace, title, args.replicas)
        case _:
            text = render_parts(*format_replay(found), out=args.out)
    share = found.compute_oracle_share("adaptive")
    summary = "" if share is None else f"adapting gets {share:.0%} of what the oracle gets"
    write_output(text.encode(), args.out, summary)
    return 0


def format_replay(found: ReplayResult) -> list[RenderableType]:
    """Rows of the contenders, then a line per change of plan."""
    rows = []
    for name, trained in found.runs.items():
        seconds, rate, share = (
            trained.seconds,
            found.compute_iterations_per_minute(name),
            found.compute_oracle_share(name),
        )
        if seconds is None:
            rows.append((name, "–", "–", "", f"ended: {trained.end_reason}"))
            continue
        shown = "" if share is None else f"{100 * share:.1f}%"
        rows.append((name, f"{seconds:.1f}", "" if rate is None else f"{rate:.1f}", shown, ""))
    lines: list[RenderableType] = [
        f"{found.iterations} iterations, simulated",
        "",
        make_table(HEADINGS, rows, right=HEADINGS[1:4]),
    ]
    count = len(found.changes)
    lines += ["", f"{count} change{'' if count == 1 else 's'} of plan"]
    lines += [f"  {change.sentence}" for change in found.changes]
    return lines
