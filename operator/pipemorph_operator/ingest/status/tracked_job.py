"""Job that may report: its controller, and its status as written."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pipemorph.control import JobController
from pipemorph.control.decide.layouts.layout_changes import LayoutChanges
from pipemorph.control.job_generations import JobGenerations
from pipemorph.spec.job_spec import JobSpec, Metadata, PipeMorphJob
from pipemorph.spec.job_status import Condition, TrainingStatus
from pipemorph.spec.status_recoveries import Recoveries
from pipemorph.views.status.summary import StatusInput
from pipemorph_operator.ingest.status import write_schedule
from pipemorph_operator.ingest.status.condition_events import ConditionEventFilter
from pipemorph_operator.ingest.status.recovery_events import RecoveryEventFilter
from pipemorph_operator.ingest.status.status_fence import StatusFence
from pipemorph_operator.kube.object_facts import parse_time

Key = tuple[str, str]
"""Namespace and name of a job."""


@dataclass(frozen=True)
class PlacedTime:
    """Time in which a job had its place, which activeDeadlineSeconds counts. ``earlier_seconds``:
    seconds before ``since``. Times are wall clock, seconds; ``since`` is None while the job is
    suspended or queued, ``until`` until it ends."""

    earlier_seconds: float = 0.0
    since: float | None = None
    until: float | None = None

    @staticmethod
    def from_status(status: Mapping[str, Any]) -> PlacedTime:
        """Read the operator's fields of a status."""
        since, until = (parse_time(status.get(key)) for key in ("startTime", "completionTime"))
        return PlacedTime(
            status.get("ranSeconds") or 0.0,
            since.timestamp() if since is not None else None,
            until.timestamp() if until is not None else None,
        )

    def total_seconds(self, now: float) -> float:
        if self.since is None:
            return self.earlier_seconds
        return self.earlier_seconds + max(
            0.0, (now if self.until is None else self.until) - self.since
        )


@dataclass
class TrackedJob:
    """Tracked job, which may report."""

    namespace: str
    name: str
    uid: str
    generation: int
    spec: JobSpec
    """Spec of the whole job; the controller's spec has only the running replicas."""
    controller: JobController
    conditions: list[Condition]
    reports: write_schedule.ReportLog
    generations: JobGenerations
    recoveries: Recoveries | None
    """Recoveries as last written."""
    recovery_events: RecoveryEventFilter
    condition_events: ConditionEventFilter
    status_fence: StatusFence
    job_uid: str | None
    """UID of the attempt's batch Job."""
    taken_over_at: float | None = None
    """Wall clock at which this process took it over, if its attempt had reported before."""
    placed_time: PlacedTime = field(default_factory=PlacedTime)
    written_training: TrainingStatus | None = None
    excluded_replicas: tuple[int, ...] = ()
    """Replicas that the controller's spec excludes."""
    key_state: Hashable = None
    """Key state as last written, see :func:`write_schedule.key_state`."""
    written_at: float = float("-inf")
    deciding_since: float | None = None
    """Time of the first visit during the decision in progress."""
    moves: LayoutChanges | None = None
    """None if its layout cannot change."""
    visited_at: float = float("-inf")
    visited_version: int = -1
    """Newest plan version at the last visit."""
    has_ended: bool = False
    write_lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def key(self) -> Key:
        return self.namespace, self.name

    @property
    def object_reference(self) -> dict[str, str]:
        """Name, namespace and UID of the API object."""
        return {"name": self.name, "namespace": self.namespace, "uid": self.uid}

    @property
    def manifest(self) -> PipeMorphJob:
        """Manifest of the job, with the controller's spec."""
        return PipeMorphJob(
            api_version="pipemorph.io/v1alpha1",
            kind="PipeMorphJob",
            metadata=Metadata(name=self.name, namespace=self.namespace),
            spec=self.controller.spec,
        )

    @property
    def has_unwritten_recoveries(self) -> bool:
        """True if status lacks the newest recoveries."""
        newest = self.generations.status_recoveries
        return newest is not None and newest != self.recoveries

    def compute_goodput(self, now: float) -> float | None:
        """Goodput at the newest report (:mod:`pipemorph.control.history.goodput`): the ranks' work
        since then is unknown. ``now``: wall clock, seconds; used without a report or at the end."""
        newest = self.reports.reported_at
        until = now if newest is None or self.has_ended else newest
        found = self.reports.useful.compute_goodput(self.placed_time.total_seconds(until))
        return None if found is None else round(found, 4)

    def awaits_directive(self, now: float) -> bool:
        """True if a decision began only a moment ago: its directive will be written together with
        all other changes."""
        if self.controller.pending_request is None:
            self.deciding_since = None
            return False
        if self.deciding_since is None:
            self.deciding_since = now
        return now - self.deciding_since < write_schedule.DECIDING_SECONDS

    @property
    def has_changes(self) -> bool:
        """True if more than the job's progress may have changed since the last visit."""
        newest = self.controller.newest_record
        return (
            self.reports.has_changes
            or self.has_unwritten_recoveries
            or self.visited_version != self.controller.plan_version
            or (newest is not None and newest.iteration_seconds_after is None)
        )

    @property
    def summary_source(self) -> StatusInput:
        return StatusInput(
            self.controller,
            self.reports.reported_at,
            self.generation,
            self.has_ended,
            self.taken_over_at,
            self.spec.parallelism.replicas if self.spec.parallelism.min_replicas else None,
            self.generations.excluded_replicas,
            self.generations.stay_reason,
            self.generations.layout_before is not None,
            self.moves.last_note if self.moves is not None else "",
        )
