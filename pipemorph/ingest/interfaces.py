"""Interfaces that a host implements for the ingest: authentication and storage of jobs."""

from __future__ import annotations

import hmac
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from pipemorph.api.spec import JobSpec
from pipemorph.control.decide.replan import Proposal, Replan
from pipemorph.control.handed_in import HandedIn
from pipemorph.ingest.plan_versions import Versions
from pipemorph.wire import Directive, DirectiveEnvelope, LinkHealthReport


@dataclass(frozen=True)
class Identity:
    """An authenticated caller. ``subject``: its name for logs, never a secret; ``uid``: of its pod,
    empty if it is not known to be in one."""

    subject: str
    uid: str = ""


class Refused(Exception):
    """A caller is rejected: 401 (not authenticated), 403 (not authorized for this job), 429
    (too many callers to check) or 503 (they cannot be checked yet)."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class Authenticator(Protocol):
    """Checks whether a bearer token is authorized for a job."""

    async def authenticate(
        self, token: str, namespace: str, job: str, source: str = ""
    ) -> Identity:
        """Identity of the caller. ``source``: its address. Raises :class:`Refused`."""


class ControlledJob(Protocol):
    """The methods of :class:`pipemorph.control.JobController` that the ingest uses."""

    @property
    def spec(self) -> JobSpec: ...

    @property
    def attempt(self) -> int: ...

    @property
    def plan_version(self) -> int: ...

    def report(self, report: LinkHealthReport, now: float) -> DirectiveEnvelope: ...

    def tick(self, now: float) -> None: ...

    def leave(self, versions: range) -> None: ...

    @property
    def replan(self) -> Replan | None: ...

    def settle(self, asked: Replan, proposal: Proposal, now: float) -> None: ...

    @property
    def wants_plan(self) -> bool: ...

    def hand_in(self, handed: HandedIn, now: float) -> None: ...

    def refuse_plan(self) -> None: ...

    def directive(self, after: int = 0) -> Directive | None: ...

    def snapshot(self) -> dict[str, Any]: ...


class JobStore(Protocol):
    """Finds the jobs of a host, and persists their plan versions across restarts."""

    def lookup(self, namespace: str, job: str) -> ControlledJob | None:
        """The job's controller; None if the host has no such job."""

    def reserved(self, namespace: str, job: str) -> int:
        """The highest plan version that may be served before it is persisted. After a crash of this
        host, the next one issues versions above it only, so that no version is ever two plans."""

    def may_have(self, namespace: str, job: str, version: int) -> bool:
        """Whether the job's ranks may have this plan version from anybody but this host."""

    def for_agent(self, namespace: str, job: str) -> range:
        """The plan versions that the job's agent may give by itself; none before they are reserved,
        so that no host gives them after a crash of this one."""

    def another_agent(self, namespace: str, job: str) -> None:
        """The job's agent is another process than before: its versions must be others, too."""

    async def persist(self, namespace: str, job: str, snapshot: Mapping[str, Any]) -> None:
        """Make a snapshot durable. Called after its directive was served if the version is
        reserved, and before otherwise. If it raises, the ingest retries."""


class BearerAuthenticator:
    """Accepts one token, which ``pipemorph run`` gives its ranks. Compares in constant time."""

    def __init__(self, token: str) -> None:
        if not token:
            raise ValueError("the ingest token is empty; expected a random secret")
        self._token = token.encode()

    async def authenticate(
        self, token: str, namespace: str, job: str, source: str = ""
    ) -> Identity:
        if not hmac.compare_digest(token.encode("utf-8", "surrogatepass"), self._token):
            raise Refused(401, "the bearer token is not this run's token")
        return Identity("run-token")


class MemoryStore:
    """Keeps jobs in memory. Plan versions need no durable reservation: the ranks of ``pipemorph
    run`` end with it, and the agent of ``pipemorph serve`` tells the next host which version it
    has, and which it may give. ``on_persist`` is called with every new directive."""

    def __init__(
        self, on_persist: Callable[[str, str, Mapping[str, Any]], None] | None = None
    ) -> None:
        self._jobs: dict[tuple[str, str], ControlledJob] = {}
        self._versions: dict[tuple[str, str], Versions] = {}
        self._on_persist = on_persist

    def add(self, namespace: str, job: str, controller: ControlledJob) -> None:
        self._jobs[namespace, job] = controller
        self._versions.setdefault((namespace, job), Versions(0))

    def remove(self, namespace: str, job: str) -> None:
        self._jobs.pop((namespace, job), None)

    def lookup(self, namespace: str, job: str) -> ControlledJob | None:
        return self._jobs.get((namespace, job))

    def reserved(self, namespace: str, job: str) -> int:
        return sys.maxsize

    def may_have(self, namespace: str, job: str, version: int) -> bool:
        return True

    def for_agent(self, namespace: str, job: str) -> range:
        versions = self._versions[namespace, job]
        versions.reserve(self._jobs[namespace, job].plan_version)
        versions.written(versions.reserved)
        return versions.for_agent()

    def another_agent(self, namespace: str, job: str) -> None:
        self._versions[namespace, job].another_agent()

    async def persist(self, namespace: str, job: str, snapshot: Mapping[str, Any]) -> None:
        if self._on_persist is not None:
            self._on_persist(namespace, job, snapshot)
