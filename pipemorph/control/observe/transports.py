"""Tracks the transport that carries each link, and the links that fell back to a slower one.

The engine moves a link from its rails to TCP when the last rail is lost, and back when one returns.
This must be visible to the user, since otherwise it looks like a slow link.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from pipemorph.api.mesh import MeshShape
from pipemorph.control.observe.events import Events
from pipemorph.wire import SHOWN, FallenLink, LinkState, TransportSample, TransportsView

MOST_COUNTED = 2**53 - 1

EndKey = tuple[int, int, str]
"""link, replica, direction"""


class TransportBook:
    """Transports of a job, per link, column and direction."""

    def __init__(self, mesh: MeshShape, *, events: Events | None = None) -> None:
        self._mesh = mesh
        self._events = events or Events()
        self._carries: dict[EndKey, str] = {}
        self._carried: list[Counter[str]] = [Counter() for _ in range(mesh.stages - 1)]
        """Per link, the number of directions that each transport carries."""
        self._ends: dict[EndKey, TransportSample] = {}
        self._fallen: dict[EndKey, TransportSample] = {}
        self._fallbacks = self._failbacks = 0

    def observe(
        self,
        links: Iterable[LinkState],
        ends: Iterable[TransportSample],
        now: float,
        iteration: int,
    ) -> None:
        """Process a report. ``now``: wall clock, seconds."""
        for row in links:
            before = self._carries.get(row.key)
            if row.transport and before != row.transport:
                self._carries[row.key] = row.transport
                counts = self._carried[row.link]
                counts[row.transport] += 1
                if before is not None:
                    counts[before] -= 1
        for end in ends:
            key = (end.link, end.replica, end.direction)
            known = self._ends.get(key)
            self._fallbacks += end.fallbacks - (known.fallbacks if known else 0)
            self._failbacks += end.failbacks - (known.failbacks if known else 0)
            self._ends[key] = end
            fell = end.transport != end.agreed
            was = key in self._fallen
            if fell:
                self._fallen[key] = end
            elif was:
                del self._fallen[key]
            # It may have fallen back and returned between two reports. Fallbacks before the first
            # report to this controller do not count.
            again = known is not None and end.fallbacks > known.fallbacks
            if (fell and not was) or again:
                text = _fallen(end).text(self._mesh) + ("" if fell else ", and is back")
                self._events.add(now, iteration, text)
            elif was and not fell:
                self._events.add(
                    now,
                    iteration,
                    f"{_where(end, self._mesh)} is back on {end.transport} ({end.direction})",
                )
            # Rails have others to fall back to.
            troubled = bool(end.trouble) and end.agreed != "rdma"
            if troubled and not (known is not None and known.trouble):
                self._events.add(
                    now,
                    iteration,
                    f"{_where(end, self._mesh)} loses data connections ({end.trouble})",
                )

    def view(self) -> TransportsView:
        """The transports as last reported."""
        fallen = [_fallen(self._fallen[key]) for key in sorted(self._fallen)]
        return TransportsView(
            links=tuple("+".join(sorted(+counts)) for counts in self._carried),
            fallen_count=len({(end.link, end.replica) for end in fallen}),
            fallen=tuple(fallen[:SHOWN]),
            # Bounded, so that status can store the sum over many ends.
            fallbacks=min(self._fallbacks, MOST_COUNTED),
            failbacks=min(self._failbacks, MOST_COUNTED),
        )


def _where(end: TransportSample, mesh: MeshShape) -> str:
    column = mesh.column_name(end.replica)
    return f"link {end.link}{' of ' if column else ''}{column}"


def _fallen(end: TransportSample) -> FallenLink:
    # A link that has returned already fell back to TCP: there is nothing else.
    return FallenLink(
        end.link,
        end.replica,
        end.direction,
        end.agreed,
        end.transport if end.transport != end.agreed else "tcp",
        end.fallbacks,
        end.trouble,
    )
