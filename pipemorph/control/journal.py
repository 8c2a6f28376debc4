"""The decisions of a job, also those that keep the plan, each with its reason."""

from __future__ import annotations

from typing import Literal

from pipemorph.control.observed.reports import Observed
from pipemorph.control.record.history import Decision, Ledger


class Journal:
    """Writes the decisions of one attempt into the job's ledger. ``now``: wall clock, seconds."""

    def __init__(self, ledger: Ledger, observed: Observed) -> None:
        self._ledger, self._observed = ledger, observed
        self._noted: set[str] = set()

    def keep(self, now: float, reason: str) -> None:
        """Record that the plan stays."""
        self.log(now, "keep", reason, f"no change: {reason}")

    def note(self, now: float, topic: str, reason: str) -> None:
        """The same, but only once per ``topic``, since it would repeat with every report."""
        if topic not in self._noted:
            self._noted.add(topic)
            self.keep(now, reason)

    def log(
        self,
        now: float,
        kind: Literal["adapt", "return", "revert", "keep", "outcome"],
        reason: str,
        line: str,
        plan_version: int | None = None,
    ) -> None:
        """Record a decision. ``line``: its text for a terminal."""
        self._ledger.decisions.append(
            Decision(
                at=now,
                iteration=self._observed.iteration,
                kind=kind,
                reason=reason,
                line=line,
                plan_version=plan_version,
            )
        )
