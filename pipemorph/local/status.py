"""A run on this machine, told as the status of a job on a cluster: so one page shows both."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from pipemorph.api.spec import PipeMorphJob
from pipemorph.api.status import (
    AdaptationSummary,
    Condition,
    ConditionStatus,
    JobState,
    JobStatus,
    TrainingStatus,
)
from pipemorph.api.status_links import FallenLink, RailsStatus, SickPort, SlowLink
from pipemorph.api.status_recoveries import Recoveries, RecoveryRecord
from pipemorph.control.observed.links import Health
from pipemorph.explain.cluster_job import ClusterJob
from pipemorph.explain.story import few, plural
from pipemorph.local.results.history import View
from pipemorph.local.results.report import Recovery
from pipemorph.local.watch import Told
from pipemorph.wire import AdaptationRecord, IterationSample

STATES: dict[str, JobState] = {
    "starting": "Starting",
    "training": "Running",
    "recovering": "Restarting",
    "completed": "Complete",
    "failed": "Failed",
    "deadline": "Failed",
    "interrupted": "Failed",
}
"""By those of :class:`Told`."""
MOST_SLOW_LINKS, MOST_RECOVERIES, NAMED = 32, 10, 5


class RunStatus:
    """Of one run. Remembers since when each condition is as it is."""

    def __init__(self, job: PipeMorphJob) -> None:
        self._mesh, self._layers = job.spec.parallelism.mesh, job.spec.parallelism.layers
        content = job.model_dump(mode="json", by_alias=True, exclude_none=True)
        content["metadata"] = {"name": job.metadata.name, "namespace": ""}
        content["spec"].pop("template", None)  # Its GPUs are those of pods, which are not here.
        self._job = ClusterJob.model_validate(content)
        self._conditions: dict[str, Condition] = {}
        self.held: tuple[int, ...] = ()
        """How many layers each stage holds; empty: evenly many."""

    def job(
        self,
        view: View,
        told: Told,
        newest: Sequence[IterationSample],
        *,
        changes: int,
        goodput: float | None,
        now: float,
    ) -> ClusterJob:
        """The job now. ``newest``: its newest iterations, oldest first, whose median time counts;
        ``changes``: how many changes of plan there were; ``now``: wall clock, seconds."""
        status = JobStatus(
            state=STATES[told.state],
            conditions=self._judge(view, told, now),
            training=self._training(view, newest, changes) if newest else None,
            recoveries=_recoveries(told.recoveries),
            goodput=goodput,
        )
        return self._job.model_copy(update={"status": status})

    def _training(
        self, view: View, newest: Sequence[IterationSample], changes: int
    ) -> TrainingStatus:
        slow = sorted(
            (link for link in view.links if link.health is Health.SLOW),
            key=lambda link: -link.delay,
        )
        last, times = newest[-1], sorted(each.seconds for each in newest)
        return TrainingStatus(
            iteration=last.index + 1,
            iteration_seconds=times[len(times) // 2],
            bubble_fraction=last.bubble_fraction,
            loss=last.loss,
            routes=[route.value for route in view.routes],
            transports=list(view.transports.links),
            wanted_plan_version=view.wanted_version,
            applied_plan_version=view.plan_version,
            slow_link_count=len(slow),
            slow_links=[
                SlowLink(
                    link=link.link,
                    replica=link.replica,
                    direction=link.direction,
                    delay_ms=1e3 * link.delay,
                    wire_time_ms=1e3 * link.wire_time,
                    confidence=link.confidence,
                    since=None if link.since is None else _timestamp(link.since),
                )
                for link in slow[:MOST_SLOW_LINKS]
            ],
            unknown_link_count=sum(link.health is Health.UNKNOWN for link in view.links),
            fallen_link_count=view.transports.fallen_count,
            fallen_links=[
                FallenLink(
                    link=each.link,
                    replica=each.replica,
                    direction=each.direction,
                    agreed=each.agreed,
                    transport=each.transport,
                    fallbacks=each.fallbacks,
                    message=each.trouble,
                )
                for each in view.transports.fallen
            ],
            rails=RailsStatus(
                ports=view.rails.ports,
                sick_count=view.rails.sick_count,
                sick_ports=[
                    SickPort(
                        stage=each.stage,
                        replica=each.replica,
                        device=each.device,
                        port=each.port,
                        state=each.state,
                        message=each.what,
                    )
                    for each in view.rails.sick
                ],
                congested_count=view.rails.congested_count,
            ),
            adaptations=changes,
            saved_seconds=view.worth.seconds,
            saved_error_seconds=view.worth.error,
            last_adaptation=_change(view.adaptations[-1]) if view.adaptations else None,
        )

    def _judge(self, view: View, told: Told, now: float) -> list[Condition]:
        """What is wrong, and that links are well."""
        found: dict[str, tuple[ConditionStatus, str, str]] = {}
        if told.reason:
            kind = "Failed" if STATES[told.state] == "Failed" else "Running"
            verdict: ConditionStatus = "True" if kind == "Failed" else "False"
            found[kind] = (verdict, told.state.capitalize(), told.reason)
        slow = [link for link in view.links if link.health is Health.SLOW]
        unknown = sum(link.health is Health.UNKNOWN for link in view.links)
        if slow:
            named = (f"link {x.link} ({1e3 * x.delay:+.0f} ms {x.direction})" for x in slow)
            found["LinksHealthy"] = ("False", "SlowLinks", f"{few(named, NAMED)} slow")
        elif unknown or not view.links:
            links = self._mesh.stages - 1
            some = f"{unknown} of " if unknown and unknown < links else ""
            text = f"nothing is known yet of {some}the {plural(links, 'link')}"
            found["LinksHealthy"] = ("Unknown", "LinksUnknown", text)
        else:
            text = f"{plural(len(view.links), 'link')}, none slow"
            found["LinksHealthy"] = ("True", "LinksHealthy", text)
        fallen, sick = view.transports.fallen, view.rails.sick
        if fallen or sick:
            texts = [each.text(self._mesh) for each in (fallen or sick)[:NAMED]]
            reason = "LinksFellBack" if fallen else "SickPorts"
            found["RailsHealthy"] = ("False", reason, "; ".join(texts))
        if view.stragglers.slowest:
            texts = [each.text(self._mesh) for each in view.stragglers.slowest[:NAMED]]
            split = view.stragglers.better_split(self._layers, self.held)
            texts += [split.text()] if split is not None else []
            found["StagesEven"] = ("False", "SlowStages", "; ".join(texts))
        late = sorted((each for each in view.reductions if each.slow), key=lambda each: -each.delay)
        if late:
            texts = [f"{each.name} (+{1e3 * each.delay:.0f} ms)" for each in late[:NAMED]]
            found["ReductionsHealthy"] = ("False", "SlowReductions", f"{', '.join(texts)} slow")
        self._conditions = {
            kind: self._condition(kind, *verdict, now) for kind, verdict in found.items()
        }
        return list(self._conditions.values())

    def _condition(
        self, kind: str, status: ConditionStatus, reason: str, message: str, now: float
    ) -> Condition:
        old = self._conditions.get(kind)
        same = old is not None and old.status == status
        return Condition(
            type=kind,
            status=status,
            last_transition_time=old.last_transition_time if old and same else _timestamp(now),
            reason=reason,
            message=message,
        )


def _recoveries(found: Sequence[Recovery]) -> Recoveries:
    last = [
        RecoveryRecord(
            generation=max(1, each.generation),
            lost_at=_timestamp(each.ending.at),
            cause=each.ending.reason,
            iterations_done=each.done,
            went_on_with=each.went_on_with,
            repeated=each.repeated,
            seconds=each.seconds,
        )
        for each in found[-MOST_RECOVERIES:]
    ]
    return Recoveries(count=len(found), last=last)


def _change(record: AdaptationRecord) -> AdaptationSummary:
    return AdaptationSummary(
        plan_version=record.plan_version,
        kind=record.kind,
        reason=record.reason,
        detected_at=_timestamp(record.detected_at),
        detected_at_iteration=record.detected_at_iteration,
        applied_at_iteration=record.applied_at_iteration,
        warmup_before=list(record.warmup_before),
        warmup_after=list(record.warmup_after),
        iteration_seconds_before=record.iteration_seconds_before,
        iteration_seconds_after=record.iteration_seconds_after,
        promised=record.promised,
        measured=record.measured,
    )


def _timestamp(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")
