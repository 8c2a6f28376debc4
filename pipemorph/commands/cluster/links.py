"""``pipemorph links JOB``: the slow links of a job of a cluster."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from pipemorph.commands.cluster import kubectl
from pipemorph.commands.emit import emit
from pipemorph.errors import InputError, one_line
from pipemorph.explain.cluster_job import ClusterJob, read_job
from pipemorph.top.job import links_part
from pipemorph.top.page import bars_for, plain
from pipemorph.top.seen import Seen

MOST_SECONDS = 600.0
EVERY_SECONDS = 5.0
"""Between two questions, as of top."""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "links",
        help="list the slow links of a job of a cluster",
        description="List the slow links of a job: by how much messages are late, since when,"
        " and what carries them. kubectl reads the job. Exit status: 0, or 2 for invalid input.",
    )
    parser.add_argument("job", metavar="JOB", help="[NAMESPACE/]NAME of the job")
    kubectl.add_arguments(parser)
    parser.add_argument(
        "--seconds",
        type=float,
        default=0.0,
        help=f"how long to watch first, up to {MOST_SECONDS:g}: with a bar per delay that was told"
        " meanwhile (default: not at all)",
    )


def run(args: argparse.Namespace) -> int:
    arguments = kubectl.job_arguments(args.job, args.namespace)
    if arguments is None:
        raise InputError(f"{one_line(args.job)}: is no name of a job; expected [NAMESPACE/]NAME")
    if not 0 <= args.seconds <= MOST_SECONDS:
        raise InputError(f"--seconds: is {args.seconds:g}; expected 0 to {MOST_SECONDS:g}")

    def ask() -> ClusterJob:
        content = kubectl.Query(args.job, arguments, args.context).answer()
        try:
            return read_job(content)
        except InputError as error:
            raise InputError(f"{args.job}: {error}") from None

    end, seen, job = time.monotonic() + args.seconds, Seen(), ask()
    seen.look(job)
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, EVERY_SECONDS))
        job = ask()
        seen.look(job)
    emit(plain(links_part(job, time.time(), seen, bars=bars_for(sys.stdout))).encode(), None)
    return 0
