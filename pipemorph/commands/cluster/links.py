"""``pipemorph links JOB``: the slow links of a job of a cluster."""

from __future__ import annotations

import argparse
import time
from typing import Any

from pipemorph.commands.cluster import kubectl
from pipemorph.commands.emit import emit
from pipemorph.errors import InputError, one_line
from pipemorph.explain.cluster_job import read_job
from pipemorph.top.job import links_part
from pipemorph.top.page import plain


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "links",
        help="list the slow links of a job of a cluster",
        description="List the slow links of a job: by how much messages are late, since when,"
        " and what carries them. kubectl reads the job. Exit status: 0, or 2 for invalid input.",
    )
    parser.add_argument("job", metavar="JOB", help="[NAMESPACE/]NAME of the job")
    kubectl.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    arguments = kubectl.job_arguments(args.job, args.namespace)
    if arguments is None:
        raise InputError(f"{one_line(args.job)}: is no name of a job; expected [NAMESPACE/]NAME")
    content = kubectl.Query(args.job, arguments, args.context).answer()
    try:
        job = read_job(content)
    except InputError as error:
        raise InputError(f"{args.job}: {error}") from None
    emit(plain(links_part(job, time.time())).encode(), None)
    return 0
