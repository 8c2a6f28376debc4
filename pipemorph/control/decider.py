"""Finds causes for another decision, asks for a proposal, and issues the plan that it chose."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from pipemorph.api.spec import JobSpec
from pipemorph.control.assessment import Assessment
from pipemorph.control.decide import findings, reasons
from pipemorph.control.decide.forecast import Option, Rules, Situation
from pipemorph.control.decide.rate_limit import Pacing
from pipemorph.control.decide.replan import CHECKED, Cause, Proposal, Replan
from pipemorph.control.decide.triggers import Judgement
from pipemorph.control.decide.truth import (
    DOUBTED_NEEDS,
    Evidence,
    Sources,
    Trial,
    Verdict,
    without,
)
from pipemorph.control.memory_limits import Room, excess
from pipemorph.control.observed.reports import Observed
from pipemorph.control.plans import Plans, PlanVersions
from pipemorph.control.record.history import Decision, Ledger
from pipemorph.control.record.worth import revise
from pipemorph.planning import Plan, Policy
from pipemorph.wire import Directive, Health, LinkState, PlanMessage

COMMIT_AHEAD = 1
"""Iterations between the current one and the first with the plan of a directive issued now."""


class Pending(NamedTuple):
    """A decision that waits for its proposal, and data for its record."""

    replan: Replan
    links: tuple[LinkState, ...]
    detectable_at: int
    before: Judgement
    """The last decision: a host that takes over meanwhile decides again from it."""
    sources: Sources = frozenset()


class Decider:
    """The decisions of one attempt. ``rules``: the sections of the spec that a plan depends on."""

    def __init__(
        self,
        spec: JobSpec,
        rules: Rules,
        assessment: Assessment,
        *,
        observed: Observed,
        ledger: Ledger,
        plans: Plans,
        versions: PlanVersions,
        endless: bool,
    ) -> None:
        self._spec, self._rules, self._assessment = spec, rules, assessment
        self._endless = endless
        self._observed, self._ledger = observed, ledger
        self._plans, self._versions = plans, versions
        self._noted: set[str] = set()
        """Topics of which something was said, see :meth:`note`."""
        self.pacing = Pacing()
        self.pending: Pending | None = None
        self._checked_rooms: tuple[Room, ...] = ()
        self._weighed_at = -1
        """The newest iteration when the plan in effect was last compared with that of the start."""
        self._turned: dict[tuple[Cause, Sources], int] = {}
        """Causes that wait for a decision, and the iteration in which each was first seen."""
        self._turned_at: int | None = None
        """That of the cause for which a decision was requested last."""

    @property
    def judged(self) -> Judgement:
        """The last decision that was settled."""
        return self.pending.before if self.pending else self._assessment.judgement

    # --- causes ---------------------------------------------------------------------------

    def compare(self, now: float) -> None:
        """Compare newly finished iterations with predictions, record what a change brought, and
        request to take it back if that is too little."""
        if self._observed.state != "training" or self.pending is not None:
            return
        verdict = self._assessment.compare(now)
        if verdict is not None:
            self._conclude(verdict, now)

    def _conclude(self, verdict: Verdict, now: float) -> None:
        trial, last = verdict.trial, self._ledger.last_iteration
        line = reasons.outcome(verdict)
        self._log(now, "outcome", line, line)
        stages = self._observed.stages.times()
        if not verdict.failed or stages is None or not trial.promise.may_go_back:
            return
        links = self._observed.links.states(now)
        present = self._assessment.measured(stages, links, now)
        # Without the evidence that was wrong, which is not believed again for now.
        self._assessment.truth.hold(trial.sources, last + 1, last, DOUBTED_NEEDS)
        self._plans.baseline = trial.baseline
        situation = without(present, trial.sources, trial.before)
        self._ask("undelivered", situation, links, previous=trial.previous)

    def consider(self, now: float) -> None:
        """Request a decision if there is a cause, and if the rate limit allows it now."""
        observed, assessment, plans = self._observed, self._assessment, self._plans
        judgement, truth = assessment.judgement, assessment.truth
        if observed.state != "training" or self.pending is not None or plans.awaits(now):
            return
        # Unless this pass finds the same cause again, the next one is of another moment.
        turned, self._turned = self._turned, {}
        rooms = observed.stages.rooms
        slow_lately = any(judgement.situation.slow) or observed.links.any_slow
        quiet = not (plans.unknown or slow_lately) and rooms == self._checked_rooms
        quiet = quiet and not assessment.barrier_differs
        if quiet and not judgement.profile_is_due(assessment.progress):
            return  # The common case: every other cause needs a link that is or was slow.
        links = observed.links.states(now)
        if self._must_not(links, now):
            self._checked_rooms = rooms
            return
        stages = observed.stages.times()
        if stages is None:
            if any(link.health is Health.SLOW for link in links):
                self._note(now, "times", "a link is slow, but no stage has reported op times yet")
            return
        situation = assessment.believed(stages, links, now)
        if not self._knows_memory(now):
            return
        if any(room.device == 0 for room in rooms):
            memory = self._spec.schedule.activation_memory
            self._note(now, "memory", reasons.no_room(situation, memory))
            self._checked_rooms = rooms
            return
        progress = assessment.progress
        cause = judgement.cause(situation, plans.known, progress, hold=self.pacing.hold)
        self._checked_rooms = rooms
        last = self._ledger.last_iteration
        if truth.held(last):
            self._turned = turned  # What is held may still become the cause.
        if cause is None:
            return
        sources = judgement.sources(cause, situation)
        self._turned_at = turned.get((cause, sources), observed.iteration)
        self._turned[cause, sources] = self._turned_at
        if not judgement.is_time(cause, links, progress, self.pacing):
            return
        if cause not in CHECKED:
            self._ask(cause, situation, links)
            return
        if sources <= truth.held(last):
            return
        evidence, since = assessment.evidence(cause, sources, situation, links)
        if lacking := truth.lacks(sources, evidence, last):
            if truth.hold(sources, since, last, lacking):
                self.keep(now, reasons.doubted(cause, links, lacking))
            return
        self._ask(cause, situation, links, evidence=evidence, sources=sources)

    def _must_not(self, links: Sequence[LinkState], now: float) -> bool:
        """Whether the plan must not change. Says so if there would be a cause."""
        stages = self._observed.stages
        refusal = reasons.why_not(self._spec, stages.crowding)
        if refusal is None:
            return False
        slow = [link for link in links if link.health is Health.SLOW]
        if slow:
            self._note(now, "policy", f"{reasons.describe(slow)}; {refusal}")
        too_much = excess(self._plans.wanted, stages.rooms)
        if too_much is not None:
            self._note(now, "memory", f"{reasons.too_much(too_much)}; {refusal}")
        return True

    def say_crowded(self, now: float) -> None:
        """Say once that the job does not adapt, or why its measurements tell little."""
        crowding, spec = self._observed.stages.crowding, self._spec
        adapts = spec.adaptation.enabled and spec.schedule.policy_kind is Policy.PIPEMORPH
        if crowding > 1 and adapts:
            text = reasons.crowded(crowding, bool(spec.faults))
            self._note(now, "crowded", text)

    def _knows_memory(self, now: float) -> bool:
        """Whether limits in bytes can be converted to microbatches. A rank reports the size of a
        microbatch with its first profile or never; in that case the limit cannot be applied."""
        stages = self._observed.stages
        unknown = [i for i, f in enumerate(stages.footprints) if not f.activation_bytes]
        if self._spec.schedule.activation_memory is None or not unknown:
            return True
        if stages.measured:
            self._note(now, "bytes", reasons.not_measured(unknown))
        return stages.measured

    # --- decisions ------------------------------------------------------------------------

    def _ask(
        self,
        cause: Cause,
        situation: Situation,
        links: Sequence[LinkState],
        *,
        evidence: Evidence | None = None,
        sources: Sources = frozenset(),
        previous: Plan | None = None,
    ) -> None:
        """Leave the decision to the host."""
        judgement, plans = self._assessment.judgement, self._plans
        before = copy.copy(judgement)
        readings = judgement.readings if cause == "profile" else ()
        detectable_at = judgement.detectable_at(situation, links, self._observed.iteration)
        judgement.made(cause, situation, self._ledger.last_iteration)
        self.pending = Pending(
            Replan(
                spec=self._rules,
                cause=cause,
                situation=situation,
                current=plans.wanted,
                baseline=plans.baseline,
                # Without its state, the controller does not know the plan of the ranks.
                lost=plans.unknown,
                remaining=self._left(),
                change_seconds=self._ledger.change_seconds,
                evidence=evidence or Evidence(),
                running=plans.running,
                start=plans.first,
                previous=previous,
                readings=readings,
            ),
            links=tuple(links),
            detectable_at=detectable_at,
            before=before,
            sources=sources,
        )

    def _left(self) -> int | None:
        """Iterations for which the plan of a directive issued now would be in effect; None if no
        end is known."""
        if self._endless:
            return None
        running = self._ledger.last_iteration + 1
        return self._spec.trainer.iterations - running - COMMIT_AHEAD

    def settle(self, asked: Replan, proposal: Proposal, now: float) -> None:
        """Act on the proposal for ``asked``. Ignored if that does not wait any more."""
        pending, truth = self.pending, self._assessment.truth
        if pending is None or pending.replan is not asked:
            return
        self.pending = None
        last = self._ledger.last_iteration
        if proposal.waits:
            self._assessment.judgement = pending.before  # So that the cause comes up again.
            truth.hold(pending.sources, pending.detectable_at, last)
            if any(f.measured for f in proposal.found if isinstance(f, findings.NotConfirmed)):
                truth.contradict(pending.sources, last)
        else:
            truth.decided(last)
        present = self._ledger.record(asked.current.version)
        if present is not None and proposal.start is not None and proposal.current is not None:
            # A decision may have had to wait since its cause was there.
            since = _changed_at(pending)
            if self._turned_at is not None:
                since = min(since, self._turned_at)
            since = max(since, self._weighed_at + 1)
            # If a change was taken back, what it was for was never there.
            since = -1 if asked.cause == "undelivered" else since
            revise(present, proposal.start - proposal.current.seconds, since)
            self._weighed_at = last
        if not proposal.waits:
            self._turned, self._turned_at = {}, None
        if proposal.chosen is None:
            self.keep(now, reasons.reason(asked.cause, pending.links, proposal))
            return
        self._issue(pending, proposal, proposal.chosen, now)
        if proposal.promise is not None:
            truth.begin(
                Trial(
                    version=self._plans.wanted.version,
                    previous=asked.running,
                    baseline=asked.baseline,
                    sources=pending.sources,
                    promise=proposal.promise,
                    before=pending.before.situation,
                    since=pending.detectable_at,
                )
            )
        if asked.cause in ("profile", "memory", "barrier") and not any(asked.situation.slow):
            self._plans.keep_as_baseline()

    def _issue(self, pending: Pending, proposal: Proposal, chosen: Option, now: float) -> None:
        """Make the chosen option the wanted plan, under a new plan version."""
        asked, version = pending.replan, self._versions.take()
        record = reasons.record_of(
            asked,
            proposal,
            chosen,
            pending.links,
            version=version,
            at=now,
            iteration=self._observed.iteration,
            detectable_at=pending.detectable_at,
            peak_memory=self._observed.stages.peak_memory(),
        )
        plan = replace(chosen.plan, version=version)
        directive = Directive(
            plan_version=version,
            issued_at=now,
            reason=record.reason,
            plan=PlanMessage.of(plan),
            record=record.model_copy(),
        )
        self._plans.issue(plan, directive)
        finished = self._ledger.last_iteration
        if asked.cause in ("slow", "worse", "restart"):
            self.pacing.hurried(finished, pending.sources)
        returning = set(asked.current.delegated) - set(chosen.plan.delegated)
        if record.kind == "return":
            was, now_slow = pending.before.situation.slow, asked.situation.slow
            returning |= {i for i, slow in enumerate(was) if slow and not now_slow[i]}
        self.pacing.issued(
            finished,
            returning if record.kind != "revert" else (),
            returns_at_once=proposal.returns_at_once,
        )
        self._ledger.append(record)
        line = reasons.short(version, asked.cause, pending.links, proposal)
        self._log(now, record.kind, record.reason, line, version)

    # --- what was decided, and why --------------------------------------------------------

    def keep(self, now: float, reason: str) -> None:
        """Record that the plan stays."""
        self._log(now, "keep", reason, f"no change: {reason}")

    def _note(self, now: float, topic: str, reason: str) -> None:
        """Record once per ``topic`` that the plan stays: it would repeat with every report."""
        if topic not in self._noted:
            self._noted.add(topic)
            self.keep(now, reason)

    def _log(
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


def _changed_at(pending: Pending) -> int:
    """Iteration from which links are as they are now: the first window of their last change."""
    was, now = pending.before.situation.slow, pending.replan.situation.slow
    turned = [
        link.since_iteration
        for i, link in enumerate(pending.links)
        if was[i] != now[i] and link.since_iteration is not None
    ]
    return max(turned, default=pending.detectable_at)
