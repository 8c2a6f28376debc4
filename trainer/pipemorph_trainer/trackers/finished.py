"""What a tracker is told of an iteration."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PlanChange:
    """A change of plan, as far as rank 0 knows it. What it was worth in the end the host of the
    control loop finds out: see ``adaptations`` of ``report.json``, or of the job's status.

    ``before``, ``after``: plan versions. ``reason``: that of the control loop; empty for a plan
    that the script installed. ``promised``: predicted gain, as a fraction of an iteration with the
    old plan; None if nobody predicted it.
    """

    before: int
    after: int
    reason: str = ""
    promised: float | None = None

    def __str__(self) -> str:
        """``plan 2 in place of plan 1: link 0 is late by 60 ms (55% promised)``"""
        text = f"plan {self.after} in place of plan {self.before}"
        text += f": {self.reason}" if self.reason else ""
        return text if self.promised is None else f"{text} ({self.promised:.0%} promised)"


@dataclass(frozen=True)
class FinishedIteration:
    """An iteration that all ranks have finished, as rank 0 knows it.

    ``index``: its number, from 0. ``seconds``: from its ``step()`` to the next one, without
    checkpoints. ``loss``: what ``step()`` returned. ``bubble_fraction``: idle time of all ranks
    over their time, 0 to 1. ``plan_version``: of the plan that it ran under; the oldest if
    pipelines of several replicas ran different ones. ``change``: if it is the first under this
    plan. ``total``: iterations of the job; None without a job.
    """

    index: int
    seconds: float
    loss: float | None
    bubble_fraction: float
    plan_version: int
    change: PlanChange | None = None
    total: int | None = None

    def figures(self) -> dict[str, float]:
        """Numbers for an experiment tracker, by name. Unknown ones are left out."""
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
