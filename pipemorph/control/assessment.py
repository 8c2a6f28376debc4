"""What is known of a job now: what its reports say, as far as measured iterations confirm it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pipemorph.api.spec import JobSpec
from pipemorph.control.decide.forecast import Situation
from pipemorph.control.decide.layouts.relayout import Network
from pipemorph.control.decide.replan import Cause
from pipemorph.control.decide.route_cost import RouteCosts
from pipemorph.control.decide.triggers import Judgement, Progress
from pipemorph.control.decide.truth import BARRIER, Evidence, Sources, TruthCheck, Verdict, without
from pipemorph.control.observed.reports import Observed
from pipemorph.control.plans import Plans
from pipemorph.control.record.history import Ledger
from pipemorph.planning import StageTimes
from pipemorph.wire import LinkState

COMPARED = 4
"""Newest iterations that are compared with a prediction for changed op times."""


class Assessment:
    """The state of one attempt for decisions. ``now``: wall clock, seconds."""

    def __init__(self, spec: JobSpec, observed: Observed, ledger: Ledger, plans: Plans) -> None:
        self._spec, self._observed, self._ledger, self._plans = spec, observed, ledger, plans
        self.judgement = Judgement.first(spec)
        """The situation of the last decision."""
        self.truth = TruthCheck()
        self._route_costs = RouteCosts()

    def change_layout(self) -> None:
        """The ranks run at other places from now on, or hold other layers: op times are others."""
        self._route_costs = RouteCosts()

    # --- the situation ----------------------------------------------------------------------

    def believed(
        self, stages: tuple[StageTimes, ...], links: Sequence[LinkState], now: float
    ) -> Situation:
        """The situation without evidence that measured iterations do not confirm."""
        situation = self.measured(stages, links, now)
        self.truth.seen_well(situation.slow)
        held = self.truth.held(self._ledger.last_iteration)
        return without(situation, held, self.judgement.situation) if held else situation

    def measured(
        self, stages: tuple[StageTimes, ...], links: Sequence[LinkState], now: float
    ) -> Situation:
        """The situation as measured."""
        observed = self._observed
        situation = self.judgement.now(
            stages,
            links,
            observed.stages.rooms,
            barrier=self.barrier,
            own=observed.links.own_states(now),
        )
        return replace(situation, route_cost=self._route_costs.now)

    @property
    def barrier(self) -> bool:
        """Whether stages wait for each other between iterations. Also if the trainer sees nothing
        that makes them wait, but a plan for that did not bring what it promised."""
        objective = self._spec.schedule.objective
        if objective != "auto":
            return objective == "makespan"
        ledger = self._ledger
        seen = self.judgement.barrier if ledger.barrier is None else ledger.barrier
        return seen or self.truth.doubt(BARRIER, ledger.last_iteration) > 0

    @property
    def barrier_differs(self) -> bool:
        """Whether the plan for healthy links expects another kind of barrier."""
        return self.judgement.barrier_differs(self.barrier)

    @property
    def progress(self) -> Progress:
        """How far the attempt is."""
        newest, wanted = self._ledger.newest(), self._plans.wanted.version
        return Progress(
            last=self._ledger.last_iteration,
            finished=self._ledger.finished,
            measured=self._observed.stages.measured,
            applied=not wanted or (newest is not None and newest.plan_version >= wanted),
        )

    @property
    def attentive(self) -> bool:
        """Whether a decision waits for the next iteration, or op times."""
        waits = self.truth.waits(self._ledger.last_iteration)
        return waits or self.judgement.compares or self.barrier_differs

    def network(self, now: float) -> Network | None:
        """What another layout would be judged by; None before op times are known, or while ranks do
        not train."""
        observed, stages = self._observed, self._observed.stages.times()
        iterations = self._ledger.under(self._plans.wanted.version)
        if stages is None or observed.state != "training" or not iterations:
            return None
        return Network(
            stages=stages,
            links=observed.links.states(now),
            reductions=observed.reductions(),
            barrier=self.barrier,
            left=self._spec.trainer.iterations - self._ledger.last_iteration - 1,
        )

    # --- finished iterations ----------------------------------------------------------------

    def weigh_routes(self, now: float) -> None:
        """Compare op times on delegated links with those on direct ones."""
        last, observed, plans = self._ledger.last_iteration, self._observed.stages, self._plans
        if not observed.measured or plans.unknown or not self._route_costs.due(last):
            return
        if (stages := observed.times()) is not None:
            iterations = len(self._ledger.under(plans.wanted.version))
            links = self._observed.links.states(now)
            self._route_costs.observe(
                stages,
                plans.wanted,
                iterations=iterations,
                last=last,
                failed_over=any(link.failed_over for link in links),
            )

    def compare(self, now: float) -> Verdict | None:
        """Compare newly finished iterations with predictions. Returns what the last change brought,
        once that is known."""
        truth, ledger, wanted = self.truth, self._ledger, self._plans.wanted
        verdict = truth.judge(ledger, ledger.last_iteration)
        if verdict is not None:
            return verdict
        stages = self._observed.stages.times() if truth.collects else None
        if stages is not None and not self._plans.unknown:
            situation = self.believed(stages, self._observed.links.states(now), now)
            if situation.slow_as(self.judgement.situation):
                truth.collect(ledger.under(wanted.version)[1:], wanted, situation)
        return None

    # --- evidence for a decision ------------------------------------------------------------

    def evidence(
        self, cause: Cause, sources: Sources, situation: Situation, links: Sequence[LinkState]
    ) -> tuple[Evidence, int]:
        """What finished iterations say of the ``sources`` of a decision, and the iteration in which
        these began to show."""
        last, judgement = self._ledger.last_iteration, self.judgement
        since = judgement.detectable_at(situation, links, self._observed.iteration)
        if cause in ("profile", "barrier", "steady"):
            # No link has just turned slow or well.
            since = last - COMPARED
        iterations = self._ledger.under(self._plans.wanted.version)[1:]
        otherwise = without(situation, sources, judgement.situation)
        return self.truth.evidence(sources, otherwise, iterations, since, last), since
