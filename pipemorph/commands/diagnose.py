"""``pipemorph diagnose TRACE…``: what any job lost, why, and what would help."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from pipemorph.commands.output_file import write_output
from pipemorph.diagnose.diagnosis import diagnose
from pipemorph.diagnose.diagnosis_json import diagnosis_to_json
from pipemorph.diagnose.diagnosis_text import format_diagnosis
from pipemorph.diagnose.formats.registry import load_recording
from pipemorph.diagnose.pictures.picture_files import render_picture_files
from pipemorph.diagnose.trace_file import OUTPUT_NAME
from pipemorph.errors import InputError, one_line
from pipemorph.planning.formats.torch_csv import dump_csv
from pipemorph.terminal import render_parts


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "diagnose",
        help="say what a pipeline job lost, why, and what would help, from a trace of its ops",
        description="Diagnose the pipeline job of TRACE: op tables (CSV, JSON lines, Parquet), "
        "Chrome traces, or the folder of a run. Formats are recognized by content.",
    )
    parser.add_argument("traces", metavar="TRACE", nargs="+", type=Path, help="file or folder")
    parser.add_argument(
        "--output", choices=("text", "json"), default="text", help="format (default: text)"
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        type=Path,
        help="also write here: diagnosis.json, diagnosis.html, traces of a step for Perfetto, and"
        " the best schedule as schedule.csv for torch",
    )


def run(args: argparse.Namespace) -> int:
    found = diagnose(load_recording(args.traces))
    fields = json.dumps(diagnosis_to_json(found)) + "\n"
    if args.out is not None:
        files = {"diagnosis.json": fields, **render_picture_files(found, args.traces)}
        schedules = [each.schedule for each in found.advice if each.schedule is not None]
        if schedules:
            files["schedule.csv"] = dump_csv(schedules[0])
        _write_files(args.out, files)
    text = fields if args.output == "json" else render_parts(*format_diagnosis(found), out=None)
    write_output(text.encode(), None)
    return 0


def _write_files(folder: Path, files: dict[str, str]) -> None:
    """Write files into ``folder``, which is made if it is missing. Those of an earlier diagnosis
    that this one does not have are removed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            if OUTPUT_NAME.fullmatch(path.name) and path.name not in files and path.is_file():
                path.unlink()
    except OSError as error:
        raise InputError(
            f"--out {one_line(str(folder))} cannot be used: {error.strerror}"
        ) from None
    for name, text in files.items():
        write_output(text.encode(), str(folder / name))
