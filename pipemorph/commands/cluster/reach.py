"""Reaches the ingest of a job of a cluster with the user's own kubectl: what the live page is of.

``kubectl proxy`` passes requests on to the API server with the user's credentials, of whatever
kind, and the API server to the ingest's Service. Only this process can reach that proxy: it listens
at a socket in a folder of its own. The ingest is shown a token that ``kubectl create token`` makes
for the job's page alone; the user's own credentials stay between kubectl and the API server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import aiohttp

from pipemorph.commands.cluster import kubectl
from pipemorph.errors import InputError, one_line
from pipemorph.watch import access

START_SECONDS = 30.0
"""Until kubectl proxy listens."""
ANSWER_SECONDS = 30.0
TOKEN_SECONDS = 1800
RENEW_SECONDS = 300.0
"""Before the end of a token another one is made: clocks may differ."""
URL_VARIABLE = "PIPEMORPH_INGEST_URL"


class Reached(NamedTuple):
    """An answer of the ingest, or of the API server in its place."""

    status: int
    body: bytes
    of_ingest: bool
    """Whether it comes from there."""

    def why(self) -> str:
        """What an error says."""
        try:
            content = json.loads(self.body)
        except ValueError:
            content = None
        said = (content.get("error") or content.get("message")) if type(content) is dict else None
        return one_line(str(said or f"HTTP {self.status}"), 400)


@dataclass(frozen=True)
class Place:
    """A job, and the Service of the ingest that serves it."""

    namespace: str
    job: str
    ingest: tuple[str, str]
    """Namespace and name."""

    @property
    def path(self) -> str:
        """Of the page, at the API server."""
        service = access.through_api_server(*self.ingest)
        return service + access.path(self.namespace, self.job)


def find(name: str, namespace: str | None, ingest: str | None, context: str | None) -> Place:
    """Where a job's page is. ``ingest``: ``NAMESPACE/SERVICE``, by default that to which its ranks
    report. Raises :class:`InputError`."""
    arguments = kubectl.job_arguments(name, namespace)
    if arguments is None:
        raise InputError(f"{one_line(name)}: is no name of a job; expected [NAMESPACE/]NAME")
    if ingest is not None and not re.fullmatch(r"[a-z0-9-]+/[a-z0-9-]+", ingest):
        raise InputError(f"--ingest: is {one_line(ingest)!r}; expected NAMESPACE/SERVICE")
    metadata = kubectl.Query(name, arguments, context).answer().get("metadata", {})
    within, job = str(metadata.get("namespace", "")), str(metadata.get("name", ""))
    if ingest is not None:
        space, _, service = ingest.partition("/")
        return Place(within, job, (space, service))
    labels = ["--namespace", within, "--selector", f"pipemorph.io/job-name={job}"]
    found = kubectl.Query(name, labels, context, ("get", "jobs.batch")).answer()
    url = _ingest_url(found.get("items") or [])
    if url is None:
        raise InputError(
            f"{name}: has no pods that say where its ingest is: it has not started, or has ended;"
            " name it with --ingest NAMESPACE/SERVICE"
        )
    parts = (urlsplit(url).hostname or "").split(".")
    if len(parts) < 3 or parts[2] != "svc":
        raise InputError(
            f"{name}: its ranks report to {one_line(url)}, which is no Service of the cluster; name"
            " that of the ingest with --ingest NAMESPACE/SERVICE"
        )
    return Place(within, job, (parts[1], parts[0]))


def _ingest_url(batch_jobs: list[Any]) -> str | None:
    """Where the ranks of the newest attempt report; None if there is none."""
    newest = sorted(batch_jobs, key=lambda job: str(job["metadata"].get("creationTimestamp", "")))
    for job in reversed(newest):
        for container in job["spec"]["template"]["spec"].get("containers", []):
            for variable in container.get("env") or []:
                if variable.get("name") == URL_VARIABLE and variable.get("value"):
                    return str(variable["value"])
    return None


class Ingest:
    """The ingest that serves a job, for who may watch it. An async context manager; entering it
    raises :class:`InputError`. ``account``: whose tokens to show."""

    def __init__(self, place: Place, account: str, context: str | None) -> None:
        self._place, self._account, self._context = place, account, context
        self._token, self._until = "", 0.0
        self._making = asyncio.Lock()
        self._stack = contextlib.AsyncExitStack()
        self._proxy: asyncio.subprocess.Process | None = None

    @property
    def name(self) -> str:
        return f"{self._place.namespace}/{self._place.job}"

    async def __aenter__(self) -> Ingest:
        try:
            folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="pmw-")))
            await self._start_proxy(folder / "api")
            connector = aiohttp.UnixConnector(path=str(folder / "api"))
            self._session = await self._stack.enter_async_context(
                aiohttp.ClientSession(
                    connector=connector, timeout=aiohttp.ClientTimeout(ANSWER_SECONDS)
                )
            )
            await self._renew()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._stack.aclose()

    async def ask(self, query: Mapping[str, str], *, page: bool) -> Reached:
        """The page, or a document. Raises :class:`InputError` if kubectl cannot be used any more,
        or makes no token."""
        if time.time() > self._until - RENEW_SECONDS:
            await self._renew()
        found = await self._ask(query, page=page)
        if found.status == 401 and found.of_ingest:
            # As after the API server has got other keys.
            await self._renew(even_if_good=True)
            found = await self._ask(query, page=page)
        return found

    async def _ask(self, query: Mapping[str, str], *, page: bool) -> Reached:
        url = "http://localhost" + self._place.path + ("" if page else "view")
        headers = {access.HEADER: self._token}
        try:
            async with self._session.get(url, params=query, headers=headers) as answer:
                body = await answer.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            if self._proxy is not None and self._proxy.returncode is not None:
                raise InputError(
                    f"{self.name}: kubectl proxy has ended; start this command again"
                ) from None
            why = json.dumps({"error": str(error) or "no answer in time"})
            return Reached(504, why.encode(), of_ingest=False)
        return Reached(answer.status, body, _of_ingest(answer.status, body))

    async def _renew(self, *, even_if_good: bool = False) -> None:
        before = self._token
        async with self._making:
            if self._token != before or (self._token and not even_if_good and self._is_good()):
                return  # Another request has done it.
            await asyncio.to_thread(self._make_token)

    def _is_good(self) -> bool:
        return time.time() <= self._until - RENEW_SECONDS

    def _make_token(self) -> None:
        namespace, job = self._place.namespace, self._place.job
        arguments = [self._account, "--namespace", namespace, "--duration", f"{TOKEN_SECONDS}s"]
        arguments += ["--audience", access.audience(namespace, job)]
        what = f"{self.name}: a token of service account {self._account}"
        try:
            answer = kubectl.Query(what, arguments, self._context, ("create", "token")).answer()
        except InputError as error:
            if "NotFound" not in str(error) and "not found" not in str(error):
                raise
            raise InputError(
                f"{error}; who may bind roles in {namespace} makes it: kubectl create"
                f" serviceaccount {self._account} -n {namespace}, and kubectl create rolebinding"
                f" {self._account} -n {namespace} --clusterrole=view"
                f" --serviceaccount={namespace}:{self._account}"
            ) from None
        status = answer.get("status", {})
        self._token = str(status.get("token", ""))
        self._until = datetime.fromisoformat(status["expirationTimestamp"]).timestamp()

    async def _start_proxy(self, socket: Path) -> None:
        # Of the API, only this one path, and only to read.
        only = "^" + re.escape(self._place.path)
        command = ["kubectl", "proxy", f"--unix-socket={socket}", f"--accept-paths={only}"]
        command += ["--reject-methods=^(POST|PUT|PATCH|DELETE)$"]
        command += ["--context", self._context] if self._context else []
        try:
            proxy = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            absent = isinstance(error, FileNotFoundError)
            why = kubectl.MISSING if absent else f"kubectl cannot be run: {error.strerror}"
            raise InputError(f"{self.name}: {why}") from None
        self._proxy = proxy
        self._stack.push_async_callback(_end, proxy)
        assert proxy.stdout is not None
        try:
            line = await asyncio.wait_for(proxy.stdout.readline(), START_SECONDS)
        except TimeoutError:
            raise InputError(f"{self.name}: kubectl proxy does not begin to serve") from None
        if not line.startswith(b"Starting to serve"):
            said = line.decode(errors="replace").strip() or "it has ended"
            raise InputError(f"{self.name}: kubectl proxy: {one_line(said, 400)}")
        # Nobody else reads it, and what it says must not fill the pipe.
        reading = asyncio.create_task(_drop(proxy.stdout))
        self._stack.callback(reading.cancel)


def _of_ingest(status: int, body: bytes) -> bool:
    """Whether an answer is the ingest's: errors of the API server are a Status, or plain text."""
    if status == 200:
        return True
    try:
        content = json.loads(body)
    except ValueError:
        return False
    return isinstance(content, dict) and "error" in content


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
        await process.wait()


async def _drop(stream: asyncio.StreamReader) -> None:
    while await stream.read(4096):
        pass
