"""The adaptation controller: reports in, directives out. No sockets, no clock, no threads.

A report updates the links' health, the stages' op times and the history of iterations. The
controller decides again if the situation has changed since the last decision: a link became slow,
slower or healthy, or op times differ from the planned ones. It then predicts the current plan and
the alternatives with the current measurements. A new plan must save at least ``adaptation.minGain``
of an iteration. When the last slow link has recovered, the first plan and its routes return. Every
decision is recorded with its reason, even if nothing changes.

Measured iterations check both the evidence for a change and its result, see
:mod:`pipemorph.control.decide.truth`: a change that does not bring half of its promise is taken
back.

Only policy ``pipemorph`` adapts. The other policies keep their schedules, so that they can be
compared with.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from pipemorph.api.spec import JobSpec
from pipemorph.control.decide import findings, reasons
from pipemorph.control.decide.forecast import Option, Outlook, Situation
from pipemorph.control.decide.rate_limit import Pacing
from pipemorph.control.decide.relayout import Network
from pipemorph.control.decide.replan import CHECKED, Cause, Proposal, Replan, own_links
from pipemorph.control.decide.route_cost import RouteCosts
from pipemorph.control.decide.triggers import Judgement, Progress
from pipemorph.control.decide.truth import (
    BARRIER,
    DOUBTED_NEEDS,
    Evidence,
    Sources,
    Trial,
    TruthCheck,
    Verdict,
    without,
)
from pipemorph.control.first_plan import initial_plan, planning_rules
from pipemorph.control.handed_in import HandedIn, judged
from pipemorph.control.history import Decision, Ledger
from pipemorph.control.memory_limits import Room, excess
from pipemorph.control.observe.events import Event, Events
from pipemorph.control.observed.links import Health, LinkHealth
from pipemorph.control.observed.reports import Observed, WrongAttempt, check
from pipemorph.control.observed.stages import Footprint
from pipemorph.control.snapshot import OwnLinks, Snapshot, rounded
from pipemorph.control.view import JobView
from pipemorph.control.worth import Worth, revise
from pipemorph.errors import InputError
from pipemorph.planning import Plan, Policy, StageTimes
from pipemorph.planning.offload import most_left
from pipemorph.wire import (
    AdaptationRecord,
    Directive,
    DirectiveEnvelope,
    LinkHealthReport,
    OwnPlanRecord,
    PlanMessage,
    RailsView,
    ReductionHealth,
    SlowDirection,
    StragglersView,
    TransportsView,
)

COMPARED = 4
"""Newest iterations that are compared with a prediction for changed op times."""
COMMIT_AHEAD = 1
"""Iterations between the current one and the first with the plan of a directive issued now."""
HAND_IN_SECONDS = 5.0
"""Time for the agent to hand in a plan that the controller does not know, before it decides again
without knowing it."""


class Pending(NamedTuple):
    """A decision that waits for its proposal, and data for its record."""

    replan: Replan
    links: tuple[LinkHealth, ...]
    detectable_at: int
    before: Judgement
    """The last decision: a host that takes over meanwhile decides again from it."""
    sources: Sources = frozenset()


class JobController:
    """The control loop of one job. ``spec`` must have passed :func:`pipemorph.manifest.load_job`.

    ``on_report`` is called with every accepted report, after it was processed. A decision takes
    longer than a report may take: it waits in :attr:`replan` until the host has made it, in this
    process or another one, and calls :meth:`settle`. Raises :class:`~pipemorph.errors.InputError`
    if the spec allows no plan at all.
    """

    def __init__(
        self,
        spec: JobSpec,
        *,
        attempt: int = 0,
        on_report: Callable[[LinkHealthReport], None] | None = None,
    ) -> None:
        self.spec = spec
        self._rules = planning_rules(spec)
        self.attempt = attempt
        self._on_report = on_report
        self._plan_version = 0
        self._agents = range(0)
        self._ledger = Ledger()
        self._events = Events()
        self._first = initial_plan(spec)
        self._start(footprints=())

    def _start(self, footprints: Sequence[Footprint]) -> None:
        """Reset the state of an attempt: ranks start with the plan of the spec."""
        self._observed = Observed(self.spec, footprints=footprints, events=self._events)
        self._directive: Directive | None = None
        self._wanted = self._running = self._first
        self._baseline = self._first
        """The plan for healthy links: that of the spec, unless measurements require another."""
        self._judgement = Judgement.first(self.spec)
        self._truth = TruthCheck()
        self._checked_rooms: tuple[Room, ...] = ()
        self._foreign_plan = False
        """Whether the ranks have a newer plan than this controller knows."""
        self._hand_in_until = float("-inf")
        self._pacing = Pacing()
        self._route_costs = RouteCosts()
        self._noted: set[str] = set()
        self._pending: Pending | None = None
        self._weighed_at = -1
        """The newest iteration when the plan in effect was last compared with that of the start."""

    # --- the wanted plan, and the state of the job ----------------------------------------

    @property
    def plan_version(self) -> int:
        """Version of the newest directive of any attempt; 0 before the first."""
        return self._plan_version

    def directive(self, after: int = 0) -> Directive | None:
        """The directive of this attempt, if its plan version is above ``after``."""
        wanted = self._directive
        return wanted if wanted is not None and wanted.plan_version > after else None

    @property
    def wanted(self) -> Plan:
        """The plan that the ranks should run: that of the newest directive, else that of the
        spec."""
        return self._wanted

    @property
    def records(self) -> list[AdaptationRecord]:
        """Adaptations so far, oldest first. Figures after a change are added as they arrive."""
        return list(self._ledger.records)

    @property
    def worth(self) -> Worth:
        """What all changes of plan were worth so far."""
        return self._ledger.worth

    @property
    def newest_record(self) -> AdaptationRecord | None:
        """The newest of :attr:`records`."""
        return self._ledger.records[-1] if self._ledger.records else None

    @property
    def decisions(self) -> list[Decision]:
        """The newest decisions, oldest first, including those that kept the plan. Bounded."""
        return list(self._ledger.decisions)

    @property
    def profiled_at(self) -> int | None:
        """The newest finished iteration at the last decision for changed op times or memory limits;
        None before the first. One under way does not count."""
        return self._judged.profiled_at

    @property
    def _judged(self) -> Judgement:
        """The last decision that was settled."""
        return self._pending.before if self._pending else self._judgement

    def links(self, now: float) -> tuple[LinkHealth, ...]:
        """State of each link."""
        return self._observed.links.states(now)

    def view(self, now: float) -> JobView:
        """The job as last reported."""
        return JobView.of(self._observed, self._ledger, self._wanted, now)

    def rails(self, now: float) -> RailsView:
        """State of the ranks' RDMA ports."""
        return self._observed.rails(now)

    def stragglers(self) -> StragglersView:
        """Stages that compute slower than they should."""
        return self._observed.stragglers

    def transports(self) -> TransportsView:
        """The transport that carries each link."""
        return self._observed.transports

    def reductions(self) -> tuple[ReductionHealth, ...]:
        """The gradient reduction of each data-parallel group that has reported."""
        return self._observed.reductions()

    def network(self, now: float) -> Network | None:
        """What another layout would be judged by; None before op times are known, or while ranks do
        not train."""
        stages = self._observed.stages.times()
        iterations = self._ledger.under(self._wanted.version)
        if stages is None or self._observed.state != "training" or not iterations:
            return None
        return Network(
            stages=stages,
            links=self.links(now),
            reductions=self.reductions(),
            barrier=self._barrier(),
            left=self.spec.trainer.iterations - self._ledger.last_iteration - 1,
        )

    @property
    def running(self) -> Plan:
        """The plan in effect, as far as it is known."""
        return self._running

    @property
    def peak_memory(self) -> tuple[int | None, ...]:
        """Newest peak memory per stage in bytes, of the highest column; None if not reported."""
        return tuple(self._observed.stages.peak_memory())

    def outlook(self, now: float) -> Outlook | None:
        """What its plans can be predicted from; None before op times are known."""
        stages = self._observed.stages.times()
        if stages is None:
            return None
        situation = self._now(stages, self.links(now), now)
        return Outlook(self._rules, situation, self._first, self._running)

    @property
    def events(self) -> tuple[Event, ...]:
        """Events of rails, transports and reductions, oldest first. Bounded."""
        return self._events.newest()

    def adopt(self, other: JobController) -> None:
        """Go on for another controller of the same job. Show its rails, transports, stragglers,
        reductions and events, if it is of the same attempt, until the agent has told everything
        again."""
        if other.attempt == self.attempt:
            self._observed.adopt(other._observed)
            self._events = other._events
        self._agents = other._agents

    # --- events ---------------------------------------------------------------------------

    def skip_to(self, plan_version: int) -> None:
        """Issue only versions above ``plan_version``: others may be in use."""
        self._plan_version = max(self._plan_version, plan_version)

    def leave(self, versions: range) -> None:
        """Never issue these versions: the job's agent may. Those that were left until now may be in
        use."""
        if versions != self._agents:
            self.skip_to(self._agents.stop - 1)
            self._agents = versions

    def begin_attempt(self, attempt: int) -> None:
        """Begin another attempt, with the plan of the spec. Plan versions continue to grow.

        Raises ValueError unless ``attempt`` is above the current one.
        """
        if attempt <= self.attempt:
            raise ValueError(f"attempt {attempt} is not after attempt {self.attempt}")
        self.attempt = attempt
        self._ledger.new_attempt()
        self._start(self._observed.stages.footprints)

    def change_places(self, slow: Sequence[SlowDirection]) -> None:
        """The ranks run at other places from now on. The plan in force goes on; links and
        reductions have to be measured again. ``slow``: of the links, as far as known."""
        self._observed.change_places(slow)
        self._route_costs = RouteCosts()  # Op times of other devices.
        self._pending = None

    def report(self, report: LinkHealthReport, now: float) -> DirectiveEnvelope:
        """Process a report, and request a decision if there is a cause. ``now``: wall clock,
        seconds since the Unix epoch. Returns the answer, without a directive.

        Raises :class:`~pipemorph.control.observed.reports.ReportRefused` and changes nothing if the
        report belongs to another attempt, was seen before, or does not fit the job.
        """
        observed = self._observed
        check(report, self.spec.parallelism, attempt=self.attempt, after=observed.sequence)
        answer = observed.take(report, now)
        if observed.newest_plan_version > self._wanted.version:
            # This controller lost its newest state. Its next version must be new to the ranks.
            self.skip_to(observed.newest_plan_version)
            if not self._foreign_plan:
                self._foreign_plan, self._hand_in_until = True, now + HAND_IN_SECONDS
        if report.last_own_version >= self._agents.stop:
            # Another host's.
            self.skip_to(report.last_own_version)
        self._ledger.add(report.iterations, observed.stages.peak_memory)
        if any(stage.crowding for stage in report.stages):
            self._say_crowded(now)
        if observed.applied_plan_version == self._wanted.version:
            self._running = self._wanted
        if report.iterations:
            self._weigh_routes()
            self._compare(now)
        self._consider(now)
        if self._on_report is not None:
            self._on_report(report)
        wants_plan = self._foreign_plan and now < self._hand_in_until
        return answer.model_copy(update={"attentive": self._attentive(), "wants_plan": wants_plan})

    @property
    def wants_plan(self) -> bool:
        """Whether the ranks run a plan that this controller does not know, and may be handed."""
        return self._foreign_plan and self._hand_in_until > float("-inf")

    def refuse_plan(self) -> None:
        """The plan that was handed in is not a good one: decide without knowing it."""
        self._hand_in_until = float("-inf")

    def hand_in(self, handed: HandedIn, now: float) -> None:
        """Go on from the plan that the ranks run, and that this controller did not know.

        Changes nothing and raises :class:`~pipemorph.control.observed.reports.WrongAttempt`, or
        :class:`InputError` if no plan is wanted, or not of this version.
        """
        message, directive, newest = handed.message, handed.message.directive, self._observed
        if message.attempt != self.attempt:
            raise WrongAttempt(
                f"attempt {message.attempt} is not {self.attempt}, the one in progress"
            )
        if not self.wants_plan:
            raise InputError(f"plan v{self._wanted.version} is in force here; no other is wanted")
        if directive.plan_version != newest.newest_plan_version:
            raise InputError(
                f"plan v{directive.plan_version} is not v{newest.newest_plan_version}, the newest"
                " that the ranks have reported"
            )
        assert directive.record is not None
        self._directive, self._foreign_plan, self._pending = directive, False, None
        self._wanted = self._running = handed.plan
        self._judgement.situation = judged(directive.record, self._judgement.situation)
        self._ledger.adopt([*message.records, directive.record], now)
        self._keep(now, reasons.handed_in(directive))

    def _attentive(self) -> bool:
        """Whether a decision waits for the next iteration, or op times."""
        waits = self._truth.waits(self._ledger.last_iteration)
        return waits or self._judgement.compares or self._judgement.barrier_differs(self._barrier())

    def tick(self, now: float) -> None:
        """Call when time has passed without a report. Silence changes nothing, but it is recorded
        when all links have become silent."""
        if self._observed.fell_silent(now):
            self._keep(
                now,
                f"no samples for {self.spec.adaptation.stale_after_seconds:g} s, so the state of"
                " the links is unknown; kept the plan",
            )

    # --- deciding -------------------------------------------------------------------------

    def _weigh_routes(self) -> None:
        """Compare op times on delegated links with those on direct ones."""
        last, observed = self._ledger.last_iteration, self._observed.stages
        if not observed.measured or self._foreign_plan or not self._route_costs.due(last):
            return
        if (stages := observed.times()) is not None:
            iterations = len(self._ledger.under(self._wanted.version))
            self._route_costs.observe(stages, self._wanted, iterations=iterations, last=last)

    def _compare(self, now: float) -> None:
        """Compare newly finished iterations with predictions."""
        truth, ledger, judged = self._truth, self._ledger, self._judgement.situation
        if self._observed.state != "training" or self._pending is not None:
            return
        verdict = truth.judge(ledger, ledger.last_iteration)
        if verdict is not None:
            self._conclude(verdict, now)
            return
        stages = self._observed.stages.times() if truth.collects else None
        if stages is not None and not self._foreign_plan:
            situation = self._believed(self._now(stages, self.links(now), now))
            if situation.slow_as(judged):
                iterations = ledger.under(self._wanted.version)[1:]
                truth.collect(iterations, self._wanted, situation)

    def _conclude(self, verdict: Verdict, now: float) -> None:
        """Record what a change brought, and request to take it back if that is too little."""
        trial, last = verdict.trial, self._ledger.last_iteration
        line = reasons.outcome(verdict)
        self._log(now, "keep", line, line)
        stages = self._observed.stages.times()
        if not verdict.failed or stages is None or not trial.promise.may_go_back:
            return
        links = self.links(now)
        present = self._now(stages, links, now)
        # Without the evidence that was wrong, which is not believed again for now.
        self._truth.hold(trial.sources, last + 1, last, DOUBTED_NEEDS)
        self._baseline = trial.baseline
        situation = without(present, trial.sources, trial.before)
        self._ask("undelivered", situation, links, previous=trial.previous)

    def _consider(self, now: float) -> None:
        """Request a decision if there is a cause, and if the rate limit allows it now."""
        observed, judgement = self._observed, self._judgement
        if observed.state != "training" or self._pending is not None:
            return
        if self._foreign_plan and now < self._hand_in_until:
            return
        rooms = observed.stages.rooms
        slow_lately = any(judgement.situation.slow) or observed.links.any_slow
        quiet = not (self._foreign_plan or slow_lately) and rooms == self._checked_rooms
        quiet = quiet and not judgement.barrier_differs(self._barrier())
        if quiet and not judgement.profile_is_due(self._progress()):
            return  # The common case: every other cause needs a link that is or was slow.
        links = self.links(now)
        refusal = reasons.why_not(self.spec, observed.stages.crowding)
        if refusal is not None:
            slow = [link for link in links if link.health is Health.SLOW]
            if slow:
                self._note(now, "policy", f"{reasons.describe(slow)}; {refusal}")
            too_much = excess(self._wanted, rooms)
            if too_much is not None:
                self._note(now, "memory", f"{reasons.too_much(too_much)}; {refusal}")
            self._checked_rooms = rooms
            return
        stages = observed.stages.times()
        if stages is None:
            if any(link.health is Health.SLOW for link in links):
                self._note(now, "times", "a link is slow, but no stage has reported op times yet")
            return
        situation = self._believed(self._now(stages, links, now))
        if not self._knows_memory(now):
            return
        if any(room.device == 0 for room in rooms):
            memory = self.spec.schedule.activation_memory
            self._note(now, "memory", reasons.no_room(situation, memory))
            self._checked_rooms = rooms
            return
        cause = self._cause(situation)
        self._checked_rooms = rooms
        if cause is None or not judgement.is_time(cause, links, self._progress(), self._pacing):
            return
        if cause not in CHECKED:
            self._ask(cause, situation, links)
            return
        last, sources = self._ledger.last_iteration, judgement.sources(cause, situation)
        if sources <= self._truth.held(last):
            return
        since = judgement.detectable_at(situation, links, observed.iteration)
        if cause in ("profile", "barrier", "steady"):
            # No link has just turned slow or well.
            since = last - COMPARED
        iterations = self._ledger.under(self._wanted.version)[1:]
        otherwise = without(situation, sources, judgement.situation)
        evidence = self._truth.evidence(sources, otherwise, iterations, since, last)
        if lacking := self._truth.lacks(sources, evidence, last):
            if self._truth.hold(sources, since, last, lacking):
                self._keep(now, reasons.doubted(cause, links, lacking))
            return
        self._ask(cause, situation, links, evidence=evidence, sources=sources)

    def _say_crowded(self, now: float) -> None:
        """Say once that the job does not adapt, or why its measurements tell little."""
        crowding, adaptation = self._observed.stages.crowding, self.spec.adaptation
        adapts = adaptation.enabled and self.spec.schedule.policy_kind is Policy.PIPEMORPH
        if crowding > 1 and adapts:
            self._note(now, "crowded", reasons.crowded(crowding, adaptation.crowded_hosts))

    def _believed(self, situation: Situation) -> Situation:
        """The situation without evidence that measured iterations do not confirm."""
        self._truth.seen_well(situation.slow)
        held = self._truth.held(self._ledger.last_iteration)
        return without(situation, held, self._judgement.situation) if held else situation

    def _now(
        self, stages: tuple[StageTimes, ...], links: Sequence[LinkHealth], now: float
    ) -> Situation:
        """The current situation."""
        observed = self._observed
        situation = self._judgement.now(
            stages,
            links,
            observed.stages.rooms,
            barrier=self._barrier(),
            own=observed.links.own_states(now),
        )
        return replace(situation, route_cost=self._route_costs.now)

    def _barrier(self) -> bool:
        """Whether stages wait for each other between iterations. Also if the trainer sees nothing
        that makes them wait, but a plan for that did not bring what it promised."""
        objective = self.spec.schedule.objective
        if objective != "auto":
            return objective == "makespan"
        ledger = self._ledger
        seen = self._judgement.barrier if ledger.barrier is None else ledger.barrier
        return seen or self._truth.doubt(BARRIER, ledger.last_iteration) > 0

    def _progress(self) -> Progress:
        newest, wanted = self._ledger.newest(), self._wanted.version
        return Progress(
            last=self._ledger.last_iteration,
            finished=self._ledger.finished,
            measured=self._observed.stages.measured,
            applied=not wanted or (newest is not None and newest.plan_version >= wanted),
        )

    def _knows_memory(self, now: float) -> bool:
        """Whether limits in bytes can be converted to microbatches. A rank reports the size of a
        microbatch with its first profile or never; in that case the limit cannot be applied."""
        stages = self._observed.stages
        unknown = [i for i, f in enumerate(stages.footprints) if not f.activation_bytes]
        if self.spec.schedule.activation_memory is None or not unknown:
            return True
        if stages.measured:
            self._note(now, "bytes", reasons.not_measured(unknown))
        return stages.measured

    def _cause(self, now: Situation) -> Cause | None:
        """Why the situation requires another decision; None if it does not."""
        wanted = None if self._foreign_plan else self._wanted
        return self._judgement.cause(now, wanted, self._progress(), hold=self._pacing.hold)

    def _ask(
        self,
        cause: Cause,
        situation: Situation,
        links: Sequence[LinkHealth],
        *,
        evidence: Evidence | None = None,
        sources: Sources = frozenset(),
        previous: Plan | None = None,
    ) -> None:
        """Leave the decision to the host."""
        judgement = self._judgement
        before = copy.copy(judgement)
        readings = judgement.readings if cause == "profile" else ()
        detectable_at = judgement.detectable_at(situation, links, self._observed.iteration)
        judgement.made(cause, situation, self._ledger.last_iteration)
        self._pending = Pending(
            Replan(
                spec=self._rules,
                cause=cause,
                situation=situation,
                current=self._wanted,
                baseline=self._baseline,
                # Without its state, the controller does not know the plan of the ranks.
                lost=self._foreign_plan,
                remaining=self._left(),
                change_seconds=self._ledger.change_seconds,
                evidence=evidence or Evidence(),
                running=self._running,
                start=self._first,
                previous=previous,
                readings=readings,
            ),
            links=tuple(links),
            detectable_at=detectable_at,
            before=before,
            sources=sources,
        )

    def _left(self) -> int:
        """Iterations for which the plan of a directive issued now would be in effect."""
        running = self._ledger.last_iteration + 1
        return self.spec.trainer.iterations - running - COMMIT_AHEAD

    @property
    def replan(self) -> Replan | None:
        """The decision that waits for :meth:`settle`. Until then reports are processed, but no
        other decision is requested."""
        return self._pending.replan if self._pending is not None else None

    def settle(self, asked: Replan, proposal: Proposal, now: float) -> None:
        """Act on the proposal that :func:`~pipemorph.control.decide.replan.propose` made for
        ``asked``. Ignored if another attempt has begun since."""
        pending = self._pending
        if pending is None or pending.replan is not asked:
            return
        self._pending = None
        last = self._ledger.last_iteration
        if proposal.waits:
            self._judgement = pending.before  # So that the cause comes up again.
            self._truth.hold(pending.sources, pending.detectable_at, last)
            if any(f.measured for f in proposal.found if isinstance(f, findings.NotConfirmed)):
                self._truth.contradict(pending.sources, last)
        else:
            self._truth.decided(last)
        present = self._ledger.record(asked.current.version)
        if present is not None and proposal.start is not None and proposal.current is not None:
            # If a change was taken back, what it was for was never there.
            since = max(pending.detectable_at, self._weighed_at)
            since = -1 if asked.cause == "undelivered" else since
            revise(present, proposal.start - proposal.current.seconds, since)
            self._weighed_at = last
        if proposal.chosen is None:
            self._keep(now, reasons.reason(asked.cause, pending.links, proposal))
            return
        self._issue(pending, proposal, proposal.chosen, now)
        if proposal.promise is not None:
            self._truth.begin(
                Trial(
                    version=self._wanted.version,
                    previous=asked.running,
                    baseline=asked.baseline,
                    sources=pending.sources,
                    promise=proposal.promise,
                    before=pending.before.situation,
                    since=pending.detectable_at,
                )
            )
        if asked.cause in ("profile", "memory", "barrier") and not any(asked.situation.slow):
            self._baseline = replace(self._wanted, version=0, routes=self._first.routes)

    def _issue(self, pending: Pending, proposal: Proposal, chosen: Option, now: float) -> None:
        """Make the chosen option the wanted plan, under a new plan version."""
        self._plan_version += 1
        if self._plan_version in self._agents:
            self._plan_version = self._agents.stop
        record = self._record(pending, proposal, chosen, now)
        self._wanted = replace(chosen.plan, version=self._plan_version)
        self._foreign_plan = False
        self._directive = Directive(
            plan_version=self._plan_version,
            issued_at=now,
            reason=record.reason,
            plan=PlanMessage.of(self._wanted),
            record=record.model_copy(),
        )
        asked, finished = pending.replan, self._ledger.last_iteration
        if asked.cause in ("slow", "worse", "restart"):
            self._pacing.hurried(finished, pending.sources)
        returning = set(asked.current.delegated) - set(chosen.plan.delegated)
        if record.kind == "return":
            was, now_slow = pending.before.situation.slow, asked.situation.slow
            returning |= {i for i, slow in enumerate(was) if slow and not now_slow[i]}
        self._pacing.issued(
            finished,
            returning if record.kind != "revert" else (),
            returns_at_once=proposal.returns_at_once,
        )
        self._ledger.append(record)
        line = reasons.short(self._plan_version, asked.cause, pending.links, proposal)
        self._log(now, record.kind, record.reason, line, self._plan_version)

    def _record(
        self, pending: Pending, proposal: Proposal, chosen: Option, now: float
    ) -> AdaptationRecord:
        """The record of a new plan, as far as known when it is issued."""
        asked, plan = pending.replan, chosen.plan
        kind: Literal["adapt", "return", "revert"] = "adapt"
        if asked.cause == "undelivered":
            kind = "revert"
        elif asked.cause not in ("slow", "worse", "memory") and plan.runs_as(asked.baseline):
            kind = "return"
        promised = None
        if proposal.promise is not None:
            promised = proposal.promise.gain
        elif proposal.current is not None and proposal.current.seconds > 0:
            promised = 1 - chosen.seconds / proposal.current.seconds
        away = most_left(plan)
        return AdaptationRecord(
            plan_version=self._plan_version,
            kind=kind,
            detected_at=now,
            detected_at_iteration=self._observed.iteration,
            detectable_at=pending.detectable_at,
            reason=reasons.reason(asked.cause, pending.links, proposal),
            links=[link.record() for link in pending.links if link.health is not Health.HEALTHY],
            warmup_before=list(asked.current.warmup),
            warmup_after=list(plan.warmup),
            routes=list(plan.all_routes),
            predicted_seconds_before=proposal.current.seconds if proposal.current else None,
            predicted_seconds_after=chosen.seconds,
            promised=promised,
            peak_memory_before=self._observed.stages.peak_memory(),
            device_limits_before=list(asked.current.device_limits),
            device_limits_after=list(plan.device_limits),
            offloaded=away.offloaded,
            recomputed=away.recomputed,
            fused_stages=list(plan.fused),
            saving=None if proposal.start is None else proposal.start - chosen.seconds,
            own_plans=_own_plans(plan, asked.situation),
        )

    def _keep(self, now: float, reason: str) -> None:
        self._log(now, "keep", reason, f"no change: {reason}")

    def _note(self, now: float, topic: str, reason: str) -> None:
        """Record a reason only once per attempt, since it would repeat with every report."""
        if topic not in self._noted:
            self._noted.add(topic)
            self._keep(now, reason)

    def _log(
        self,
        now: float,
        kind: Literal["adapt", "return", "revert", "keep"],
        reason: str,
        line: str,
        plan_version: int | None = None,
    ) -> None:
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

    # --- snapshots ------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """The state that :meth:`restore` needs, as data for JSON."""
        judgement, observed, baseline = self._judged, self._observed, None
        judged = judgement.situation
        if self._baseline != self._first:
            baseline = PlanMessage.of(self._baseline)
        return Snapshot(
            attempt=self.attempt,
            plan_version=self._plan_version,
            sequence=observed.sequence,
            directive=self._directive,
            wire_times=list(judged.wire_times),
            delays=list(judged.delays),
            slow=list(judged.slow),
            own_links=[
                OwnLinks(
                    replicas=list(each.replicas),
                    wire_times=list(each.wire_times),
                    delays=list(each.delays),
                    slow=list(each.slow),
                )
                for each in judged.own
            ],
            profiled_at=judgement.profiled_at,
            stages=[] if judgement.profiled_at is None else list(map(rounded, judged.stages)),
            barrier=judgement.barrier,
            flaps=self._pacing.flaps,
            slow_directions=observed.links.slow_directions(),
            slow_since=observed.links.slow_since(),
            records=self.records,
            worth_before=(self._ledger.before.seconds, self._ledger.before.error),
            baseline=baseline,
            doubts=self._truth.doubts(),
            footprints=[each.saved() for each in observed.stages.footprints],
        ).model_dump(mode="json")

    @classmethod
    def restore(
        cls,
        spec: JobSpec,
        snapshot: Mapping[str, Any],
        *,
        on_report: Callable[[LinkHealthReport], None] | None = None,
    ) -> JobController:
        """A controller that continues from a snapshot. The next reports restore the links' health.
        Raises :class:`InputError` if the snapshot cannot be used."""
        saved = Snapshot.read(snapshot)
        self = cls(spec, attempt=saved.attempt, on_report=on_report)
        observed, judgement = self._observed, self._judgement
        stages = spec.parallelism.stages
        self._plan_version, observed.sequence = saved.plan_version, saved.sequence
        self._ledger.records.extend(saved.records)
        self._ledger.before = Worth(*saved.worth_before)
        self._pacing.flaps = saved.flaps
        if saved.directive is not None:
            self._plan_version = max(saved.plan_version, saved.directive.plan_version)
            self._directive = saved.directive
        self._wanted, self._baseline = saved.plans(self._first)
        self._running = self._wanted
        if len(saved.footprints) == stages:
            observed.stages.restore_footprints(saved.footprints)
        first = judgement.situation
        known = saved.profiled_at is not None and len(saved.stages) == stages
        judged = saved.judged(tuple(saved.stages) if known else first.stages)
        if judged is not None:
            judgement.situation = replace(judged, barrier=first.barrier, assumed=first.assumed)
            judgement.profiled_at = saved.profiled_at if known else None
        if saved.barrier is not None:
            judgement.barrier = saved.barrier
        self._truth.restore_doubts(saved.doubts)
        observed.links.restore(saved.slow_directions, saved.slow_since)
        return self


def _own_plans(plan: Plan, situation: Situation) -> list[OwnPlanRecord]:
    """The plans that only some replicas run."""
    return [
        OwnPlanRecord(
            replicas=list(replicas), text=text, warmup=list(own.warmup), routes=list(own.routes)
        )
        for (replicas, own), text in zip(
            plan.own, reasons.own_plans(own_links(situation, plan)), strict=True
        )
    ]
