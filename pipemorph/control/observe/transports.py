"""Tracks the transport that carries each link, and the links that fell back to a slower one.

The engine moves a link from its rails to TCP when the last rail is lost, and back when one returns.
This must be visible to the user, since otherwise it looks like a slow link.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pipemorph.api.mesh import MeshShape
from pipemorph.control.observe.events import Events
from pipemorph.wire import LinkSample, TransportSample

SHOWN = 32
MOST_COUNTED = 2**53 - 1

EndKey = tuple[int, int, str]
"""link, replica, direction"""


@dataclass(frozen=True)
class FallenLink:
    """One end of an engine link that does not use the agreed transport. ``direction``: the one that
    this end sends; ``trouble``: the engine's reason."""

    link: int
    replica: int
    direction: str
    agreed: str
    transport: str
    fallbacks: int
    trouble: str

    def record(self) -> dict[str, object]:
        """For report.json."""
        return {
            "link": self.link,
            "replica": self.replica,
            "direction": self.direction,
            "agreed": self.agreed,
            "transport": self.transport,
            "fallbacks": self.fallbacks,
            "trouble": self.trouble,
        }

    def text(self, mesh: MeshShape) -> str:
        """``link 2 fell back from rdma to tcp (rxe0 port 1: port error)``"""
        where = _where(self, mesh)
        why = f" ({self.trouble})" if self.trouble else ""
        return f"{where} fell back from {self.agreed} to {self.transport}{why}"


@dataclass(frozen=True)
class TransportsView:
    """Transports of a job's links.

    ``links``: the transport of each link, such as ``rdma``; ``rdma+tcp`` if replicas or directions
    differ; empty if unknown. Counts are over all ends since they were made.
    """

    links: tuple[str, ...] = ()
    fallen_count: int = 0
    fallen: tuple[FallenLink, ...] = ()
    fallbacks: int = 0
    failbacks: int = 0


class TransportBook:
    """Transports of a job, per link, column and direction."""

    def __init__(self, mesh: MeshShape, *, events: Events | None = None) -> None:
        self._mesh, self._links = mesh, mesh.stages - 1
        self._events = events or Events()
        self._carries: dict[EndKey, str] = {}
        self._ends: dict[EndKey, TransportSample] = {}
        self._fallen: dict[EndKey, TransportSample] = {}
        self._fallbacks = self._failbacks = 0

    def observe(
        self,
        links: Iterable[LinkSample],
        ends: Iterable[TransportSample],
        now: float,
        iteration: int,
    ) -> None:
        """Process a report. ``now``: wall clock, seconds."""
        for window in links:
            self._carries[window.link, window.replica, window.direction] = window.transport
        for end in ends:
            key = (end.link, end.replica, end.direction)
            before = self._ends.get(key)
            self._fallbacks += end.fallbacks - (before.fallbacks if before else 0)
            self._failbacks += end.failbacks - (before.failbacks if before else 0)
            self._ends[key] = end
            fell = end.transport != end.agreed
            was = key in self._fallen
            if fell:
                self._fallen[key] = end
            elif was:
                del self._fallen[key]
            # It may have fallen back and returned between two reports. Fallbacks before the first
            # report to this controller do not count.
            again = before is not None and end.fallbacks > before.fallbacks
            if (fell and not was) or again:
                text = _fallen(end).text(self._mesh) + ("" if fell else ", and is back")
                self._events.add(now, iteration, text)
            elif was and not fell:
                self._events.add(
                    now,
                    iteration,
                    f"{_where(end, self._mesh)} is back on {end.transport} ({end.direction})",
                )

    def view(self) -> TransportsView:
        """The transports as last reported."""
        seen: list[set[str]] = [set() for _ in range(self._links)]
        for (link, _, _), transport in self._carries.items():
            seen[link].add(transport)
        fallen = [_fallen(self._fallen[key]) for key in sorted(self._fallen)]
        return TransportsView(
            links=tuple("+".join(sorted(found)) for found in seen),
            fallen_count=len({(end.link, end.replica) for end in fallen}),
            fallen=tuple(fallen[:SHOWN]),
            # Bounded, so that status can store the sum over many ends.
            fallbacks=min(self._fallbacks, MOST_COUNTED),
            failbacks=min(self._failbacks, MOST_COUNTED),
        )


def _where(end: FallenLink | TransportSample, mesh: MeshShape) -> str:
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
