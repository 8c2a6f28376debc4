"""``pipemorph explain JOB``: what a job saw, what was decided, and what it was worth."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from pipemorph.commands.cluster import kubectl
from pipemorph.commands.emit import emit
from pipemorph.document import named, only_document, read_text
from pipemorph.errors import InputError
from pipemorph.explain import MOST_LINES, explain_job
from pipemorph.terminal import render

MAX_BYTES = 1 << 30
"""Largest report: it lists every iteration."""


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
        help="a run's folder or its report.json; [NAMESPACE/]NAME of a job of the cluster, which "
        "kubectl reads; or a file, or - for standard input, with what kubectl get -o json prints",
    )
    kubectl.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    name = str(args.job)
    path = Path(name)
    asked = args.namespace is not None or args.context is not None
    if name != "-" and (asked or not path.exists()):
        content, source = _from_cluster(name, args.namespace, args.context), name
    else:
        if path.is_dir():
            path /= "report.json"
        content, source = _from_file(path if name != "-" else "-"), named(str(path))
    try:
        story = explain_job(content)
    except InputError as error:
        raise InputError(f"{source}: {error}") from None
    emit(render(story.page()).encode(), None)
    return 0


def _from_file(path: str | Path) -> dict[str, Any]:
    text = read_text(path, MAX_BYTES)
    try:
        # JSON first: a report may have hundreds of thousands of lines.
        content = json.loads(text)
    except (ValueError, RecursionError):
        try:
            content = only_document(text)
        except InputError as error:
            raise InputError(f"{named(path)}: {error}") from None
    if not isinstance(content, dict):
        raise InputError(f"{named(path)}: expected a run's report.json or a PipeMorphJob")
    return content


def _from_cluster(name: str, namespace: str | None, context: str | None) -> dict[str, Any]:
    arguments = kubectl.job_arguments(name, namespace)
    if arguments is None or name.endswith((".json", ".yaml")):
        raise InputError(
            f"{named(name)}: no such file, nor [NAMESPACE/]NAME of a job; name a run's folder, its"
            " report.json, or a job"
        )
    if shutil.which("kubectl") is None:
        raise InputError(f"{name}: no such file, and {kubectl.MISSING}")
    try:
        return kubectl.ask(name, arguments, context)
    except InputError as error:
        if namespace is None and context is None:
            raise InputError(f"no file or folder here has this name; as a job: {error}") from None
        raise
