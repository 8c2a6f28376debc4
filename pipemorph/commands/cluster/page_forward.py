"""Reaches the live page of a job of a cluster with the user's own kubectl and rights.

``kubectl port-forward`` leads to a loopback port of the pod in which rank 0 runs. The page's token
is in a Secret of the attempt, which kubectl reads.
"""

from __future__ import annotations

import base64
import binascii
import re
import select
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipemorph.commands.cluster import kubectl
from pipemorph.errors import InputError, one_line
from pipemorph.http_client import HttpClient, NoResponseError
from pipemorph.spec.running_subset import RunningSubset
from pipemorph.views.explanation.explained_job import parse_job_object

START_SECONDS, FIRST_SECONDS = 30.0, 30.0
"""Time limits: kubectl port-forward listens; the page, which starts, has a first document."""
ANSWER_SECONDS = 30.0
MOST_PAGE_BYTES = 64 << 20
"""Size limit of a document, which has every op of an iteration."""
VOLUME, PORT_VARIABLE = "pipemorph-page", "PIPEMORPH_PAGE_PORT"
"""Names of a pod's volume with the page's Secret, and of its variable with the page's port."""
FORWARDING = re.compile(r"Forwarding from 127\.0\.0\.1:(\d+) ")


@dataclass(frozen=True)
class PagePod:
    """The pod that serves a job's page. ``secret``: name of the Secret with the token."""

    job: str
    namespace: str
    pod: str
    port: int
    secret: str
    host_network: bool


def find_page_pod(name: str, namespace: str | None, context: str | None) -> PagePod:
    """The pod with rank 0 of the job ``name``. Raises :class:`InputError`."""
    within, pods, _ = list_rank_pods(name, namespace, context, rank=0)
    running = [each for each in pods if each.get("status", {}).get("phase") == "Running"]
    if not running:
        raise InputError(f"{name}: has no running pod with rank 0: it waits, starts or has ended")
    return _parse_page_pod(name, within, running[-1])


def list_rank_pods(
    name: str, namespace: str | None, context: str | None, rank: int
) -> tuple[str, list[dict[str, Any]], int]:
    """Namespace of a job, the pods with a rank of it, oldest first, and the number of ranks of a
    pod. Raises :class:`InputError`."""
    arguments = kubectl.parse_job_arguments(name, namespace)
    if arguments is None:
        raise kubectl.invalid_job_name_error(name)
    content = kubectl.query_kubectl(name, arguments, context)
    try:
        job = parse_job_object(content)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None
    found = job.status.recoveries if job.status is not None else None
    cut = job.spec.parallelism
    if rank >= cut.world_size:
        raise InputError(f"rank: is {rank}; {name} has {cut.world_size} ranks, numbered from 0")
    index = rank // cut.ranks_per_pod
    if found is not None:
        index = found.layout.find_pod(rank, cut.ranks_per_pod)
        if rank == 0 and found.excluded_replicas:
            index = RunningSubset(cut, tuple(found.excluded_replicas)).active_pods[0]
    within = job.metadata.namespace
    labels = (
        f"pipemorph.io/job-name={job.metadata.name},"
        f"batch.kubernetes.io/job-completion-index={index}"
    )
    selected = ["--namespace", within, "--selector", labels]
    pods = kubectl.query_kubectl(name, selected, context, ("get", "pods")).get("items") or []
    pods.sort(key=lambda each: str(each["metadata"].get("creationTimestamp", "")))
    return within, pods, cut.ranks_per_pod


def _parse_page_pod(name: str, namespace: str, pod: Mapping[str, Any]) -> PagePod:
    spec = pod["spec"]
    secrets = [
        str(volume["secret"]["secretName"])
        for volume in spec.get("volumes") or []
        if volume.get("name") == VOLUME and "secret" in volume
    ]
    ports = [
        str(variable.get("value"))
        for container in spec.get("containers") or []
        for variable in container.get("env") or []
        if variable.get("name") == PORT_VARIABLE
    ]
    if not secrets or not ports or not ports[0].isdecimal():
        raise InputError(
            f"{name}: its pods serve no live page: their command does not call the launcher, or"
            " an earlier release made them"
        )
    return PagePod(
        job=f"{namespace}/{name.rpartition('/')[2]}",
        namespace=namespace,
        pod=str(pod["metadata"]["name"]),
        port=int(ports[0]),
        secret=secrets[0],
        host_network=bool(spec.get("hostNetwork")),
    )


def read_page_token(page: PagePod, context: str | None) -> str:
    """The token of the page. Raises :class:`InputError`."""
    arguments = [page.secret, "--namespace", page.namespace]
    content = kubectl.query_kubectl(page.job, arguments, context, ("get", "secrets"))
    try:
        token = base64.b64decode(content["data"]["token"], validate=True).decode("ascii")
    except (KeyError, TypeError, ValueError, binascii.Error):
        token = ""
    if not re.fullmatch(r"[\w-]{16,}", token):
        raise InputError(f"{page.job}: Secret {page.secret} has no token of a page")
    return token


class PagePortForward:
    """``kubectl port-forward`` to a pod's page. A context manager; entering it raises
    :class:`InputError`. ``port``: of 127.0.0.1; 0: any free one."""

    def __init__(self, page: PagePod, token: str, context: str | None, port: int = 0) -> None:
        self._page, self._token, self._context, self._wanted = page, token, context, port
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # Closed by __exit__.
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/{self._token}/"

    def __enter__(self) -> PagePortForward:
        page = self._page
        command = ["kubectl", "port-forward", "--address", "127.0.0.1", "--namespace"]
        command += [page.namespace, f"pod/{page.pod}", f"{self._wanted or ''}:{page.port}"]
        command += ["--context", self._context] if self._context else []
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self._errors,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            self._errors.close()
            raise InputError(f"{page.job}: kubectl cannot be run: {error.strerror}") from None
        assert self._process.stdout is not None
        ready = select.select([self._process.stdout], [], [], START_SECONDS)[0]
        line = self._process.stdout.readline().decode(errors="replace") if ready else ""
        found = FORWARDING.match(line)
        if found is None:
            why = self._describe_failure() if not line else one_line(line)
            self.__exit__()
            raise InputError(f"{page.job}: {why}")
        self._port = int(found[1])
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._errors.close()

    def wait(self) -> None:
        """Return when the connection has ended, as with the pod."""
        assert self._process is not None
        self._process.wait()

    def request_document(self, query: Mapping[str, str]) -> tuple[int, bytes]:
        """Status and body of a document. Raises :class:`InputError` once kubectl has ended."""
        client = HttpClient(self.url)
        try:
            answer = client.request_blocking(
                "view", query=query, seconds=ANSWER_SECONDS, most_bytes=MOST_PAGE_BYTES
            )
        except NoResponseError as error:
            assert self._process is not None
            if self._process.poll() is not None:
                raise InputError(f"{self._page.job}: {self._describe_failure()}") from None
            return 503, str(error).encode()
        return answer.status, answer.body

    def wait_for_first_document(self) -> tuple[int, bytes]:
        """Status and body of the first document, once the page has started."""
        end = time.monotonic() + FIRST_SECONDS
        while True:
            status, body = self.request_document({})
            if status != 503 or time.monotonic() > end:
                return status, body
            time.sleep(0.5)

    def _describe_failure(self) -> str:
        """Last line of kubectl's errors."""
        assert self._process is not None
        with_code = "kubectl port-forward does not begin to serve"
        if self._process.poll() is not None:
            with_code = f"kubectl port-forward exited with {self._process.returncode}"
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip().splitlines()
        return one_line(said[-1], 500) if said else with_code


def explain_missing_page(page: PagePod, status: int) -> str:
    """Message that there is no page, with what to do."""
    if status == 401:
        return f"{page.job}: the pod refuses the token of Secret {page.secret}; is it of this pod?"
    return (
        f"{page.job}: pod {page.pod} serves no page at port {page.port} (HTTP {status}); its log"
        " says why"
    )
