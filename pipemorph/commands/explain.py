"""``pipemorph explain JOB``: what a job saw, what was decided, and what it was worth."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
from pathlib import Path
from typing import Any

from pipemorph.commands.emit import emit
from pipemorph.document import named, only_document, read_text
from pipemorph.errors import InputError, one_line
from pipemorph.explain import MOST_LINES, explain_job, explain_report

MAX_BYTES = 1 << 30
"""Largest report: it lists every iteration."""
KUBECTL_SECONDS = 60
_NAME = re.compile(r"(?:([a-z0-9][a-z0-9-]*)/)?([a-z0-9][a-z0-9.-]*)")


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
    parser.add_argument(
        "--context", metavar="NAME", help="kubectl's context (default: its current one)"
    )


def run(args: argparse.Namespace) -> int:
    name = str(args.job)
    path = Path(name)
    if name != "-" and not path.exists():
        content, source = _from_cluster(name, args.context), name
    else:
        if path.is_dir():
            path /= "report.json"
        content, source = _from_file(path if name != "-" else "-"), named(str(path))
    try:
        explain = explain_job if "kind" in content else explain_report
        lines = explain(content).lines()
    except InputError as error:
        raise InputError(f"{source}: {error}") from None
    emit("".join(f"{line}\n" for line in lines).encode(), None)
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


def _from_cluster(name: str, context: str | None) -> dict[str, Any]:
    """The object of a job, read by kubectl with the user's own credentials."""
    found = _NAME.fullmatch(name)
    if found is None or name.endswith((".json", ".yaml")):
        raise InputError(
            f"{named(name)}: no such file, nor [NAMESPACE/]NAME of a job; name a run's folder, its"
            " report.json, or a job"
        )
    namespace, job = found.groups()
    command = ["kubectl", "get", "pipemorphjobs.pipemorph.io", job, "--output", "json"]
    command += ["--namespace", namespace] if namespace else []
    command += ["--context", context] if context else []
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=KUBECTL_SECONDS, check=False
        )
    except FileNotFoundError:
        raise InputError(
            f"{name}: no such file, and kubectl, which reads a job of a cluster, is not on PATH;"
            " install it, or pipe what kubectl get -o json prints to pipemorph explain -"
        ) from None
    except subprocess.TimeoutExpired:
        raise InputError(
            f"{name}: kubectl did not answer within {KUBECTL_SECONDS} s; is the cluster reachable?"
        ) from None
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"kubectl exited with {done.returncode}"]
        raise InputError(f"{name}: {one_line(said[-1], 500)}")
    content = json.loads(done.stdout)
    assert isinstance(content, dict)
    return content
