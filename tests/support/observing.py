"""Rank 0's agent as its controller sees it, for tests: telemetry of ranks in, reports out."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from pipemorph.control import JobController
from pipemorph.control.job_state.reports import build_observer_settings
from pipemorph.detection.job_observer import JobObserver
from pipemorph.protocol import DirectiveEnvelope, LinkHealthReport
from pipemorph.replay.replayed_ranks import JobTelemetry, ReplayedRanks
from pipemorph.spec.job_spec import JobSpec


def report(sequence: int = 1, **fields: Any) -> LinkHealthReport:
    """A report of a job that trains, with any fields."""
    values: dict[str, Any] = {
        "protocol": 7, "job": "j", "namespace": "default", "attempt": 0, "sequence": sequence,
        "sent_at": 1.0, "state": "training", "iteration": 0, "observed_plan_version": 0,
        "applied_plan_version": 0,
    }  # fmt: skip
    return LinkHealthReport.model_validate(values | fields)


def trained(*indices: int, seconds: float = 1.0, **fields: Any) -> LinkHealthReport:
    """A report of finished iterations, which took ``seconds`` each; with any fields."""
    common = {"seconds": seconds, "plan_version": 0, "loss": None, "bubble_fraction": 0.1}
    return report(iterations=[{"index": index, **common} for index in indices], **fields)


class Agent:
    """Observes a job of ``spec``. ``paced``: whether it reports when a report is due, and not
    with all telemetry."""

    def __init__(
        self,
        spec: JobSpec,
        *,
        job: str = "j",
        namespace: str = "default",
        attempt: int = 0,
        paced: bool = False,
    ) -> None:
        mesh = spec.parallelism.mesh
        self.observer = JobObserver(mesh, job=job, namespace=namespace, attempt=attempt)
        self.ranks = ReplayedRanks(mesh, self.observer)
        self.paced, self.attempt = paced, attempt
        self.sequence = 0
        # State after the answer to the first report, which it sends before ranks measure.
        self._take(0.0, DirectiveEnvelope(settings=build_observer_settings(spec)))

    def _take(self, now: float, answer: DirectiveEnvelope) -> None:
        nothing = self.observer.build_report(1, now, 0)
        self.observer.record_delivery(nothing, answer)

    def observe(self, now: float, **telemetry: Any) -> bool:
        """Take in telemetry. Returns whether a report is due."""
        self.ranks.process_telemetry(JobTelemetry(**telemetry), now, refresh=not self.paced)
        return not self.paced or self.observer.is_report_due(now)

    def tell(
        self,
        controller: JobController,
        now: float,
        *,
        observed: int = 0,
        issued_at: float | None = None,
        **telemetry: Any,
    ) -> bool:
        """Take in telemetry, and report to the controller if that is due. Returns whether it
        was. ``observed``, ``issued_at``: of the newest directive."""
        if not self.observe(now, **telemetry):
            return False
        self.sequence += 1
        sent = self.observer.build_report(self.sequence, now, observed, plan_issued_at=issued_at)
        arrived = LinkHealthReport.model_validate_json(sent.to_json())
        self.observer.record_delivery(sent, controller.process_report(arrived, now))
        return True


_AGENTS: WeakKeyDictionary[JobController, Agent] = WeakKeyDictionary()


def tell(controller: JobController, now: float, **telemetry: Any) -> None:
    """Let the controller's one agent take in telemetry and report it."""
    agent = _AGENTS.get(controller)
    if agent is None or agent.attempt != controller.attempt:
        agent = Agent(controller.spec, attempt=controller.attempt)
        _AGENTS[controller] = agent
    agent.tell(controller, now, **telemetry)
