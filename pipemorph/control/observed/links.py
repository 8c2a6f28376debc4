"""The links of a job as its agent last reported them: one state per link.

A plan has one one-way delay per link. So a link is as slow as its slowest direction in its slowest
column: an activation and its gradient cross the link once each way, and the slower way determines
the slackness that is needed. Replicas may have plans of their own, so each of them with a slow link
has such states, too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from pipemorph.api.mesh import MeshShape
from pipemorph.wire import MOST_SLOW, Health, LinkState

ALIKE = 1 / 16
"""Relative difference of two directions' wire times within which either may be the longer one: so
much may have changed since it was reported. A narrow one counts, since what is narrow is told from
a delay with some windows more in one direction than in the other."""


States = tuple[LinkState, ...]
"""One state per link."""
OwnStates = list[tuple[tuple[int, ...], States]]
"""Replicas, and the states of their links."""
Slow = dict[tuple[int, str], LinkState]
"""The slow directions of one link, by column and direction."""


class LinkTable:
    """The links of one attempt. A report costs what it has; reading costs nothing while it is
    unchanged, else the number of links, times that of replicas with a slow link."""

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
        self._own: OwnStates | None = []
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
            self._all = self._own = None

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

    def own_states(self, now: float) -> OwnStates:
        """Replicas, and one state per link of these: each that has a slow link, and all others
        together. Empty if there is one replica, or no link is slow.

        Links that are well are as in any replica.
        """
        if self._mesh.replicas == 1 or not self._count:
            return []
        if self.is_silent(now):
            return [(tuple(range(self._mesh.replicas)), self._unknown)]
        if self._own is None:
            self._own = self._owned()
        return self._own

    def _owned(self) -> OwnStates:
        by_replica: dict[int, dict[int, list[LinkState]]] = {}
        usual = list(self._states)
        for link, slow in enumerate(self._slow):
            if slow:
                usual[link] = self._merged(link, (), self._rest[link])
            for (column, _), row in slow.items():
                found = by_replica.setdefault(self._mesh.replica_of(column), {})
                found.setdefault(link, []).append(row)
        own: OwnStates = []
        for replica, links in sorted(by_replica.items()):
            states = list(usual)
            for link, rows in links.items():
                states[link] = self._merged(link, rows, None)
            own.append(((replica,), tuple(states)))
        others = tuple(r for r in range(self._mesh.replicas) if r not in by_replica)
        return [*own, (others, tuple(usual))] if others else own

    def _merged(
        self, link: int, directions: Iterable[LinkState], rest: LinkState | None
    ) -> LinkState:
        """The state of a link from those of its directions: of the slow ones, if there are any."""
        if self._inside[link]:
            return LinkState(link, Health.HEALTHY)
        slow = [row for row in directions if row.health is Health.SLOW]
        if not slow:
            if rest is None or rest.health is Health.UNKNOWN:
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
