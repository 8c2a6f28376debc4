"""Tracks the transport that carries each link, and the links that fell back to a slower one.

The engine moves a link from its rails to TCP when the last rail is lost, and back when one returns.
The user must see this, since it looks like a slow link.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from pipemorph.detection.event_log import EventLog
from pipemorph.protocol import (
    MOST_LISTED,
    LinkState,
    TransportFallback,
    TransportSample,
    TransportsView,
)
from pipemorph.spec.mesh import MeshShape

MOST_COUNTED = 2**53 - 1

LinkEndKey = tuple[int, int, str]
"""link, replica, direction"""


class TransportMonitor:
    """Tracks the transports of a job by link, column and direction."""

    def __init__(self, mesh: MeshShape, *, events: EventLog | None = None) -> None:
        self._mesh = mesh
        self._events = events or EventLog()
        self._transport_by_direction: dict[LinkEndKey, str] = {}
        self._transports_by_link: list[Counter[str]] = [Counter() for _ in range(mesh.stages - 1)]
        """Number of directions that each transport carries, by link."""
        self._newest_samples: dict[LinkEndKey, TransportSample] = {}
        self._fallen_samples: dict[LinkEndKey, TransportSample] = {}
        self._fallbacks = self._failbacks = 0

    def observe_states(
        self,
        links: Iterable[LinkState],
        ends: Iterable[TransportSample],
        now: float,
        iteration: int,
    ) -> None:
        """Process a report. ``now``: wall clock, seconds."""
        for row in links:
            before = self._transport_by_direction.get(row.key)
            if row.transport and before != row.transport:
                self._transport_by_direction[row.key] = row.transport
                counts = self._transports_by_link[row.link]
                counts[row.transport] += 1
                if before is not None:
                    counts[before] -= 1
        for end in ends:
            key = (end.link, end.replica, end.direction)
            known = self._newest_samples.get(key)
            self._fallbacks += end.fallbacks - (known.fallbacks if known else 0)
            self._failbacks += end.failbacks - (known.failbacks if known else 0)
            self._newest_samples[key] = end
            fell = end.transport != end.agreed
            was = key in self._fallen_samples
            if fell:
                self._fallen_samples[key] = end
            elif was:
                del self._fallen_samples[key]
            # A link may fall back and return between two reports. Fallbacks before the first report
            # to this controller do not count.
            again = known is not None and end.fallbacks > known.fallbacks
            if (fell and not was) or again:
                text = _make_fallen_link(end).format_text(self._mesh) + (
                    "" if fell else ", and is back"
                )
                self._events.add_event(now, iteration, text)
            elif was and not fell:
                self._events.add_event(
                    now,
                    iteration,
                    f"{_describe_link(end, self._mesh)} is back on {end.transport}"
                    f" ({end.direction})",
                )
            # Rails have others to fall back to.
            troubled = bool(end.trouble) and end.agreed != "rdma"
            if troubled and not (known is not None and known.trouble):
                self._events.add_event(
                    now,
                    iteration,
                    f"{_describe_link(end, self._mesh)} loses data connections ({end.trouble})",
                )

    def build_view(self) -> TransportsView:
        """Build the view of the transports as last reported."""
        fallen = [
            _make_fallen_link(self._fallen_samples[key]) for key in sorted(self._fallen_samples)
        ]
        return TransportsView(
            links=tuple("+".join(sorted(+counts)) for counts in self._transports_by_link),
            fallen_count=len({(end.link, end.replica) for end in fallen}),
            fallen=tuple(fallen[:MOST_LISTED]),
            # Bounded, so that status can store the sum over many ends.
            fallbacks=min(self._fallbacks, MOST_COUNTED),
            failbacks=min(self._failbacks, MOST_COUNTED),
        )


def _describe_link(end: TransportSample, mesh: MeshShape) -> str:
    column = mesh.format_column_name(end.replica)
    return f"link {end.link}{' of ' if column else ''}{column}"


def _make_fallen_link(end: TransportSample) -> TransportFallback:
    # A link that has already returned fell back to TCP: there is no other transport.
    return TransportFallback(
        end.link,
        end.replica,
        end.direction,
        end.agreed,
        end.transport if end.transport != end.agreed else "tcp",
        end.fallbacks,
        end.trouble,
    )
