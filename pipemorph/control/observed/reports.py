"""Checks reports, and keeps what the reports of one attempt say."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from functools import lru_cache

from pipemorph.api.sections.parallelism import Parallelism
from pipemorph.api.spec import JobSpec
from pipemorph.control.observe.events import Events
from pipemorph.control.observed.links import LinkTable
from pipemorph.control.observed.stages import Footprint, StageTable, expected_times
from pipemorph.errors import PipeMorphError
from pipemorph.wire import (
    DirectiveEnvelope,
    Health,
    LinkHealthReport,
    LinkState,
    ObserverSettings,
    RailHealth,
    RailsView,
    ReductionHealth,
    StageOps,
    StragglersView,
    TransportsView,
)

RAILS_SILENT_SECONDS = 200.0
"""An agent that has not reported for longer tells nothing of the rails any more."""


class ReportRefused(PipeMorphError):
    """Base class of the refusals below. The message is one line."""


class WrongAttempt(ReportRefused):
    """The report belongs to another attempt than the current one."""


class ReplayedReport(ReportRefused):
    """The report's sequence number is not above ``last``, the last one accepted."""

    def __init__(self, sequence: int, last: int) -> None:
        super().__init__(f"sequence {sequence} is not above {last}, the last one taken")
        self.last = last


class Superseded(ReportRefused):
    """The agent has met an ingest of a higher term."""

    def __init__(self, reported: int, own: int) -> None:
        super().__init__(f"an ingest of term {reported} controls this job; this one has {own}")


class ReportMismatch(ReportRefused):
    """The report names a link, stage or replica that the job does not have, in ``field``."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


def check(report: LinkHealthReport, cut: Parallelism, *, attempt: int, after: int) -> None:
    """Raise :class:`~pipemorph.control.observed.reports.ReportRefused` unless the report belongs to
    ``attempt``, has a sequence number above ``after``, and fits the parallelism ``cut``."""
    if report.attempt != attempt:
        raise WrongAttempt(f"attempt {report.attempt} is not {attempt}, the one in progress")
    if report.sequence <= after:
        raise ReplayedReport(report.sequence, after)
    if report.is_progress:
        return
    links, columns = (cut.stages - 1, "links"), (cut.mesh.columns, "columns")
    stages = (cut.stages, "stages")
    for i, row in enumerate(report.directions):
        _within(f"directions[{i}].link", row.link, *links)
        _within(f"directions[{i}].replica", row.replica, *columns)
    for i, rest in enumerate(report.links):
        _within(f"links[{i}].link", rest.link, *links)
        _within(f"links[{i}].replica", rest.replica, *columns)
        if rest.health is Health.SLOW:
            raise ReportMismatch(f"links[{i}].health", "is slow; expected healthy or unknown")
    for i, state in enumerate(report.stages):
        _within(f"stages[{i}].stage", state.stage, *stages)
    for i, reduction in enumerate(report.reductions):
        _within(f"reductions[{i}].stage", reduction.stage, *stages)
        _within(f"reductions[{i}].replica", reduction.replica, *columns)
    rails = report.rails or RailsView()
    for i, rail in enumerate((*rails.sick, *rails.congested)):
        _within(f"rails[{i}].stage", rail.stage, *stages)
        _within(f"rails[{i}].replica", rail.replica, *columns)
    transports = report.transports or TransportsView()
    for i, end in enumerate(transports.fallen):
        _within(f"transports.fallen[{i}].link", end.link, *links)
        _within(f"transports.fallen[{i}].replica", end.replica, *columns)
    _as_many("transports.links", len(transports.links), *links)
    stragglers = report.stragglers or StragglersView()
    for i, slow in enumerate(stragglers.slowest):
        _within(f"stragglers.slowest[{i}].stage", slow.stage, *stages)
        _within(f"stragglers.slowest[{i}].column", slow.column or 0, *columns)
    _as_many("stragglers.paces", len(stragglers.paces), *stages)


def _within(field: str, value: int, count: int, what: str) -> None:
    if value >= count:
        raise ReportMismatch(field, f"is {value}; the job has {count} {what}")


def _as_many(field: str, found: int, count: int, what: str) -> None:
    if found not in (0, count):
        raise ReportMismatch(field, f"has {found} values; the job has {count} {what}")


def settings_of(spec: JobSpec) -> ObserverSettings:
    """What the agent of a job has to know of its spec."""
    adaptation = spec.adaptation
    settings = ObserverSettings(
        min_delay=adaptation.min_delay_ms / 1e3,
        stale_after=adaptation.stale_after_seconds,
        rails=list(spec.transport.rdma.devices),
        offloads=bool(adaptation.allow_offload and adaptation.host_memory),
        ops=[
            _ops(stage.forward, stage.backward_input, stage.backward_weight)
            for stage in expected_times(spec) or ()
        ],
    )
    revision = hashlib.blake2s(settings.model_dump_json().encode(), digest_size=8).hexdigest()
    return settings.model_copy(update={"revision": revision})


@lru_cache(4096)
def _ops(forward: float, backward_input: float, backward_weight: float) -> StageOps:
    """Kept: most stages of a job are alike, and a host restores a thousand jobs at once."""
    return StageOps(forward=forward, backward_input=backward_input, backward_weight=backward_weight)


class Observed:
    """What one attempt's reports say: the newest state of everything.

    ``footprints``: from an earlier attempt; they remain valid.
    """

    def __init__(
        self, spec: JobSpec, *, footprints: Sequence[Footprint] = (), events: Events
    ) -> None:
        self._spec = spec
        self.sequence = 0
        self.state = "starting"
        self.message: str | None = None
        self.iteration = 0
        self.observed_plan_version = self.applied_plan_version = 0
        self.plan_issued_at: float | None = None
        self.stages = StageTable(spec, footprints)
        self.links = LinkTable(
            spec.parallelism.mesh, stale_after=spec.adaptation.stale_after_seconds
        )
        self.transports = TransportsView(links=("",) * (spec.parallelism.stages - 1))
        self.stragglers = StragglersView()
        self._rails = RailsView()
        self._reductions: dict[tuple[int, int], ReductionHealth] = {}
        self._settings = settings_of(spec)
        self._events = events
        self._memory = secrets.token_hex(8)
        self._heard_at = float("-inf")
        self._known = False
        """Whether any link was known, since they last were all unknown."""

    def take(self, report: LinkHealthReport, now: float) -> DirectiveEnvelope:
        """Process a report that passed :func:`check`, and answer it. ``now``: wall clock,
        seconds."""
        self._heard_at = now
        self.sequence = report.sequence
        self.state, self.message = report.state, report.message
        self.iteration = report.iteration
        self.observed_plan_version = report.observed_plan_version
        self.applied_plan_version = report.applied_plan_version
        known = report.observed_plan_version == self.newest_plan_version
        self.plan_issued_at = report.plan_issued_at if known else 0.0
        slow = self.links.begin() if report.fresh else []
        if not report.fresh:
            self.links.forget()
        self.links.take(report.directions, report.links, now)
        self._known |= self.links.any_known
        for state in report.stages:
            self.stages.take(state)
        if report.reductions:
            for reduction in report.reductions:
                self._reductions[reduction.stage, reduction.replica] = reduction
            self.stages.reduce(self._exposed())
        self._rails = report.rails or self._rails
        self.transports = report.transports or self.transports
        self.stragglers = report.stragglers or self.stragglers
        for event in report.events:
            self._events.add(now, event.iteration, event.text)
        stale = report.settings != self._settings.revision
        return DirectiveEnvelope(
            memory=self._memory, settings=self._settings if stale else None, slow=slow
        )

    def change_layout(self, slow: Sequence[LinkState] | None) -> None:
        """Forget what is known of links and reductions: their ranks are elsewhere now, or hold
        other layers. ``slow``: of the links, for the agent that starts; None: these are as they
        were."""
        spec = self._spec
        if slow is not None:
            self.links = LinkTable(
                spec.parallelism.mesh, stale_after=spec.adaptation.stale_after_seconds
            )
            self.links.restore(slow)
            self.transports = TransportsView(links=("",) * (spec.parallelism.stages - 1))
        self._reductions = {}
        self.stages.reduce({})

    @property
    def newest_plan_version(self) -> int:
        """Version of the newest plan of the agent and its ranks. :attr:`plan_issued_at`: when it
        was issued; 0 if the ranks have it from another agent, None if the agent does not say."""
        return max(self.observed_plan_version, self.applied_plan_version)

    def reductions(self) -> tuple[ReductionHealth, ...]:
        """One state per group that has reported, by stage."""
        return tuple(self._reductions[key] for key in sorted(self._reductions))

    def _exposed(self) -> dict[int, float]:
        """What follows the last op of each stage, of its slowest group, in seconds."""
        found: dict[int, float] = {}
        for state in self._reductions.values():
            found[state.stage] = max(found.get(state.stage, 0.0), state.exposed)
        return found

    def rails(self, now: float) -> RailsView:
        """The rails, of which nothing is known while the agent is silent."""
        rails = self._rails
        if now - self._heard_at <= RAILS_SILENT_SECONDS:
            return rails
        return RailsView(RailHealth.UNKNOWN, rails.ports, rails.expected, silent=rails.ports)

    def adopt(self, other: Observed) -> None:
        """Show the rails, transports, stragglers and reductions of another one of the same attempt,
        until the agent has told everything again."""
        self.transports, self.stragglers = other.transports, other.stragglers
        self._rails, self._reductions = other._rails, dict(other._reductions)
        self._heard_at = other._heard_at

    def fell_silent(self, now: float) -> bool:
        """Whether all links of a training job have become silent. True once, until there are new
        samples."""
        if self.state != "training" or not self._known:
            return False
        if self.links.is_silent(now) or not self.links.any_known:
            self._known = False
            return True
        return False
