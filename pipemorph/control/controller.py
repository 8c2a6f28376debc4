"""The adaptation controller: reports in, directives out. No sockets, no clock, no threads.

A report updates the links' health, the stages' op times and the record of iterations. If the
situation has changed since it was last judged (a link became slow, or slower, or well again;
op times turned out other than planned with), the present plan and the alternatives are
predicted on what is measured now. A new plan is wanted only if it is predicted to save
``adaptation.minGain`` of an iteration; when the last slow link is well, the plan and paths of
the start come back. Every look at it is recorded with its reason, also when nothing changes.

Only policy ``pipemorph`` adapts. The other policies are what they are called, undisturbed or
not, so that a comparison with them means something.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipemorph.control.detector import Thresholds
from pipemorph.control.errors import ReplayedReport, ReportMismatch, WrongAttempt
from pipemorph.control.events import Event, Events
from pipemorph.control.forecast import Option, Situation
from pipemorph.control.health import Health, LinkBook, LinkHealth
from pipemorph.control.initial import initial_paths, initial_problem, initial_schedule
from pipemorph.control.limits import Limits, Room, excess
from pipemorph.control.pacing import Pacing
from pipemorph.control.profile import Footprint, StageBook, expected_times, in_flight_limits
from pipemorph.control.rails import RailBook, RailsView
from pipemorph.control.records import AdaptationRecord, Decision, Ledger
from pipemorph.control.replan import (
    Cause,
    Proposal,
    Replan,
    propose,
    shown_paths,
    shown_stages,
    shown_time,
)
from pipemorph.control.transports import TransportBook, TransportsView
from pipemorph.errors import InputError
from pipemorph.planning import Path, Plan, Policy, StageTimes
from pipemorph.planning.offload import offloaded
from pipemorph.spec import JobSpec
from pipemorph.wire import Directive, LinkHealthReport, PlanMessage

WARM_UP = 3
"""Iterations before measured op times are held against those planned with."""
PROFILE_EVERY = 50
"""Iterations between two plans for op times that changed."""
COMPARE_EVERY = 5
"""Iterations between two comparisons that found nothing."""
MATERIAL = 0.25
"""Change of a delay, as a fraction of it, that is worth another look."""
MATERIAL_OP = 0.2
"""Change of an op time, as a fraction of it, that is worth another look."""

COMMIT_AHEAD = 2
"""Iterations from the running one to the first that a directive issued now is in effect for."""

STEADY = 4
"""Holds after which a delay that has not moved is looked at once more: on a path first used
while the link was slow, what is left may be the path's own normal time."""


class Snapshot(BaseModel):
    """What outlives the host: enough that an epoch is never given to another plan, that what
    was changed is changed back, and that the records stay."""

    model_config = ConfigDict(extra="forbid")

    format: Literal[1] = 1
    attempt: int = Field(ge=0)
    epoch: int = Field(ge=0)
    sequence: int = Field(ge=0)
    directive: Directive | None = None
    wire_times: list[float] = Field(default_factory=list)
    delays: list[float] = Field(default_factory=list)
    slow: list[bool] = Field(default_factory=list)
    flaps: int = 0
    bases: list[tuple[int, int, str, dict[str, float]]] = Field(default_factory=list)
    slow_series: list[tuple[int, int, str, float]] = Field(default_factory=list)
    """Link, replica, direction and delay of what was slow when this was taken."""
    records: list[AdaptationRecord] = Field(default_factory=list)
    home: PlanMessage | None = None
    """The plan for links that are well, where measurements asked for another than the spec's."""
    footprints: list[tuple[int | None, float | None]] = Field(default_factory=list)
    """Per stage: bytes that one microbatch holds, seconds that a copy of them takes."""


@dataclass(frozen=True)
class JobView:
    """The job as last reported, for a progress line or status. Seconds."""

    state: str
    message: str | None
    iteration: int
    iteration_seconds: float | None
    bubble_fraction: float | None
    loss: float | None
    links: tuple[LinkHealth, ...]
    warmup: tuple[int, ...]
    paths: tuple[Path, ...]
    wanted_epoch: int
    observed_epoch: int
    applied_epoch: int
    peak_memory: list[int | None]
    offloaded: tuple[int, ...] = ()
    """Microbatches per iteration that the wanted plan moves to host memory, per stage."""
    rails: RailsView = field(default_factory=RailsView)
    transports: TransportsView = field(default_factory=TransportsView)


@dataclass(frozen=True)
class _Pending:
    """A decision that waits for its proposal, and what its record will say."""

    replan: Replan
    links: tuple[LinkHealth, ...]
    why: str
    detectable_at: int
    before: Situation
    """What was judged last: it is judged again by a host that takes over before the end."""


class JobController:
    """One job's loop. ``spec`` must have passed :func:`pipemorph.manifest.load_job`.

    ``on_report`` hears of every accepted report, after it was taken in. With ``deferred``,
    decisions wait in :attr:`replan` for the host to have them made elsewhere, instead of being
    made inside of :meth:`report`. Raises :class:`~pipemorph.errors.InputError` if the spec
    allows no plan at all.
    """

    def __init__(
        self,
        spec: JobSpec,
        *,
        attempt: int = 0,
        on_report: Callable[[LinkHealthReport], None] | None = None,
        deferred: bool = False,
    ) -> None:
        self.spec = spec
        # What a decision needs of it; a pod template need not travel between processes.
        self._rules = spec.model_copy(update={"template": None, "placement": None})
        self._deferred = deferred
        self.attempt = attempt
        self._on_report = on_report
        self._epoch = 0
        self._ledger = Ledger()
        self._events = Events()
        stages = spec.parallelism.stages
        self._first_limits = Limits(in_flight_limits(spec), (None,) * stages)
        self._footprints: list[Footprint] = []
        self._first_schedule = initial_schedule(spec)
        self._first_paths = initial_paths(spec)
        self._start()

    def _start(self) -> None:
        """State of one attempt: ranks start from the plan of the spec."""
        spec = self.spec
        adaptation = spec.adaptation
        self._sequence = 0
        self._state = "starting"
        self._message: str | None = None
        self._iteration = 0
        self._observed_epoch = self._applied_epoch = 0
        self._directive: Directive | None = None
        self._schedule = self._first_schedule
        self._paths = self._first_paths
        self._limits = self._first_limits
        self._home, self._home_limits = self._first_schedule, self._first_limits
        self._stages = StageBook(spec, self._footprints)
        self._footprints = self._stages.footprints
        self._links = LinkBook(
            spec.parallelism.stages - 1,
            thresholds=Thresholds(
                min_delay=adaptation.min_delay_ms / 1e3, relative=adaptation.min_delay_fraction
            ),
            stale_after=adaptation.stale_after_seconds,
        )
        links = spec.parallelism.stages - 1
        self._rails = RailBook(named=spec.transport.rdma.devices, events=self._events)
        self._transports = TransportBook(links, events=self._events)
        self._judged = Situation(
            stages=initial_problem(spec).stages,
            wire_times=(0.0,) * links,
            delays=(0.0,) * links,
            slow=(False,) * links,
            unknown=(True,) * links,
        )
        self._checked_rooms: tuple[Room, ...] = ()
        self._assumed_times = expected_times(spec) is None
        self._profiled_at: int | None = None
        self._compare_from = 0
        self._judged_after: int | None = None
        self._looked_at_steady = False
        self._foreign_plan = False
        self._heard = False
        self._pacing = Pacing()
        self._noted: set[str] = set()
        self._pending: _Pending | None = None

    # --- what is wanted -------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """Epoch of the newest directive of any attempt; 0 before the first."""
        return self._epoch

    def directive(self, after: int = 0) -> Directive | None:
        """The directive of this attempt, if its epoch is above ``after``."""
        wanted = self._directive
        return wanted if wanted is not None and wanted.epoch > after else None

    @property
    def wanted(self) -> Plan:
        """The plan the ranks should run: the newest directive's, else that of the spec."""
        return self._plan(self._directive.epoch if self._directive else 0)

    @property
    def records(self) -> list[AdaptationRecord]:
        """Adaptations so far, oldest first; figures after a change fill in as they come."""
        return list(self._ledger.records)

    @property
    def decisions(self) -> list[Decision]:
        """The latest looks at whether to adapt, oldest first, bounded."""
        return list(self._ledger.decisions)

    def links(self, now: float) -> tuple[LinkHealth, ...]:
        """State of each link."""
        return self._links.states(now)

    def view(self, now: float) -> JobView:
        """The job as last reported."""
        newest = self._ledger.newest()
        return JobView(
            state=self._state,
            message=self._message,
            iteration=self._iteration,
            iteration_seconds=self._ledger.recent_seconds(),
            bubble_fraction=newest.bubble_fraction if newest else None,
            loss=newest.loss if newest else None,
            links=self.links(now),
            warmup=self._schedule.warmup(),
            paths=self._paths,
            offloaded=tuple(offloaded(self._schedule, self._limits.device)),
            wanted_epoch=self._directive.epoch if self._directive else 0,
            observed_epoch=self._observed_epoch,
            applied_epoch=self._applied_epoch,
            peak_memory=self._stages.peak_memory(),
            rails=self.rails(now),
            transports=self.transports(),
        )

    def rails(self, now: float) -> RailsView:
        """State of the ranks' RDMA ports."""
        return self._rails.view(now)

    def transports(self) -> TransportsView:
        """What carries each link."""
        return self._transports.view()

    @property
    def events(self) -> tuple[Event, ...]:
        """What happened to rails and transports, oldest first, bounded."""
        return self._events.newest()

    def adopt_rails(self, other: JobController) -> None:
        """Take over what another controller of the same attempt knows of rails and transports:
        ranks repeat it once a minute only."""
        if other.attempt == self.attempt:
            self._rails, self._transports = other._rails, other._transports
            self._events = other._events

    # --- events ---------------------------------------------------------------------------

    def begin_attempt(self, attempt: int) -> None:
        """Another attempt starts, from the plan of the spec. Epochs go on growing.

        Raises ValueError unless ``attempt`` is above the present one.
        """
        if attempt <= self.attempt:
            raise ValueError(f"attempt {attempt} is not after attempt {self.attempt}")
        self.attempt = attempt
        self._ledger.new_attempt()
        self._start()

    def report(self, report: LinkHealthReport, now: float) -> None:
        """Take in a report and decide. ``now``: wall clock, seconds since the epoch.

        Raises a :class:`~pipemorph.control.errors.ReportRefused` and changes nothing if the
        report is of another attempt, was seen before or does not fit the job.
        """
        self._check(report)
        self._sequence = report.sequence
        self._state, self._message = report.state, report.message
        self._iteration = report.iteration
        self._observed_epoch = report.observed_epoch
        self._applied_epoch = report.applied_epoch
        if report.observed_epoch > self._epoch:
            # This controller lost its state. Its next epoch must still be news to the ranks.
            self._epoch = report.observed_epoch
            self._foreign_plan = True
        for profile in report.stages:
            self._stages.observe(profile)
        if report.links:
            self._links.observe(report.links, now, op_time=self._stages.longest_op)
            self._heard = True
            self._links.compare_peers()
        self._rails.observe(report.rails, report.ports, now, report.iteration)
        self._transports.observe(report.links, report.transports, now, report.iteration)
        self._ledger.add(report.iterations, self._stages.peak_memory)
        self._consider(now)
        if self._on_report is not None:
            self._on_report(report)

    def tick(self, now: float) -> None:
        """Time has passed without a report. Nothing is changed on silence; when the last link
        falls silent that is recorded."""
        if self._state != "training" or not self._heard:
            return
        if self._links.is_silent(now):
            self._heard = False
            self._keep(
                now,
                f"no samples for {self.spec.adaptation.stale_after_seconds:g} s, the links are"
                " unknown; kept the plan",
            )

    def _check(self, report: LinkHealthReport) -> None:
        if report.attempt != self.attempt:
            raise WrongAttempt(
                f"attempt {report.attempt} is not {self.attempt}, the one in progress"
            )
        if report.sequence <= self._sequence:
            raise ReplayedReport(
                f"sequence {report.sequence} is not above {self._sequence}, the last one taken"
            )
        cut = self.spec.parallelism
        for i, sample in enumerate(report.links):
            _within(f"links[{i}].link", sample.link, cut.stages - 1, "links")
            _within(f"links[{i}].replica", sample.replica, cut.replicas, "replicas")
        for i, profile in enumerate(report.stages):
            _within(f"stages[{i}].stage", profile.stage, cut.stages, "stages")
            _within(f"stages[{i}].replica", profile.replica, cut.replicas, "replicas")
        for i, rail in enumerate(report.rails):
            _within(f"rails[{i}].stage", rail.stage, cut.stages, "stages")
            _within(f"rails[{i}].replica", rail.replica, cut.replicas, "replicas")
        for i, end in enumerate(report.transports):
            _within(f"transports[{i}].link", end.link, cut.stages - 1, "links")
            _within(f"transports[{i}].replica", end.replica, cut.replicas, "replicas")

    # --- deciding -------------------------------------------------------------------------

    def _consider(self, now: float) -> None:
        """Decide if there is a cause, and if it is time."""
        if self._state != "training" or self._pending is not None:
            return
        quiet = not (self._foreign_plan or any(self._judged.slow) or self._links.any_slow)
        quiet = quiet and self._stages.rooms == self._checked_rooms
        if quiet and not self._profile_is_due():
            return  # As nearly always: every other cause has a slow link before or now.
        links = self.links(now)
        refusal = self._may_not_adapt()
        if refusal is not None:
            slow = [link for link in links if link.health is Health.SLOW]
            if slow:
                self._note(now, "policy", f"{_describe(slow)}; {refusal}")
            if (too_much := self._excess()) is not None:
                self._note(now, "memory", f"{too_much}; {refusal}")
            self._checked_rooms = self._stages.rooms
            return
        stages = self._stages.times()
        if stages is None:
            if any(link.health is Health.SLOW for link in links):
                self._note(now, "times", "a link is slow, but no stage has reported op times yet")
            return
        situation = self._situation(stages, links)
        if not self._knows_memory(now):
            return
        if any(room.device == 0 for room in situation.rooms):
            self._note(now, "memory", self._no_room(situation))
            self._checked_rooms = situation.rooms
            return
        cause = self._cause(situation)
        self._checked_rooms = situation.rooms
        if cause is None or not self._is_time(cause, links):
            return
        self._decide(cause, situation, links, now)

    def _may_not_adapt(self) -> str | None:
        if not self.spec.adaptation.enabled:
            return "adaptation is disabled in the spec"
        if self.spec.schedule.policy_kind is not Policy.PIPEMORPH:
            return f"policy {self.spec.schedule.policy} keeps its schedule and paths"
        return None

    def _situation(self, stages: tuple[StageTimes, ...], links: Sequence[LinkHealth]) -> Situation:
        """Now, with what was last judged in place of what is not known or about to change."""
        before = self._judged
        known = [
            link.health is not Health.UNKNOWN and not (link.in_doubt and before.slow[i])
            for i, link in enumerate(links)
        ]
        return Situation(
            stages=stages,
            wire_times=tuple(
                link.wire_time if known[i] else before.wire_times[i] for i, link in enumerate(links)
            ),
            delays=tuple(
                link.delay if known[i] else before.delays[i] for i, link in enumerate(links)
            ),
            slow=tuple(
                link.health is Health.SLOW if known[i] else before.slow[i]
                for i, link in enumerate(links)
            ),
            unknown=tuple(link.health is Health.UNKNOWN for link in links),
            rooms=self._stages.rooms,
        )

    def _excess(self) -> str | None:
        """Where the wanted plan holds more than there is room for; None if nowhere."""
        dispatch = self.spec.schedule.dispatch_kind
        return excess(self._schedule, self._limits, self._stages.rooms, dispatch)

    def _knows_memory(self, now: float) -> bool:
        """Whether a limit in bytes is one in microbatches already. A rank says with its first
        profile what a microbatch holds, or never does: then the limit cannot be held."""
        unknown = [i for i, f in enumerate(self._footprints) if not f.activation_bytes]
        if self.spec.schedule.activation_memory is None or not unknown:
            return True
        if self._stages.measured:
            self._note(
                now,
                "bytes",
                f"activationMemory does not limit {shown_stages(unknown)}: not measured there what"
                " a microbatch holds; give inFlightLimit",
            )
        return self._stages.measured

    def _no_room(self, situation: Situation) -> str:
        stage = next(i for i, room in enumerate(situation.rooms) if room.device == 0)
        return (
            f"a microbatch holds {situation.stages[stage].activation_bytes} bytes on stage {stage},"
            f" more than activationMemory, {self.spec.schedule.activation_memory} bytes: no plan"
            " fits; kept the plan"
        )

    def _cause(self, now: Situation) -> Cause | None:
        """Why the situation deserves another judgement than the last one, if it does."""
        if self._foreign_plan:
            return "restart"
        before = self._judged
        if now.rooms != before.rooms and self._excess() is not None:
            return "memory"
        links = range(len(now.slow))
        if any(now.slow[i] and not before.slow[i] for i in links):
            return "slow"
        if any(before.slow[i] and not now.slow[i] for i in links):
            return "recovered"
        change = [now.delays[i] - before.delays[i] for i in links]
        least = self.spec.adaptation.min_delay_ms / 1e3
        material = [max(least, MATERIAL * before.delays[i]) for i in links]
        if any(now.slow[i] and change[i] > material[i] for i in links):
            return "worse"
        if any(now.slow[i] and -change[i] > material[i] for i in links):
            return "eased"
        if self._is_steady(now):
            return "steady"
        if self._profile_is_due() and self._differs(now):
            return "profile"
        return None

    def _is_steady(self, now: Situation) -> bool:
        since = self._judged_after
        if since is None or self._looked_at_steady or self._paths == self._first_paths:
            return False
        waited = self._ledger.last_iteration - since
        return any(now.slow) and waited >= STEADY * self._pacing.hold

    def _profile_is_due(self) -> bool:
        """Whether to hold op times against those planned with: every few iterations, since that
        takes longer than all else a report does while the links are well."""
        last = self._ledger.last_iteration
        if not self._stages.measured or last < self._compare_from:
            return False
        if self._profiled_at is None:
            return self._ledger.finished >= WARM_UP
        return last - self._profiled_at >= PROFILE_EVERY

    def _differs(self, now: Situation) -> bool:
        """Whether op times or normal wire times are not what was planned with."""
        self._compare_from = self._ledger.last_iteration + COMPARE_EVERY
        if self._assumed_times and self._profiled_at is None:
            return True
        before = self._judged
        scale = max(op for stage in now.stages for op in _ops(stage))
        ops = any(
            abs(new - old) > MATERIAL_OP * max(old, scale / 2)
            for new_stage, old_stage in zip(now.stages, before.stages, strict=True)
            for new, old in zip(_ops(new_stage), _ops(old_stage), strict=True)
        )
        wires = any(
            abs(new - old) > MATERIAL_OP * scale
            for new, old in zip(now.wire_times, before.wire_times, strict=True)
        )
        # What a plan may hold, and a shorter backward that was not known of.
        limits = any(
            (new.in_flight_limit, new.device_limit) != (old.in_flight_limit, old.device_limit)
            or (old.fused_backward is None and new.fusing_pays)
            for new, old in zip(now.stages, before.stages, strict=True)
        )
        return ops or wires or limits

    def _is_time(self, cause: Cause, links: Sequence[LinkHealth]) -> bool:
        """Whether a directive may be issued for this cause now. If not, it will be looked at
        again with the next report."""
        finished = self._ledger.last_iteration
        if cause == "memory":
            return True
        if cause in ("slow", "restart"):
            return self._pacing.may_hurry(finished)
        if finished == self._judged_after:
            return False  # A delay that varies is looked at once per iteration.
        if cause == "worse":
            return self._pacing.may_hurry(finished)
        wanted = self._directive.epoch if self._directive else 0
        applied = self._ledger.newest()
        if wanted and (applied is None or applied.epoch < wanted):
            return False
        if not self._pacing.is_settled(finished):
            return False
        if cause == "recovered":
            well = [
                link.since_iteration
                for link, was_slow in zip(links, self._judged.slow, strict=True)
                if was_slow and link.health is Health.HEALTHY and link.since_iteration is not None
            ]
            return self._pacing.may_return(finished, max(well, default=0))
        return True

    def _decide(
        self, cause: Cause, situation: Situation, links: Sequence[LinkHealth], now: float
    ) -> None:
        """Judge the situation: at once, or leave it to the host to have it judged."""
        turned = [
            link.since_iteration
            for link, was, is_slow in zip(links, self._judged.slow, situation.slow, strict=True)
            if was != is_slow and link.since_iteration is not None
        ]
        before = self._judged
        self._judged, self._judged_after = situation, self._ledger.last_iteration
        self._looked_at_steady = cause == "steady"
        if cause in ("profile", "memory"):
            self._profiled_at = self._ledger.last_iteration
        self._pending = _Pending(
            Replan(
                spec=self._rules,
                cause=cause,
                situation=situation,
                schedule=self._schedule,
                paths=self._paths,
                limits=self._limits,
                home=self._home,
                first_paths=self._first_paths,
                home_limits=self._home_limits,
                # After a lost state the ranks run a plan not known here: nothing to compare.
                lost=self._foreign_plan,
                remaining=self._left(),
                change_seconds=self._ledger.change_seconds,
            ),
            links=tuple(links),
            why=_why(cause, links),
            # Other causes have no first window: they are seen when they are looked for.
            detectable_at=min([*turned, self._iteration]),
            before=before,
        )
        if not self._deferred:
            self.settle(self._pending.replan, propose(self._pending.replan), now)

    def _left(self) -> int:
        """Iterations that a directive issued now would still be in effect for."""
        running = self._ledger.last_iteration + 1
        return self.spec.trainer.iterations - running - COMMIT_AHEAD

    @property
    def replan(self) -> Replan | None:
        """The decision that waits for :meth:`settle`, in a controller that defers them. Until
        then reports are taken in, and no other decision is asked for."""
        return self._pending.replan if self._pending is not None else None

    def settle(self, asked: Replan, proposal: Proposal, now: float) -> None:
        """Act on what :func:`~pipemorph.control.replan.propose` made of ``asked``. One that is
        no longer waited for, since another attempt began, is dropped."""
        pending = self._pending
        if pending is None or pending.replan is not asked:
            return
        self._pending = None
        if proposal.chosen is None:
            self._keep(now, f"{pending.why}; {proposal.reason}")
            return
        self._issue(pending, proposal.chosen, proposal, now)
        if asked.cause in ("profile", "memory") and not any(asked.situation.slow):
            self._home, self._home_limits = proposal.chosen.schedule, proposal.chosen.limits

    def _issue(self, pending: _Pending, chosen: Option, proposal: Proposal, now: float) -> None:
        """Make the chosen option the wanted plan, under a new epoch."""
        present = proposal.present
        cause = pending.replan.cause
        before = self._schedule.warmup()
        moved_back = chosen.delegated < sum(path is Path.DELEGATED for path in self._paths)
        returns = cause not in ("slow", "worse", "memory") and (
            chosen.schedule,
            chosen.paths,
            chosen.limits.device,
        ) == (self._home, self._first_paths, self._home_limits.device)
        old = (
            f"{shown_time(present.seconds)} with the present plan" if present else "unknown before"
        )
        reason = (
            f"{pending.why}; predicted per iteration {old}, {shown_time(chosen.seconds)} with"
            f" warm-up {'-'.join(map(str, chosen.schedule.warmup()))} and"
            f" {shown_paths(chosen.paths)}"
            f"{'; ' + proposal.reason if proposal.reason else ''}"
        )
        limits_before = self._limits
        self._epoch += 1
        self._schedule, self._paths = chosen.schedule, chosen.paths
        self._limits = chosen.limits
        self._foreign_plan = False
        self._directive = Directive(
            epoch=self._epoch,
            issued_at=now,
            reason=reason,
            plan=PlanMessage.of(self._plan(self._epoch)),
        )
        kind: Literal["adapt", "return"] = "return" if returns else "adapt"
        finished = self._ledger.last_iteration
        if cause in ("slow", "worse", "restart"):
            self._pacing.hurried(finished)
        self._pacing.issued(finished, returning=returns or moved_back)
        self._ledger.records.append(
            AdaptationRecord(
                epoch=self._epoch,
                kind=kind,
                detected_at=now,
                detected_at_iteration=self._iteration,
                detectable_at=pending.detectable_at,
                reason=reason,
                links=[
                    link.record() for link in pending.links if link.health is not Health.HEALTHY
                ],
                warmup_before=list(before),
                warmup_after=list(chosen.schedule.warmup()),
                paths=list(chosen.paths),
                predicted_seconds_before=present.seconds if present else None,
                predicted_seconds_after=chosen.seconds,
                peak_memory_before=self._stages.peak_memory(),
                device_limits_before=list(limits_before.device),
                device_limits_after=list(chosen.limits.device),
                offloaded=chosen.offloaded(),
                fused_stages=list(chosen.fused),
            )
        )
        self._log(now, kind, reason, self._epoch)

    def _plan(self, version: int) -> Plan:
        return Plan(
            version=version,
            policy=self.spec.schedule.policy_kind,
            schedule=self._schedule,
            paths=self._paths,
            in_flight_limits=self._limits.in_flight,
            dispatch=self.spec.schedule.dispatch_kind,
            device_limits=self._limits.device,
        )

    def _keep(self, now: float, reason: str) -> None:
        self._log(now, "keep", reason)

    def _note(self, now: float, topic: str, reason: str) -> None:
        """A reason that would repeat with every report: once per attempt."""
        if topic not in self._noted:
            self._noted.add(topic)
            self._keep(now, reason)

    def _log(
        self,
        now: float,
        kind: Literal["adapt", "return", "keep"],
        reason: str,
        epoch: int | None = None,
    ) -> None:
        self._ledger.decisions.append(
            Decision(at=now, iteration=self._iteration, kind=kind, reason=reason, epoch=epoch)
        )

    # --- outliving the host ---------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """What :meth:`restore` needs, as plain JSON-ready data."""
        judged = self._judged if self._pending is None else self._pending.before
        return Snapshot(
            attempt=self.attempt,
            epoch=self._epoch,
            sequence=self._sequence,
            directive=self._directive,
            wire_times=list(judged.wire_times),
            delays=list(judged.delays),
            slow=list(judged.slow),
            flaps=self._pacing.flaps,
            bases=self._links.bases(),
            slow_series=self._links.delays(),
            records=self.records,
            home=self._home_message(),
            footprints=[(f.activation_bytes, f.offload_copy) for f in self._footprints],
        ).model_dump(mode="json")

    def _home_message(self) -> PlanMessage | None:
        if (self._home, self._home_limits) == (self._first_schedule, self._first_limits):
            return None
        return PlanMessage.of(
            Plan(
                version=0,
                policy=self.spec.schedule.policy_kind,
                schedule=self._home,
                paths=self._first_paths,
                in_flight_limits=self._home_limits.in_flight,
                dispatch=self.spec.schedule.dispatch_kind,
                device_limits=self._home_limits.device,
            )
        )

    @classmethod
    def restore(
        cls,
        spec: JobSpec,
        snapshot: Mapping[str, Any],
        *,
        on_report: Callable[[LinkHealthReport], None] | None = None,
        deferred: bool = False,
    ) -> JobController:
        """A controller that goes on where a snapshot was taken. Link health refills from the
        next reports. Raises :class:`InputError` if the snapshot cannot be used."""
        try:
            saved = Snapshot.model_validate(snapshot)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise InputError(f"the saved state is unusable: {where}: {first['msg']}") from None
        self = cls(spec, attempt=saved.attempt, on_report=on_report, deferred=deferred)
        self._epoch, self._sequence = saved.epoch, saved.sequence
        self._ledger.records.extend(saved.records)
        self._pacing.flaps = saved.flaps
        links = spec.parallelism.stages - 1
        if saved.directive is not None:
            self._epoch = max(saved.epoch, saved.directive.epoch)
            plan = saved.directive.plan.plan()
            if plan.schedule.stage_count != links + 1 or len(plan.paths) != links:
                raise InputError("the saved state is of a job with another number of stages")
            self._directive = saved.directive
            self._schedule, self._paths = plan.schedule, plan.paths
            self._limits = Limits.of(plan)
        if saved.home is not None:
            home = saved.home.plan()
            if home.schedule.stage_count != links + 1:
                raise InputError("the saved state is of a job with another number of stages")
            self._home, self._home_limits = home.schedule, Limits.of(home)
        if len(saved.footprints) == links + 1:
            self._stages.restore_footprints(saved.footprints)
        if len(saved.slow) == len(saved.wire_times) == len(saved.delays) == links:
            self._judged = Situation(
                stages=self._judged.stages,
                wire_times=tuple(saved.wire_times),
                delays=tuple(saved.delays),
                slow=tuple(saved.slow),
                unknown=(True,) * links,
            )
        self._links.restore_bases(saved.bases)
        self._links.restore_delays(saved.slow_series)
        return self


def _within(field: str, value: int, count: int, what: str) -> None:
    if value >= count:
        raise ReportMismatch(field, f"is {value}; the job has {count} {what}")


def _ops(stage: StageTimes) -> tuple[float, float, float]:
    return stage.forward, stage.backward_input, stage.backward_weight


def _describe(slow: Sequence[LinkHealth]) -> str:
    return ", ".join(
        f"link {link.link} is slow by {shown_time(link.delay)} one way"
        f" ({link.direction}, {link.confidence:.0%} sure)"
        for link in slow
    )


def _why(cause: Cause, links: Sequence[LinkHealth]) -> str:
    slow = [link for link in links if link.health is Health.SLOW]
    match cause:
        case "profile":
            return "op times or wire times are not those planned with"
        case "steady":
            return f"{_describe(slow)}, for a while now"
        case "restart":
            return "the plan in effect is not one this controller knows of"
        case "memory":
            return "the plan in effect holds more than there is room for"
        case "recovered":
            return "a link recovered" + (f", {_describe(slow)}" if slow else ", none is slow")
        case _:
            return _describe(slow)


__all__ = ["JobController", "JobView", "Snapshot"]
