"""Reads the transports of this rank's links from the engine, for link health reports.

A link that fell back from its rails to TCP looks like a slow link; only the engine knows which it
is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pipemorph.wire import TransportSample
from pipemorph_trainer.links.message import Direction

if TYPE_CHECKING:
    from pipemorph_trainer.links.link import LinkEnd

LOOK_SECONDS = 1.0
REFRESH_SECONDS = 60.0
"""Interval in which all links are reported again, since the ingest may have restarted."""


class TransportWatch:
    """Looks at the ends with an engine link, at a limited rate."""

    def __init__(
        self,
        ends: Sequence[LinkEnd],
        replica: int,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ends, self._replica, self._clock = ends, replica, clock
        self._looked_at = float("-inf")
        self._told_at = float("-inf")
        self._told: dict[int, TransportSample] = {}

    def take(self, *, now: bool = False) -> list[TransportSample]:
        """The ends that have changed since the last call; once a minute, all ends. ``now``: ignore
        the rate limit."""
        at = self._clock()
        if at - self._looked_at < LOOK_SECONDS and not now:
            return []
        self._looked_at = at
        if at - self._told_at >= REFRESH_SECONDS:
            self._told_at = at
            self._told = {}
        changed = []
        for i, end in enumerate(self._ends):
            sample = self._sample(end)
            if sample is not None and self._told.get(i) != sample:
                self._told[i] = sample
                changed.append(sample)
        return changed

    def _sample(self, end: LinkEnd) -> TransportSample | None:
        link = end.engine_link
        if link is None:
            return None
        stats = link.stats()
        lost = [p for p in stats.paths if p.kind == "rdma" and p.trouble]
        trouble = "; ".join(f"{p.rail}: {p.trouble}" for p in lost)
        return TransportSample(
            link=end.link,
            replica=self._replica,
            direction="forward" if end.sends is Direction.FORWARD else "backward",
            agreed=link.transport,  # type: ignore[arg-type]
            transport=stats.transport,
            fallbacks=stats.fallbacks,
            failbacks=stats.failbacks,
            reconnects=stats.reconnects,
            trouble=" ".join(trouble.split())[:200],
        )
