"""Checks reports and collects what the reports of one attempt say."""

from __future__ import annotations

from collections.abc import Sequence

from pipemorph.api.parallelism import Parallelism
from pipemorph.api.spec import JobSpec
from pipemorph.control.observe.detector import Thresholds
from pipemorph.control.observe.events import Events
from pipemorph.control.observe.link_health import LinkBook
from pipemorph.control.observe.rail_health import RailBook
from pipemorph.control.observe.reductions import ReductionBook
from pipemorph.control.observe.stage_profile import Footprint, StageBook
from pipemorph.control.observe.stragglers import StragglerBook
from pipemorph.control.observe.transports import TransportBook
from pipemorph.errors import PipeMorphError
from pipemorph.wire import LinkHealthReport


class ReportRefused(PipeMorphError):
    """Base class of the refusals below. The message is one line."""


class WrongAttempt(ReportRefused):
    """The report belongs to another attempt than the current one."""


class ReplayedReport(ReportRefused):
    """The report's sequence number is not above ``last``, the last one accepted."""

    def __init__(self, sequence: int, last: int) -> None:
        super().__init__(f"sequence {sequence} is not above {last}, the last one taken")
        self.last = last


class ReportMismatch(ReportRefused):
    """The report names a link, stage or replica that the job does not have, in ``field``."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


def check(report: LinkHealthReport, cut: Parallelism, *, attempt: int, after: int) -> None:
    """Raise :class:`~pipemorph.control.observe.reports.ReportRefused` unless the report belongs to
    ``attempt``, has a sequence number above ``after``, and fits the parallelism ``cut``."""
    if report.attempt != attempt:
        raise WrongAttempt(f"attempt {report.attempt} is not {attempt}, the one in progress")
    if report.sequence <= after:
        raise ReplayedReport(report.sequence, after)
    for i, sample in enumerate(report.links):
        _within(f"links[{i}].link", sample.link, cut.stages - 1, "links")
        _within(f"links[{i}].replica", sample.replica, cut.mesh.columns, "columns")
    for i, profile in enumerate(report.stages):
        _within(f"stages[{i}].stage", profile.stage, cut.stages, "stages")
        _within(f"stages[{i}].replica", profile.replica, cut.mesh.columns, "columns")
    for i, reduction in enumerate(report.reductions):
        _within(f"reductions[{i}].stage", reduction.stage, cut.stages, "stages")
        _within(f"reductions[{i}].replica", reduction.replica, cut.mesh.columns, "columns")
    for i, rail in enumerate(report.rails):
        _within(f"rails[{i}].stage", rail.stage, cut.stages, "stages")
        _within(f"rails[{i}].replica", rail.replica, cut.mesh.columns, "columns")
    for i, end in enumerate(report.transports):
        _within(f"transports[{i}].link", end.link, cut.stages - 1, "links")
        _within(f"transports[{i}].replica", end.replica, cut.mesh.columns, "columns")


def _within(field: str, value: int, count: int, what: str) -> None:
    if value >= count:
        raise ReportMismatch(field, f"is {value}; the job has {count} {what}")


class Reported:
    """State of one attempt, from its reports: the newest progress, and the history of each
    measurement.

    ``footprints``: from an earlier attempt; they remain valid.
    """

    def __init__(
        self, spec: JobSpec, *, footprints: Sequence[Footprint] = (), events: Events
    ) -> None:
        adaptation = spec.adaptation
        self.sequence = 0
        self.state = "starting"
        self.message: str | None = None
        self.iteration = 0
        self.observed_plan_version = self.applied_plan_version = 0
        self.stages = StageBook(spec, footprints)
        mesh = spec.parallelism.mesh
        thresholds = Thresholds(
            min_delay=adaptation.min_delay_ms / 1e3, relative=adaptation.min_delay_fraction
        )
        self.reductions = ReductionBook(mesh, thresholds, events=events)
        self.links = LinkBook(
            mesh,
            thresholds=thresholds,
            stale_after=adaptation.stale_after_seconds,
        )
        self.rails = RailBook(named=spec.transport.rdma.devices, mesh=mesh, events=events)
        self.transports = TransportBook(mesh, events=events)
        self.stragglers = StragglerBook(spec.parallelism.stages, mesh, events)
        self._heard = False

    def take(self, report: LinkHealthReport, now: float) -> None:
        """Process a report that passed :func:`check`. ``now``: wall clock, seconds."""
        self.sequence = report.sequence
        self.state, self.message = report.state, report.message
        self.iteration = report.iteration
        self.observed_plan_version = report.observed_plan_version
        self.applied_plan_version = report.applied_plan_version
        for profile in report.stages:
            self.stages.observe(profile)
            self.stragglers.observe(profile, now, report.iteration)
        if report.reductions:
            self.reductions.observe(report.reductions, now)
            self.stages.reduce(self.reductions.exposed())
        if report.links:
            self.links.observe(report.links, now, ends=self.stages)
            self._heard = True
            self.links.compare_peers()
        self.rails.observe(report.rails, report.ports, now, report.iteration)
        self.transports.observe(report.links, report.transports, now, report.iteration)

    def fell_silent(self, now: float) -> bool:
        """Whether all links of a training job have become silent. True once, until there are new
        samples."""
        if self.state != "training" or not self._heard:
            return False
        if self.links.is_silent(now):
            self._heard = False
            return True
        return False
