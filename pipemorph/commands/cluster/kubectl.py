"""Reads PipeMorphJobs of a cluster with the user's own kubectl, and so with their credentials."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipemorph.errors import InputError, ObjectNotFoundError, one_line

RESOURCE = "pipemorphjobs.pipemorph.io"
ANSWER_TIMEOUT_SECONDS = 60
"""Time limit of a kubectl call."""
KUBECTL_MISSING = (
    "kubectl, which reads a job of a cluster, is not on PATH; install it, or pipe what kubectl get"
    " -o json prints to pipemorph explain -"
)
NO_CLUSTER = (
    "kubectl has no cluster configured: there is no kubeconfig, or it has no current context; set"
    " KUBECONFIG or give --context"
)
_DEFAULT_SERVER = "server localhost:8080 was refused"
"""Part of kubectl's error without a configuration: it then tries this address."""
_NAME = re.compile(r"(?:([a-z0-9][a-z0-9-]*)/)?([a-z0-9][a-z0-9.-]*)")

Content = dict[str, Any]


def add_kubectl_arguments(parser: argparse.ArgumentParser) -> None:
    """Add kubectl's options for the cluster and the namespace."""
    parser.add_argument(
        "-n", "--namespace", metavar="NAME", help="namespace (default: that of kubectl's context)"
    )
    parser.add_argument(
        "--context", metavar="NAME", help="kubectl's context (default: its current one)"
    )


def invalid_job_name_error(name: str) -> InputError:
    """The error for ``name``, which is no name of a job."""
    return InputError(
        f"{one_line(name)}: is no name of a job; expected [NAMESPACE/]NAME"
        f"{_suggest_run_folder(name)}"
    )


def _suggest_run_folder(name: str) -> str:
    found = Path(name).is_dir()
    return f"; it is a folder here: pipemorph explain {one_line(name)}" if found else ""


def parse_job_arguments(name: str, namespace: str | None) -> list[str] | None:
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


def query_kubectl(
    subject: str,
    arguments: Sequence[str],
    context: str | None,
    verb: Sequence[str] = ("get", RESOURCE),
    *,
    content: bytes | None = None,
) -> Content:
    """Run kubectl; returns the object or list that it prints. ``subject``: name of the object, for
    errors; ``verb``: first arguments, by default those that get PipeMorphJobs; ``content``: its
    standard input. Raises :class:`InputError` as :func:`run_kubectl`."""
    printed = run_kubectl(subject, [*verb, *arguments, "--output", "json"], context, content)
    try:
        found = json.loads(printed)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise InputError(f"{subject}: kubectl printed no JSON object")
    return found


def run_kubectl(
    subject: str, arguments: Sequence[str], context: str | None, content: bytes | None = None
) -> bytes:
    """Run kubectl; returns what it prints. Raises :class:`InputError` with kubectl's error, or if
    kubectl is missing or late (:data:`ANSWER_TIMEOUT_SECONDS`)."""
    command = ["kubectl", *arguments, *(["--context", context] if context else [])]
    try:
        done = subprocess.run(
            command,
            input=content or b"",
            capture_output=True,
            timeout=ANSWER_TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise InputError(
            f"{subject}: kubectl did not answer within {ANSWER_TIMEOUT_SECONDS} s; is the cluster"
            " reachable?"
        ) from None
    except OSError as error:
        raise InputError(f"{subject}: {describe_start_error(error)}") from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        last = said[-1] if said else f"kubectl exited with {done.returncode}"
        why = NO_CLUSTER if _DEFAULT_SERVER in last else one_line(last, 500)
        kind = ObjectNotFoundError if why.startswith("Error from server (NotFound)") else InputError
        raise kind(f"{subject}: {why}{_suggest_run_folder(subject)}")
    return done.stdout


def describe_start_error(error: OSError) -> str:
    """Reason why kubectl did not start."""
    absent = isinstance(error, FileNotFoundError)
    return KUBECTL_MISSING if absent else f"kubectl cannot be run: {error.strerror}"
