"""``pipemorph run JOB --out DIR``: train on this machine, and say what the network did."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from pipemorph.errors import InputError
from pipemorph.log_level import log_level


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "run",
        help="run a PipeMorphJob on this machine",
        description="Run the PipeMorphJob of JOB on this machine, one process per rank. "
        "Exit status: 0 completed, 1 not completed, 2 unusable input, 130 interrupted.",
    )
    parser.add_argument("job", metavar="JOB", help="PipeMorphJob manifest, YAML or JSON")
    parser.add_argument(
        "--out",
        metavar="DIR",
        required=True,
        help="folder for report.json, timeline.json, timeline.png, logs and traces",
    )
    parser.add_argument(
        "--force", action="store_true", help="replace an earlier run that DIR holds"
    )


def run(args: argparse.Namespace) -> int:
    # Late: the other subcommands do not need a server.
    from pipemorph.local import run_job

    if not args.out:
        # To pathlib that is the present folder.
        raise InputError("--out is empty; name a folder")
    log_level()  # of the ranks' agent, which nobody would miss for long
    return run_job(args.job, Path(args.out), force=args.force)
