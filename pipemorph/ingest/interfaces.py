"""What a host plugs into the ingest: who may speak for a job, and where its state lives."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from pipemorph.control.decide.replan import Proposal, Replan
from pipemorph.wire import Directive, LinkHealthReport


@dataclass(frozen=True)
class Identity:
    """Who is speaking, once believed. ``subject`` is for the log, never a secret."""

    subject: str


class Refused(Exception):
    """A caller is turned away: 401 (not known), 403 (known, but not for this job) or 429 (too many
    to say)."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class Authenticator(Protocol):
    """Decides whether a bearer token may speak for a job."""

    async def authenticate(
        self, token: str, namespace: str, job: str, source: str = ""
    ) -> Identity:
        """Identity of the caller, who comes from the address ``source``. Raises
        :class:`Refused`."""


class ControlledJob(Protocol):
    """What the ingest needs of :class:`pipemorph.control.JobController`."""

    @property
    def attempt(self) -> int: ...

    @property
    def plan_version(self) -> int: ...

    def report(self, report: LinkHealthReport, now: float) -> None: ...

    def tick(self, now: float) -> None: ...

    @property
    def replan(self) -> Replan | None: ...

    def settle(self, asked: Replan, proposal: Proposal, now: float) -> None: ...

    def directive(self, after: int = 0) -> Directive | None: ...

    def snapshot(self) -> dict[str, Any]: ...


class JobStore(Protocol):
    """Where the jobs of a host are found, and how their plan version outlives it."""

    def lookup(self, namespace: str, job: str) -> ControlledJob | None:
        """The job's controller, or None if there is no such job here."""

    async def persist(self, namespace: str, job: str, snapshot: Mapping[str, Any]) -> None:
        """Make a snapshot durable. A new directive is served only after this returns; if it
        raises, the directive is held back and persisted again at the next report or tick."""


class BearerAuthenticator:
    """One token for one host: what ``pipemorph run`` gives its ranks. Constant-time compare."""

    def __init__(self, token: str) -> None:
        if not token:
            raise ValueError("the ingest token is empty; expected a random secret")
        self._token = token.encode()

    async def authenticate(
        self, token: str, namespace: str, job: str, source: str = ""
    ) -> Identity:
        if not hmac.compare_digest(token.encode("utf-8", "surrogatepass"), self._token):
            raise Refused(401, "the bearer token is not the one of this run")
        return Identity("run-token")


class MemoryStore:
    """Jobs of one process. A snapshot need not outlive it: when ``pipemorph run`` ends, so
    do its ranks. ``on_persist`` hears of every new directive before it is served."""

    def __init__(
        self, on_persist: Callable[[str, str, Mapping[str, Any]], None] | None = None
    ) -> None:
        self._jobs: dict[tuple[str, str], ControlledJob] = {}
        self._on_persist = on_persist

    def add(self, namespace: str, job: str, controller: ControlledJob) -> None:
        self._jobs[namespace, job] = controller

    def remove(self, namespace: str, job: str) -> None:
        self._jobs.pop((namespace, job), None)

    def lookup(self, namespace: str, job: str) -> ControlledJob | None:
        return self._jobs.get((namespace, job))

    async def persist(self, namespace: str, job: str, snapshot: Mapping[str, Any]) -> None:
        if self._on_persist is not None:
            self._on_persist(namespace, job, snapshot)
