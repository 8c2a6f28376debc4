"""Links of a job, from the states that its ranks report, and what follows from all of them. Pure.

The cost of a report is that of its rows. Only :meth:`JobLinks.compare` walks all directions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from pipemorph.api.mesh import MeshShape
from pipemorph.control.observe.series import NOTES, Key
from pipemorph.wire import Health, LinkState
from pipemorph.wire.ranks import RankReport, receiver

FEW_LINKS = 4
"""With fewer links, most of them may really be slow at once."""
FEW_BASES = 4
"""Fewest directions on a route that can tell what is usual there: fewer cannot outvote the two
directions of one link."""


class JobLinks:
    """States of all directions, and of the links that are made of them."""

    def __init__(self, mesh: MeshShape) -> None:
        self._mesh = mesh
        self._rows: list[dict[Key, LinkState]] = [{} for _ in range(mesh.stages - 1)]
        """By link."""
        self._well = [0] * (mesh.stages - 1)
        """By link, number of directions that are well."""
        self._suspects: dict[int, list[int]] = {}
        """By rank, its suspect links; without empty ones."""
        self._late: Counter[int] = Counter()
        """By link, number of ranks to which it is suspect; without zeros."""
        self._slow: set[Key] = set()
        self._lost: dict[int, list[LinkState]] = {}
        """By silent rank, the states that it had reported."""
        self._dirty: set[int] = set()
        """Links with directions that are not slow and have changed since :meth:`rests`."""
        self.moved: dict[Key, None] = {}
        """Directions that are or were slow, with reports since this was last cleared."""
        self.turned: dict[int, None] = {}
        """Links of which a direction has changed its health since then."""

    def take(self, report: RankReport) -> None:
        """Process a report that fits the job."""
        for row in report.links:
            self._put(row)
        if report.suspects or report.rank in self._suspects:
            self._suspect(report.rank, report.suspects)

    def _put(self, row: LinkState) -> None:
        rows, key = self._rows[row.link], row.key
        known = rows.get(key)
        rows[key] = row
        well = known is not None and known.health is Health.HEALTHY
        self._well[row.link] += (row.health is Health.HEALTHY) - well
        slow, was = is_slow(row), key in self._slow
        if slow or was:
            self.moved[key] = None
        if known is None or known.health is not row.health or slow is not was:
            self.turned[row.link] = None
        (self._slow.add if slow else self._slow.discard)(key)
        self._dirty.add(row.link)

    def _suspect(self, rank: int, links: list[int]) -> None:
        self._late.subtract(self._suspects.pop(rank, []))
        if links:
            self._suspects[rank] = links
            self._late.update(links)
        self._late = +self._late

    @property
    def most_are_late(self) -> bool:
        """Whether most links that are not slow already are suspect. The cause is then something
        that they share, the machine or the job."""
        judged = sum(1 for link, well in enumerate(self._well) if well or link in self._late)
        return judged >= FEW_LINKS and 2 * len(self._late) > judged

    @property
    def all_known(self) -> bool:
        """Whether each link has a direction that is well, or slow."""
        slow = {key[0] for key in self._slow}
        return all(well or link in slow for link, well in enumerate(self._well))

    @property
    def any_slow(self) -> bool:
        return bool(self._slow)

    def has(self, key: Key) -> bool:
        return key in self._rows[key[0]]

    def state(self, key: Key) -> LinkState:
        """The state of a direction with a row."""
        return self._rows[key[0]][key]

    def rests(self) -> list[int]:
        """Links with directions that have changed since the last call."""
        found, self._dirty = sorted(self._dirty), set()
        return found

    def rest(self, link: int) -> LinkState:
        """The state of a link's directions that are well, as one: that of the longest wire time,
        with the least confidence. Walks all of the link's directions."""
        well = [row for row in self._rows[link].values() if row.health is Health.HEALTHY]
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

    def compare(self) -> tuple[dict[str, float], dict[str, float]]:
        """Usual wire time per route, and of notes: the lower quartile of what is normal on its
        directions, since several may be slow at once; of routes with enough directions, and of the
        others. Walks all of them."""
        known: dict[str, list[float]] = {}
        for rows in self._rows:
            for row in rows.values():
                for route in (row.route, NOTES):
                    if (base := row.bases.get(route)) is not None:
                        known.setdefault(route, []).append(base)
        usual: dict[str, float] = {}
        rare: dict[str, float] = {}
        for route, bases in known.items():
            found = usual if len(bases) >= FEW_BASES else rare
            found[route] = sorted(bases)[(len(bases) - 1) // 4]
        return usual, rare

    def lose(self, rank: int) -> None:
        """Forget what a rank that is silent has reported: its directions are unknown."""
        self._suspect(rank, [])
        self._lost[rank] = [
            row
            for rows in self._rows
            for row in rows.values()
            if row.health is not Health.UNKNOWN and receiver(self._mesh, row) == rank
        ]
        for row in self._lost[rank]:
            self._put(replace(row, health=Health.UNKNOWN))

    def find(self, rank: int) -> None:
        """Take up again what a rank had reported before it was silent."""
        for row in self._lost.pop(rank, []):
            self._put(row)

    def restore(self, row: LinkState) -> None:
        """Note a direction that was slow when an earlier agent ended, until its rank knows its
        state."""
        known = self._rows[row.link].get(row.key)
        if known is None or (known.health is Health.UNKNOWN and not is_slow(known)):
            self._put(replace(row, health=Health.UNKNOWN))


def is_slow(row: LinkState) -> bool:
    """Whether a direction is slow, with or without recent windows."""
    return row.health is Health.SLOW or (row.health is Health.UNKNOWN and row.delay > 0)


def unlike(usual: Mapping[str, float], sent: Mapping[str, float], least: float) -> bool:
    """Whether a usual wire time differs from what was ``sent`` by the part ``least`` of it."""
    return usual.keys() != sent.keys() or any(
        abs(base - sent[route]) > least * sent[route] for route, base in usual.items()
    )
