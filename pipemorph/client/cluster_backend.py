"""Jobs on a cluster, through the user's own kubectl and so with their credentials, as for
``pipemorph top`` and ``watch``."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping
from typing import Any

from pipemorph.commands.cluster import kubectl
from pipemorph.commands.cluster.page_forward import list_rank_pods
from pipemorph.errors import InputError, one_line
from pipemorph.spec.job_spec import PipeMorphJob

DELETE_SECONDS = 50
"""Time in which a deleted job must be gone."""


class ClusterBackend:
    """Jobs on a cluster where PipeMorph is installed. ``namespace`` and ``context`` are by default
    those of kubectl, whose configuration and credentials count; within a pod without a kubeconfig,
    kubectl uses the pod's service account."""

    def __init__(self, *, namespace: str | None = None, context: str | None = None) -> None:
        self._namespace, self._context = namespace, context

    def create_job(self, job: PipeMorphJob, document: Mapping[str, Any]) -> str:
        """Create the object; returns ``NAMESPACE/NAME``."""
        arguments = ["--namespace", self._namespace] if self._namespace else []
        created = kubectl.query_kubectl(
            job.metadata.name, arguments, self._context, ("create", "--filename", "-"),
            content=json.dumps(document).encode(),
        )["metadata"]  # fmt: skip
        return f"{created['namespace']}/{created['name']}"

    def read_job(self, name: str) -> Mapping[str, Any]:
        return kubectl.query_kubectl(name, self._parse_name(name), self._context)

    def list_jobs(self) -> list[Mapping[str, Any]]:
        arguments = ["--namespace", self._namespace] if self._namespace else []
        found = kubectl.query_kubectl("list of jobs", arguments, self._context)
        return list(found.get("items") or [])

    def read_log(self, name: str, rank: int, follow: bool) -> Iterator[str]:
        """Lines of the newest pod with the rank. They end with the pod: those of another attempt
        need another call."""
        within, pods, ranks = list_rank_pods(name, self._namespace, self._context, rank)
        if not pods:
            raise InputError(f"{name}: has no pod with rank {rank}: it waits, or its pods are gone")
        command = ["kubectl", "logs", pods[-1]["metadata"]["name"], "--namespace", within]
        command += ["--container", "trainer", *(["--follow"] if follow else [])]
        command += ["--context", self._context] if self._context else []
        prefix = f"[rank {rank}] " if ranks > 1 else ""
        return _iterate_output(f"{name}, rank {rank}", command, prefix)

    def delete_job(self, name: str) -> None:
        arguments = ["delete", kubectl.RESOURCE, *self._parse_name(name)]
        kubectl.run_kubectl(name, [*arguments, f"--timeout={DELETE_SECONDS}s"], self._context)

    def _parse_name(self, name: str) -> list[str]:
        arguments = kubectl.parse_job_arguments(name, self._namespace)
        if arguments is None:
            raise kubectl.invalid_job_name_error(name)
        return arguments


def _iterate_output(subject: str, command: list[str], prefix: str) -> Iterator[str]:
    """Lines that kubectl prints, those with ``prefix`` without it. Closing the iterator ends
    kubectl."""
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, errors="replace",
        )  # fmt: skip
    except OSError as error:
        raise InputError(f"{subject}: {kubectl.describe_start_error(error)}") from None
    assert process.stdout is not None and process.stderr is not None
    try:
        for line in process.stdout:
            if line.startswith(prefix):
                yield line[len(prefix) :].rstrip("\r\n")
        said = process.stderr.read().strip()
        if process.wait() != 0:
            raise InputError(f"{subject}: {one_line(said, 500) or 'kubectl logs failed'}")
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()
