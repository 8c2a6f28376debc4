"""Client of jobs, the same for this machine and a cluster."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, get_args

from pipemorph.client.job_snapshot import JobSnapshot
from pipemorph.errors import InputError, ObjectNotFoundError, PipeMorphError, one_line
from pipemorph.manifest import MAX_BYTES, parse_job
from pipemorph.spec.job_spec import PipeMorphJob
from pipemorph.spec.job_status import JobState
from pipemorph.views.status.condition_names import INGEST_CONDITIONS
from pipemorph.yaml_json import display_name, parse_single_document, read_text

OPERATOR_CONDITIONS = ("PodsReady", "PreflightPassed", "Ready", "Reconciling", "Stalled")
"""Types of conditions, besides the ingest's, that are not the name of a state."""
MOST_SHOWN = 4
"""Most conditions in a message."""


class JobFailedError(PipeMorphError):
    """The job has ended in another state than the awaited one. ``snapshot``: its last state."""

    def __init__(self, message: str, snapshot: JobSnapshot) -> None:
        super().__init__(one_line(message, 1000))
        self.snapshot = snapshot


class JobDeadlineError(PipeMorphError, TimeoutError):
    """The job did not reach a state in time. ``snapshot``: its last state."""

    def __init__(self, message: str, snapshot: JobSnapshot) -> None:
        super().__init__(one_line(message, 1000))
        self.snapshot = snapshot


class JobBackend(Protocol):
    """Place where jobs run. Every call raises :class:`~pipemorph.errors.InputError` if there is no
    such job, or if the place cannot be reached."""

    def create_job(self, job: PipeMorphJob, document: Mapping[str, Any]) -> str:
        """Start a job; returns its name. ``document``: its manifest, without defaults."""
        ...

    def read_job(self, name: str) -> Mapping[str, Any]:
        """The job with its status."""
        ...

    def list_jobs(self) -> list[Mapping[str, Any]]:
        """List jobs with their status."""
        ...

    def read_log(self, name: str, rank: int, follow: bool) -> Iterator[str]:
        """Lines of a rank."""
        ...

    def delete_job(self, name: str) -> None:
        """End a job and delete it with its results."""
        ...


class JobClient:
    """Client of the jobs of a backend: a :class:`LocalBackend` runs them on this machine, a
    :class:`ClusterBackend` on a cluster where PipeMorph is installed.

    Every call raises :class:`~pipemorph.errors.InputError` for invalid input, an unknown job (then
    a :class:`~pipemorph.errors.ObjectNotFoundError`), or a backend that cannot be reached.
    """

    def __init__(self, backend: JobBackend) -> None:
        self._backend = backend

    def submit_job(self, job: PipeMorphJob | Mapping[str, Any] | str | Path) -> str:
        """Start a job and return its name, without waiting. ``job``: a manifest as a file's path, a
        mapping, or a :class:`~pipemorph.spec.job_spec.PipeMorphJob`. It is checked first, as
        ``pipemorph run`` checks it, so an invalid one starts nothing."""
        document, source = _read_manifest(job)
        try:
            checked = parse_job(json.dumps(document))
        except InputError as error:
            raise InputError(f"{source}: {error}") from None
        return self._backend.create_job(checked, document)

    def get_job(self, name: str) -> JobSnapshot:
        """The state of a job now."""
        return JobSnapshot(self._backend.read_job(name))

    def list_jobs(self) -> list[JobSnapshot]:
        """The states of all jobs now, sorted by name."""
        found = [JobSnapshot(each) for each in self._backend.list_jobs()]
        return sorted(found, key=lambda job: job.name)

    def watch_job(
        self, name: str, *, timeout: float | None = None, polling_interval: float = 1.0
    ) -> Iterator[JobSnapshot]:
        """Yield the state of a job now and whenever its status has changed, until it is over.
        Raises :class:`JobDeadlineError` after ``timeout`` seconds; None: no limit."""
        last = None
        for job in self._poll(name, timeout, polling_interval, {"Complete"}):
            now = job.status.model_dump(
                exclude={"conditions": {"__all__": {"last_transition_time"}}}
            )
            if now != last:
                yield job
            last = now
            if job.is_over:
                return

    def wait_for_job_status(
        self,
        name: str,
        status: Collection[str] = ("Complete",),
        *,
        timeout: float = 600.0,
        polling_interval: float = 1.0,
    ) -> JobSnapshot:
        """Wait until a job has one of the states in ``status``, or one of the conditions in it is
        True, such as ``Ready`` or ``ScheduleAdapted``; returns the job.

        Raises :class:`JobFailedError` if the job is over without that, and
        :class:`JobDeadlineError`, which says what is missing, after ``timeout`` seconds.
        """
        wanted = _check_wanted(status)
        for job in self._poll(name, timeout, polling_interval, wanted):
            true = {kind for kind, each in job.conditions.items() if each.status == "True"}
            if job.state in wanted or true & wanted:
                return job
            if job.is_over:
                reasons = _describe_conditions(job, {job.state, *wanted})
                raise JobFailedError(
                    f"{name}: is {job.state} after iteration {job.iteration} of {job.iterations};"
                    f" expected {_join(wanted)}{reasons}",
                    job,
                )
        raise AssertionError("polling does not end by itself")

    def get_job_logs(self, name: str, *, rank: int = 0, follow: bool = False) -> Iterator[str]:
        """Lines that a rank has printed, without line breaks. ``follow``: also those that it will
        print, until it ends."""
        if rank < 0:
            raise InputError(f"rank: is {rank}; expected at least 0")
        return self._backend.read_log(name, rank, follow)

    def delete_job(self, name: str) -> None:
        """End a job if it runs, and delete it. On this machine its results go too, but no other
        file of its folder."""
        self._backend.delete_job(name)

    def _poll(
        self, name: str, timeout: float | None, interval: float, wanted: Collection[str]
    ) -> Iterator[JobSnapshot]:
        """Yield the job every ``interval`` seconds. A cluster that does not answer ends this only
        at the first call or at the deadline; a job that is gone always does."""
        end = None if timeout is None else time.monotonic() + timeout
        job, problem = self.get_job(name), ""
        while True:
            yield job
            if end is not None and time.monotonic() + interval > end:
                missing = problem or _describe_missing(job)
                message = f"{name}: is {job.state} after {timeout:g} s; expected {_join(wanted)}"
                raise JobDeadlineError(message + missing, job)
            time.sleep(interval)
            try:
                job, problem = self.get_job(name), ""
            except ObjectNotFoundError:
                raise
            except InputError as error:
                problem = f"; {error}"


def _read_manifest(job: PipeMorphJob | Mapping[str, Any] | str | Path) -> tuple[Any, str]:
    """The manifest as plain data without defaults, which the API server adds, and its name for
    errors."""
    if isinstance(job, PipeMorphJob):
        return job.model_dump(mode="json", by_alias=True, exclude_unset=True), job.metadata.name
    if isinstance(job, Mapping):
        try:
            return json.loads(json.dumps(job)), "job"
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(f"job: is no plain data: {one_line(str(error))}") from None
    text = read_text(job, MAX_BYTES)
    try:
        return parse_single_document(text), display_name(job)
    except InputError as error:
        raise InputError(f"{display_name(job)}: {error}") from None


def _check_wanted(status: Collection[str]) -> set[str]:
    wanted = {status} if isinstance(status, str) else set(status)
    known = (*get_args(JobState), *OPERATOR_CONDITIONS, *INGEST_CONDITIONS)
    if not wanted or (unknown := sorted(wanted - set(known))):
        found = f"has {one_line(unknown[0])}" if wanted else "is empty"
        raise InputError(f"status: {found}; expected states or conditions: {', '.join(known)}")
    return wanted


def _describe_missing(job: JobSnapshot) -> str:
    """Describe what a job lacks, for the end of a message."""
    parts = []
    if job.status.ready:
        parts.append(f"{job.status.ready} pods are ready")
    if job.iteration or job.state == "Running":
        rest = job.seconds_remaining
        left = "" if rest is None else f", {rest:.0f} s at the present pace are missing"
        parts.append(f"iteration {job.iteration} of {job.iterations}{left}")
    else:
        parts.append("no iteration was reported")
    return f"; {', '.join(parts)}{_describe_conditions(job, None)}"


def _describe_conditions(job: JobSnapshot, kinds: Collection[str] | None) -> str:
    """Conditions of some types, or all that are not True, with their messages."""
    found = [
        f"{each.type} is {each.status}: {each.message or each.reason}"
        for each in job.status.conditions
        if (each.type in kinds if kinds is not None else each.status != "True")
    ]
    return "".join(f"; {each}" for each in found[:MOST_SHOWN])


def _join(wanted: Collection[str]) -> str:
    return " or ".join(sorted(wanted))
