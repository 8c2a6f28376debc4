"""A job that may report: its controller, and what is known of its status."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pipemorph.api.spec import JobSpec, Metadata, PipeMorphJob
from pipemorph.api.status import Condition, TrainingStatus
from pipemorph.api.status_recoveries import Recoveries
from pipemorph.control import JobController
from pipemorph.control.decide.layouts.moves import Moves
from pipemorph.control.generations import Generations
from pipemorph.status.summary import Source
from pipemorph_operator.cluster.facts import parse_time
from pipemorph_operator.ingest.status import write_schedule
from pipemorph_operator.ingest.status.condition_events import ConditionEvents
from pipemorph_operator.ingest.status.fence import Fence
from pipemorph_operator.ingest.status.recovery_events import RecoveryEvents

Key = tuple[str, str]
"""Namespace and name of a job."""


@dataclass(frozen=True)
class Placed:
    """How long a job has had its place: the time that activeDeadlineSeconds counts. ``ran``:
    seconds before ``since``. Times are wall clock, seconds; ``since`` is None while the job is
    suspended or queued, ``until`` while it is not over."""

    ran: float = 0.0
    since: float | None = None
    until: float | None = None

    @staticmethod
    def of(status: Mapping[str, Any]) -> Placed:
        """By what the operator has written."""
        since, until = (parse_time(status.get(key)) for key in ("startTime", "completionTime"))
        return Placed(
            status.get("ranSeconds") or 0.0,
            since.timestamp() if since is not None else None,
            until.timestamp() if until is not None else None,
        )

    def seconds(self, now: float) -> float:
        if self.since is None:
            return self.ran
        return self.ran + max(0.0, (now if self.until is None else self.until) - self.since)


@dataclass
class TrackedJob:
    """A tracked job, which may report."""

    namespace: str
    name: str
    uid: str
    generation: int
    spec: JobSpec
    """Of the whole job; the controller's is that of the replicas that run."""
    controller: JobController
    conditions: list[Condition]
    reports: write_schedule.ReportLog
    generations: Generations
    recoveries: Recoveries | None
    """As last written."""
    recovery_events: RecoveryEvents
    events: ConditionEvents
    fence: Fence
    job_uid: str | None
    """UID of the attempt's batch Job."""
    taken_over_at: float | None = None
    """Wall clock from which it is tracked here, if the attempt's ranks had reported before."""
    placed: Placed = field(default_factory=Placed)
    written: TrainingStatus | None = None
    left_out: tuple[int, ...] = ()
    """Replicas that the controller is without."""
    key_state: Hashable = None
    """State that was last written, see :func:`write_schedule.key_state`."""
    written_at: float = float("-inf")
    deciding_since: float | None = None
    """The first look at which the decision under way was seen."""
    moves: Moves | None = None
    """None: its layout cannot change."""
    looked_at: float = float("-inf")
    looked_version: int = -1
    """The newest plan version at the last look."""
    ended: bool = False
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def key(self) -> Key:
        return self.namespace, self.name

    @property
    def about(self) -> dict[str, str]:
        """Of the API object: name, namespace and UID."""
        return {"name": self.name, "namespace": self.namespace, "uid": self.uid}

    @property
    def manifest(self) -> PipeMorphJob:
        """The job as a manifest states it."""
        return PipeMorphJob(
            api_version="pipemorph.io/v1alpha1",
            kind="PipeMorphJob",
            metadata=Metadata(name=self.name, namespace=self.namespace),
            spec=self.controller.spec,
        )

    @property
    def recovers(self) -> bool:
        """Whether status does not have what there is to tell of generations."""
        told = self.generations.told
        return told is not None and told != self.recoveries

    def goodput(self, now: float) -> float | None:
        """See :mod:`pipemorph.control.record.goodput`. ``now``: wall clock, seconds. Of reports
        that are old, as of the newest one: it is not known what the ranks do."""
        heard = self.reports.reported_at
        until = now if heard is None or self.ended else heard
        found = self.reports.useful.goodput(self.placed.seconds(until))
        return None if found is None else round(found, 4)

    def awaits_directive(self, now: float) -> bool:
        """Whether a decision has been under way for a moment only: its directive is written with
        all that has changed."""
        if self.controller.replan is None:
            self.deciding_since = None
            return False
        if self.deciding_since is None:
            self.deciding_since = now
        return now - self.deciding_since < write_schedule.DECIDING_SECONDS

    @property
    def has_news(self) -> bool:
        """Whether more than the job's progress may have changed since the last look."""
        newest = self.controller.newest_record
        return (
            self.reports.news
            or self.recovers
            or self.looked_version != self.controller.plan_version
            or (newest is not None and newest.iteration_seconds_after is None)
        )

    @property
    def source(self) -> Source:
        return Source(
            self.controller,
            self.reports.reported_at,
            self.generation,
            self.ended,
            self.taken_over_at,
            self.spec.parallelism.replicas if self.spec.parallelism.min_replicas else None,
            self.generations.left_out,
            self.generations.stays,
            self.generations.layout_before is not None,
            self.moves.told if self.moves is not None else "",
        )
