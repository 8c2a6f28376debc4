"""Data of a finished iteration, for trackers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PlanChange:
    """Change of plan, as rank 0 sees it. The host of the control loop measures its effect: see
    ``adaptations`` of ``report.json``, or of the job's status.

    ``before``, ``after``: plan versions. ``reason``: of the control loop; empty for a plan that the
    script installed. ``promised``: predicted gain, as a fraction of an iteration with the old plan;
    None without a prediction.
    """

    before: int
    after: int
    reason: str = ""
    promised: float | None = None

    def __str__(self) -> str:
        """Format: ``plan 2 in place of plan 1: link 0 is late by 60 ms (55% promised)``."""
        text = f"plan {self.after} in place of plan {self.before}"
        text += f": {self.reason}" if self.reason else ""
        return text if self.promised is None else f"{text} ({self.promised:.0%} promised)"


@dataclass(frozen=True)
class FinishedIteration:
    """Iteration that all ranks have finished, as rank 0 sees it.

    ``index``: from 0. ``seconds``: from its ``step()`` to the next one, without checkpoints.
    ``loss``: the return value of ``step()``. ``bubble_fraction``: idle time of all ranks over their
    time, 0 to 1. ``plan_version``: of the plan that it ran under; the oldest if replicas ran
    different ones. ``change``: set in the first iteration under a plan. ``total``: iterations of
    the job; None without a job.
    """

    index: int
    seconds: float
    loss: float | None
    bubble_fraction: float
    plan_version: int
    change: PlanChange | None = None
    total: int | None = None

    def figures(self) -> dict[str, float]:
        """Return numbers for an experiment tracker, by name, without unknown ones."""
        found: dict[str, float] = {
            "iteration_seconds": self.seconds,
            "bubble_fraction": self.bubble_fraction,
            "plan_version": self.plan_version,
        }
        if self.loss is not None:
            found["loss"] = self.loss
        if self.change is not None and self.change.promised is not None:
            found["promised_gain"] = self.change.promised
        return found
