"""Reads PipeMorphJobs of a cluster with the user's own kubectl, and so with their credentials."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
import time
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


class Query:
    """One question to kubectl, which runs beside this process until it is asked for the answer.

    ``what``: the name of what is asked for, for errors; ``verb``: the first words, by default those
    that get PipeMorphJobs. Raises :class:`InputError` without kubectl.
    """

    def __init__(
        self,
        what: str,
        arguments: Sequence[str],
        context: str | None,
        verb: Sequence[str] = ("get", RESOURCE),
    ) -> None:
        self._what, self._deadline = what, time.monotonic() + SECONDS
        command = ["kubectl", *verb, *arguments, "--output", "json"]
        command += ["--context", context] if context else []
        # Files, not pipes: nobody reads while it runs, and an answer may be large.
        self._out, self._err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=self._out, stderr=self._err
            )
        except OSError as error:
            self._out.close()
            self._err.close()
            absent = isinstance(error, FileNotFoundError)
            why = MISSING if absent else f"kubectl cannot be run: {error.strerror}"
            raise InputError(f"{what}: {why}") from None

    def ended(self) -> bool:
        """Whether there is an answer, or it is too late for one."""
        return self._process.poll() is not None or time.monotonic() > self._deadline

    def answer(self) -> Content:
        """The object or list; waits for it. Raises :class:`InputError`: what kubectl said, or that
        it did not answer within :data:`SECONDS`."""
        try:
            status = self._process.wait(max(0.0, self._deadline - time.monotonic()))
            texts = []
            for file in (self._out, self._err):
                file.seek(0)
                texts.append(file.read().decode(errors="replace"))
        except subprocess.TimeoutExpired:
            raise InputError(
                f"{self._what}: kubectl did not answer within {SECONDS} s; is the cluster"
                " reachable?"
            ) from None
        finally:
            self.close()
        if status:
            said = texts[1].strip().splitlines() or [f"kubectl exited with {status}"]
            why = NO_CLUSTER if _DEFAULT_SERVER in said[-1] else one_line(said[-1], 500)
            raise InputError(f"{self._what}: {why}{_folder_hint(self._what)}")
        try:
            content = json.loads(texts[0])
        except (ValueError, RecursionError):
            content = None
        if not isinstance(content, dict):
            raise InputError(f"{self._what}: kubectl printed no JSON object")
        return content

    def close(self) -> None:
        """End kubectl, if it still runs."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._out.close()
        self._err.close()
