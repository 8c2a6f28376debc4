"""A decision on its way: what is asked, and what will be put on record of the answer."""

from __future__ import annotations

from dataclasses import dataclass

from pipemorph.control.decide import reasons
from pipemorph.control.decide.forecast import Option, Situation
from pipemorph.control.decide.replan import Proposal, Replan
from pipemorph.control.history import AdaptationRecord
from pipemorph.control.observe.link_health import Health, LinkHealth
from pipemorph.planning import Path


@dataclass(frozen=True)
class Pending:
    """A decision that waits for its proposal, and what its record will say."""

    replan: Replan
    links: tuple[LinkHealth, ...]
    why: str
    detectable_at: int
    before: Situation
    """What was judged last: it is judged again by a host that takes over before the end."""

    def returns(self, chosen: Option) -> bool:
        """Whether this brings back the plan for links that are well."""
        asked = self.replan
        return asked.cause not in ("slow", "worse", "memory") and (
            chosen.schedule,
            chosen.paths,
            chosen.limits.device,
        ) == (asked.home, asked.first_paths, asked.home_limits.device)

    def moves_back(self, chosen: Option) -> bool:
        """Whether fewer links are delegated than now."""
        return chosen.delegated < sum(path is Path.DELEGATED for path in self.replan.paths)

    def record(
        self,
        chosen: Option,
        proposal: Proposal,
        *,
        plan_version: int,
        now: float,
        iteration: int,
        peak_memory: list[int | None],
    ) -> AdaptationRecord:
        """Of a directive with the chosen option, issued ``now`` during ``iteration``.
        ``peak_memory``: bytes per stage under the plan in effect."""
        asked, present = self.replan, proposal.present
        return AdaptationRecord(
            plan_version=plan_version,
            kind="return" if self.returns(chosen) else "adapt",
            detected_at=now,
            detected_at_iteration=iteration,
            detectable_at=self.detectable_at,
            reason=reasons.change(self.why, proposal, chosen),
            links=[link.record() for link in self.links if link.health is not Health.HEALTHY],
            warmup_before=list(asked.schedule.warmup()),
            warmup_after=list(chosen.schedule.warmup()),
            paths=list(chosen.paths),
            predicted_seconds_before=present.seconds if present else None,
            predicted_seconds_after=chosen.seconds,
            peak_memory_before=peak_memory,
            device_limits_before=list(asked.limits.device),
            device_limits_after=list(chosen.limits.device),
            offloaded=chosen.offloaded(),
            fused_stages=list(chosen.fused),
        )
