"""Links of a job, from the states that its ranks report, and conclusions from all of them. Pure.

A report costs time by its rows. Only :meth:`JobLinks.compute_usual_times` walks all directions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from pipemorph.detection.direction_series import NOTES, DirectionKey
from pipemorph.protocol import Health, LinkState
from pipemorph.protocol.rank_messages import RankReport, find_receiving_rank
from pipemorph.spec.mesh import MeshShape

FEWEST_LINKS = 4
"""Fewest links for a majority: with fewer, most of them may really be slow at once."""
FEWEST_BASES = 4
"""Fewest directions on a route that show its usual wire time: fewer cannot outvote the two
directions of one link."""


class JobLinks:
    """States of all directions, and of the links that they form."""

    def __init__(self, mesh: MeshShape) -> None:
        self._mesh = mesh
        self._directions: list[dict[DirectionKey, LinkState]] = [{} for _ in range(mesh.stages - 1)]
        """Directions by link."""
        self._healthy_counts = [0] * (mesh.stages - 1)
        """Number of healthy directions by link."""
        self._suspects: dict[int, list[int]] = {}
        """Suspect links by rank, without empty lists."""
        self._suspecting_ranks: Counter[int] = Counter()
        """Number of ranks that suspect a link, by link, without zeros."""
        self._slow_directions: set[DirectionKey] = set()
        self._states_of_silent: dict[int, list[LinkState]] = {}
        """States that silent ranks had reported, by rank."""
        self._changed_links: set[int] = set()
        """Links with directions that are not slow and have changed since
        :meth:`take_changed_links`."""
        self.moved_directions: dict[DirectionKey, None] = {}
        """Directions that are or were slow, with reports since this was last cleared."""
        self.turned_links: dict[int, None] = {}
        """Links with a direction that changed its health since then."""

    def process_report(self, report: RankReport) -> None:
        """Process a report that fits the job."""
        for row in report.links:
            self._update_direction(row)
        if report.suspects or report.rank in self._suspects:
            self._update_suspects(report.rank, report.suspects)

    def _update_direction(self, row: LinkState) -> None:
        """Update one direction, the counts of its link, and the sets of changes."""
        rows, key = self._directions[row.link], row.key
        known = rows.get(key)
        rows[key] = row
        well = known is not None and known.health is Health.HEALTHY
        self._healthy_counts[row.link] += (row.health is Health.HEALTHY) - well
        slow, was = is_slow(row), key in self._slow_directions
        if slow or was:
            self.moved_directions[key] = None
        if known is None or known.health is not row.health or slow is not was:
            self.turned_links[row.link] = None
        (self._slow_directions.add if slow else self._slow_directions.discard)(key)
        self._changed_links.add(row.link)

    def _update_suspects(self, rank: int, links: list[int]) -> None:
        self._suspecting_ranks.subtract(self._suspects.pop(rank, []))
        if links:
            self._suspects[rank] = links
            self._suspecting_ranks.update(links)
        self._suspecting_ranks = +self._suspecting_ranks

    @property
    def most_are_late(self) -> bool:
        """True if most links that are not yet slow are suspect. The cause is then something that
        they share, the machine or the job."""
        judged = sum(
            1
            for link, well in enumerate(self._healthy_counts)
            if well or link in self._suspecting_ranks
        )
        return judged >= FEWEST_LINKS and 2 * len(self._suspecting_ranks) > judged

    @property
    def all_known(self) -> bool:
        """True if each link has a direction that is healthy or slow."""
        slow = {key[0] for key in self._slow_directions}
        return all(well or link in slow for link, well in enumerate(self._healthy_counts))

    @property
    def any_slow(self) -> bool:
        return bool(self._slow_directions)

    def get_direction(self, key: DirectionKey) -> LinkState:
        """State of a direction with a row."""
        return self._directions[key[0]][key]

    def take_changed_links(self) -> list[int]:
        """Links with directions that have changed since the last call."""
        found, self._changed_links = sorted(self._changed_links), set()
        return found

    def merge_healthy_directions(self, link: int) -> LinkState:
        """Merge a link's healthy directions into one state: that of the longest wire time, with the
        least confidence. Walks all of the link's directions."""
        well = [row for row in self._directions[link].values() if row.health is Health.HEALTHY]
        if not well:
            return LinkState(link, Health.UNKNOWN)
        since = [row.since_iteration for row in well if row.since_iteration is not None]
        return replace(
            max(well, key=lambda row: row.wire_time),
            confidence=min(row.confidence for row in well),
            since_iteration=max(since, default=None),
            failed_over=any(row.failed_over for row in well),
            bases={},
            route="",
            transport="",
        )

    def compute_usual_times(self) -> tuple[dict[str, float], dict[str, float]]:
        """Compute the usual wire time by route, and of notes: the lower quartile of the bases of
        its directions, since several may be slow at once. Returns routes with enough directions,
        and the others. Walks all directions."""
        known: dict[str, list[float]] = {}
        for rows in self._directions:
            for row in rows.values():
                for route in (row.route, NOTES):
                    if (base := row.bases.get(route)) is not None:
                        known.setdefault(route, []).append(base)
        usual: dict[str, float] = {}
        rare: dict[str, float] = {}
        for route, bases in known.items():
            found = usual if len(bases) >= FEWEST_BASES else rare
            found[route] = sorted(bases)[(len(bases) - 1) // 4]
        return usual, rare

    def mark_rank_silent(self, rank: int) -> None:
        """Forget the reports of a silent rank: its directions are unknown."""
        self._update_suspects(rank, [])
        self._states_of_silent[rank] = [
            row
            for rows in self._directions
            for row in rows.values()
            if row.health is not Health.UNKNOWN and find_receiving_rank(self._mesh, row) == rank
        ]
        for row in self._states_of_silent[rank]:
            self._update_direction(replace(row, health=Health.UNKNOWN))

    def restore_rank(self, rank: int) -> None:
        """Restore the states that a rank had reported before it was silent."""
        for row in self._states_of_silent.pop(rank, []):
            self._update_direction(row)

    def restore_direction(self, row: LinkState) -> None:
        """Restore a direction that was slow when an earlier agent ended, until its rank reports."""
        known = self._directions[row.link].get(row.key)
        if known is None or (known.health is Health.UNKNOWN and not is_slow(known)):
            self._update_direction(replace(row, health=Health.UNKNOWN))


def is_slow(row: LinkState) -> bool:
    """True if a direction is slow, with or without recent windows."""
    return row.health is Health.SLOW or (row.health is Health.UNKNOWN and row.delay > 0)


def usual_times_differ(usual: Mapping[str, float], sent: Mapping[str, float], least: float) -> bool:
    """True if a usual wire time differs from the one ``sent`` by the fraction ``least`` of it."""
    return usual.keys() != sent.keys() or any(
        abs(base - sent[route]) > least * sent[route] for route, base in usual.items()
    )
