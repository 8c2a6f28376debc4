"""State of a job's decisions: plans, and what is remembered from one decision to the next.

:mod:`pipemorph.control.decision` reads and changes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from pipemorph.api.spec import JobSpec
from pipemorph.control.decide.replan import Past, Proposal, Replan
from pipemorph.control.decide.situation import (
    Cause,
    RouteCosts,
    Situation,
    Sources,
    change_of_links,
    turned_at,
)
from pipemorph.control.decide.truth import Promise, Reference
from pipemorph.control.first_plan import initial_problem
from pipemorph.control.observed.reports import Observed, Superseded
from pipemorph.control.observed.stages import Room, expected_times
from pipemorph.control.record.history import OPEN_RECORDS, Ledger
from pipemorph.planning import Plan, StageTimes
from pipemorph.wire import Directive, Health, LinkState

HAND_IN_SECONDS = 5.0
"""Time for the agent to hand in its snapshot, before the controller decides without it."""
REFINED = 3
"""Iterations after a link became slow in which another delay is the first one, better known."""


class PlanVersions:
    """Numbers of plans. They only grow, also across attempts.

    Two hosts may give one number to two plans, when one takes over from the other: of these, the
    ranks run the one that reached their agent first, and the other host gives its plan another
    number (:meth:`Plans.ranks_have`). ``term``: of the lease of this host.
    """

    def __init__(self, term: int = 0) -> None:
        self.newest = 0
        """The newest one issued, or known to be in use; 0 before the first."""
        self.term = term
        """Of this host in this job: above that of all hosts before it, once the agent reports."""
        self._met = False

    def take(self) -> int:
        """The number of another plan."""
        self.newest += 1
        return self.newest

    def skip_to(self, version: int) -> None:
        """Take only numbers above ``version``: others may be in use."""
        self.newest = max(self.newest, version)

    def meet(self, reported: int | None) -> None:
        """Take the highest term that the agent has seen; None: it has seen no host.

        The term of a lease begins at 0 again when the lease is made anew. So it is not enough.
        Raises :class:`Superseded` if the agent has met a later host since.
        """
        if self._met and reported is not None and reported > self.term:
            raise Superseded(reported, self.term)
        if not self._met and reported is not None:
            self.term = max(self.term, reported + 1)
        self._met = True

    def adopt(self, other: PlanVersions) -> None:
        """Go on with the numbers of another controller of the same job and host."""
        self.skip_to(other.newest)
        self.term, self._met = other.term, other._met


class Plans:
    """The plans of one attempt, which begins with that of the spec, ``first``."""

    def __init__(self, first: Plan) -> None:
        self.first = first
        self.wanted = self.running = first
        """The plan of the newest directive, and the one that ranks are known to run."""
        self.baseline = first
        """The plan for healthy links: that of the spec, unless measurements require another."""
        self.directive: Directive | None = None
        self.issued: dict[int, Plan] = {}
        """The newest issued plans by their versions."""
        self.unknown = False
        """Whether the ranks have a plan that this controller does not know."""
        self._confirmed = False
        """Whether the agent has reported the wanted plan as its newest."""
        self._hand_in_until = float("-inf")

    @property
    def known(self) -> Plan | None:
        """The plan that the ranks run, or are about to; None if the controller does not know it."""
        return None if self.unknown else self.wanted

    def issue(self, plan: Plan, directive: Directive) -> None:
        """Make ``plan`` the wanted one."""
        self.wanted, self.directive = plan, directive
        self.issued = dict([*self.issued.items(), (plan.version, plan)][-OPEN_RECORDS:])
        self.unknown = self._confirmed = False
        self.refuse()

    def applied(self, version: int) -> None:
        """The ranks run the plan of this version."""
        if version == self.wanted.version and not self.unknown:
            self.running = self.wanted

    def keep_as_baseline(self) -> None:
        """The wanted plan is that for healthy links from now on."""
        self.baseline = replace(self.wanted, version=0)

    # --- a plan that is not known -----------------------------------------------------------

    def ranks_have(self, version: int, issued_at: float | None, now: float) -> bool:
        """Take the newest plan of the ranks: its version, and when it was issued, see
        :attr:`~.observed.reports.Observed.newest_plan_version`. Returns whether this controller
        does not know it.

        Another host may have given the version of the wanted plan to the plan of the ranks. Then
        the wanted plan will never run: there is none any more.
        """
        if version < self.wanted.version:
            return False
        if version == self.wanted.version:
            ours = self.directive is None or issued_at in (None, self.directive.issued_at)
            self._confirmed |= ours
            if self._confirmed:
                return False
            self.wanted, self.directive = self.first, None
        if not self.unknown:
            self.unknown = True
            self.expect(now)
        return True

    def expect(self, now: float) -> None:
        """Wait for the snapshot of the agent."""
        self._hand_in_until = now + HAND_IN_SECONDS

    def awaits(self, now: float) -> bool:
        """Whether the agent should hand in its snapshot, and it may still come."""
        return now < self._hand_in_until

    @property
    def may_be_handed_in(self) -> bool:
        """Whether a snapshot of the agent would be accepted."""
        return self._hand_in_until > float("-inf")

    def refuse(self) -> None:
        """Wait for no snapshot, and accept none."""
        self._hand_in_until = float("-inf")


@dataclass
class LastDecision:
    """The last decision of an attempt, and what is compared with it. At first, nothing was decided,
    and ``situation`` is the one that the spec expects."""

    situation: Situation
    barrier: bool
    """Whether the plan for healthy links expects a barrier between iterations."""
    cause: Cause | None = None
    after: int | None = None
    """The newest finished iteration at the last decision."""
    profiled_at: int | None = None
    """The same at the last decision for op times or memory limits."""
    compare_from: int = 0
    """The iteration from which op times are compared again."""
    steadied: bool = False
    """Whether a constant delay was considered once more since links last changed."""
    readings: int = 0
    """Newest comparisons of op times in a row that differed."""

    @staticmethod
    def first(spec: JobSpec) -> LastDecision:
        links = spec.parallelism.stages - 1
        situation = Situation(
            assumed=expected_times(spec) is None,
            stages=initial_problem(spec).stages,
            wire_times=(0.0,) * links,
            delays=(0.0,) * links,
            slow=(False,) * links,
            unknown=(True,) * links,
            barrier=spec.schedule.objective != "period",
        )
        return LastDecision(situation, situation.barrier)


class Changed(NamedTuple):
    """The last change of links. ``since``: the first iteration after it; ``another``: the plan in
    effect was made for another state; ``ran``: since then, each iteration and plan version, with
    the position of both among those that the decision predicts, :attr:`Replan.past`; ``coming``:
    the iteration there that stands for all that had not finished."""

    since: int
    another: bool
    ran: tuple[tuple[int, int, int], ...]
    coming: int


class Pending(NamedTuple):
    """A decision that waits for its proposal, and data for its record."""

    replan: Replan
    links: tuple[LinkState, ...]
    detectable_at: int
    before: LastDecision
    """The last decision: a host that takes over meanwhile decides again from it."""
    since: int
    """The iteration after which those under the plan in effect are comparable."""
    changed: Changed
    sources: Sources = frozenset()


@dataclass(frozen=True)
class Trial:
    """A change of plan that is not judged yet. ``before``: the situation of the decision before;
    ``since``: iteration in which the reason for the change began to show; ``previous`` and
    ``baseline``: the plan in effect and the one for healthy links before the change."""

    version: int
    previous: Plan
    baseline: Plan
    sources: Sources
    promise: Promise
    before: Situation
    since: int


@dataclass
class Hold:
    """Evidence that is not believed for now. ``since``: iteration in which it began to show;
    ``began``: when it was first not believed; both, and ``retry_at``, count finished iterations."""

    since: int
    began: int
    retry_at: int
    wait: int = 1


@dataclass
class DecisionState:
    """What is remembered between the decisions of one attempt, and what they read.

    ``rules``: the sections of the spec that a plan depends on; ``endless``: no end of the job is
    known.
    """

    spec: JobSpec
    rules: JobSpec
    observed: Observed
    ledger: Ledger
    plans: Plans
    versions: PlanVersions
    endless: bool
    last: LastDecision = field(init=False)
    pending: Pending | None = None
    noted: set[str] = field(default_factory=set)
    """Topics of which something was written, see :func:`.decision.consider`."""

    # --- causes ---
    checked_rooms: tuple[Room, ...] = ()
    fits: tuple[Plan, tuple[Room, ...]] | None = None
    """The plan that was last found to fit, and into what: that takes a walk over all of its ops."""
    eased: tuple[tuple[StageTimes, ...], tuple[StageTimes, ...], bool] | None = None
    """Op times that were compared last with the planned ones, those, and whether any is shorter."""
    turned: dict[tuple[Cause, Sources], int] = field(default_factory=dict)
    """Causes that wait for a decision, and the iteration in which each was first seen."""
    turned_at: int | None = None
    """That of the cause for which a decision was requested last."""
    weighed: Situation | None = None
    """The situation in which the plan in effect was last compared with that of the start, without a
    decision; None: that of the last decision."""
    route_costs: RouteCosts = field(default_factory=RouteCosts)

    # --- limits of the number of changes ---
    flaps: int = 0
    """How often a link became slow again soon after its plan had returned."""
    returns_at_once: bool = False
    """Whether the plan in effect costs more than it can save once links are well."""
    issued_at: int | None = None
    returned: dict[int, int] = field(default_factory=dict)
    """Per link that is healthy again: when the plan for that was issued."""

    # --- what measured iterations say ---
    reference: Reference | None = None
    reference_from: int = 0
    """The first iteration that the reference may be of."""
    reference_complete: bool = False
    trial: Trial | None = None
    doubts: dict[int, tuple[int, int | None]] = field(default_factory=dict)
    """Per source: the level of doubt, and the iteration it is from; None before the first."""
    holds: dict[int, Hold] = field(default_factory=dict)
    missed: tuple[float, Situation] | None = None
    """Seconds by which the prediction of the last change that failed was wrong, and for what."""

    def __post_init__(self) -> None:
        self.last = LastDecision.first(self.spec)

    @property
    def deciding(self) -> bool:
        """Whether a decision waits for its proposal. One that only weighs gives way to others."""
        return self.pending is not None and self.pending.replan.cause != "weigh"

    @property
    def settled(self) -> LastDecision:
        """The last decision that was settled."""
        return self.pending.before if self.pending else self.last


# --- what plans save ---------------------------------------------------------------------------
# A change is often found some iterations late, also after the next change of plan. So each finished
# iteration counts with the plan that it ran and the links that were slow in it.


def changed_since(
    state: DecisionState, cause: Cause, now: Situation, links: Sequence[LinkState], shown: int
) -> tuple[Changed, tuple[Past, ...]]:
    """The last change of links, and the plans that have run since, each with the slow links."""
    plans, before = state.plans, state.weighed or state.last.situation
    least = state.spec.adaptation.min_delay_ms / 1e3
    since, another = shown, change_of_links(now, before, least) is not None
    # Links are as they are now since the first window of their last change.
    began = [link.since_iteration for link in links if link.health is Health.SLOW]
    refined = max((at for at in began if at is not None), default=-1)
    if turned := turned_at(now, before, links):
        # A link that is well is not slow in the situation, so that no earlier state is known.
        ended = [
            link.since_iteration
            for link, was, is_slow in zip(links, before.slow, now.slow, strict=True)
            if was and not is_slow and link.since_iteration is not None
        ]
        since = max(ended, default=min(turned))
    elif since - refined <= REFINED:
        since, another = refined, False
    if state.turned_at is not None and cause != "weigh":
        # A decision may have had to wait since its cause was there.
        since = min(since, state.turned_at)
    if cause == "undelivered":
        since, another = -1, False  # What the change was for was never there.
    known = plans.issued | {each.version: each for each in (plans.running, plans.wanted)}
    coming = state.ledger.last_iteration + 1
    ran, past = list[tuple[int, int, int]](), list[Past]()
    for index, version in [
        *state.ledger.counted(since),
        *((coming, version) for version in {plans.running.version, plans.wanted.version}),
    ]:
        record = state.ledger.record(version)
        if record is None or version not in known:
            continue
        if cause == "undelivered" and version != plans.wanted.version:
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


def revise_saved(state: DecisionState, pending: Pending, proposal: Proposal) -> None:
    """Record what plans save in the present state of links, since this began."""
    if proposal.saving is None:
        return
    present = state.ledger.record(pending.replan.current.version)
    if present is not None and pending.changed.another:
        state.ledger.turn(present, pending.changed.since)
    for index, version, which in pending.changed.ran:
        last = None if index == pending.changed.coming else index
        state.ledger.revise(version, proposal.past[which], index, last)
