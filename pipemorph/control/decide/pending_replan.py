"""A decision on its way: what is asked, and what will be put on record of the answer."""

from __future__ import annotations

from dataclasses import dataclass

from pipemorph.control.decide import reasons
from pipemorph.control.decide.forecast import Option, Situation
from pipemorph.control.decide.replan import Proposal, Replan
from pipemorph.control.history import AdaptationRecord
from pipemorph.control.observe.link_health import Health, LinkHealth
from pipemorph.planning.offload import offloaded


@dataclass(frozen=True)
class Pending:
    """A decision that waits for its proposal, and what its record will say."""

    replan: Replan
    links: tuple[LinkHealth, ...]
    detectable_at: int
    before: Situation
    """What was judged last: it is judged again by a host that takes over before the end."""

    def reason(self, proposal: Proposal) -> str:
        """Why the proposal came out as it did, in full."""
        return reasons.reason(self.replan.cause, self.links, proposal)

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
        asked, plan = self.replan, chosen.plan
        returns = asked.cause not in ("slow", "worse", "memory") and plan.runs_as(asked.baseline)
        return AdaptationRecord(
            plan_version=plan_version,
            kind="return" if returns else "adapt",
            detected_at=now,
            detected_at_iteration=iteration,
            detectable_at=self.detectable_at,
            reason=self.reason(proposal),
            links=[link.record() for link in self.links if link.health is not Health.HEALTHY],
            warmup_before=list(asked.current.warmup),
            warmup_after=list(plan.warmup),
            paths=list(plan.paths),
            predicted_seconds_before=proposal.current.seconds if proposal.current else None,
            predicted_seconds_after=chosen.seconds,
            peak_memory_before=peak_memory,
            device_limits_before=list(asked.current.device_limits),
            device_limits_after=list(plan.device_limits),
            offloaded=offloaded(plan.schedule, plan.device_limits),
            fused_stages=list(plan.fused),
        )
