"""Adaptation controller: reports in, directives out. No sockets, no clock, no threads.

A report updates the links' health, the stages' op times and the history of iterations. The
controller decides again if the situation has changed since the last decision: a link became slow,
slower or healthy, or op times differ from the planned ones. It then predicts the current plan and
the alternatives with the current measurements. A new plan must save at least ``adaptation.minGain``
of an iteration. When the last slow link has recovered, the first plan and its routes return. Every
decision is recorded with its reason, even if nothing changes.

Measured iterations check the evidence for a change and its result
(:mod:`pipemorph.control.decide.prediction_check`): a change that brings less than half of its
promise is undone.

Only policy ``pipemorph`` adapts. The other policies never change their schedules, as a baseline
for comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from pipemorph.control import decision
from pipemorph.control.decide import reasons
from pipemorph.control.decide.decision_state import (
    AttemptPlans,
    DecisionState,
    PlanVersions,
    has_barrier,
    list_doubt_levels,
    measure_situation,
    request_weighing,
)
from pipemorph.control.decide.forecast import Outlook
from pipemorph.control.decide.layouts.layer_split import LayerSplit
from pipemorph.control.decide.layouts.layout_search import NetworkMeasurements
from pipemorph.control.decide.layouts.stage_overhead import StageOverhead
from pipemorph.control.decide.layouts.uneven_stages import describe_uneven_stages
from pipemorph.control.decide.plan_choice import DecisionRequest, PlanProposal
from pipemorph.control.decide.situation import RouteCostEstimator
from pipemorph.control.first_plan import initial_plan, select_planning_fields
from pipemorph.control.history.job_history import (
    DecisionRecord,
    FinishedRecord,
    JobHistory,
    SavedTime,
)
from pipemorph.control.job_state.reports import JobState, WrongAttempt, check_report
from pipemorph.control.job_state.stages import MicrobatchFootprint
from pipemorph.control.snapshot import DECIDED, Snapshot, drop_fields, round_times
from pipemorph.detection.event_log import EventLog, HealthEvent
from pipemorph.errors import InputError
from pipemorph.planning import Plan, Route
from pipemorph.planning.offload import count_away_microbatches
from pipemorph.protocol import (
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
from pipemorph.spec.job_spec import JobSpec
from pipemorph.spec.layout import Layout


@dataclass(frozen=True)
class JobView:
    """Job as last observed. Times in seconds."""

    state: str = "starting"
    message: str | None = None
    iteration: int = 0
    iteration_seconds: float | None = None
    bubble_fraction: float | None = None
    idle_seconds: Mapping[str, float] = field(default_factory=dict)
    """Idle time of an iteration by cause, of the newest sampled ones."""
    idle_totals: Mapping[str, float] = field(default_factory=dict)
    """Idle seconds of a rank by cause so far, since this host has the job."""
    loss: float | None = None
    links: tuple[LinkState, ...] = ()
    warmup_counts: tuple[int, ...] = ()
    routes: tuple[Route, ...] = ()
    wanted_plan_version: int = 0
    """Version of the plan that the ranks should run; it may not be in effect yet."""
    observed_plan_version: int = 0
    applied_plan_version: int = 0
    """Version of the plan in effect."""
    peak_memory: tuple[int | None, ...] = ()
    """Bytes by stage, of the column with the highest peak; None if not reported."""
    offloaded_microbatches: tuple[int, ...] = ()
    """Microbatches per iteration that the wanted plan offloads, by stage."""
    recomputed_microbatches: tuple[int, ...] = ()
    """Microbatches per iteration whose forward the wanted plan runs again, by stage."""
    shares: tuple[int, ...] = ()
    """Microbatches of each replica under the wanted plan; empty: equal numbers."""
    rails: RailsView = field(default_factory=RailsView)
    transports: TransportsView = field(default_factory=TransportsView)
    stragglers: StragglersView = field(default_factory=StragglersView)
    reductions: tuple[ReductionHealth, ...] = ()
    """State of each data-parallel group that has reported."""
    saved_time: SavedTime = field(default_factory=SavedTime)
    """Time that all changes of plan have saved so far."""

    @staticmethod
    def from_state(observed: JobState, ledger: JobHistory, wanted: Plan, now: float) -> JobView:
        """Build the view. ``now``: wall clock, seconds."""
        newest = ledger.get_newest()
        away = count_away_microbatches(wanted.schedule, wanted.device_limits, wanted.recompute)
        return JobView(
            state=observed.state,
            message=observed.message,
            iteration=observed.iteration,
            iteration_seconds=ledger.get_recent_seconds(),
            bubble_fraction=newest.bubble_fraction if newest else None,
            idle_seconds=ledger.idle_seconds,
            idle_totals={**ledger.idle_totals},
            loss=newest.loss if newest else None,
            links=observed.links.get_states(now),
            warmup_counts=wanted.warmup,
            routes=wanted.routes,
            offloaded_microbatches=tuple(away.offloaded),
            recomputed_microbatches=tuple(away.recomputed),
            shares=wanted.shares,
            wanted_plan_version=wanted.version,
            observed_plan_version=observed.observed_plan_version,
            applied_plan_version=observed.applied_plan_version,
            peak_memory=tuple(observed.stages.list_peak_memory()),
            rails=observed.get_rails(now),
            transports=observed.transports,
            stragglers=observed.stragglers,
            reductions=observed.list_reductions(),
            saved_time=ledger.saved_time,
        )


class JobController:
    """Control loop of one job. ``spec`` must have passed :func:`pipemorph.manifest.load_job`.

    ``on_report`` is called with every accepted report, after it was processed. A decision takes
    longer than a report may take: the request waits in :attr:`pending_request` until the host has
    computed the proposal, in this process or another one, and calls :meth:`apply_proposal`.
    ``term``: term of the host's lease. ``endless``: the end of the job is unknown, whatever its
    spec says, so any gain pays for a change in the long run. ``plan``: that ranks run which nothing
    here has planned. Raises :class:`~pipemorph.errors.InputError` if the spec allows no plan at
    all.
    """

    def __init__(
        self,
        spec: JobSpec,
        *,
        attempt: int = 0,
        term: int = 0,
        on_report: Callable[[LinkHealthReport], None] | None = None,
        endless: bool = False,
        plan: Plan | None = None,
    ) -> None:
        self.spec = spec
        self._has_no_end = endless
        self._rules = select_planning_fields(spec)
        self.attempt = attempt
        self._on_report = on_report
        self._versions = PlanVersions(term)
        self._is_new_to_job = True
        """True until the first report or snapshot of the job."""
        self._ledger = JobHistory()
        self._events = EventLog()
        self._initial_plan = plan or initial_plan(spec)
        self._stage_overhead = StageOverhead(spec.parallelism.layers)
        self._reset_attempt(footprints=())

    def _reset_attempt(self, footprints: Sequence[MicrobatchFootprint]) -> None:
        """Reset the state of an attempt, which starts with the spec's plan and an even split."""
        self.layers: tuple[int, ...] = ()
        """Layers by stage; empty: an even split."""
        self._job_state = JobState(self.spec, footprints=footprints, events=self._events)
        self._plans = AttemptPlans(self._initial_plan)
        self._decision = DecisionState(
            self.spec,
            self._rules,
            job_state=self._job_state,
            history=self._ledger,
            plans=self._plans,
            versions=self._versions,
            has_no_end=self._has_no_end,
        )

    # --- the wanted plan, and the state of the job ----------------------------------------

    @property
    def plan_version(self) -> int:
        """Version of the newest directive of any attempt; 0 before the first."""
        return self._versions.newest_version

    @property
    def term(self) -> int:
        """Term of this host in this job; earlier hosts have lower terms."""
        return self._versions.term

    def get_directive(self, after: int = 0) -> Directive | None:
        """Directive of this attempt; None unless its plan version is above ``after``."""
        wanted = self._plans.directive
        return wanted if wanted is not None and wanted.plan_version > after else None

    @property
    def wanted_plan(self) -> Plan:
        """Plan that the ranks should run: that of the newest directive, else that of the spec."""
        return self._plans.wanted_plan

    @property
    def running_plan(self) -> Plan:
        """Plan in effect, as far as it is known."""
        return self._plans.running_plan

    @property
    def records(self) -> list[AdaptationRecord]:
        """Adaptations so far, oldest first. Figures after a change are added as they arrive."""
        return list(self._ledger.records)

    @property
    def change_count(self) -> int:
        """Number of changes of plan so far, including those without a record."""
        return self._ledger.change_count

    @property
    def saved_time(self) -> SavedTime:
        """Time that all changes of plan have saved so far."""
        return self._ledger.saved_time

    @property
    def newest_record(self) -> AdaptationRecord | None:
        """Newest of :attr:`records`; None before the first."""
        return self._ledger.records[-1] if self._ledger.records else None

    @property
    def decisions(self) -> list[DecisionRecord]:
        """Newest decisions, oldest first, including those without a change. Bounded."""
        return list(self._ledger.decisions)

    @property
    def finished_iterations(self) -> list[FinishedRecord]:
        """Newest finished iterations of this attempt, by index. Bounded."""
        return self._ledger.list_iterations()

    @property
    def last_profiled_iteration(self) -> int | None:
        """Newest finished iteration at the last decision for changed op times or memory limits;
        None before the first. A pending decision does not count."""
        return self._decision.settled_decision.profiled_iteration

    def get_link_states(self, now: float) -> tuple[LinkState, ...]:
        """State of each link."""
        return self._job_state.links.get_states(now)

    def get_job_view(self, now: float) -> JobView:
        """Build the view of the job as last reported."""
        return JobView.from_state(self._job_state, self._ledger, self._plans.wanted_plan, now)

    def explain_held_change(self, links: Sequence[LinkState]) -> str | None:
        """Reason that holds back a change of plan while one of ``links`` is slow; None without."""
        return decision.explain_held_change(self._decision, links)

    def measure_network(self, now: float) -> NetworkMeasurements | None:
        """Measurements that another layout is judged by; None before op times are known, or while
        ranks do not train. The first call measures what stages compute besides their layers."""
        observed, stages = self._job_state, self._job_state.stages.get_stage_times()
        iterations = self._ledger.list_iterations_under(self._plans.wanted_plan.version)
        if stages is None or observed.state != "training" or not iterations:
            return None
        found = NetworkMeasurements(
            stages=stages,
            links=observed.links.get_states(now),
            reductions=observed.list_reductions(),
            barrier=has_barrier(self._decision),
            iterations_remaining=self.spec.trainer.iterations - self._ledger.last_iteration - 1,
        )
        if self.spec.parallelism.layers is None:
            return found
        if not self.layers:
            self._stage_overhead = self._stage_overhead.with_measured_times(
                found.stages, self.spec.schedule.policy_kind
            )
        return replace(found, stage_overhead=self._stage_overhead)

    def describe_uneven_stages(self) -> str:
        """Describe a stage that takes longer than the others by the work that it holds, and what
        another split of the layers would give; empty if there is none, or while op times are not
        measured."""
        stages = self._job_state.stages.get_stage_times()
        if stages is None or not self._job_state.stages.all_measured or len(stages) < 2:
            return ""
        layout, overhead = Layout.from_parallelism(self.spec.parallelism), self._stage_overhead
        if not self.layers:
            overhead = overhead.with_measured_times(stages, self.spec.schedule.policy_kind)
        elif not overhead.initial_seconds:
            return ""  # The share of the layers in a stage's time is unknown.
        layout = layout.with_layers(self.layers) if self.layers else layout
        return describe_uneven_stages(LayerSplit(self.spec, layout, stages, overhead))

    def get_outlook(self, now: float) -> Outlook | None:
        """Input to predict the job's plans from; None before op times are known."""
        stages = self._job_state.stages.get_stage_times()
        if stages is None:
            return None
        situation = measure_situation(self._decision, stages, self.get_link_states(now), now)
        running, outside = self._plans.running_plan, self._ledger.outside_seconds
        return Outlook(self._rules, situation, self._initial_plan, running, outside)

    @property
    def events(self) -> tuple[HealthEvent, ...]:
        """Events of rails, transports and reductions, oldest first. Bounded."""
        return self._events.get_newest()

    def take_over_from(self, other: JobController) -> None:
        """Continue another controller's plan versions. In the same attempt, show its rails,
        transports, stragglers, reductions and events until the agent has reported them again."""
        if other.attempt == self.attempt:
            self._job_state.take_over_views(other._job_state)
            self._events = other._events
        self._versions.continue_from(other._versions)

    # --- events ---------------------------------------------------------------------------

    def skip_plan_versions(self, plan_version: int) -> None:
        """Issue only versions above ``plan_version``: others may be in use."""
        self._versions.skip_to(plan_version)

    def count_earlier_changes(self, changes: int, worth: SavedTime) -> None:
        """Add changes of plan without records to the count, until the agent's snapshot comes."""
        self._ledger.changes_before, self._ledger.before = changes, worth

    def begin_attempt(self, attempt: int) -> None:
        """Begin another attempt, with the plan of the spec. Plan versions continue to grow.

        Raises ValueError unless ``attempt`` is above the current one.
        """
        if attempt <= self.attempt:
            raise ValueError(f"attempt {attempt} is not after attempt {self.attempt}")
        self.attempt = attempt
        self._scale_stages(())
        self._ledger.begin_attempt()
        self._reset_attempt(self._job_state.stages.footprints)

    def with_replicas_of(self, spec: JobSpec) -> JobController:
        """Controller that continues this one with the replicas of ``spec``. They are numbered anew:
        links, reductions and stages have to be measured again. The plan in force stays, unless it
        is for other microbatches, or has shares: then ranks begin with that of the spec."""
        saved = self.take_snapshot()
        for each in ("slow_directions", "slow_since"):
            del saved[each]
        microbatches = spec.schedule.microbatches != self.spec.schedule.microbatches
        if microbatches or self.wanted_plan.shares:
            saved = drop_fields(saved, *DECIDED, "baseline")
        made = JobController.from_snapshot(spec, saved, on_report=self._on_report)
        made._versions.continue_from(self._versions)
        made._events = self._events
        return made

    def change_layout(self, slow: Sequence[LinkState] | None, layers: tuple[int, ...] = ()) -> None:
        """Record that the ranks run at other places, or hold other layers. The plan in force stays.
        Links and reductions have to be measured again; expected stage times follow from the layers.
        ``slow``: links that are known to be slow; None: places and links are unchanged. ``layers``:
        by stage; empty: an even split."""
        self._job_state.change_layout(slow)
        self._scale_stages(layers)
        self._decision.route_costs, self._decision.pending = RouteCostEstimator(), None

    def _scale_stages(self, layers: tuple[int, ...]) -> None:
        """Set the expected time of each stage from its number of layers."""
        before, self.layers = self.layers, layers
        total, stages = self.spec.parallelism.layers, self.spec.parallelism.stages
        if total is None or before == layers:
            return
        even = (total // stages,) * stages
        self._job_state.stages.scale_work(
            self._stage_overhead.compute_work_factors(before or even, layers or even)
        )

    def process_report(self, report: LinkHealthReport, now: float) -> DirectiveEnvelope:
        """Process a report, and request a decision if there is a cause. ``now``: wall clock,
        seconds since the Unix epoch. Returns the answer, without a directive.

        Raises :class:`~pipemorph.control.job_state.reports.ReportRefused` and changes nothing if
        the report belongs to another attempt, was seen before, does not fit the job, or names a
        later host.
        """
        observed, plans, state = self._job_state, self._plans, self._decision
        check_report(report, self.spec.parallelism, attempt=self.attempt, after=observed.sequence)
        self._versions.record_reported_term(report.term)
        answer = observed.process_report(report, now)
        if self._is_new_to_job and report.snapshot:
            plans.await_snapshot(now)
        self._is_new_to_job = False
        newest, wanted = observed.newest_plan_version, plans.wanted_plan.version
        if plans.record_rank_version(newest, observed.plan_issued_at, now):
            # The next version must be new to the ranks.
            self._versions.skip_to(newest)
            if newest == wanted:
                # Another host's plan has this version: the plan of this host never runs.
                self._ledger.withdraw_record(wanted)
        self._ledger.add_iterations(report.iterations, observed.stages.list_peak_memory)
        if any(stage.crowding for stage in report.stages):
            decision.record_cpu_contention(state, now)
        plans.record_applied_version(observed.applied_plan_version)
        if report.iterations:
            decision.measure_route_cost(state, now)
            decision.compare_iterations(state, now)
        decision.consider_decision(state, now)
        if report.iterations:
            request_weighing(state, now)
        if self._on_report is not None:
            self._on_report(report)
        update = {
            "attentive": decision.awaits_iterations(state),
            "wants_snapshot": plans.awaits_snapshot(now),
            "term": self.term,
        }
        return answer.model_copy(update=update)

    @property
    def accepts_snapshot(self) -> bool:
        """True if the agent may send its snapshot: this controller is new to the job, or the plan
        of the ranks is unknown to it."""
        return self._plans.may_adopt_plan

    def refuse_snapshot(self) -> None:
        """Continue without the agent's snapshot, which is not usable."""
        self._plans.refuse_snapshots()

    def adopt_plan(self, attempt: int, saved: Snapshot, now: float) -> None:
        """Adopt the plan and state of the agent's snapshot, which
        :mod:`pipemorph.control.adopted_plan` has checked. ``attempt``: attempt of the agent.

        Changes nothing and raises :class:`~pipemorph.control.job_state.reports.WrongAttempt`, or
        :class:`InputError` if no snapshot is wanted, or its plan is not that of the ranks.
        """
        if {attempt, saved.attempt} != {self.attempt}:
            other = attempt if attempt != self.attempt else saved.attempt
            raise WrongAttempt(f"attempt {other} is not the attempt in progress, {self.attempt}")
        if not self.accepts_snapshot:
            raise InputError(f"plan v{self.wanted_plan.version} is in force; no snapshot is wanted")
        directive, newest = saved.directive, self._job_state.newest_plan_version
        found = directive.plan_version if directive is not None else 0
        if found != newest:
            raise InputError(
                f"its plan is v{found}; the newest plan that the ranks reported is v{newest}"
            )
        issued_at = self._job_state.plan_issued_at
        if directive is not None and issued_at not in (None, directive.issued_at):
            raise InputError(
                f"its plan v{found} is another one than the plan v{found} of the ranks"
            )
        self._decision.pending = None
        self._plans.refuse_snapshots()
        self._plans.plan_unknown = False
        self._continue_from(saved, now)
        decision.record_kept_plan(self._decision, now, reasons.describe_adopted_plan(directive))

    def check_silence(self, now: float) -> None:
        """Record once that all links have become silent. Call it when no report has come."""
        if self._job_state.fell_silent(now):
            decision.record_kept_plan(
                self._decision,
                now,
                f"no samples for {self.spec.adaptation.stale_after_seconds:g} s, so the state of"
                " the links is unknown; the plan stays",
            )

    # --- decisions ------------------------------------------------------------------------

    @property
    def pending_request(self) -> DecisionRequest | None:
        """Decision that waits for :meth:`apply_proposal`; no other one is requested until then."""
        pending = self._decision.pending
        return pending.request if pending is not None else None

    def apply_proposal(self, request: DecisionRequest, proposal: PlanProposal, now: float) -> None:
        """Apply the proposal that :func:`~pipemorph.control.decide.plan_choice.decide` made for
        ``request``. Ignored if another attempt has begun since."""
        decision.apply_proposal(self._decision, request, proposal, now)

    # --- snapshots ------------------------------------------------------------------------

    @property
    def snapshot_key(self) -> tuple[object, ...]:
        """Key that differs when a snapshot has something new that another host would miss."""
        last, plans = self._decision.settled_decision, self._plans
        return (
            self.attempt,
            self._versions.newest_version,
            plans.wanted_plan.version,
            plans.baseline_plan,
            last.profiled_iteration,
            last.barrier,
            self._decision.flap_count,
            tuple(sorted(list_doubt_levels(self._decision).items())),
            self.layers,
            self._stage_overhead.initial_seconds,
            *(
                (r.plan_version, r.iteration_seconds_after, r.saving)
                for r in self._ledger.open_records
            ),
        )

    def take_snapshot(self) -> dict[str, Any]:
        """Build the state that :meth:`from_snapshot` needs, as data for JSON."""
        last, observed, plans = self._decision.settled_decision, self._job_state, self._plans
        judged, baseline = last.situation, None
        if plans.baseline_plan != plans.initial_plan:
            baseline = PlanMessage.from_plan(plans.baseline_plan)
        return Snapshot(
            attempt=self.attempt,
            plan_version=self._versions.newest_version,
            sequence=observed.sequence,
            directive=plans.directive,
            wire_times=list(judged.wire_times),
            delays=list(judged.delays),
            slow=list(judged.slow),
            profiled_at=last.profiled_iteration,
            stages=[] if last.profiled_iteration is None else list(map(round_times, judged.stages)),
            barrier=last.barrier,
            flaps=self._decision.flap_count,
            slow_directions=observed.links.list_slow_directions(),
            slow_since=observed.links.get_slow_since(),
            records=self.records,
            changes_before=self._ledger.changes_before,
            worth_before=(self._ledger.before.seconds, self._ledger.before.error_seconds),
            baseline=baseline,
            doubts=list_doubt_levels(self._decision),
            footprints=[each.to_snapshot() for each in observed.stages.footprints],
            layers=self.layers,
            initial_stage_seconds=self._stage_overhead.initial_seconds,
        ).model_dump(mode="json")

    @classmethod
    def from_snapshot(
        cls,
        spec: JobSpec,
        snapshot: Mapping[str, Any],
        *,
        on_report: Callable[[LinkHealthReport], None] | None = None,
    ) -> JobController:
        """Make a controller that continues from a snapshot. The next reports restore the links'
        health. Raises :class:`InputError` if the snapshot cannot be used."""
        saved = Snapshot.parse_snapshot(snapshot).for_microbatches(spec.schedule.microbatches)
        self = cls(spec, attempt=saved.attempt, on_report=on_report)
        self._job_state.sequence, self._is_new_to_job = saved.sequence, False
        stages = spec.parallelism.stages
        if len(saved.initial_stage_seconds) == stages:
            self._stage_overhead = replace(
                self._stage_overhead, initial_seconds=saved.initial_stage_seconds
            )
        if len(saved.layers) == stages:
            # Op times in the spec are those of an even split of the layers.
            self._scale_stages(saved.layers)
        self._continue_from(saved, inf)
        self._job_state.links.restore_directions(saved.slow_directions, saved.slow_since)
        return self

    def _continue_from(self, saved: Snapshot, now: float) -> None:
        """Continue from a snapshot of the same job. ``now``: no record can be newer."""
        plans, last = self._plans, self._decision.last_decision
        stages = self.spec.parallelism.stages
        plans.wanted_plan, plans.baseline_plan = saved.decode_plans(plans.initial_plan)
        plans.running_plan, plans.directive = plans.wanted_plan, saved.directive
        self._versions.skip_to(max(saved.plan_version, plans.wanted_plan.version))
        records = [
            r.model_copy(update={"detected_at": min(r.detected_at, now)}) for r in saved.records
        ]
        self._ledger.restore_records(records, saved.changes_before, SavedTime(*saved.worth_before))
        self._decision.flap_count = saved.flaps
        if len(saved.initial_stage_seconds) == stages:
            self._stage_overhead = replace(
                self._stage_overhead, initial_seconds=saved.initial_stage_seconds
            )
        same = saved.layers == self.layers
        if same and len(saved.footprints) == stages:
            self._job_state.stages.restore_footprints(saved.footprints)
        first = last.situation
        known = same and saved.profiled_at is not None and len(saved.stages) == stages
        judged = saved.decode_situation(tuple(saved.stages) if known else first.stages)
        if judged is not None:
            last.situation = replace(
                judged, barrier=first.barrier, op_times_assumed=first.op_times_assumed
            )
            last.profiled_iteration = saved.profiled_at if known else None
        if saved.barrier is not None:
            last.barrier = saved.barrier
        self._decision.source_doubts = {
            source: (level, None) for source, level in saved.doubts.items()
        }
