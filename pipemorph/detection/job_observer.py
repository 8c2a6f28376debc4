"""Observes a job: merges the reports of its ranks into reports of states for the host.

It runs in rank 0's agent. Pure: no clock, no sockets. Ranks judge their own directions of links,
and report states that have changed (:mod:`~pipemorph.detection.rank_monitor`). The observer
adds what needs all ranks: most links late at once, usual wire times, stragglers, reductions, rails
and transports. Changes that may require another plan are reported at once: a link that became slow
or healthy, a delay that changed, an iteration that shows the gain of a new plan. Anything else goes
with the next report, one a second, or fewer if the host requests it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import repeat

from pipemorph.detection.detector import DetectorThresholds
from pipemorph.detection.event_log import EventLog
from pipemorph.detection.job_links import JobLinks, usual_times_differ
from pipemorph.detection.rail_monitor import RailMonitor
from pipemorph.detection.rank_monitor import compute_silence_limit
from pipemorph.detection.reduction_monitor import ReductionMonitor
from pipemorph.detection.report.report_builder import ReportBuilder
from pipemorph.detection.stage_monitor import StageMonitor
from pipemorph.detection.straggler_monitor import StragglerMonitor
from pipemorph.detection.transport_monitor import TransportMonitor
from pipemorph.protocol import (
    PROTOCOL,
    DirectiveEnvelope,
    Health,
    LinkHealthReport,
    LinkState,
    ObserverSettings,
)
from pipemorph.protocol.agent_messages import MOST_ITERATIONS
from pipemorph.protocol.rank_messages import RankAnswer, RankReport, RankState, find_receiving_rank
from pipemorph.spec.mesh import MeshShape

STATE_ORDER: tuple[RankState, ...] = ("starting", "training", "finished", "failed")
REPORT_SECONDS = 1.0
"""Seconds between two reports with all changes, unless the host requests fewer."""
RANK_REPORTS_PER_SECOND = 64
"""Reports a second, of all ranks together, without anything urgent."""
USUAL_TIME_CHANGE = 0.02
"""Relative change of a usual wire time that is sent to ranks."""
ATTENTIVE_ITERATIONS = 32
"""Iterations that are reported as they finish, since a decision may wait for them: after the start,
after the newest change of the plan or of a link's state, while a link is slow, and while the host
waits for iterations."""


class JobObserver:
    """Observes one attempt of a job."""

    def __init__(self, mesh: MeshShape, *, job: str, namespace: str, attempt: int) -> None:
        self._job, self._namespace, self._attempt = job, namespace, attempt
        self._settings = settings = ObserverSettings()
        self._mesh, self._events = mesh, EventLog()
        self._links = JobLinks(mesh)
        self._stages = StageMonitor(mesh.stages)
        thresholds = DetectorThresholds(min_delay=settings.min_delay)
        self._reductions = ReductionMonitor(mesh, thresholds, events=self._events)
        self._rails = RailMonitor(mesh=mesh, events=self._events)
        self._transports = TransportMonitor(mesh, events=self._events)
        self._stragglers = StragglerMonitor(mesh.stages, mesh, self._events)

        self._ranks: dict[int, tuple[RankState, float]] = {}
        """State of each rank that has reported, and the time of its last report."""
        self._states: Counter[RankState] = Counter()
        self._silent_ranks: set[int] = set()
        self._ports_by_rank: dict[int, int | None] = {}
        self._iteration = self._applied_plan_version = 0
        self._rank_pause = max(0.05, mesh.world_size / RANK_REPORTS_PER_SECOND)
        """Seconds between two reports of a rank without anything urgent."""
        self._usual_times: tuple[dict[str, float], dict[str, float]] = {}, {}
        """Usual wire times, as last sent to ranks."""
        self._most_late = False
        self._suspicions: dict[int, int] = {}
        """Newest suspicion by rank."""
        self._directions_to_restore: dict[int, list[LinkState]] = {}
        """Directions that were slow, for the rank's detectors, by rank."""
        self._iterations_delivered: list[int] = []
        """Iterations that the host has, not yet confirmed to rank 0."""
        self._to_answer: dict[int, bool] = {}
        """Ranks to be answered; True if with everything."""

        self._changes = ReportBuilder(self._events, lambda: self._settings.min_delay)
        self._state: RankState = "starting"
        self._attentive_until = 0
        self._refresh_at = self._report_at = float("-inf")
        self._urgent = True
        """True if a message or the job's state must be reported at once."""
        self._host_memory = ""
        self._is_first_report, self._host_waits = True, False
        self.report_seconds = REPORT_SECONDS
        """Seconds between two reports, as the host requests."""

    @property
    def state(self) -> RankState:
        """State of the job."""
        return self._state

    # --- reports of ranks -----------------------------------------------------------------

    def record_connection(self, rank: int) -> None:
        """Record a new connection of a rank: both sides send everything."""
        self._to_answer[rank] = True
        self._suspicions.pop(rank, None)

    def process_report(self, report: RankReport, now: float) -> None:
        """Process a report that fits the job, of one rank. ``now``: wall clock, seconds."""
        rank = report.rank
        if rank == 0:
            self._iteration = report.iteration
            if report.applied_plan_version != self._applied_plan_version:
                self._applied_plan_version = report.applied_plan_version
                self._report_next_iterations()
        before = self._ranks.get(rank)
        self._ranks[rank] = report.state, now
        if before is None or before[0] != report.state:
            self._states.subtract([before[0]] if before is not None else [])
            self._states.update([report.state])
            self._update_job_state()
        if rank in self._silent_ranks:
            self._silent_ranks.discard(rank)
            self._links.restore_rank(rank)
        self._links.process_report(report)
        if report.suspicion > self._suspicions.get(rank, 0):
            self._suspicions[rank] = report.suspicion
            self._to_answer.setdefault(rank, False)
        self._announce_most_late()
        for state in report.stages:
            self._stages.update_state(state)
            self._stragglers.update_state(state)
        if report.reduction is not None:
            self._reductions.observe_samples([report.reduction], now)
        if (
            report.rails
            or rank not in self._ports_by_rank
            or self._ports_by_rank[rank] != report.ports
        ):
            self._ports_by_rank[rank] = report.ports
            self._rails.observe_ports(report.rails, self._count_rdma_ports(), now, self._iteration)
        if report.links or report.transports:
            self._transports.observe_states(report.links, report.transports, now, self._iteration)
        if report.finished_iteration is not None:
            self._changes.add_iterations([report.finished_iteration])
            self._urgent |= self._reports_at_once
        if report.message:
            source = "" if report.message.startswith("rank ") else f"rank {rank}: "
            self.report_message(f"{source}{report.message}")

    def report_message(self, message: str) -> None:
        """Report a message."""
        self._changes.message, self._urgent = message[:1024], True

    def _count_rdma_ports(self) -> int | None:
        """Number of RDMA ports of all ranks; None until every rank has reported its number."""
        counts = list(self._ports_by_rank.values())
        if len(counts) < self._mesh.world_size or None in counts:
            return None
        return sum(count or 0 for count in counts)

    def _update_job_state(self) -> None:
        """Update the job's state: failed if one rank failed, finished if all have finished, else
        the earliest. Ranks without a report are starting, unless others are training: no iteration
        is possible without them."""
        states = set(+self._states)
        if "failed" not in states and len(self._ranks) < self._mesh.world_size:
            states.add("training" if "training" in states else "starting")
        state: RankState = "failed" if "failed" in states else min(states, key=STATE_ORDER.index)
        if state != self._state:
            self._state, self._urgent = state, True
            self._report_next_iterations()

    @property
    def _reports_at_once(self) -> bool:
        return self._host_waits or self._iteration <= self._attentive_until

    def _report_next_iterations(self) -> None:
        """Report the next iterations as they finish."""
        self._attentive_until = self._iteration + ATTENTIVE_ITERATIONS

    def _announce_most_late(self) -> None:
        """Notify ranks when most links become late at once, and when they no longer are."""
        most = self._links.most_are_late
        if most != self._most_late:
            self._most_late = most
            for rank in self._ranks:
                self._to_answer.setdefault(rank, False)

    # --- states of the job ----------------------------------------------------------------

    def update_states(self, now: float, *, refresh: bool = False) -> None:
        """Update states that have changed. Call it soon after reports, and about once a second
        without. ``refresh``: update everything, as before the last report of a job."""
        links, changes = self._links, self._changes
        refresh |= now >= self._refresh_at
        if refresh:
            self._mark_silent_ranks(now)
        moved, links.moved_directions = links.moved_directions, {}
        for key in moved:
            changes.directions.update_value(
                replace(links.get_direction(key), route="", transport="")
            )
        turned, links.turned_links = links.turned_links, {}
        for link in turned:
            changes.links.update_value(links.merge_healthy_directions(link))
        if turned and links.all_known:
            # Once its peers are known, a link that was slow from the start can be found.
            self._update_usual_times()
        if moved or turned or links.any_slow:
            self._report_next_iterations()
        if refresh or self._reports_at_once:
            for stage in self._stages.take_changed_stages():
                changes.stages.update_value(self._stages.merge_columns(stage))
            for group in self._reductions.take_changed_states():
                changes.reductions.update_value(group)
        if refresh:
            self._update_slow_changes(now)

    def _mark_silent_ranks(self, now: float) -> None:
        """Forget the links of ranks that have reported nothing for too long."""
        silent = compute_silence_limit(self._settings, self._rank_pause)
        for rank, (state, reported_at) in self._ranks.items():
            ended = state in ("finished", "failed")
            if now - reported_at > silent and rank not in self._silent_ranks and not ended:
                self._silent_ranks.add(rank)
                self._links.mark_rank_silent(rank)

    def _update_slow_changes(self, now: float) -> None:
        """Update states that change with time."""
        self._refresh_at = now + REPORT_SECONDS
        changed = self._links.take_changed_links()
        for link in changed:
            self._changes.links.update_value(self._links.merge_healthy_directions(link))
        if changed:
            self._update_usual_times()
        self._changes.rails.update_value(self._rails.build_view(now))
        self._changes.transports.update_value(self._transports.build_view())
        self._stragglers.compare_paces(now, self._iteration)
        self._changes.stragglers.update_value(self._stragglers.build_view())

    def _update_usual_times(self) -> None:
        """Compute usual wire times, and send them to ranks if they have changed."""
        usual = self._links.compute_usual_times()
        if any(map(usual_times_differ, usual, self._usual_times, repeat(USUAL_TIME_CHANGE))):
            self._usual_times = usual
            self._to_answer |= dict.fromkeys(self._ranks, True)

    def take_answers(self, connected: Collection[int]) -> list[tuple[list[int], RankAnswer]]:
        """Answers to ``connected`` ranks: lists of ranks, each with one answer for all of them."""
        alike: dict[tuple[bool, int], list[int]] = {}
        found = []
        for rank in [rank for rank in self._to_answer if rank in connected]:
            everything = self._to_answer.pop(rank)
            suspicion = self._suspicions.get(rank, 0)
            rows, reported = self._directions_to_restore.pop(rank, []), []
            if rank == 0:
                reported, self._iterations_delivered = (
                    self._iterations_delivered[:MOST_ITERATIONS],
                    self._iterations_delivered[MOST_ITERATIONS:],
                )  # fmt: skip
                if self._iterations_delivered:
                    self._to_answer[0] = False
            if rows or reported:
                found.append(
                    (
                        [rank],
                        self._build_answer(everything or bool(rows), suspicion, rows, reported),
                    )
                )
            else:
                alike.setdefault((everything, suspicion), []).append(rank)
        return found + [(ranks, self._build_answer(*each)) for each, ranks in alike.items()]

    def _build_answer(
        self,
        everything: bool,
        answered: int,
        slow: Sequence[LinkState] = (),
        reported: Sequence[int] = (),
    ) -> RankAnswer:
        return RankAnswer(
            settings=self._settings if everything else None,
            usual=self._usual_times[0] if everything else {},
            rare=self._usual_times[1] if everything else {},
            most_late=self._most_late,
            answered=answered,
            pause=self._rank_pause if everything else None,
            slow=[*slow],
            reported=[*reported],
        )

    # --- reports --------------------------------------------------------------------------

    def is_report_due(self, now: float) -> bool:
        """True if a report should be sent now."""
        return self._urgent or self._changes.has_urgent or now >= self._report_at

    @property
    def has_changes(self) -> bool:
        """True if the next report has more than the heartbeat."""
        return self._urgent or bool(self._changes)

    def build_report(
        self,
        sequence: int,
        sent_at: float,
        observed_plan_version: int,
        *,
        plan_issued_at: float | None = None,
        term: int | None = None,
        snapshot: str = "",
    ) -> LinkHealthReport:
        """Build the next report, of at most ``MAX_REPORT_BYTES``. Its changes stay pending until
        :meth:`record_delivery`. The last four arguments are the agent's state from the ingest."""
        self._report_at, self._urgent = sent_at + self.report_seconds, False
        empty = LinkHealthReport(
            protocol=PROTOCOL,
            job=self._job,
            namespace=self._namespace,
            attempt=self._attempt,
            sequence=sequence,
            sent_at=sent_at,
            state=self._state,
            iteration=self._iteration,
            observed_plan_version=observed_plan_version,
            plan_issued_at=plan_issued_at,
            term=term,
            snapshot=snapshot,
            applied_plan_version=self._applied_plan_version,
            settings=self._settings.revision,
            fresh=self._is_first_report,
            message=self._changes.message,
        )
        return self._changes.fill_report(empty)

    def record_delivery(self, report: LinkHealthReport, answer: DirectiveEnvelope) -> None:
        """Record that the host has accepted a report, and process its answer."""
        self._changes.record_delivered(report)
        if self._host_memory and answer.memory != self._host_memory:
            self._changes.mark_all_changed()
        self._host_memory, self._host_waits = answer.memory, answer.attentive
        self.report_seconds = answer.seldom
        if answer.settings is not None:
            self._change_settings(answer.settings)
        for row in answer.slow:
            self._restore_slow_direction(row)
        self._changes.keep_delivered_iterations(report.iterations)
        if report.iterations:
            self._iterations_delivered += [sample.index for sample in report.iterations]
            self._to_answer.setdefault(0, False)
        self._is_first_report = False

    def repeat_states(self) -> None:
        """Put every state into the next report again, for a host that has just begun to read."""
        self._changes.mark_states_changed()
        self._urgent = True

    def _restore_slow_direction(self, row: LinkState) -> None:
        """Restore a direction that was slow in the last report that the host received: its recovery
        must be reported."""
        known = LinkState(row.link, Health.UNKNOWN, replica=row.replica, direction=row.direction)
        self._changes.directions.record_delivered([known])
        rank = find_receiving_rank(self._mesh, row)
        self._links.restore_direction(row)
        self._directions_to_restore.setdefault(rank, []).append(row)
        self._to_answer.setdefault(rank, False)
        self._changes.directions.update_value(self._links.get_direction(row.key))

    def _change_settings(self, settings: ObserverSettings) -> None:
        """Use other settings."""
        self._settings = settings
        self._to_answer |= dict.fromkeys(self._ranks, True)
        self._reductions.change_thresholds(DetectorThresholds(min_delay=settings.min_delay))
        self._rails.set_named_devices(settings.rails)
