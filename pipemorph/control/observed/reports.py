"""Checks reports, and keeps what those of one attempt say.

A plan has one one-way delay per link. So a link is as slow as its slowest direction in its slowest
column: an activation and its gradient cross the link once each way, and the slower way determines
the slackness that is needed.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from pipemorph.api.mesh import MeshShape
from pipemorph.api.sections.parallelism import Parallelism
from pipemorph.api.spec import JobSpec
from pipemorph.control.observe.events import Events
from pipemorph.control.observed.stages import Footprint, StageTable, expected_times
from pipemorph.errors import PipeMorphError
from pipemorph.wire import (
    MOST_SLOW,
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

ALIKE = 1 / 16
"""Relative difference of two directions' wire times within which either may be the longer one: so
much may have changed since it was reported. A narrow one counts, since what is narrow is told from
a delay with some windows more in one direction than in the other."""


States = tuple[LinkState, ...]
"""One state per link."""
Slow = dict[tuple[int, str], LinkState]
"""The slow directions of one link, by column and direction."""
RAILS_SILENT_SECONDS = 200.0
"""An agent that has not reported for longer tells nothing of the rails any more."""


class LinkTable:
    """The links of one attempt. A report costs what it has; reading costs nothing while it is
    unchanged, else the number of links."""

    def __init__(self, mesh: MeshShape, *, stale_after: float) -> None:
        self._mesh, self._stale_after = mesh, stale_after
        self._rest: list[LinkState | None] = [None] * (mesh.stages - 1)
        self._slow: list[Slow] = [{} for _ in self._rest]
        self._count = 0
        self._inside = [a == b for a, b in zip(mesh.placed, mesh.placed[1:], strict=False)]
        """Whether a link is within a rank, where nothing is sent."""
        self._unknown = tuple(self._merged(i, (), None) for i in range(len(self._rest)))
        self._states: list[LinkState] = list(self._unknown)
        self._all: States | None = self._unknown
        self._heard_at = float("-inf")
        self._remembered: list[LinkState] = []
        self._since: dict[int, float] = {}
        """Links with slow directions: when the first of these was found."""

    # --- reports --------------------------------------------------------------------------

    def take(self, directions: Sequence[LinkState], links: Sequence[LinkState], now: float) -> None:
        """Process the states of a report, which may be few or none."""
        self._heard_at = now
        changed = {row.link for row in links} | {row.link for row in directions}
        for row in directions:
            self._put(row)
        for rest in links:
            self._rest[rest.link] = rest
        for link in changed:
            if not self._slow[link]:
                self._since.pop(link, None)
            elif any(row.health is Health.SLOW for row in self._slow[link].values()):
                self._since.setdefault(link, now)
        self._refresh(changed)

    def _put(self, row: LinkState) -> None:
        slow, key = self._slow[row.link], (row.replica, row.direction)
        self._count -= key in slow
        if row.health is Health.HEALTHY:
            slow.pop(key, None)
        else:
            slow[key] = row
            self._count += 1

    def _refresh(self, links: Collection[int]) -> None:
        for link in links:
            state = self._merged(link, self._slow[link].values(), self._rest[link])
            if state.health is Health.SLOW:
                state = replace(state, since=self._since.get(link))
            self._states[link] = state
        if links:
            self._all = None

    def begin(self) -> list[LinkState]:
        """The slow directions, for an agent that has just started: what it is told of them is all
        that it knows of the time before it. At most ``MOST_SLOW``; the others are forgotten."""
        known = self.slow_directions()[:MOST_SLOW]
        kept = {row.key for row in known}
        for link, slow in enumerate(self._slow):
            gone = [key for key in slow if (link, *key) not in kept]
            for key in gone:
                del slow[key]
                self._count -= 1
            if gone:
                self._refresh((link,))
        return known

    # --- what is known --------------------------------------------------------------------

    @property
    def any_slow(self) -> bool:
        """Whether any direction of any link is slow, with or without recent samples."""
        return self._count > 0

    @property
    def any_known(self) -> bool:
        """Whether the last report of any link knew its state."""
        return self._all is not self._unknown and any(
            state.health is not Health.UNKNOWN
            for state, inside in zip(self._states, self._inside, strict=True)
            if not inside
        )

    def is_silent(self, now: float) -> bool:
        """Whether there has been no report for longer than ``stale_after``."""
        return now - self._heard_at > self._stale_after

    def states(self, now: float) -> States:
        """One state per link. The states of an agent that is silent are unknown."""
        if self.is_silent(now):
            return self._unknown
        if self._all is None:
            self._all = tuple(self._states)
        return self._all

    def _merged(
        self, link: int, directions: Iterable[LinkState], rest: LinkState | None
    ) -> LinkState:
        """The state of a link from those of its directions: of the slow ones, if there are any.
        Unknown if one that was slow is silent now, whatever the others say."""
        if self._inside[link]:
            return LinkState(link, Health.HEALTHY)
        known = list(directions)
        slow = [row for row in known if row.health is Health.SLOW]
        if not slow:
            if known or rest is None or rest.health is Health.UNKNOWN:
                return LinkState(link, Health.UNKNOWN)
            return replace(rest, column=self._mesh.column_name(rest.replica))
        longest = max(row.wire_time for row in slow)
        near = [row for row in slow if row.wire_time >= (1 - ALIKE) * longest]
        worst = max(near, key=lambda row: (row.transfer, row.wire_time))
        since = [row.since_iteration for row in slow if row.since_iteration is not None]
        return replace(
            worst,
            delay=max(row.delay for row in slow),
            wire_time=longest,
            confidence=max(row.confidence for row in slow),
            in_doubt=any(row.in_doubt for row in slow),
            since_iteration=min(since) if since else None,
            failed_over=any(row.failed_over for row in slow),
            column=self._mesh.column_name(worst.replica),
        )

    # --- snapshots ------------------------------------------------------------------------

    def slow_directions(self) -> list[LinkState]:
        """What a fresh agent, or a snapshot, needs of the directions that are slow; or those of
        :meth:`restore`, as long as no report has told of any."""
        if not self._count:
            return self._remembered
        return [row.without_windows() for slow in self._slow for row in slow.values()]

    def slow_since(self) -> dict[int, float]:
        """When each link with slow directions was found to have one, for a snapshot."""
        return dict(self._since)

    def restore(self, rows: Iterable[LinkState], since: Mapping[int, float] | None = None) -> None:
        """Remember directions that were slow before the host restarted, and since when."""
        self._remembered = [row for row in rows if row.link < len(self._rest)]
        links = {row.link for row in self._remembered}
        self._since = {link: at for link, at in (since or {}).items() if link in links}

    def forget(self) -> None:
        """Drop what :meth:`restore` set: the agent remembers by itself."""
        self._remembered = []


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
