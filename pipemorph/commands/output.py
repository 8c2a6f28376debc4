"""How `plan` and `simulate` print: JSON, text or a picture, to stdout or a file."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from pipemorph.errors import InputError
from pipemorph.pictures import Timeline, render_png, render_text
from pipemorph.planning.problem import Problem
from pipemorph.planning.simulator import Simulation


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output",
        choices=["json", "text", "png"],
        default="json",
        help="what to print (default: %(default)s); png needs --out",
    )
    parser.add_argument("--out", metavar="FILE", help="write to FILE, not to stdout")


def write(
    fields: dict[str, Any], simulation: Simulation, problem: Problem, args: argparse.Namespace
) -> None:
    """Print what was asked for. Raises :class:`InputError` if ``--out`` cannot be written."""
    if args.output == "json":
        _emit((json.dumps(fields) + "\n").encode(), args.out)
        return
    timeline = Timeline.of_simulation(simulation, problem, title=headline(fields))
    if args.output == "text":
        _emit((render_text(timeline) + "\n").encode(), args.out)
        return
    if args.out is None:
        raise InputError("--output png needs --out FILE")
    _emit(render_png(timeline), args.out)


def headline(fields: dict[str, Any]) -> str:
    """One line: policy, makespan against its bound, bubble."""
    return (
        f"{fields['policy']}: {fields['makespan']:g} ms (lower bound {fields['lower_bound']:g}),"
        f" bubble {fields['bubble_fraction']:.1%}"
    )


def _emit(data: bytes, out: str | None) -> None:
    if out is None:
        sys.stdout.buffer.write(data)
        return
    try:
        Path(out).write_bytes(data)
    except OSError as error:
        raise InputError(f"cannot write {out}: {error.strerror}") from None
