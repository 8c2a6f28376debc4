"""A controller's view of its job, for the progress line, report.json and status."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipemorph.control.observed.reports import Observed
from pipemorph.control.record.history import Ledger, Worth
from pipemorph.planning import Plan, Route
from pipemorph.planning.offload import most_left
from pipemorph.wire import (
    LinkState,
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
    """Of the plan that the ranks should run, which may not be in effect yet."""
    observed_plan_version: int = 0
    applied_plan_version: int = 0
    """Of the plan in effect."""
    peak_memory: tuple[int | None, ...] = ()
    """Bytes per stage, of the highest column; None if not reported."""
    offloaded: tuple[int, ...] = ()
    """Microbatches per iteration that the wanted plan offloads, per stage."""
    recomputed: tuple[int, ...] = ()
    """Those whose forward it runs again."""
    rails: RailsView = field(default_factory=RailsView)
    transports: TransportsView = field(default_factory=TransportsView)
    stragglers: StragglersView = field(default_factory=StragglersView)
    reductions: tuple[ReductionHealth, ...] = ()
    """Of every data-parallel group that has observed."""
    worth: Worth = field(default_factory=Worth)
    """What all changes of plan were worth so far."""
    own_plans: tuple[str, ...] = ()
    """Replicas that run another plan than ``warmup`` tells, and for what delays; one text each."""

    @staticmethod
    def of(observed: Observed, ledger: Ledger, wanted: Plan, now: float) -> JobView:
        """Make the view. ``now``: wall clock, seconds."""
        newest = ledger.newest()
        away = most_left(wanted)
        return JobView(
            state=observed.state,
            message=observed.message,
            iteration=observed.iteration,
            iteration_seconds=ledger.recent_seconds(),
            bubble_fraction=newest.bubble_fraction if newest else None,
            loss=newest.loss if newest else None,
            links=observed.links.states(now),
            warmup=wanted.warmup,
            routes=wanted.all_routes,
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
            own_plans=tuple(own.text for own in ledger.own_plans(wanted.version)),
        )
