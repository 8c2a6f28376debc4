"""Interfaces that a host implements for the ingest: authentication and storage of jobs."""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import Protocol

from pipemorph.control import JobController


@dataclass(frozen=True)
class Identity:
    """Authenticated caller. ``subject``: its name for logs, never a secret; ``uid``: of its pod,
    empty if it is not known to run in one."""

    subject: str
    uid: str = ""


class AccessDeniedError(Exception):
    """A caller is rejected: 401 (not authenticated), 403 (not authorized for this job), 429
    (too many callers to check) or 503 (they cannot be checked yet)."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class Authenticator(Protocol):
    """Checks whether a bearer token is authorized for a job."""

    async def authenticate_caller(
        self, token: str, namespace: str, job: str, source: str = ""
    ) -> Identity:
        """Identity of the caller. ``source``: its address. Raises :class:`AccessDeniedError`."""


class JobStore(Protocol):
    """Finds the jobs of a host, and persists their status."""

    def find_job(self, namespace: str, job: str) -> JobController | None:
        """The job's controller; None if the host has no such job."""

    async def persist_status(self, namespace: str, job: str) -> None:
        """Persist the job's status. Called after a directive was served. If it raises, the ingest
        retries."""


class BearerAuthenticator:
    """Accepts the token that ``pipemorph run`` gives its ranks. Compares in constant time."""

    def __init__(self, token: str) -> None:
        if not token:
            raise ValueError("the ingest token is empty; expected a random secret")
        self._token = token.encode()

    async def authenticate_caller(
        self, token: str, namespace: str, job: str, source: str = ""
    ) -> Identity:
        if not hmac.compare_digest(token.encode("utf-8", "surrogatepass"), self._token):
            raise AccessDeniedError(401, "the bearer token is not this run's token")
        return Identity("run-token")


class InMemoryJobStore:
    """Holds jobs in memory, and persists nothing: the ranks of ``pipemorph run`` end with it, and
    the agent of ``pipemorph serve`` hands its snapshot to the next host."""

    def __init__(self) -> None:
        self._jobs: dict[tuple[str, str], JobController] = {}

    def add_job(self, namespace: str, job: str, controller: JobController) -> None:
        self._jobs[namespace, job] = controller

    def remove_job(self, namespace: str, job: str) -> None:
        self._jobs.pop((namespace, job), None)

    def find_job(self, namespace: str, job: str) -> JobController | None:
        return self._jobs.get((namespace, job))

    async def persist_status(self, namespace: str, job: str) -> None:
        """Do nothing: there is no status."""
