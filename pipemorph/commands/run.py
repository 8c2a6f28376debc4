"""``pipemorph run JOB --out DIR``: runs a job on this machine, and reports adaptations."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipemorph.argument_types import port_type
from pipemorph.errors import InputError
from pipemorph.log_level import read_log_level


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "run",
        help="run a PipeMorphJob on this machine",
        description="Run the PipeMorphJob of JOB on this machine, one process per rank. "
        "Exit status: 0 completed, 1 not completed, 2 invalid input, 130 interrupted.",
    )
    parser.add_argument("job", metavar="JOB", help="PipeMorphJob manifest, YAML or JSON")
    parser.add_argument(
        "--out",
        metavar="DIR",
        required=True,
        help="folder for report.json, timeline.json, timeline.png, logs and traces",
    )
    add_run_arguments(parser, _parse_page_port)


def add_run_arguments(parser: argparse.ArgumentParser, page_port: Callable[[str], int]) -> None:
    """Add ``--force`` and ``--watch``. ``page_port``: type of the page's port."""
    parser.add_argument(
        "--force", action="store_true", help="replace the results of an earlier run in DIR"
    )
    parser.add_argument(
        "--watch",
        metavar="PORT",
        nargs="?",
        type=page_port,
        const=0,
        help="serve a live page on this port of 127.0.0.1, by default any that is free; its "
        "address, which is printed, has a token",
    )


def _parse_page_port(text: str) -> int:
    try:
        return port_type(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}; put the job before --watch") from None


def run(args: argparse.Namespace) -> int:
    # Imported late: other subcommands do not need the server.
    from pipemorph.local.run import run_job

    if not args.out:
        # pathlib would take it as the current folder.
        raise InputError("--out is empty; name a folder")
    read_log_level()  # Reject an invalid PIPEMORPH_LOG now; the agent would fail on it later.
    return run_job(args.job, Path(args.out), force=args.force, watch=args.watch)
