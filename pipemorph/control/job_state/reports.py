"""Checks reports, and holds the state of one attempt from them.

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

from pipemorph.control.job_state.stages import MicrobatchFootprint, StageTable, get_expected_times
from pipemorph.detection.event_log import EventLog
from pipemorph.errors import PipeMorphError
from pipemorph.protocol import (
    MOST_SLOW,
    DirectiveEnvelope,
    Health,
    LinkHealthReport,
    LinkState,
    ObserverSettings,
    RailHealth,
    RailsView,
    ReductionHealth,
    StatedOpTimes,
    StragglersView,
    TransportsView,
)
from pipemorph.spec.job_spec import JobSpec
from pipemorph.spec.mesh import MeshShape
from pipemorph.spec.sections.parallelism import Parallelism

ALIKE_WIRE_TIMES = 1 / 16
"""Relative difference of two directions' wire times within which either may be the longer one,
since it may have changed by as much since the report. Of these a narrow one counts: in one
direction it may take some windows more to distinguish narrow from late."""


LinkStates = tuple[LinkState, ...]
"""States by link."""
SlowDirections = dict[tuple[int, str], LinkState]
"""Slow directions of one link, by column and direction."""
RAILS_SILENT_SECONDS = 200.0
"""Seconds without a report of the agent after which rails are unknown."""


class LinkTable:
    """Links of one attempt. A report costs time by its rows. Reading is free while nothing has
    changed, else it costs time by the number of links."""

    def __init__(self, mesh: MeshShape, *, stale_after: float) -> None:
        self._mesh, self._stale_after = mesh, stale_after
        self._healthy_states: list[LinkState | None] = [None] * (mesh.stages - 1)
        self._slow: list[SlowDirections] = [{} for _ in self._healthy_states]
        self._slow_count = 0
        self._within_rank = [
            a == b for a, b in zip(mesh.pp_indices, mesh.pp_indices[1:], strict=False)
        ]
        """True for links within a rank, where nothing is sent."""
        self._unknown = tuple(
            self._merge_directions(i, (), None) for i in range(len(self._healthy_states))
        )
        self._states: list[LinkState] = list(self._unknown)
        self._all_states: LinkStates | None = self._unknown
        self._reported_at = float("-inf")
        self._remembered_directions: list[LinkState] = []
        self._slow_since: dict[int, float] = {}
        """Time at which the first slow direction of a link was found, by link."""

    # --- reports --------------------------------------------------------------------------

    def process_states(
        self, directions: Sequence[LinkState], links: Sequence[LinkState], now: float
    ) -> None:
        """Process the states of a report, which may be few or none."""
        self._reported_at = now
        changed = {row.link for row in links} | {row.link for row in directions}
        for row in directions:
            self._update_direction(row)
        for rest in links:
            self._healthy_states[rest.link] = rest
        for link in changed:
            if not self._slow[link]:
                self._slow_since.pop(link, None)
            elif any(row.health is Health.SLOW for row in self._slow[link].values()):
                self._slow_since.setdefault(link, now)
        self._update_links(changed)

    def _update_direction(self, row: LinkState) -> None:
        slow, key = self._slow[row.link], (row.replica, row.direction)
        self._slow_count -= key in slow
        if row.health is Health.HEALTHY:
            slow.pop(key, None)
        else:
            slow[key] = row
            self._slow_count += 1

    def _update_links(self, links: Collection[int]) -> None:
        """Merge the states of links that have changed."""
        for link in links:
            state = self._merge_directions(
                link, self._slow[link].values(), self._healthy_states[link]
            )
            if state.health is Health.SLOW:
                state = replace(state, since=self._slow_since.get(link))
            self._states[link] = state
        if links:
            self._all_states = None

    def begin_agent(self) -> list[LinkState]:
        """Slow directions for an agent that has just started, its only memory of the time before.
        At most ``MOST_SLOW``; the others are forgotten."""
        known = self.list_slow_directions()[:MOST_SLOW]
        sent = {row.key for row in known}
        for link, slow in enumerate(self._slow):
            gone = [key for key in slow if (link, *key) not in sent]
            for key in gone:
                del slow[key]
                self._slow_count -= 1
            if gone:
                self._update_links((link,))
        return known

    # --- states ---------------------------------------------------------------------------

    @property
    def any_slow(self) -> bool:
        """True if any direction of any link is slow, with or without recent samples."""
        return self._slow_count > 0

    @property
    def any_known(self) -> bool:
        """True if the last report knew the state of any link."""
        return self._all_states is not self._unknown and any(
            state.health is not Health.UNKNOWN
            for state, inside in zip(self._states, self._within_rank, strict=True)
            if not inside
        )

    def is_silent(self, now: float) -> bool:
        """True if there has been no report for longer than ``stale_after``."""
        return now - self._reported_at > self._stale_after

    def get_states(self, now: float) -> LinkStates:
        """States by link; unknown while the agent is silent."""
        if self.is_silent(now):
            return self._unknown
        if self._all_states is None:
            self._all_states = tuple(self._states)
        return self._all_states

    def _merge_directions(
        self, link: int, directions: Iterable[LinkState], rest: LinkState | None
    ) -> LinkState:
        """Merge the states of a link's directions: of the slow ones, if there are any. Unknown if
        one that was slow is silent now, whatever the state of the others."""
        if self._within_rank[link]:
            return LinkState(link, Health.HEALTHY)
        known = list(directions)
        slow = [row for row in known if row.health is Health.SLOW]
        if not slow:
            if known or rest is None or rest.health is Health.UNKNOWN:
                return LinkState(link, Health.UNKNOWN)
            return replace(rest, column=self._mesh.format_column_name(rest.replica))
        longest = max(row.wire_time for row in slow)
        near = [row for row in slow if row.wire_time >= (1 - ALIKE_WIRE_TIMES) * longest]
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
            column=self._mesh.format_column_name(worst.replica),
        )

    # --- snapshots ------------------------------------------------------------------------

    def list_slow_directions(self) -> list[LinkState]:
        """Slow directions for a new agent or a snapshot; restored ones until a report has some."""
        if not self._slow_count:
            return self._remembered_directions
        return [row.without_windows() for slow in self._slow for row in slow.values()]

    def get_slow_since(self) -> dict[int, float]:
        """Time at which a link was found to be slow, by link, for a snapshot."""
        return dict(self._slow_since)

    def restore_directions(
        self, rows: Iterable[LinkState], since: Mapping[int, float] | None = None
    ) -> None:
        """Restore directions that were slow before the host restarted, and the times since."""
        self._remembered_directions = [row for row in rows if row.link < len(self._healthy_states)]
        links = {row.link for row in self._remembered_directions}
        self._slow_since = {link: at for link, at in (since or {}).items() if link in links}

    def forget_restored(self) -> None:
        """Drop the directions of :meth:`restore_directions`: the agent remembers them itself."""
        self._remembered_directions = []


class ReportRefused(PipeMorphError):
    """Base class of the refusals below. The message is one line."""


class WrongAttempt(ReportRefused):
    """Raised if a report belongs to another attempt than the current one."""


class ReplayedReport(ReportRefused):
    """Raised if a report's sequence number is not above ``last``, the last one accepted."""

    def __init__(self, sequence: int, last: int) -> None:
        super().__init__(f"sequence {sequence} is not above {last}, the last one accepted")
        self.last = last


class SupersededIngest(ReportRefused):
    """Raised if the agent has seen an ingest of a higher term."""

    def __init__(self, reported: int, own: int) -> None:
        super().__init__(f"an ingest of term {reported} controls this job; this one has term {own}")


class ReportMismatch(ReportRefused):
    """Raised if ``field`` of a report names a link, stage or replica that the job does not have."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


def check_report(report: LinkHealthReport, cut: Parallelism, *, attempt: int, after: int) -> None:
    """Raise :class:`~pipemorph.control.job_state.reports.ReportRefused` unless the report belongs
    to ``attempt``, has a sequence number above ``after``, and fits the parallelism ``cut``."""
    if report.attempt != attempt:
        raise WrongAttempt(f"attempt {report.attempt} is not the attempt in progress, {attempt}")
    if report.sequence <= after:
        raise ReplayedReport(report.sequence, after)
    if report.is_progress:
        return
    links, columns = (cut.stages - 1, "links"), (cut.mesh.columns, "columns")
    stages = (cut.stages, "stages")
    for i, row in enumerate(report.directions):
        _check_index(f"directions[{i}].link", row.link, *links)
        _check_index(f"directions[{i}].replica", row.replica, *columns)
    for i, rest in enumerate(report.links):
        _check_index(f"links[{i}].link", rest.link, *links)
        _check_index(f"links[{i}].replica", rest.replica, *columns)
        if rest.health is Health.SLOW:
            raise ReportMismatch(f"links[{i}].health", "is slow; expected healthy or unknown")
    for i, state in enumerate(report.stages):
        _check_index(f"stages[{i}].stage", state.stage, *stages)
    for i, reduction in enumerate(report.reductions):
        _check_index(f"reductions[{i}].stage", reduction.stage, *stages)
        _check_index(f"reductions[{i}].replica", reduction.replica, *columns)
    rails = report.rails or RailsView()
    for i, rail in enumerate((*rails.faulty, *rails.congested)):
        _check_index(f"rails[{i}].stage", rail.stage, *stages)
        _check_index(f"rails[{i}].replica", rail.replica, *columns)
    transports = report.transports or TransportsView()
    for i, end in enumerate(transports.fallen):
        _check_index(f"transports.fallen[{i}].link", end.link, *links)
        _check_index(f"transports.fallen[{i}].replica", end.replica, *columns)
    _check_length("transports.links", len(transports.links), *links)
    stragglers = report.stragglers or StragglersView()
    for i, slow in enumerate(stragglers.slowest):
        _check_index(f"stragglers.slowest[{i}].stage", slow.stage, *stages)
        _check_index(f"stragglers.slowest[{i}].column", slow.column or 0, *columns)
    _check_length("stragglers.paces", len(stragglers.paces), *stages)


def _check_index(field: str, value: int, count: int, what: str) -> None:
    """Raise :class:`ReportMismatch` unless an index is below the job's ``count``."""
    if value >= count:
        raise ReportMismatch(field, f"is {value}; the job has {count} {what}")


def _check_length(field: str, found: int, count: int, what: str) -> None:
    """Raise :class:`ReportMismatch` unless a list is empty or has the job's ``count``."""
    if found not in (0, count):
        raise ReportMismatch(field, f"has {found} values; the job has {count} {what}")


def build_observer_settings(spec: JobSpec) -> ObserverSettings:
    """Settings of the job's agent, from the spec."""
    adaptation = spec.adaptation
    settings = ObserverSettings(
        min_delay=adaptation.min_delay_ms / 1e3,
        stale_after=adaptation.stale_after_seconds,
        rails=list(spec.transport.rdma.devices),
        offloads=bool(adaptation.allow_offload and adaptation.host_memory),
        ops=[
            _make_stage_ops(stage.forward, stage.backward_input, stage.backward_weight)
            for stage in get_expected_times(spec) or ()
        ],
    )
    revision = hashlib.blake2s(settings.model_dump_json().encode(), digest_size=8).hexdigest()
    return settings.model_copy(update={"revision": revision})


@lru_cache(4096)
def _make_stage_ops(forward: float, backward_input: float, backward_weight: float) -> StatedOpTimes:
    """Make op times. Cached: stages are alike, and a host restores a thousand jobs at once."""
    return StatedOpTimes(
        forward=forward, backward_input=backward_input, backward_weight=backward_weight
    )


class JobState:
    """State of one attempt, from its newest reports.

    ``footprints``: from an earlier attempt; they remain valid.
    """

    def __init__(
        self, spec: JobSpec, *, footprints: Sequence[MicrobatchFootprint] = (), events: EventLog
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
        self._settings = build_observer_settings(spec)
        self._events = events
        self._memory_token = secrets.token_hex(8)
        self._reported_at = float("-inf")
        self._any_link_known = False
        """True if any link was known since all were last unknown."""

    def process_report(self, report: LinkHealthReport, now: float) -> DirectiveEnvelope:
        """Process and answer a report that passed :func:`check_report`. ``now``: wall clock."""
        self._reported_at = now
        self.sequence = report.sequence
        self.state, self.message = report.state, report.message
        self.iteration = report.iteration
        self.observed_plan_version = report.observed_plan_version
        self.applied_plan_version = report.applied_plan_version
        known = report.observed_plan_version == self.newest_plan_version
        self.plan_issued_at = report.plan_issued_at if known else 0.0
        slow = self.links.begin_agent() if report.fresh else []
        if not report.fresh:
            self.links.forget_restored()
        self.links.process_states(report.directions, report.links, now)
        self._any_link_known |= self.links.any_known
        for state in report.stages:
            self.stages.update_state(state)
        if report.reductions:
            for reduction in report.reductions:
                self._reductions[reduction.stage, reduction.replica] = reduction
            self.stages.set_reductions(self._find_exposed_reductions())
        self._rails = report.rails or self._rails
        self.transports = report.transports or self.transports
        self.stragglers = report.stragglers or self.stragglers
        for event in report.events:
            self._events.add_event(now, event.iteration, event.text)
        stale = report.settings != self._settings.revision
        return DirectiveEnvelope(
            memory=self._memory_token, settings=self._settings if stale else None, slow=slow
        )

    def change_layout(self, slow: Sequence[LinkState] | None) -> None:
        """Forget links and reductions: their ranks are at other places, or hold other layers.
        ``slow``: slow links, for the agent that starts; None: links are unchanged."""
        spec = self._spec
        if slow is not None:
            self.links = LinkTable(
                spec.parallelism.mesh, stale_after=spec.adaptation.stale_after_seconds
            )
            self.links.restore_directions(slow)
            self.transports = TransportsView(links=("",) * (spec.parallelism.stages - 1))
        self._reductions = {}
        self.stages.set_reductions({})

    @property
    def newest_plan_version(self) -> int:
        """Version of the newest plan of the agent and its ranks. :attr:`plan_issued_at`: time of
        its issue; 0 if the ranks have it from another agent, None if not reported."""
        return max(self.observed_plan_version, self.applied_plan_version)

    def list_reductions(self) -> tuple[ReductionHealth, ...]:
        """States of all groups that have reported, by stage."""
        return tuple(self._reductions[key] for key in sorted(self._reductions))

    def _find_exposed_reductions(self) -> dict[int, float]:
        """Seconds of reduction after the last op of each stage, of its slowest group."""
        found: dict[int, float] = {}
        for state in self._reductions.values():
            found[state.stage] = max(found.get(state.stage, 0.0), state.exposed)
        return found

    def get_rails(self, now: float) -> RailsView:
        """View of the rails; unknown while the agent is silent."""
        rails = self._rails
        if now - self._reported_at <= RAILS_SILENT_SECONDS:
            return rails
        return RailsView(RailHealth.UNKNOWN, rails.ports, rails.expected, silent=rails.ports)

    def take_over_views(self, other: JobState) -> None:
        """Show the rails, transports, stragglers and reductions of another controller of the same
        attempt, until the agent has reported everything again."""
        self.transports, self.stragglers = other.transports, other.stragglers
        self._rails, self._reductions = other._rails, dict(other._reductions)
        self._reported_at = other._reported_at

    def fell_silent(self, now: float) -> bool:
        """True, once, if all links of a training job have become silent since the last samples."""
        if self.state != "training" or not self._any_link_known:
            return False
        if self.links.is_silent(now) or not self.links.any_known:
            self._any_link_known = False
            return True
        return False
