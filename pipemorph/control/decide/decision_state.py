"""State of a job's decisions, the evidence behind them, and the seconds that they save.

:class:`DecisionState` has the plans, and the memory from one decision to the next.
:mod:`pipemorph.control.decision` reads and changes it, and so do the modules beside this one.

A source of evidence (a link, op times, the barrier) that was wrong lately is doubted: it must be
confirmed by more iterations. A source that measured iterations contradict is held: the believed
situation leaves it out for some iterations.

A decision predicts the seconds that the plan in effect saves, and those before it. Where links
change and the plan stays, :func:`request_weighing` requests a prediction alone.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from pipemorph.control.decide.plan_choice import DecisionRequest, Past, PlanProposal
from pipemorph.control.decide.prediction_check import (
    MeasuredReference,
    PromisedTimes,
    SituationEvidence,
)
from pipemorph.control.decide.replica_shares import Paces, measure_paces
from pipemorph.control.decide.situation import (
    BARRIER_SOURCE,
    Cause,
    EvidenceSources,
    RouteCostEstimator,
    Situation,
    find_link_change,
    find_turning_iterations,
    op_times_differ,
    update_link_states,
    without_sources,
)
from pipemorph.control.first_plan import build_initial_problem
from pipemorph.control.history.job_history import OPEN_RECORDS, JobHistory
from pipemorph.control.job_state.reports import JobState, SupersededIngest
from pipemorph.control.job_state.stages import StageRoom, get_expected_times
from pipemorph.planning import Plan, StageTimes
from pipemorph.protocol import Directive, Health, LinkState
from pipemorph.spec.job_spec import JobSpec

ADOPT_PLAN_SECONDS = 5.0
"""Seconds for the agent to send its snapshot, before the controller decides without it."""
PACE_ITERATIONS = 2
"""Newest iterations in which a stage is slow or healthy for certain, once that is found."""
COMPARED_ITERATIONS = 4
"""Newest iterations that are compared with a prediction for changed op times."""
DOUBTED_ITERATIONS, MOST_DOUBT = 4, 3
"""Confirming iterations that a change needs after the first failure; they double with each further
failure, at most MOST_DOUBT times."""
OVERDUE_ITERATIONS = 16
"""Iterations after which unconfirmed evidence is tried nevertheless; 4 times as many for each
doubt. The model may miss how a link is slow (traffic shaping), and a slower plan is undone."""
LONGEST_HOLD = 32
"""Most iterations until evidence that is held is judged again."""
FORGET_ITERATIONS = 200
"""Iterations until a doubt counts one less."""
WEIGHED_DELAY_CHANGE = 0.05
"""Relative change of a delay from which the plan's saving is predicted anew."""
REFINED_ITERATIONS = 3
"""Iterations after a link became slow in which another delay only refines the first one."""


class PlanVersions:
    """Numbers of plans. They only grow, also across attempts.

    When one host takes over from another, both may use the same number for different plans. The
    ranks run the plan that reached their agent first, and the other host renumbers its plan
    (:meth:`AttemptPlans.record_rank_version`). ``term``: term of this host's lease.
    """

    def __init__(self, term: int = 0) -> None:
        self.newest_version = 0
        """Newest version issued, or known to be in use; 0 before the first."""
        self.term = term
        """Term of this host in this job: above all earlier hosts', once the agent reports."""
        self._has_report = False

    def issue_version(self) -> int:
        """Issue the next version."""
        self.newest_version += 1
        return self.newest_version

    def skip_to(self, version: int) -> None:
        """Issue only versions above ``version``: others may be in use."""
        self.newest_version = max(self.newest_version, version)

    def record_reported_term(self, reported: int | None) -> None:
        """Record the highest term that the agent has seen; None: it has seen no host.

        The lease's term is not enough: it begins at 0 again when the lease is created anew. Raises
        :class:`SupersededIngest` if the agent has seen a later host since.
        """
        if self._has_report and reported is not None and reported > self.term:
            raise SupersededIngest(reported, self.term)
        if not self._has_report and reported is not None:
            self.term = max(self.term, reported + 1)
        self._has_report = True

    def continue_from(self, other: PlanVersions) -> None:
        """Continue with the versions of another controller of the same job and host."""
        self.skip_to(other.newest_version)
        self.term, self._has_report = other.term, other._has_report


class AttemptPlans:
    """Plans of one attempt, which begins with the plan of the spec, ``first``."""

    def __init__(self, first: Plan) -> None:
        self.initial_plan = first
        self.wanted_plan = self.running_plan = first
        """Plan of the newest directive, and the plan that ranks are known to run."""
        self.baseline_plan = first
        """Plan for healthy links: that of the spec, unless measurements require another."""
        self.directive: Directive | None = None
        self.issued: dict[int, Plan] = {}
        """The newest issued plans by their versions."""
        self.plan_unknown = False
        """True if the plan of the ranks is unknown to this controller."""
        self._confirmed = False
        """True if the agent has reported the wanted plan as its newest."""
        self._snapshot_awaited_until = float("-inf")

    @property
    def known_plan(self) -> Plan | None:
        """Plan that the ranks run, or are about to; None if unknown to the controller."""
        return None if self.plan_unknown else self.wanted_plan

    def issue_plan(self, plan: Plan, directive: Directive) -> None:
        """Make ``plan`` the wanted one."""
        self.wanted_plan, self.directive = plan, directive
        self.issued = dict([*self.issued.items(), (plan.version, plan)][-OPEN_RECORDS:])
        self.plan_unknown = self._confirmed = False
        self.refuse_snapshots()

    def record_applied_version(self, version: int) -> None:
        """Record that the ranks run the plan of this version."""
        if version == self.wanted_plan.version and not self.plan_unknown:
            self.running_plan = self.wanted_plan

    def set_baseline(self) -> None:
        """Make the wanted plan the one for healthy links."""
        self.baseline_plan = replace(self.wanted_plan, version=0, shares=(), resized=())

    # --- a plan that is not known -----------------------------------------------------------

    def record_rank_version(self, version: int, issued_at: float | None, now: float) -> bool:
        """Record the newest plan of the ranks: its version and time of issue, see
        :attr:`.JobState.newest_plan_version`. Returns True if it is unknown.

        Another host may have used the version of the wanted plan for the plan of the ranks. Then
        the wanted plan will never run and is dropped.
        """
        if version < self.wanted_plan.version:
            return False
        if version == self.wanted_plan.version:
            ours = self.directive is None or issued_at in (None, self.directive.issued_at)
            self._confirmed |= ours
            if self._confirmed:
                return False
            self.wanted_plan, self.directive = self.initial_plan, None
        if not self.plan_unknown:
            self.plan_unknown = True
            self.await_snapshot(now)
        return True

    def await_snapshot(self, now: float) -> None:
        """Wait for the snapshot of the agent."""
        self._snapshot_awaited_until = now + ADOPT_PLAN_SECONDS

    def awaits_snapshot(self, now: float) -> bool:
        """True if the agent should send its snapshot, and there is still time for it."""
        return now < self._snapshot_awaited_until

    @property
    def may_adopt_plan(self) -> bool:
        """True if a snapshot of the agent would be accepted."""
        return self._snapshot_awaited_until > float("-inf")

    def refuse_snapshots(self) -> None:
        """Wait for no snapshot, and accept none."""
        self._snapshot_awaited_until = float("-inf")


@dataclass
class LastDecision:
    """Last decision of an attempt, which later reports are compared with. Before the first one,
    ``situation`` is the one that the spec expects."""

    situation: Situation
    barrier: bool
    """True if the plan for healthy links expects a barrier between iterations."""
    cause: Cause | None = None
    iteration_finished: int | None = None
    """Newest finished iteration at the last decision."""
    profiled_iteration: int | None = None
    """Newest finished iteration at the last decision for op times or memory limits."""
    compare_from: int = 0
    """First iteration at which op times are compared again."""
    steady_delay_considered: bool = False
    """True if a constant delay was considered once more since links last changed."""
    differing_readings: int = 0
    """Number of newest comparisons of op times in a row that differed."""

    @staticmethod
    def from_spec(spec: JobSpec) -> LastDecision:
        """State before the first decision: op times of the spec, and no delays."""
        links = spec.parallelism.stages - 1
        situation = Situation(
            op_times_assumed=get_expected_times(spec) is None,
            stages=build_initial_problem(spec).stages,
            wire_times=(0.0,) * links,
            delays=(0.0,) * links,
            slow=(False,) * links,
            unknown=(True,) * links,
            barrier=spec.schedule.objective != "period",
        )
        return LastDecision(situation, situation.barrier)


class Changed(NamedTuple):
    """Last change of links. ``since``: first iteration after it; ``another``: the plan in effect
    was made for another state; ``ran``: each iteration since then with its plan version and the
    index of its prediction, :attr:`DecisionRequest.past`; ``coming``: the iteration in ``ran`` that
    represents all unfinished ones."""

    since: int
    another: bool
    ran: tuple[tuple[int, int, int], ...]
    coming: int


class PendingDecision(NamedTuple):
    """Decision that waits for its proposal, and data for its record."""

    request: DecisionRequest
    links: tuple[LinkState, ...]
    detectable_at: int
    previous_decision: LastDecision
    """Last decision: a host that takes over meanwhile decides again from it."""
    comparable_since: int
    """Iteration after which those under the plan in effect are comparable."""
    changed: Changed
    sources: EvidenceSources = frozenset()


@dataclass(frozen=True)
class PlanTrial:
    """Change of plan that is not judged yet. ``situation_before``: of the decision before;
    ``shown_since``: iteration that first showed the reason for the change; ``previous_plan``,
    ``baseline_plan``: plan in effect and plan for healthy links before the change."""

    version: int
    previous_plan: Plan
    baseline_plan: Plan
    sources: EvidenceSources
    promise: PromisedTimes
    situation_before: Situation
    shown_since: int


@dataclass
class EvidenceHold:
    """Evidence that is held: not believed now. ``shown_since``: iteration that first showed it;
    ``held_since``: first one of the hold; both, and ``retry_at``, count finished iterations."""

    shown_since: int
    held_since: int
    retry_at: int
    wait_iterations: int = 1


@dataclass
class DecisionState:
    """Memory between the decisions of one attempt, and the state that they read.

    ``planning_spec``: sections of the spec that a plan depends on; ``has_no_end``: none is known.
    """

    spec: JobSpec
    planning_spec: JobSpec
    job_state: JobState
    history: JobHistory
    plans: AttemptPlans
    versions: PlanVersions
    has_no_end: bool
    last_decision: LastDecision = field(init=False)
    pending: PendingDecision | None = None
    noted_topics: set[str] = field(default_factory=set)
    """Topics that were recorded once, see :func:`.decision.consider_decision`."""

    # --- causes ---
    checked_memory_limits: tuple[StageRoom, ...] = ()
    fitting_plan: tuple[Plan, tuple[StageRoom, ...]] | None = None
    """Plan that was last found to fit, and its limits: a check walks over all of its ops."""
    compared_op_times: tuple[tuple[StageTimes, ...], tuple[StageTimes, ...], bool] | None = None
    """Last comparison: op times, planned op times, and True if any is shorter."""
    cause_iterations: dict[tuple[Cause, EvidenceSources], int] = field(default_factory=dict)
    """Causes that wait for a decision, and the iteration that first showed each."""
    decision_cause_iteration: int | None = None
    """First iteration of the cause for which a decision was last requested."""
    weighed_situation: Situation | None = None
    """Situation in which the plan in effect was last compared with the initial plan, without a
    decision; None: that of the last decision."""
    route_costs: RouteCostEstimator = field(default_factory=RouteCostEstimator)

    # --- limits of the number of changes ---
    flap_count: int = 0
    """Number of times that a link became slow again soon after its plan had returned."""
    returns_at_once: bool = False
    """True if the plan in effect costs more than it can save once links are healthy."""
    issued_at: int | None = None
    returned_links: dict[int, int] = field(default_factory=dict)
    """Iteration at which the plan for a recovered link was issued, by link."""

    # --- measured iterations ---
    reference: MeasuredReference | None = None
    reference_from: int = 0
    """First iteration that the reference may include."""
    reference_complete: bool = False
    trial: PlanTrial | None = None
    source_doubts: dict[int, tuple[int, int | None]] = field(default_factory=dict)
    """Level of doubt, and its iteration, None before the first, by source."""
    held_sources: dict[int, EvidenceHold] = field(default_factory=dict)
    prediction_error: tuple[float, Situation] | None = None
    """Seconds of error in the prediction of the last change that failed, and its situation."""

    def __post_init__(self) -> None:
        self.last_decision = LastDecision.from_spec(self.spec)

    @property
    def last_iteration(self) -> int:
        """Index of the newest finished iteration; -1 before the first."""
        return self.history.last_iteration

    @property
    def is_deciding(self) -> bool:
        """True if a decision waits for its proposal. Cause ``weigh`` gives way to others."""
        return self.pending is not None and self.pending.request.cause != "weigh"

    @property
    def settled_decision(self) -> LastDecision:
        """Last decision whose proposal was applied."""
        return self.pending.previous_decision if self.pending else self.last_decision


# --- the situation as measured and as believed ------------------------------------------------


def measure_situation(
    state: DecisionState, stages: tuple[StageTimes, ...], links: Sequence[LinkState], now: float
) -> Situation:
    """Situation as measured."""
    expected = replace(
        state.last_decision.situation,
        stages=stages,
        rooms=state.job_state.stages.rooms,
        barrier=has_barrier(state),
        route_cost=state.route_costs.current_cost,
        paces=measure_replica_paces(state),
    )
    return update_link_states(expected, links)


def measure_replica_paces(state: DecisionState) -> Paces:
    """Speeds of the replicas, if plans may follow them and one is slow."""
    if not state.spec.adaptation.rebalance or state.spec.parallelism.replicas == 1:
        return ()
    return measure_paces(state.job_state.stragglers, state.spec.parallelism.mesh)


def measure_believed_situation(
    state: DecisionState, stages: tuple[StageTimes, ...], links: Sequence[LinkState], now: float
) -> Situation:
    """Situation without evidence that measured iterations do not confirm."""
    situation = measure_situation(state, stages, links, now)
    for link in [s for s in state.held_sources if s >= 0 and not situation.slow[s]]:
        del state.held_sources[link]
    held = find_held_sources(state)
    return without_sources(situation, held, state.last_decision.situation) if held else situation


def has_barrier(state: DecisionState) -> bool:
    """True if stages wait for each other between iterations, or if the trainer reports no barrier
    but a plan for that missed its promise."""
    objective = state.spec.schedule.objective
    if objective != "auto":
        return objective == "makespan"
    there = state.history.barrier
    return (state.last_decision.barrier if there is None else there) or get_doubt_level(
        state, BARRIER_SOURCE
    ) > 0


# --- doubts, and sources that are held --------------------------------------------------------


def get_doubt_level(state: DecisionState, source: int) -> int:
    """Number of times that a source was wrong lately."""
    level, at = state.source_doubts.get(source, (0, state.last_iteration))
    if at is None:
        state.source_doubts[source] = (level, at := state.last_iteration)
    return max(0, level - max(0, state.last_iteration - at) // FORGET_ITERATIONS)


def list_doubt_levels(state: DecisionState) -> dict[int, int]:
    """Levels of doubt by source, for a snapshot."""
    return {source: level for source, (level, _) in state.source_doubts.items() if level}


def find_held_sources(state: DecisionState) -> EvidenceSources:
    """Sources that are held: not believed now."""
    return frozenset(
        s for s, hold in state.held_sources.items() if state.last_iteration < hold.retry_at
    )


def hold_sources(
    state: DecisionState, sources: EvidenceSources, since: int, wait: int | None = None
) -> bool:
    """Hold ``sources``, not believing them, for ``wait`` iterations; by default twice as many as
    last time. Returns True if any was believed before."""
    new = False
    for source in sources:
        hold = state.held_sources.get(source)
        if hold is None:
            hold, new = (
                EvidenceHold(since, state.last_iteration, state.last_iteration),
                True,
            )
            state.held_sources[source] = hold
        hold.retry_at = state.last_iteration + (wait or hold.wait_iterations)
        hold.wait_iterations = min(LONGEST_HOLD, 2 * hold.wait_iterations)
    return new


def gather_evidence(
    state: DecisionState,
    cause: Cause,
    sources: EvidenceSources,
    situation: Situation,
    links: Sequence[LinkState],
) -> tuple[SituationEvidence, int]:
    """Evidence of finished iterations for the ``sources`` of a decision, and the iteration that
    first showed these."""
    since = find_first_detectable(state, situation, links)
    if cause in ("profile", "barrier", "steady"):
        # No link has just become slow or healthy.
        since = state.last_iteration - COMPARED_ITERATIONS
    elif cause == "pace":
        since = state.last_iteration - PACE_ITERATIONS
    holds = [state.held_sources[source] for source in sources if source in state.held_sources]
    first = min([since, *(hold.shown_since for hold in holds)])
    doubt = max((get_doubt_level(state, source) for source in sources), default=0)
    waited = state.last_iteration - min(
        (hold.held_since for hold in holds), default=state.last_iteration
    )
    iterations = state.history.list_iterations_under(state.plans.wanted_plan.version)[1:]
    found = SituationEvidence(
        state.reference,
        without_sources(situation, sources, state.last_decision.situation),
        tuple(f.comparable_seconds for f in iterations if f.index > first),
        error_seconds=_get_prediction_error(state, situation),
        waited_too_long=waited >= OVERDUE_ITERATIONS * 4**doubt,
    )
    return found, since


def _get_prediction_error(state: DecisionState, now: Situation) -> float:
    """Seconds of known prediction error in this situation."""
    if state.prediction_error is None:
        return 0.0
    seconds, then = state.prediction_error
    return 0.0 if op_times_differ(now, then) or now.slow != then.slow else seconds


def find_first_detectable(state: DecisionState, now: Situation, links: Sequence[LinkState]) -> int:
    """Iteration of the first window that showed the present state of all links."""
    # Causes other than links have no first window: the current iteration.
    return max(
        find_turning_iterations(now, state.last_decision.situation, links),
        default=state.job_state.iteration,
    )


def count_lacking_iterations(
    state: DecisionState, sources: EvidenceSources, evidence: SituationEvidence
) -> int:
    """Number of iterations that doubted sources lack until they may cause a change."""
    doubt = max((get_doubt_level(state, source) for source in sources), default=0)
    if not doubt or evidence.waited_too_long:
        return 0
    return max(0, int(DOUBTED_ITERATIONS * 2 ** (doubt - 1)) - len(evidence.measured_seconds))


# --- saved seconds ----------------------------------------------------------------------------


def request_weighing(state: DecisionState, now: float) -> None:
    """Request a prediction of what the plan in effect saves, if links have changed since the last
    one and the plan stays: the evidence is held, or the job ends too soon for another plan."""
    plans, observed = state.plans, state.job_state
    if (
        state.pending is not None
        or plans.plan_unknown
        or plans.running_plan is not plans.wanted_plan
    ):
        return
    before = state.weighed_situation or state.last_decision.situation
    stages = observed.stages.get_stage_times()
    if not plans.wanted_plan.version or stages is None:
        return
    if not (any(before.slow) or observed.links.any_slow):
        return
    links = observed.links.get_states(now)
    situation = measure_believed_situation(state, stages, links, now)
    moved = find_link_change(situation, before, 0.0, WEIGHED_DELAY_CHANGE)
    if moved is None and not op_times_differ(situation, before):
        return
    changed, past = list_past_plans(state, "weigh", situation, links, observed.iteration)
    state.pending = PendingDecision(
        DecisionRequest(
            spec=state.planning_spec,
            cause="weigh",
            situation=situation,
            current_plan=plans.wanted_plan,
            baseline_plan=plans.baseline_plan,
            plan_unknown=False,
            iterations_remaining=None,
            change_seconds=None,
            evidence=SituationEvidence(),
            running_plan=plans.running_plan,
            initial_plan=plans.initial_plan,
            past=past,
        ),
        links=tuple(links),
        detectable_at=observed.iteration,
        previous_decision=copy.copy(state.last_decision),
        comparable_since=observed.iteration,
        changed=changed,
    )


def list_past_plans(
    state: DecisionState, cause: Cause, now: Situation, links: Sequence[LinkState], shown: int
) -> tuple[Changed, tuple[Past, ...]]:
    """Last change of links, and the plans that have run since, each with the slow links."""
    plans, before = state.plans, state.weighed_situation or state.last_decision.situation
    least = state.spec.adaptation.min_delay_ms / 1e3
    since, another = shown, find_link_change(now, before, least) is not None
    # Links are as they are now since the first window of their last change.
    began = [link.since_iteration for link in links if link.health is Health.SLOW]
    refined = max((at for at in began if at is not None), default=-1)
    if turned := find_turning_iterations(now, before, links):
        # A link that is well is not slow in the situation, so that no earlier state is known.
        ended = [
            link.since_iteration
            for link, was, is_slow in zip(links, before.slow, now.slow, strict=True)
            if was and not is_slow and link.since_iteration is not None
        ]
        since = max(ended, default=min(turned))
    elif since - refined <= REFINED_ITERATIONS:
        since, another = refined, False
    if state.decision_cause_iteration is not None and cause != "weigh":
        # A decision may have waited after its cause appeared.
        since = min(since, state.decision_cause_iteration)
    if cause == "undelivered":
        since, another = -1, False  # The reason for the change never existed.
    known = plans.issued | {each.version: each for each in (plans.running_plan, plans.wanted_plan)}
    coming = state.history.last_iteration + 1
    ran, past = list[tuple[int, int, int]](), list[Past]()
    for index, version in [
        *state.history.counted(since),
        *((coming, version) for version in {plans.running_plan.version, plans.wanted_plan.version}),
    ]:
        record = state.history.find_record(version)
        if record is None or version not in known:
            continue
        if cause == "undelivered" and version != plans.wanted_plan.version:
            continue
        were = {link.link for link in record.links if link.health is Health.SLOW}
        slow = frozenset(
            i
            for i, link in enumerate(links)
            if now.slow[i] and (i in were or (link.since_iteration or 0) <= index)
        )
        each = Past(known[version], slow)
        if each not in past:
            past.append(each)
        ran.append((index, version, past.index(each)))
    return Changed(since, another, tuple(ran), coming), tuple(past)


def revise_saved_time(
    state: DecisionState, pending: PendingDecision, proposal: PlanProposal
) -> None:
    """Record what plans save in the present state of links, from its begin on."""
    if proposal.saving is None:
        return
    present = state.history.find_record(pending.request.current_plan.version)
    if present is not None and pending.changed.another:
        state.history.end_figures(present, pending.changed.since)
    for index, version, which in pending.changed.ran:
        last = None if index == pending.changed.coming else index
        state.history.revise_saving(version, proposal.past[which], index, last)
