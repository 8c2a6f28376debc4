"""State of a job's decisions: what is remembered from one to the next.

:mod:`pipemorph.control.decision` reads and changes it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from pipemorph.api.spec import JobSpec
from pipemorph.control.decide.replan import Replan
from pipemorph.control.decide.situation import Cause, RouteCosts, Situation, Sources
from pipemorph.control.decide.truth import Promise, Reference
from pipemorph.control.first_plan import initial_problem
from pipemorph.control.observed.reports import Observed
from pipemorph.control.observed.stages import Room, expected_times
from pipemorph.control.plans import Plans, PlanVersions
from pipemorph.control.record.history import Ledger
from pipemorph.planning import Plan, StageTimes
from pipemorph.wire import LinkState


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
    readings: tuple[tuple[StageTimes, ...], ...] = ()
    """Op times at the newest comparisons that differed, oldest first."""

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


class Pending(NamedTuple):
    """A decision that waits for its proposal, and data for its record."""

    replan: Replan
    links: tuple[LinkState, ...]
    detectable_at: int
    before: LastDecision
    """The last decision: a host that takes over meanwhile decides again from it."""
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
    turned: dict[tuple[Cause, Sources], int] = field(default_factory=dict)
    """Causes that wait for a decision, and the iteration in which each was first seen."""
    turned_at: int | None = None
    """That of the cause for which a decision was requested last."""
    weighed_at: int = -1
    """The newest iteration when the plan in effect was last compared with that of the start."""
    route_costs: RouteCosts = field(default_factory=RouteCosts)

    # --- limits of the number of changes ---
    flaps: int = 0
    """How often a link became slow again soon after its plan had returned."""
    returns_at_once: bool = False
    """Whether the plan in effect costs more than it can save once links are well."""
    hurries: int = 0
    """Directives for links that became slow, less those that are allowed again."""
    refilled_at: int = 0
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

    def __post_init__(self) -> None:
        self.last = LastDecision.first(self.spec)

    @property
    def settled(self) -> LastDecision:
        """The last decision that was settled."""
        return self.pending.before if self.pending else self.last
