"""Judges what one rank measures, and holds what of it the job's agent does not know. Pure.

Each window goes to the detector of its direction. What may ask for another plan is sent at once;
anything else with the next report, of which there is one in :attr:`RankMonitor.pause`, and a
heartbeat while nothing changes. A value counts as sent once it is handed to the connection: if it
is lost, so is the connection, and everything is sent over the next one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pipemorph.api.mesh import MeshShape
from pipemorph.control.observe.detector import Thresholds
from pipemorph.control.observe.link_book import LinkBook
from pipemorph.control.observe.report.news import Budget, News, link_differs, stage_differs
from pipemorph.control.observe.series import Key
from pipemorph.control.observe.stage_book import StageProfiles, expected_ops
from pipemorph.wire import Health, LinkSample, LinkState, ObserverSettings, StageProfile, StageState
from pipemorph.wire.messages import MOST_STAGES
from pipemorph.wire.ranks import MOST_DIRECTIONS, RankAnswer

LOOK_SECONDS = 0.25
"""Between two looks at directions without unusual windows."""
HEARTBEAT_SECONDS, HEARTBEAT_PAUSES = 20.0, 2.0
"""A rank with nothing new reports as often, or each so many of its pauses if that is longer."""
MOST_BYTES = 1 << 20
"""Of the states in one report."""


class RankMonitor:
    """Monitors rank ``rank`` of ``mesh``. Times are seconds by any one clock."""

    def __init__(self, mesh: MeshShape, rank: int) -> None:
        self._settings = settings = ObserverSettings()
        self._profiles: dict[int, StageProfiles] = {}
        column = mesh.coordinate(rank).column
        for stage in mesh.coordinate(rank).held:
            self._profiles[stage] = StageProfiles(stage, column)
        self._links = LinkBook(
            mesh,
            thresholds=Thresholds(min_delay=settings.min_delay),
            stale_after=settings.stale_after,
            longest_op=lambda stage: self._profiles[stage].longest_op(),
        )
        self._phase = (rank * 0.618) % 1.0
        """Spreads the reports of ranks that began together."""
        self.pause = 1.0
        """Least time between two reports that have nothing urgent, as the agent says."""
        self._directions: News[Key, LinkState] = News(
            LinkState,
            lambda row: row.key,
            lambda told, new: link_differs(told, new, self._settings.min_delay),
        )
        self._stages: News[int, StageState] = News(StageState, lambda row: row.stage, stage_differs)
        self._sent_suspects: list[int] = []
        self._look_at = self._report_at = self._beat_at = float("-inf")

    @property
    def inflated(self) -> bool:
        """Whether the newest ops of this rank took longer than they can."""
        return any(each.inflated for each in self._profiles.values())

    def observe(
        self,
        windows: Iterable[LinkSample],
        now: float,
        *,
        profiles: Sequence[StageProfile] = (),
    ) -> None:
        """Process new windows of the directions that the rank receives, and profiles of its
        stages."""
        for profile in profiles:
            self._profiles[profile.stage].add(profile)
            state = self._profiles[profile.stage].state()
            if state is not None:
                self._stages.put(state)
        self._links.observe(windows, now, inflated=self.inflated)
        if self._links.changed or now >= self._look_at:
            self._links.changed, self._look_at = False, now + LOOK_SECONDS
            for row in self._links.states(now):
                known = row.health is not Health.UNKNOWN or row.transport
                if known or self._directions.has(row.key):
                    self._directions.put(row)

    def connected(self) -> None:
        """A connection to an agent has been made: whatever was sent before may be lost."""
        self._directions.again()
        self._stages.again()
        self._links.connected, self._sent_suspects = True, []
        self._links.reconnect()

    def hear(self, answer: RankAnswer, now: float) -> None:
        """Process an answer of the agent."""
        if answer.settings is not None:
            self._set(answer.settings)
        if answer.pause is not None:
            self.pause = answer.pause
        if answer.usual or answer.rare:
            self._links.compare(answer.usual, answer.rare)
        self._links.answer(answer.answered, most_late=answer.most_late)
        self._links.restore(answer.slow, now)

    def _set(self, settings: ObserverSettings) -> None:
        self._settings = settings
        self._links.set(Thresholds(min_delay=settings.min_delay), settings.stale_after)
        for stage, profiles in self._profiles.items():
            profiles.expected = expected_ops(settings, stage)
            profiles.offloads = settings.offloads

    def due(self, now: float) -> bool:
        """Whether to send a report now."""
        if self._directions.urgent or self._stages.urgent:
            return True
        if self._links.suspects != self._sent_suspects or now >= self._beat_at:
            return True
        return now >= self._report_at and bool(len(self._directions) + len(self._stages))

    def take(self, now: float) -> dict[str, Any]:
        """What is new, as fields of a :class:`~pipemorph.wire.ranks.RankReport`."""
        first = self._report_at == float("-inf")
        self._report_at = now + self.pause * (self._phase if first else 1.0)
        beat = min(HEARTBEAT_SECONDS, self._settings.stale_after / 3)
        self._beat_at = now + max(beat, HEARTBEAT_PAUSES * self.pause)
        budget = Budget(MOST_BYTES)
        links = self._directions.take(budget, MOST_DIRECTIONS)
        stages = self._stages.take(budget, MOST_STAGES)
        self._directions.delivered(links)
        self._stages.delivered(stages)
        self._sent_suspects = self._links.suspects
        return {
            "links": links,
            "stages": stages,
            "suspects": self._sent_suspects,
            "suspicion": self._links.suspicion,
        }


def silent_after(settings: ObserverSettings, pause: float) -> float:
    """Seconds without a report of a rank after which its states are unknown."""
    return max(settings.stale_after, 2.5 * HEARTBEAT_PAUSES * pause)
