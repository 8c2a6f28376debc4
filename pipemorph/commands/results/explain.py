"""``pipemorph explain JOB``: what a job saw, what was decided, and what it was worth."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

from pipemorph.commands.cluster import kubectl
from pipemorph.commands.output_file import write_output
from pipemorph.errors import InputError
from pipemorph.terminal import render_parts
from pipemorph.views.explanation import MOST_LINES, explain_job
from pipemorph.yaml_json import display_name


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "explain",
        help="say what a job saw, what was decided, and what it was worth",
        description=f"Explain a job in at most {MOST_LINES} lines: what was seen, what was done, "
        "what it was worth, what to do now. Exit status: 0, or 2 for invalid input.",
    )
    parser.add_argument(
        "job",
        metavar="JOB",
        help="a run's folder, also while it runs, or its report.json; [NAMESPACE/]NAME of a job "
        "of the cluster, which kubectl reads; or a file, or - for standard input, with what kubectl"
        " get -o json prints",
    )
    kubectl.add_kubectl_arguments(parser)


def run(args: argparse.Namespace) -> int:
    name = str(args.job)
    path = Path(name)
    in_cluster = args.namespace is not None or args.context is not None
    if name != "-" and (in_cluster or not path.exists()):
        content, source = _query_cluster(name, args.namespace, args.context), name
    else:
        # Imported late: a job of a cluster does not need it.
        from pipemorph.local.results.status_file import read_report_file, read_run_folder

        source = display_name(name)
        if path.is_dir():
            content = read_run_folder(path)
        else:
            content = read_report_file(path if name != "-" else "-")
    try:
        story = explain_job(content)
    except InputError as error:
        raise InputError(f"{source}: {error}") from None
    write_output(render_parts(story.to_table()).encode(), None)
    return 0


def _query_cluster(name: str, namespace: str | None, context: str | None) -> dict[str, Any]:
    arguments = kubectl.parse_job_arguments(name, namespace)
    if arguments is None or name.endswith((".json", ".yaml")):
        raise InputError(
            f"{display_name(name)}: no such file, nor [NAMESPACE/]NAME of a job; name a run's"
            " folder, its report.json, or a job"
        )
    if shutil.which("kubectl") is None:
        raise InputError(f"{name}: no such file, and {kubectl.KUBECTL_MISSING}")
    try:
        return kubectl.query_kubectl(name, arguments, context)
    except InputError as error:
        if namespace is None and context is None:
            raise InputError(f"no file or folder here has this name; as a job: {error}") from None
        raise
