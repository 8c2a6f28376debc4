"""``pipemorph reproduce``: the paper's figures beside ours."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from pipemorph.commands.output_file import print_progress, write_output
from pipemorph.errors import InputError, one_line
from pipemorph.reproduce.compared_figure import RunForm
from pipemorph.reproduce.comparison import render_reproduce_page, run_experiments
from pipemorph.reproduce.experiments.experiment_list import EXPERIMENTS
from pipemorph.reproduce.figure_text import format_comparison
from pipemorph.terminal import render_parts

PAGE, FIGURES = "reproduce.html", "reproduce.json"


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "reproduce",
        help="compute the paper's figures here, beside the published ones",
        description="Compute the figures of “Attack of the Bubbles” (NSDI '26) that need no GPUs, "
        "simulated or emulated, and compare them with the published ones. Where they differ, the "
        "reason is stated and checked against the figures.",
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        help=f"write {PAGE} and {FIGURES} there",
    )
    parser.add_argument(
        "--only",
        action="append",
        choices=[each.name for each in EXPERIMENTS],
        metavar="NAME",
        help="run this experiment; repeatable (default: all): "
        + ", ".join(each.name for each in EXPERIMENTS),
    )
    parser.add_argument(
        "--full",
        action="store_true",
        help="the long form: more iterations, traces and delays",
    )


def run(args: argparse.Namespace) -> int:
    chosen = [each for each in EXPERIMENTS if args.only is None or each.name in args.only]
    folder = None if args.out is None else _make_folder(args.out)
    found = run_experiments(chosen, RunForm(args.full, print_progress))
    if folder is not None:
        write_output(render_reproduce_page(found).encode(), str(folder / PAGE))
        write_output((json.dumps(found, indent=1) + "\n").encode(), str(folder / FIGURES))
    write_output(render_parts(*format_comparison(found)).encode(), None)
    return 1 if any(each["failure"] for each in found["experiments"]) else 0


def _make_folder(name: str) -> Path:
    """Folder for the output. Raises :class:`InputError` if it cannot be made."""
    if not name:
        raise InputError("--out is empty; name a folder")
    folder = Path(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out: cannot make {one_line(name)}: {error.strerror}") from None
    return folder
