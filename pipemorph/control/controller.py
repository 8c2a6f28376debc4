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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from pipemorph.api.spec import JobSpec
from pipemorph.control import decision
from pipemorph.control.decide import reasons
from pipemorph.control.decide.forecast import Outlook
from pipemorph.control.decide.layouts.beside import Beside
from pipemorph.control.decide.layouts.relayout import Network
from pipemorph.control.decide.replan import Proposal, Replan
from pipemorph.control.decide.situation import RouteCosts
from pipemorph.control.decide.state import DecisionState, Plans, PlanVersions
from pipemorph.control.first_plan import initial_plan, planning_rules
from pipemorph.control.observe.events import Event, Events
from pipemorph.control.observed.reports import Observed, WrongAttempt, check
from pipemorph.control.observed.stages import Footprint
from pipemorph.control.record.history import Decision, Finished, Ledger, Worth
from pipemorph.control.snapshot import DECIDED, Snapshot, rounded, without
from pipemorph.errors import InputError
from pipemorph.planning import Plan, Route
from pipemorph.planning.offload import left
from pipemorph.wire import (
    AdaptationRecord,
    Directive,
    DirectiveEnvelope,
    LinkHealthReport,
    LinkState,
    PlanMessage,
    RailsView,
    ReductionHealth,
    StragglersView,
    TransportsView,
)


@dataclass(frozen=True)
class JobView:
    """The job as last observed. Times in seconds."""

    state: str = "starting"
    message: str | None = None
    iteration: int = 0
    iteration_seconds: float | None = None
    bubble_fraction: float | None = None
    loss: float | None = None
    links: tuple[LinkState, ...] = ()
    warmup: tuple[int, ...] = ()
    routes: tuple[Route, ...] = ()
    wanted_plan_version: int = 0
    """Version of the plan that the ranks should run, which may not be in effect yet."""
    observed_plan_version: int = 0
    applied_plan_version: int = 0
    """Version of the plan in effect."""
    peak_memory: tuple[int | None, ...] = ()
    """Bytes per stage, of the highest column; None if not reported."""
    offloaded: tuple[int, ...] = ()
    """Microbatches per iteration that the wanted plan offloads, per stage."""
    recomputed: tuple[int, ...] = ()
    """Microbatches per iteration whose forward that plan runs again, per stage."""
    rails: RailsView = field(default_factory=RailsView)
    transports: TransportsView = field(default_factory=TransportsView)
    stragglers: StragglersView = field(default_factory=StragglersView)
    reductions: tuple[ReductionHealth, ...] = ()
    """Of every data-parallel group that has observed."""
    worth: Worth = field(default_factory=Worth)
    """What all changes of plan were worth so far."""

    @staticmethod
    def of(observed: Observed, ledger: Ledger, wanted: Plan, now: float) -> JobView:
        """Make the view. ``now``: wall clock, seconds."""
        newest = ledger.newest()
        away = left(wanted.schedule, wanted.device_limits, wanted.recompute)
        return JobView(
            state=observed.state,
            message=observed.message,
            iteration=observed.iteration,
            iteration_seconds=ledger.recent_seconds(),
            bubble_fraction=newest.bubble_fraction if newest else None,
            loss=newest.loss if newest else None,
            links=observed.links.states(now),
            warmup=wanted.warmup,
            routes=wanted.routes,
            offloaded=tuple(away.offloaded),
            recomputed=tuple(away.recomputed),
            wanted_plan_version=wanted.version,
            observed_plan_version=observed.observed_plan_version,
            applied_plan_version=observed.applied_plan_version,
            peak_memory=tuple(observed.stages.peak_memory()),
            rails=observed.rails(now),
            transports=observed.transports,
            stragglers=observed.stragglers,
            reductions=observed.reductions(),
            worth=ledger.worth,
        )


class JobController:
    """The control loop of one job. ``spec`` must have passed :func:`pipemorph.manifest.load_job`.

    ``on_report`` is called with every accepted report, after it was processed. A decision takes
    longer than a report may take: it waits in :attr:`replan` until the host has made it, in this
    process or another one, and calls :meth:`settle`. ``term``: of the host's lease. ``endless``:
    nobody knows when the job ends, whatever its spec says, so that any gain pays for a change in
    the long run. Raises :class:`~pipemorph.errors.InputError` if the spec allows no plan at all.
    """

    def __init__(
        self,
        spec: JobSpec,
        *,
        attempt: int = 0,
        term: int = 0,
        on_report: Callable[[LinkHealthReport], None] | None = None,
        endless: bool = False,
    ) -> None:
        self.spec = spec
        self._endless = endless
        self._rules = planning_rules(spec)
        self.attempt = attempt
        self._on_report = on_report
        self._versions = PlanVersions(term)
        self._new = True
        """Whether neither a report nor a snapshot has said anything of the job."""
        self._ledger = Ledger()
        self._events = Events()
        self._first = initial_plan(spec)
        self._beside = Beside(spec.parallelism.layers)
        self._start(footprints=())

    def _start(self, footprints: Sequence[Footprint]) -> None:
        """Reset the state of an attempt: ranks start with the plan of the spec, and with layers
        that are split evenly."""
        self.layers: tuple[int, ...] = ()
        """How many layers each stage holds; empty: they are split evenly."""
        self._observed = Observed(self.spec, footprints=footprints, events=self._events)
        self._plans = Plans(self._first)
        self._decision = DecisionState(
            self.spec,
            self._rules,
            observed=self._observed,
            ledger=self._ledger,
            plans=self._plans,
            versions=self._versions,
            endless=self._endless,
        )

    # --- the wanted plan, and the state of the job ----------------------------------------

    @property
    def plan_version(self) -> int:
        """Version of the newest directive of any attempt; 0 before the first."""
        return self._versions.newest

    @property
    def term(self) -> int:
        """Term of this host in this job; earlier hosts have lower terms."""
        return self._versions.term

    def directive(self, after: int = 0) -> Directive | None:
        """The directive of this attempt, if its plan version is above ``after``."""
        wanted = self._plans.directive
        return wanted if wanted is not None and wanted.plan_version > after else None

    @property
    def wanted(self) -> Plan:
        """The plan that the ranks should run: that of the newest directive, else that of the
        spec."""
        return self._plans.wanted

    @property
    def running(self) -> Plan:
        """The plan in effect, as far as it is known."""
        return self._plans.running

    @property
    def records(self) -> list[AdaptationRecord]:
        """Adaptations so far, oldest first. Figures after a change are added as they arrive."""
        return list(self._ledger.records)

    @property
    def changes(self) -> int:
        """Number of changes of plan so far, also of those without a record."""
        return self._ledger.changes

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
    def finished(self) -> list[Finished]:
        """The newest finished iterations of this attempt, by index. Bounded."""
        return self._ledger.newest_iterations()

    @property
    def profiled_at(self) -> int | None:
        """The newest finished iteration at the last decision for changed op times or memory limits;
        None before the first. One under way does not count."""
        return self._decision.settled.profiled_at

    def links(self, now: float) -> tuple[LinkState, ...]:
        """State of each link."""
        return self._observed.links.states(now)

    def view(self, now: float) -> JobView:
        """The job as last reported."""
        return JobView.of(self._observed, self._ledger, self._plans.wanted, now)

    def network(self, now: float) -> Network | None:
        """What another layout would be judged by; None before op times are known, or while ranks do
        not train. From the first one on it is known what stages do beside their layers."""
        observed, stages = self._observed, self._observed.stages.times()
        iterations = self._ledger.under(self._plans.wanted.version)
        if stages is None or observed.state != "training" or not iterations:
            return None
        found = Network(
            stages=stages,
            links=observed.links.states(now),
            reductions=observed.reductions(),
            barrier=decision.barrier(self._decision),
            left=self.spec.trainer.iterations - self._ledger.last_iteration - 1,
        )
        if self.spec.parallelism.layers is None:
            return found
        if not self.layers:
            self._beside = self._beside.seen(found.stages, self.spec.schedule.policy_kind)
        return replace(found, beside=self._beside)

    def outlook(self, now: float) -> Outlook | None:
        """What its plans can be predicted from; None before op times are known."""
        stages = self._observed.stages.times()
        if stages is None:
            return None
        situation = decision.measured(self._decision, stages, self.links(now), now)
        running, outside = self._plans.running, self._ledger.outside
        return Outlook(self._rules, situation, self._first, running, outside)

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
        self._versions.adopt(other._versions)

    # --- events ---------------------------------------------------------------------------

    def skip_to(self, plan_version: int) -> None:
        """Issue only versions above ``plan_version``: others may be in use."""
        self._versions.skip_to(plan_version)

    def count_earlier(self, changes: int, worth: Worth) -> None:
        """Count changes of plan of which nothing else is known, until the agent hands in more."""
        self._ledger.changes_before, self._ledger.before = changes, worth

    def begin_attempt(self, attempt: int) -> None:
        """Begin another attempt, with the plan of the spec. Plan versions continue to grow.

        Raises ValueError unless ``attempt`` is above the current one.
        """
        if attempt <= self.attempt:
            raise ValueError(f"attempt {attempt} is not after attempt {self.attempt}")
        self.attempt = attempt
        self._scale_stages(())
        self._ledger.new_attempt()
        self._start(self._observed.stages.footprints)

    def resized(self, spec: JobSpec) -> JobController:
        """A controller that goes on for this one with the replicas of ``spec``, which are numbered
        anew: links, reductions and stages have to be measured again. The plan in force stays,
        unless it is for other microbatches: then ranks begin with that of the spec."""
        saved = self.snapshot()
        for each in ("slow_directions", "slow_since"):
            del saved[each]
        if spec.schedule.microbatches != self.spec.schedule.microbatches:
            saved = without(saved, *DECIDED, "baseline")
        made = JobController.restore(spec, saved, on_report=self._on_report)
        made._versions.adopt(self._versions)
        made._events = self._events
        return made

    def change_layout(self, slow: Sequence[LinkState] | None, layers: tuple[int, ...] = ()) -> None:
        """The ranks run at other places from now on, or hold other layers. The plan in force goes
        on; links and reductions have to be measured again, and stages are expected to take what
        their layers take. ``slow``: of the links, as far as known; None: ranks are where they were,
        and so are the links. ``layers``: by stage, empty: split evenly."""
        self._observed.change_layout(slow)
        self._scale_stages(layers)
        self._decision.route_costs, self._decision.pending = RouteCosts(), None

    def _scale_stages(self, layers: tuple[int, ...]) -> None:
        """Expect of each stage what so many layers take."""
        before, self.layers = self.layers, layers
        total, stages = self.spec.parallelism.layers, self.spec.parallelism.stages
        if total is None or before == layers:
            return
        even = (total // stages,) * stages
        self._observed.stages.scale(self._beside.factors(before or even, layers or even))

    def report(self, report: LinkHealthReport, now: float) -> DirectiveEnvelope:
        """Process a report, and request a decision if there is a cause. ``now``: wall clock,
        seconds since the Unix epoch. Returns the answer, without a directive.

        Raises :class:`~pipemorph.control.observed.reports.ReportRefused` and changes nothing if the
        report belongs to another attempt, was seen before, does not fit the job, or tells of a
        later host.
        """
        observed, plans, state = self._observed, self._plans, self._decision
        check(report, self.spec.parallelism, attempt=self.attempt, after=observed.sequence)
        self._versions.meet(report.term)
        answer = observed.take(report, now)
        if self._new and report.snapshot:
            plans.expect(now)
        self._new = False
        newest, wanted = observed.newest_plan_version, plans.wanted.version
        if plans.ranks_have(newest, observed.plan_issued_at, now):
            # The next version must be new to the ranks.
            self._versions.skip_to(newest)
            if newest == wanted:
                # Another host's plan has it: that of this one never runs.
                self._ledger.withdraw(wanted)
        self._ledger.add(report.iterations, observed.stages.peak_memory)
        if any(stage.crowding for stage in report.stages):
            decision.say_crowded(state, now)
        plans.applied(observed.applied_plan_version)
        if report.iterations:
            decision.weigh_routes(state, now)
            decision.compare(state, now)
        decision.consider(state, now)
        if report.iterations:
            decision.weigh(state, now)
        if self._on_report is not None:
            self._on_report(report)
        told = {
            "attentive": decision.attentive(state),
            "wants_snapshot": plans.awaits(now),
            "term": self.term,
        }
        return answer.model_copy(update=told)

    @property
    def wants_snapshot(self) -> bool:
        """Whether the agent may hand in its snapshot: this controller is new to the job, or the
        ranks run a plan that it does not know."""
        return self._plans.may_be_handed_in

    def refuse_snapshot(self) -> None:
        """Go on without the snapshot that was handed in: it is not a good one."""
        self._plans.refuse()

    def hand_in(self, attempt: int, saved: Snapshot, now: float) -> None:
        """Go on from the snapshot of the agent, which :mod:`pipemorph.control.handed_in` has
        checked. ``attempt``: of the agent.

        Changes nothing and raises :class:`~pipemorph.control.observed.reports.WrongAttempt`, or
        :class:`InputError` if none is wanted, or its plan is not that of the ranks.
        """
        if {attempt, saved.attempt} != {self.attempt}:
            other = attempt if attempt != self.attempt else saved.attempt
            raise WrongAttempt(f"attempt {other} is not {self.attempt}, the one in progress")
        if not self.wants_snapshot:
            raise InputError(f"plan v{self.wanted.version} is in force here; no other is wanted")
        directive, newest = saved.directive, self._observed.newest_plan_version
        found = directive.plan_version if directive is not None else 0
        if found != newest:
            raise InputError(
                f"its plan is v{found}, and not v{newest}, the newest that the ranks have reported"
            )
        issued_at = self._observed.plan_issued_at
        if directive is not None and issued_at not in (None, directive.issued_at):
            raise InputError(
                f"its plan v{found} is not the one of that version that the ranks have"
            )
        self._decision.pending = None
        self._plans.refuse()
        self._plans.unknown = False
        self._continue(saved, now)
        decision.keep(self._decision, now, reasons.handed_in(directive))

    def tick(self, now: float) -> None:
        """Call when time has passed without a report. Silence changes nothing, but it is recorded
        when all links have become silent."""
        if self._observed.fell_silent(now):
            decision.keep(
                self._decision,
                now,
                f"no samples for {self.spec.adaptation.stale_after_seconds:g} s, so the state of"
                " the links is unknown; kept the plan",
            )

    # --- decisions ------------------------------------------------------------------------

    @property
    def replan(self) -> Replan | None:
        """The decision that waits for :meth:`settle`. Until then reports are processed, but no
        other decision is requested."""
        pending = self._decision.pending
        return pending.replan if pending is not None else None

    def settle(self, asked: Replan, proposal: Proposal, now: float) -> None:
        """Act on the proposal that :func:`~pipemorph.control.decide.replan.propose` made for
        ``asked``. Ignored if another attempt has begun since."""
        decision.settle(self._decision, asked, proposal, now)

    # --- snapshots ------------------------------------------------------------------------

    @property
    def state(self) -> tuple[object, ...]:
        """Differs when a snapshot has something new that another host would miss."""
        last, plans = self._decision.settled, self._plans
        return (
            self.attempt,
            self._versions.newest,
            plans.wanted.version,
            plans.baseline,
            last.profiled_at,
            last.barrier,
            self._decision.flaps,
            tuple(sorted(decision.doubt_levels(self._decision).items())),
            self.layers,
            self._beside.least,
            *((r.plan_version, r.iteration_seconds_after, r.saving) for r in self._ledger.open),
        )

    def snapshot(self) -> dict[str, Any]:
        """The state that :meth:`restore` needs, as data for JSON."""
        last, observed, plans = self._decision.settled, self._observed, self._plans
        judged, baseline = last.situation, None
        if plans.baseline != plans.first:
            baseline = PlanMessage.of(plans.baseline)
        return Snapshot(
            attempt=self.attempt,
            plan_version=self._versions.newest,
            sequence=observed.sequence,
            directive=plans.directive,
            wire_times=list(judged.wire_times),
            delays=list(judged.delays),
            slow=list(judged.slow),
            profiled_at=last.profiled_at,
            stages=[] if last.profiled_at is None else list(map(rounded, judged.stages)),
            barrier=last.barrier,
            flaps=self._decision.flaps,
            slow_directions=observed.links.slow_directions(),
            slow_since=observed.links.slow_since(),
            records=self.records,
            changes_before=self._ledger.changes_before,
            worth_before=(self._ledger.before.seconds, self._ledger.before.error),
            baseline=baseline,
            doubts=decision.doubt_levels(self._decision),
            footprints=[each.saved() for each in observed.stages.footprints],
            layers=self.layers,
            beside=self._beside.least,
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
        saved = Snapshot.read(snapshot).for_microbatches(spec.schedule.microbatches)
        self = cls(spec, attempt=saved.attempt, on_report=on_report)
        self._observed.sequence, self._new = saved.sequence, False
        stages = spec.parallelism.stages
        if len(saved.beside) == stages:
            self._beside = replace(self._beside, least=saved.beside)
        if len(saved.layers) == stages:
            # What the spec says of op times is of stages with equally many layers.
            self._scale_stages(saved.layers)
        self._continue(saved, inf)
        self._observed.links.restore(saved.slow_directions, saved.slow_since)
        return self

    def _continue(self, saved: Snapshot, now: float) -> None:
        """Go on from a snapshot of the same job. ``now``: no record can be newer."""
        plans, last = self._plans, self._decision.last
        stages = self.spec.parallelism.stages
        plans.wanted, plans.baseline = saved.plans(plans.first)
        plans.running, plans.directive = plans.wanted, saved.directive
        self._versions.skip_to(max(saved.plan_version, plans.wanted.version))
        records = [
            r.model_copy(update={"detected_at": min(r.detected_at, now)}) for r in saved.records
        ]
        self._ledger.restore(records, saved.changes_before, Worth(*saved.worth_before))
        self._decision.flaps = saved.flaps
        if len(saved.beside) == stages:
            self._beside = replace(self._beside, least=saved.beside)
        same = saved.layers == self.layers
        if same and len(saved.footprints) == stages:
            self._observed.stages.restore_footprints(saved.footprints)
        first = last.situation
        known = same and saved.profiled_at is not None and len(saved.stages) == stages
        judged = saved.judged(tuple(saved.stages) if known else first.stages)
        if judged is not None:
            last.situation = replace(judged, barrier=first.barrier, assumed=first.assumed)
            last.profiled_at = saved.profiled_at if known else None
        if saved.barrier is not None:
            last.barrier = saved.barrier
        self._decision.doubts = {source: (level, None) for source, level in saved.doubts.items()}
