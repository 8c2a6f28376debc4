"""Judges the measurements of one rank, and holds changes for the job's agent. Pure.

Each window goes to the detector of its direction. Changes that may require another plan are sent at
once; others with the next report, one in :attr:`RankMonitor.report_seconds` seconds, and a
heartbeat while nothing changes. A value counts as sent once it is written to the connection: if it
is lost, the connection is lost, too, and everything is sent over the next one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pipemorph.detection.detector import DetectorThresholds
from pipemorph.detection.direction_series import DirectionKey
from pipemorph.detection.link_monitor import LinkMonitor
from pipemorph.detection.report.delta_tracker import (
    ByteBudget,
    DeltaTracker,
    classify_link_change,
    classify_stage_change,
)
from pipemorph.detection.stage_monitor import StageProfiles, get_expected_ops
from pipemorph.protocol import (
    Health,
    LinkSample,
    LinkState,
    ObserverSettings,
    StageProfile,
    StageState,
)
from pipemorph.protocol.agent_messages import MOST_STAGES
from pipemorph.protocol.rank_messages import MOST_DIRECTIONS, RankAnswer
from pipemorph.spec.mesh import MeshShape

CHECK_SECONDS = 0.25
"""Seconds between two checks of directions without unusual windows."""
HEARTBEAT_SECONDS, HEARTBEAT_PAUSES = 20.0, 2.0
"""Interval of heartbeats without changes: seconds, or a multiple of the pause if longer."""
MOST_STATE_BYTES = 1 << 20
"""Most bytes of the states in one report."""


class RankMonitor:
    """Monitors rank ``rank`` of ``mesh``. Times are seconds by any one clock."""

    def __init__(self, mesh: MeshShape, rank: int) -> None:
        self._settings = settings = ObserverSettings()
        self._profiles: dict[int, StageProfiles] = {}
        column = mesh.find_coordinate(rank).column
        for stage in mesh.find_coordinate(rank).held_stages:
            self._profiles[stage] = StageProfiles(stage, column)
        self._links = LinkMonitor(
            mesh,
            thresholds=DetectorThresholds(min_delay=settings.min_delay),
            stale_after=settings.stale_after,
            longest_op=lambda stage: self._profiles[stage].get_longest_op(),
        )
        self._phase = (rank * 0.618) % 1.0
        """Offset that spreads the reports of ranks that began together."""
        self.report_seconds = 1.0
        """Least seconds between two reports without anything urgent, as the agent requests."""
        self._directions: DeltaTracker[DirectionKey, LinkState] = DeltaTracker(
            LinkState,
            lambda row: row.key,
            lambda sent, new: classify_link_change(sent, new, self._settings.min_delay),
        )
        self._stages: DeltaTracker[int, StageState] = DeltaTracker(
            StageState, lambda row: row.stage, classify_stage_change
        )
        self._sent_suspects: list[int] = []
        self._check_at = self._report_at = self._heartbeat_at = float("-inf")

    @property
    def ops_inflated(self) -> bool:
        """True if the newest ops of this rank took longer than they can."""
        return any(each.ops_inflated for each in self._profiles.values())

    def observe_windows(
        self,
        windows: Iterable[LinkSample],
        now: float,
        *,
        profiles: Sequence[StageProfile] = (),
    ) -> None:
        """Process new windows of directions that the rank receives, and profiles of its stages."""
        for profile in profiles:
            self._profiles[profile.stage].add_profile(profile)
            state = self._profiles[profile.stage].build_state()
            if state is not None:
                self._stages.update_value(state)
        self._links.observe_samples(windows, now, inflated=self.ops_inflated)
        if self._links.has_unusual_window or now >= self._check_at:
            self._links.has_unusual_window, self._check_at = False, now + CHECK_SECONDS
            for row in self._links.list_states(now):
                known = row.health is not Health.UNKNOWN or row.transport
                if known or self._directions.has_value(row.key):
                    self._directions.update_value(row)

    def record_connection(self) -> None:
        """Record a new connection to an agent: everything sent before may be lost."""
        self._directions.mark_all_changed()
        self._stages.mark_all_changed()
        self._links.has_agent, self._sent_suspects = True, []
        self._links.reset_answers()

    def process_answer(self, answer: RankAnswer, now: float) -> None:
        """Process an answer of the agent."""
        if answer.settings is not None:
            self._change_settings(answer.settings)
        if answer.pause is not None:
            self.report_seconds = answer.pause
        if answer.usual or answer.rare:
            self._links.set_usual_times(answer.usual, answer.rare)
        self._links.process_answer(answer.answered, most_late=answer.most_late)
        self._links.restore_slow_directions(answer.slow, now)

    def _change_settings(self, settings: ObserverSettings) -> None:
        self._settings = settings
        self._links.change_settings(
            DetectorThresholds(min_delay=settings.min_delay), settings.stale_after
        )
        for stage, profiles in self._profiles.items():
            profiles.expected = get_expected_ops(settings, stage)
            profiles.offloads = settings.offloads

    def is_report_due(self, now: float) -> bool:
        """True if a report should be sent now."""
        if self._directions.has_urgent or self._stages.has_urgent:
            return True
        if self._links.suspect_links != self._sent_suspects or now >= self._heartbeat_at:
            return True
        return now >= self._report_at and bool(len(self._directions) + len(self._stages))

    def take_changes(self, now: float) -> dict[str, Any]:
        """Take the pending changes, as fields of a
        :class:`~pipemorph.protocol.rank_messages.RankReport`."""
        first = self._report_at == float("-inf")
        self._report_at = now + self.report_seconds * (self._phase if first else 1.0)
        beat = min(HEARTBEAT_SECONDS, self._settings.stale_after / 3)
        self._heartbeat_at = now + max(beat, HEARTBEAT_PAUSES * self.report_seconds)
        budget = ByteBudget(MOST_STATE_BYTES)
        links = self._directions.take_changes(budget, MOST_DIRECTIONS)
        stages = self._stages.take_changes(budget, MOST_STAGES)
        self._directions.record_delivered(links)
        self._stages.record_delivered(stages)
        self._sent_suspects = self._links.suspect_links
        return {
            "links": links,
            "stages": stages,
            "suspects": self._sent_suspects,
            "suspicion": self._links.suspicion_number,
        }


def compute_silence_limit(settings: ObserverSettings, pause: float) -> float:
    """Seconds without a report of a rank after which its states are unknown."""
    return max(settings.stale_after, 2.5 * HEARTBEAT_PAUSES * pause)
