"""State of a job at one time, as notebooks and scripts read it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipemorph.spec.job_status import Condition, JobStatus
from pipemorph.spec.status_links import SlowLink
from pipemorph.terminal import render_parts
from pipemorph.views.explanation import explain_job
from pipemorph.views.explanation.explained_job import parse_job_object


class JobSnapshot:
    """State of a job when it was read. ``content``: the job with its status, as ``kubectl get -o
    json`` prints it, or the report of a run on this machine. Raises
    :class:`~pipemorph.errors.InputError` if it is neither."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self.content = content
        self._job = parse_job_object(content)

    @property
    def name(self) -> str:
        """Name that the calls of a client accept: ``NAME``, on a cluster ``NAMESPACE/NAME``."""
        return self._job.name

    @property
    def status(self) -> JobStatus:
        """The whole status, see :class:`~pipemorph.spec.job_status.JobStatus`."""
        return self._job.status or JobStatus()

    @property
    def state(self) -> str:
        """``Pending``, ``Queued``, ``Starting``, ``Running``, ``Restarting``, ``Suspended``,
        ``Complete`` or ``Failed``."""
        return self.status.state or "Pending"

    @property
    def is_over(self) -> bool:
        """True if the state does not change any more."""
        return self.state in ("Complete", "Failed") or self._job.is_over

    @property
    def conditions(self) -> dict[str, Condition]:
        """Conditions by their type, such as ``LinksHealthy``."""
        return {each.type: each for each in self.status.conditions}

    @property
    def iteration(self) -> int:
        """Iteration in progress at stage 0; 0 before the first report."""
        return self.status.training.iteration if self.status.training is not None else 0

    @property
    def iterations(self) -> int:
        """Iterations that the job has to run."""
        return self._job.spec.trainer.iterations

    @property
    def iteration_seconds(self) -> float | None:
        """Median seconds of the newest iterations; None before the first report."""
        training = self.status.training
        return training.iteration_seconds if training is not None else None

    @property
    def seconds_remaining(self) -> float | None:
        """Seconds of the remaining iterations at the present pace; None if unknown."""
        return self._job.seconds_remaining

    @property
    def slow_links(self) -> list[SlowLink]:
        """Slow links, slowest first."""
        return list(self.status.training.slow_links) if self.status.training is not None else []

    @property
    def adaptations(self) -> int:
        """Number of changes of plan so far."""
        return self.status.training.adaptations if self.status.training is not None else 0

    @property
    def saved_seconds(self) -> float:
        """Predicted seconds that all changes of plan have saved so far."""
        return self.status.training.saved_seconds if self.status.training is not None else 0.0

    def explain(self) -> str:
        """Explain what was seen, decided and saved, and what to do now, in at most ten lines."""
        return render_parts(explain_job(self.content).to_table())

    def __repr__(self) -> str:
        links = ", ".join(f"link {each.link} +{each.delay_ms:.0f} ms" for each in self.slow_links)
        return (
            f"<job {self.name}: {self.state}, iteration {self.iteration} of {self.iterations},"
            f" slow links: {links or 'none'}, {self.adaptations} adaptations,"
            f" {self.saved_seconds:.1f} s saved>"
        )
