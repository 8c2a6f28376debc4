"""Reads PipeMorphJobs of a cluster with the user's own kubectl, and so with their credentials."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipemorph.errors import InputError, one_line

RESOURCE = "pipemorphjobs.pipemorph.io"
SECONDS = 60
"""Longest time that kubectl may take."""
MISSING = (
    "kubectl, which reads a job of a cluster, is not on PATH; install it, or pipe what kubectl get"
    " -o json prints to pipemorph explain -"
)
NO_CLUSTER = (
    "kubectl knows no cluster: there is no kubeconfig, or it has no current context; set KUBECONFIG"
    " or give --context"
)
_DEFAULT_SERVER = "server localhost:8080 was refused"
"""In kubectl's error without a configuration: it tries the API server at this address."""
_NAME = re.compile(r"(?:([a-z0-9][a-z0-9-]*)/)?([a-z0-9][a-z0-9.-]*)")

Content = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """kubectl's options that say which cluster and namespace are meant."""
    parser.add_argument(
        "-n", "--namespace", metavar="NAME", help="namespace (default: that of kubectl's context)"
    )
    parser.add_argument(
        "--context", metavar="NAME", help="kubectl's context (default: its current one)"
    )


def no_name_of_a_job(name: str) -> InputError:
    """The error for ``name``, which kubectl could not find."""
    return InputError(
        f"{one_line(name)}: is no name of a job; expected [NAMESPACE/]NAME{_folder_hint(name)}"
    )


def _folder_hint(name: str) -> str:
    found = Path(name).is_dir()
    return f"; it is a folder here: pipemorph explain {one_line(name)}" if found else ""


def job_arguments(name: str, namespace: str | None) -> list[str] | None:
    """kubectl's arguments for the job ``[NAMESPACE/]NAME``; None if that is no name of a job.

    Raises :class:`InputError` if ``namespace`` is another one.
    """
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    within, job = found.groups()
    if namespace is not None and within not in (None, namespace):
        raise InputError(
            f"--namespace: is {one_line(namespace)}; {name} names {within}; give one of the two"
        )
    within = within or namespace
    return [job, *(["--namespace", within] if within else [])]


def ask(
    what: str,
    arguments: Sequence[str],
    context: str | None,
    verb: Sequence[str] = ("get", RESOURCE),
) -> Content:
    """The object or list that kubectl prints. ``what``: the name of what is asked for, for errors;
    ``verb``: the first words, by default those that get PipeMorphJobs. Raises
    :class:`InputError`: what kubectl said, that there is none, or that it did not answer within
    :data:`SECONDS`."""
    command = ["kubectl", *verb, *arguments, "--output", "json"]
    command += ["--context", context] if context else []
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise InputError(
            f"{what}: kubectl did not answer within {SECONDS} s; is the cluster reachable?"
        ) from None
    except OSError as error:
        absent = isinstance(error, FileNotFoundError)
        why = MISSING if absent else f"kubectl cannot be run: {error.strerror}"
        raise InputError(f"{what}: {why}") from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        last = said[-1] if said else f"kubectl exited with {done.returncode}"
        why = NO_CLUSTER if _DEFAULT_SERVER in last else one_line(last, 500)
        raise InputError(f"{what}: {why}{_folder_hint(what)}")
    try:
        content = json.loads(done.stdout)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise InputError(f"{what}: kubectl printed no JSON object")
    return content
